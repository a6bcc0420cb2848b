"""File of a database's words, which people edit: how they call its tables, columns and values."""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from text2sql_grpo.checked import Bounds, checked
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.files import parse_yaml

HOLE = "{}"  # in a phrase, where the value stands
Name = Annotated[str, Bounds(strip_whitespace=True, min_length=1)]


@checked
class Words:
    """How people call the tables, columns and values of a database; all optional.

    Attributes:
        database: Name of the database, for the reader alone.
        split: Questions that the database is for. Words with it are complete: no other column is asked about
            by its name in quotes.
        tables: Table -> noun of a row in the singular; None for a table that is not asked about.
        columns: `table.column` -> noun; None for a column that is not asked about.
        said: `table.column` -> stored value -> value as people say it; None to derive it from the values.
        clauses: `table.column` -> phrases behind the plural of a row's noun with `{}` for the value ("on the
            {} ward"); or value as people say it -> such phrases without `{}`.
    """

    database: str | None = None
    split: Literal["train", "dev", "test"] | None = None
    tables: dict[str, Name | None] = field(default_factory=dict)
    columns: dict[str, Name | None] = field(default_factory=dict)
    said: dict[str, dict[str, Name]] | None = None
    clauses: dict[str, list[str] | dict[str, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, phrases in self.clauses.items():
            for phrase in phrases if isinstance(phrases, list) else ():
                if phrase.count(HOLE) != 1:
                    raise ValueError(f"clauses.{place}: {phrase!r} must hold {HOLE} once, for the value")

    def phrases(self, place: str) -> dict[str, tuple[str, ...]]:
        """Phrases of `clauses` by the value as people say it; under the empty text the phrases with `{}`."""
        given = self.clauses.get(place, [])
        by_value = given if isinstance(given, dict) else {"": given}
        return {said: tuple(phrases) for said, phrases in by_value.items()}


def read_words(path: Path | None) -> Words:
    """Words of a database, from YAML or JSON; none without a file.

    Raises:
        DataError: The file cannot be read, or holds something else.
    """
    if path is None:
        return Words()
    try:
        words = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the words as YAML or JSON: {error} (at {path})") from error
    if not isinstance(words, dict):
        parts = ", ".join(each.name for each in dataclasses.fields(Words))
        raise DataError(f"words must be a mapping with {parts} (at {path})")
    try:
        return Words(**{str(part): _with_text_keys(names) for part, names in words.items()})
    except ConfigError as error:
        raise DataError(f"{error} (at {path})") from error


def _with_text_keys(tree: Any) -> Any:
    """Mapping with keys as text, such as the 1 of `1: open`, which YAML reads as a number."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _with_text_keys(value) for key, value in tree.items()}
