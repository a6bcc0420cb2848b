"""Words and values of a database, for the question generator."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import schema as sql_schema
from text2sql_grpo.sql.schema import quote_name, read_schema
from text2sql_grpo.sql.sqlite_file import open_database

Value = str | int | float
Kind = Literal["number", "date", "text"]

MAX_VALUES = 10_000
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_IRREGULAR = {
    **{"person": "people", "child": "children", "man": "men", "woman": "women", "foot": "feet"},
    **{"staff": "staff", "mileage": "mileage", "horsepower": "horsepower", "pay": "pay", "series": "series"},
}


@dataclass(frozen=True)
class Column:
    """One column, its noun phrase and its values.

    Attributes:
        sql: Name in SQL, quoted if needed.
        is_key: Part of a primary or foreign key.
        values: Distinct values without NULL, sorted, at most `MAX_VALUES`.
        said: Stored value -> value as people say it, if the two differ; empty for most columns.
        clauses: Value as people say it -> phrases behind the plural of a row's noun ("on the Lisbon ward");
            under `""` those of any other value, with `{}` in its place.
    """

    table: str
    name: str
    sql: str
    noun: str
    kind: Kind
    is_key: bool
    has_nulls: bool
    values: tuple[Value, ...]
    said: Mapping[Value, str] = field(default_factory=dict)
    clauses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """One table; `noun` names one row."""

    name: str
    sql: str
    noun: str
    row_count: int
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Link:
    """The only foreign key between two tables: `on` is the condition of their join."""

    child: Table
    parent: Table
    on: str


@dataclass(frozen=True)
class Database:
    """A database open for reading, with its words."""

    name: str
    split: str
    connection: sqlite3.Connection
    tables: tuple[Table, ...]
    links: tuple[Link, ...]


def open_with_words(path: Path, name: str, words_path: Path) -> Database:
    """Open a SQLite file for reading, with the words people use for its content.

    Args:
        path: The SQLite file.
        name: Name of the database.
        words_path: JSON with `split`, `tables`, `columns`, `said` and `clauses`, all optional; without the
            file, words come from identifiers and values, and the split is `train`.

    Raises:
        DataError: A file cannot be read, or the words name a table or column that the database lacks.
    """
    try:
        words = json.loads(words_path.read_text(encoding="utf-8")) if words_path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the words as JSON: {error} (at {words_path})") from error
    schema = read_schema(path)
    known = {f"{table.name}.{column.name}" for table in schema.tables for column in table.columns}
    asked = {*words.get("columns", {}), *words.get("said", {}), *words.get("clauses", {})}
    unknown = sorted(
        (set(words.get("tables", {})) - {table.name for table in schema.tables}) | (asked - known)
    )
    if unknown:
        raise DataError(f"unknown tables or columns of {path}: {unknown} (at {words_path})")
    with ExitStack() as stack:
        connection = stack.enter_context(closing(open_database(path)))
        try:
            tables = {table.name: _read_table(connection, table, words) for table in schema.tables}
        except sqlite3.Error as error:
            raise DataError(f"cannot read the database: {error} (at {path})") from error
        stack.pop_all()
    links = tuple(_links(schema, tables))
    return Database(name, words.get("split", "train"), connection, tuple(tables.values()), links)


def _links(schema: sql_schema.Schema, tables: Mapping[str, Table]) -> Iterator[Link]:
    """Joins that a question can name without ambiguity: pairs of tables with a single foreign key."""
    pairs = Counter(
        frozenset((table.name, key.table)) for table in schema.tables for key in table.foreign_keys
    )
    for table in schema.tables:
        for key in table.foreign_keys:
            is_plain = len(key.columns) == len(key.references) == 1 and key.table != table.name
            if is_plain and key.table in tables and pairs[frozenset((table.name, key.table))] == 1:
                child, parent = tables[table.name], tables[key.table]
                column, target = quote_name(key.columns[0]), quote_name(key.references[0])
                yield Link(child, parent, f"{child.sql}.{column} = {parent.sql}.{target}")


def _read_table(connection: sqlite3.Connection, table: sql_schema.Table, words: Mapping[str, Any]) -> Table:
    sql = quote_name(table.name)
    foreign = {name for key in table.foreign_keys for name in key.columns}
    columns = []
    for declared in table.columns:
        name = quote_name(declared.name)
        query = f"SELECT DISTINCT {name} FROM {sql} ORDER BY 1 LIMIT {MAX_VALUES + 1}"
        found = [row[0] for row in connection.execute(query)]
        values = tuple(value for value in found if value is not None)
        kind = _kind(values)
        if kind is None:
            continue
        place = f"{table.name}.{declared.name}"
        columns.append(
            Column(
                table=table.name,
                name=declared.name,
                sql=name,
                noun=words.get("columns", {}).get(place) or identifier_words(declared.name),
                kind=kind,
                is_key=declared.is_primary_key or declared.name in foreign,
                has_nulls=len(values) < len(found),
                values=values,
                said=_said(place, values, words),
                clauses=_clauses(words.get("clauses", {}).get(place, [])),
            )
        )
    noun = words.get("tables", {}).get(table.name) or singular(identifier_words(table.name))
    return Table(table.name, sql, noun, table.n_rows, tuple(columns))


def _kind(values: tuple[Any, ...]) -> Kind | None:
    """Kind of the stored values, whatever the declared type; None if mixed, blobs or empty."""
    if not values:
        return None
    if all(isinstance(value, int | float) for value in values):
        return "number"
    if not all(isinstance(value, str) for value in values):
        return None
    return "date" if all(_DATE.match(value) for value in values) else "text"


def _said(place: str, values: tuple[Value, ...], words: Mapping[str, Any]) -> dict[Value, str]:
    """Stored -> said for one column: from `words` if it maps any column, else derived."""
    if "said" in words:
        given = words["said"].get(place, {})
        said = {value: given[str(value)] for value in values if str(value) in given}
        if given and not _is_usable(said):
            raise DataError(f"said forms must be distinct and not the stored ones, got {said} ({place})")
        return said
    found: dict[Value, str] = {
        value: form for value in values if isinstance(value, str) and (form := said_form(value))
    }
    return found if len(found) * 2 > len(values) and len(found) > 1 and _is_usable(found) else {}


def _clauses(given: list[str] | dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    by_value = given if isinstance(given, dict) else {"": given}
    return {said: tuple(phrases) for said, phrases in by_value.items()}


def _is_usable(said: Mapping[Value, str]) -> bool:
    forms = [form.lower() for form in said.values()]
    return len(set(forms)) == len(forms) and all(
        str(value).lower() != form.lower() for value, form in said.items()
    )


def said_form(stored: str) -> str | None:
    """Stored value as people say it, by a few rules; None if none applies.

    >>> said_form("IN_TRANSIT"), said_form("02-Lisbon"), said_form("SMITH, J."), said_form("Lisbon")
    ('in transit', 'Lisbon', 'J. Smith', None)
    """
    if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", stored):
        return stored.replace("_", " ").lower()
    if numbered := re.fullmatch(r"\d+[-_. ]+([A-Za-z].*)", stored):
        return numbered[1]
    if person := re.fullmatch(r"([A-Z][\w'-]+), ([A-Z]\w*\.?)", stored):
        return f"{person[2]} {person[1].title()}"
    return None


def identifier_words(name: str) -> str:
    """Words of an identifier.

    >>> identifier_words("unit_price"), identifier_words("UnitPrice"), identifier_words("Unit Price")
    ('unit price', 'unit price', 'unit price')
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_\W]+", " ", name)
    return " ".join(spaced.lower().split())


