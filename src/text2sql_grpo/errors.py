"""Failures that stop a run. A failure of the model's query is an `ExecutionOutcome`, never an exception."""


class RunError(Exception):
    """Failure of this package or its user: a missing file, a broken gold, a wrong config."""


class ConfigError(RunError):
    """A config file or option is wrong."""


class DataError(RunError):
    """A question file, database or gold query is wrong."""


class ModelError(RunError):
    """A model folder, tokenizer, chat template or adapter is wrong."""


class HubError(RunError):
    """The Hugging Face Hub refused a request, or could not be reached."""
