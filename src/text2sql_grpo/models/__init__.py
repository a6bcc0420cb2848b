"""Resolving, converting and running models."""
