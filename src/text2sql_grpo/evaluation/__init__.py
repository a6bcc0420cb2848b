"""Answers to held-out questions, their accuracy with intervals, and comparisons."""

from typing import Literal

Board = Literal["bird", "spider", "spider2", "livesql"]
Perturbation = Literal["order", "rename", "distractors", "typos", "phrasing", "no_schema"]
