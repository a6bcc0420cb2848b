"""GRPO's step out of parts, on TRL's trainer and loss."""
