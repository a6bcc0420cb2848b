"""Audits of questions and rewards before training."""
