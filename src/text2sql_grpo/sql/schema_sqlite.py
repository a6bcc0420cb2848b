"""Schema of a SQLite file, from its pragmas, the stored CREATE statements and BIRD's descriptions."""

import csv
import logging
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from io import StringIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import ForeignKey, Schema
from text2sql_grpo.sql.schema_catalogue import READ_CHARS, Rows, one_line, schema_of
from text2sql_grpo.sql.sqlite_file import open_database, text_of

logger = logging.getLogger(__name__)

_DESCRIPTION = ("original_column_name", "column_name", "column_description", "value_description")
_PROGRESS_STEPS = 100  # SQLite instructions between two checks of the deadline
_COMMENT = re.compile(r"^(?P<code>[^'\n]*?)--(?P<comment>.*)$")
_TABLE_START = re.compile(r"\s*CREATE\s+TABLE\b[^(]*\(\s*", re.IGNORECASE)
_COLUMN_START = re.compile(r'\s*,?\s*(?:"(?P<a>(?:[^"]|"")+)"|\[(?P<b>[^]]+)\]|`(?P<c>[^`]+)`|(?P<d>\w+))')

_RELATIONS = "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY type, rowid"
# Hidden 1 is a virtual table's hidden column; 2 and 3 are generated columns. One that is not stored (2) has
# no examples: its expression would run here.
_COLUMNS = f"""
    SELECT iif(hidden = 2, 'NULL', replace(
        'CASE typeof(?) WHEN ''text'' THEN substr(?, 1, {READ_CHARS}) WHEN ''blob'' THEN NULL ELSE ? END',
        '?', '"' || replace(name, '"', '""') || '"')), name, type, "notnull", pk, hidden > 1
    FROM pragma_table_xinfo(?) WHERE hidden <> 1
"""
# The primary key, then each unique index without a condition; the name of an expression is NULL.
_KEY_PARTS = """
    SELECT place, name FROM (
        SELECT NULL AS place, pk AS part, name FROM pragma_table_xinfo(?) WHERE pk
        UNION ALL
        SELECT -l.seq, i.seqno, i.name FROM pragma_index_list(?) l JOIN pragma_index_info(l.name) i
        WHERE l."unique" AND NOT l.partial
    ) ORDER BY place, part
"""
_FOREIGN_KEYS = """
    SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq
"""  # the last declared has id 0


