"""Answers to held-out questions, their accuracy with intervals, and comparisons."""
