"""Train language models to answer questions over a SQL database, by reinforcement learning on TRL."""

__version__ = "0.1.0"