def read(database: Path | str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. Comments come from the CREATE statements, then from BIRD's descriptions."""
    deadline = time.monotonic() + timeout_s
    path = Path(database)
    descriptions = _descriptions(path.parent / "database_description")
    try:
        with closing(open_database(database)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_STEPS)
            connection.text_factory = text_of  # invalid UTF-8 becomes unprintable: no example shows it
            return _schema(connection, path.stem, descriptions)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise DataError(f"reading the schema of {database} took longer than {timeout_s:g} s") from error
        raise DataError(f"cannot read the schema: {error} (at {database})") from error


def _descriptions(folder: Path) -> dict[str, dict[str, str]]:
    """BIRD's descriptions (`<table>.csv` in a folder), by table and column in lower case."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(folder.glob("*.csv")):
        try:  # some of BIRD's files are in other encodings
            text = path.read_text("utf-8-sig", errors="replace")
            rows = list(csv.DictReader(StringIO(text, newline="")))
        except (OSError, csv.Error) as error:
            raise DataError(f"cannot read the descriptions: {error} (at {path})") from error
        for row in rows:
            column, name, *notes = ((row.get(field) or "").strip() for field in _DESCRIPTION)
            meaning = notes if notes[0] else [name, *notes[1:]]
            found[path.stem.lower()][column.lower()] = one_line("; ".join(filter(None, meaning)))
    return found


def _schema(connection: sqlite3.Connection, name: str, descriptions: dict[str, dict[str, str]]) -> Schema:
    def ask(query: str, *parameters: str) -> Rows:
        return connection.execute(query, parameters).fetchall()

    shadows: Rows = []
    if sqlite3.sqlite_version_info >= (3, 37):  # tables behind a full-text or rtree table
        shadows = ask("SELECT name FROM pragma_table_list WHERE type = 'shadow'")
    relations: Rows = []
    columns: Rows = []
    keys: list[tuple[str, list[str]]] = []
    tables: dict[str, list[str]] = {}  # the columns of each
    primary: dict[str, list[str]] = {}
    for relation, kind, statement in ask(_RELATIONS):
        if relation.startswith("sqlite_") or (relation,) in shadows:
            continue
        try:
            own = ask(_COLUMNS, relation)
        except sqlite3.OperationalError as error:
            is_virtual = statement.startswith("CREATE VIRTUAL TABLE")  # its module may be missing
            if (kind == "table" and not is_virtual) or error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            logger.warning("%s is left out of the schema: no query can read it: %s", relation, error)
            continue
        comment, comments = _comments(statement) if kind == "table" else ("", {})
        described = descriptions.get(relation.lower(), {}) if kind == "table" else {}
        relations.append((relation, "", relation, kind == "table", comment, statement, ""))
        computed = {}
        if any(row[-1] for row in own):
            from text2sql_grpo.sql.query import generated_columns  # with sqlglot, which few files need

            computed = generated_columns(statement)
        for value, column, type_name, is_required, place, is_generated in own:
            facts = (column, type_name, not (is_required or place), bool(place))
            note = comments.get(column.lower()) or described.get(column.lower(), "")
            expression = computed.get(column.lower(), "*") if is_generated else ""
            columns.append((relation, value, *facts, note, expression, (), "", False))
        if kind == "table":
            tables[relation] = [column for _, column, *_ in own]
            parts = ask(_KEY_PARTS, relation, relation)
            primary[relation] = [column for place, column in parts if place is None]
            keys += [(relation, [column for _, column in key]) for _, key in groupby(parts, itemgetter(0))]
    foreign_keys = [
        (table, _foreign_key(parts, table, tables, primary))
        for table in tables
        for _, parts in groupby(ask(_FOREIGN_KEYS, table), itemgetter(0))
    ]
    return schema_of(
        name, "sqlite", ask, relations=relations, columns=columns, keys=keys, foreign_keys=foreign_keys
    )


def _comments(statement: str) -> tuple[str, dict[str, str]]:
    """Comment behind the opening bracket, and by lower-case name those behind a line of one column.

    Lines with a string or several columns are skipped.
    """
    table_comment, comments = "", dict[str, str]()
    for line in statement.splitlines():
        match = _COMMENT.match(line)
        if not match:
            continue
        code, comment = match["code"], one_line(match["comment"])
        start = _TABLE_START.match(code)
        if start and start.end() == len(code):
            table_comment = comment
            continue
        code = code[start.end() :] if start else code
        column = _COLUMN_START.match(code)
        rest = re.sub(r"\([^()]*\)", "", code[column.end() :]).rstrip() if column else ","
        if column and "," not in rest.removesuffix(","):
            name = next(filter(None, column.groups())).replace('""', '"')
            comments.setdefault(name.lower(), comment)
    return table_comment, comments


def _foreign_key(
    parts: Iterable[tuple[Any, ...]], table: str, tables: dict[str, list[str]], primary: dict[str, list[str]]
) -> ForeignKey:
    """Foreign key, spelled as its tables are: SQLite ignores case, and implies the primary key."""
    _, parents, own, named = zip(*parts, strict=True)
    parent = _spelled(parents[:1], tables)[0]
    known = primary.get(parent, [])
    references = named if named[0] is not None else known if len(known) == len(own) else ()
    return ForeignKey(_spelled(own, tables[table]), parent, _spelled(references, tables.get(parent, [])))


def _spelled(names: Iterable[str], declared: Iterable[str]) -> tuple[str, ...]:
    spelling = {name.lower(): name for name in declared}
    return tuple(spelling.get(name.lower(), name) for name in names)
