"""Faults of questions and of a reward, found before training."""
