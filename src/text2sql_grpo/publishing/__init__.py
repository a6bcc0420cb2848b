"""Publishing of a finished run: merge, model card, Hub."""
