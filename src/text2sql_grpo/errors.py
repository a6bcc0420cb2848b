"""The exception tree: two families that are never mixed.

`QueryError` is the model's failure: shown to the model as an observation and scored.
`RunError` is ours or the user's (missing file, broken gold, wrong config): it stops the run.
"""


class QueryError(Exception):
    """The model's query failed; the text is fit to show to the model."""


class QueryNotAllowed(QueryError):
    """Not a read of the database (a write, ATTACH, a PRAGMA that is not a look-up, ...)."""


class QueryTimeout(QueryError):
    """Stopped at its time limit."""


class QueryOutOfMemory(QueryError):
    """Stopped at its memory limit."""


class RunError(Exception):
    """Something on our side or the user's: message = what was expected, what came, where."""


class ConfigError(RunError):
    """A config file or option is wrong."""


class DataError(RunError):
    """A question file, database or gold query is wrong."""


class ModelError(RunError):
    """A model folder, tokenizer, chat template or adapter is wrong."""


class HubError(RunError):
    """The Hugging Face Hub refused, or could not be asked."""