def plural(noun: str) -> str:
    """Plural of a noun phrase, by the common rules.

    >>> plural("visit"), plural("city"), plural("foreman"), plural("date of birth")
    ('visits', 'cities', 'foremen', 'dates of birth')
    """
    prepositions = re.search(" (of|in|per|on|with) ", noun)
    head, preposition, rest = noun.partition(prepositions[0]) if prepositions else (noun, "", "")
    before, space, last = head.rpartition(" ")
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith("man") and last != "human":
        last = last[:-3] + "men"
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    elif re.search(r"(s|x|z|ch|sh)$", last):
        last += "es"
    else:
        last += "s"
    return before + space + last + preposition + rest


def with_article(noun: str) -> str:
    """Noun phrase with its indefinite article, by pronunciation.

    >>> with_article("hour"), with_article("age"), with_article("union flag"), with_article("visit")
    ('an hour', 'an age', 'a union flag', 'a visit')
    """
    is_vowel = re.match("[aeiou]|hour|honou?r|x-", noun.lower()) and not re.match(
        "uni|use|one|eu", noun.lower()
    )
    return f"an {noun}" if is_vowel else f"a {noun}"


def singular(noun: str) -> str:
    """Singular of a table's name, which may be a plural.

    >>> singular("cities"), singular("order lines"), singular("addresses"), singular("status")
    ('city', 'order line', 'address', 'status')
    """
    before, space, last = noun.rpartition(" ")
    for one, many in _IRREGULAR.items():
        if last == many:
            return before + space + one
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    if re.search(r"(ss|x|z|ch|sh|us)es$", noun):
        return noun[:-2]
    return noun[:-1] if re.search(r"[^su]s$", noun) else noun
