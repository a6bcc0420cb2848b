"""Checkpoints, ranks, bad steps, signals and alerts."""
