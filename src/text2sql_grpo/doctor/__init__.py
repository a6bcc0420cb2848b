"""Checks that a run would work on this machine, with its memory and time."""
