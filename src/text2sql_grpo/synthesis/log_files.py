"""Statements of logs: SQL files, histories, PostgreSQL's log, pg_stat_statements, dbt projects."""

import csv
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from text2sql_grpo.data.question_files import parsed_json
from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.files import parse_yaml
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.query import MAX_CHARS, MAX_PARSED_CHARS, split_statements

LIVE = "pg_stat_statements"
MAX_LINE = 1_000_000  # characters; a longer line is read in pieces
SHORT = 2_000  # characters of a text that is read again at each semicolon
N_LOOKED_AT = 200  # lines of a file by which PostgreSQL's log is told from SQL

_LIVE_SQL = f"""SELECT query, calls FROM {LIVE}
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY calls DESC LIMIT 9999"""
_TOO_LONG = f"longer than {MAX_PARSED_CHARS:,} characters, or without an end"
_META = re.compile(r"\s*(\\[a-z!?].*|\.[a-z]+\b.*|#.*|_HiStOrY_V2_)$", re.I | re.S)
_END = re.compile(r"\\(g|gx|gset|gexec|G)\b.*$|^\s*(go|/)\s*$", re.I)
_START = re.compile(r"^(SELECT|WITH)\b", re.I | re.M)
_ENTRY = re.compile(
    r"\b(LOG|DETAIL|ERROR|FATAL|PANIC|STATEMENT|HINT|CONTEXT|WARNING|NOTICE|QUERY):  (.*)", re.S
)
_LOGGED = re.compile(r"(?:duration: [\d.]+ ms  )?(?:statement|execute [^:]*): (.*)", re.S)
_VALUES = re.compile(r"\$\d+ = (?:'((?:[^']|'')*)'|NULL)")


@dataclass(frozen=True)
class Statement:
    """One statement of a log.

    Attributes:
        sql: Its text; empty if there is a reason.
        calls: How often it ran.
        values: Values of its parameters in order, None for NULL; empty if the log has none.
        reason: Why it was not read; empty if it was.
    """

    sql: str
    calls: int = 1
    values: tuple[str | None, ...] = ()
    reason: str = ""


def read_log(source: str, database: Database) -> Iterator[Statement]:
    """Statements of a log, lazily.

    Args:
        source: `pg_stat_statements` of the database's server; the folder of a dbt project; or a file: `.csv`,
            `.json` or `.jsonl` with the columns `query` and `calls`, PostgreSQL's log, or SQL.

    Raises:
        DataError: The log cannot be read, or is of another kind.
    """
    path = Path(source).expanduser()
    dialect = parse_address(database).dialect
    if source == LIVE and not path.exists():
        return _exported(_live(str(database)), source)
    if path.is_dir():
        return _dbt_project(path)
    if reader := _EXPORTS.get(path.suffix.lower()):
        return _exported(reader(path), path)
    lines = _lines(path)
    head = list(islice(lines, N_LOOKED_AT))
    found = [entry for line in head if (entry := _ENTRY.search(line))]
    is_server = any(entry[1] == "LOG" and _LOGGED.match(entry[2]) for entry in found)
    return (_server_log if is_server else _sql_text)(chain(head, lines), dialect)


def _live(url: str) -> list[dict[str, Any]]:
    """Statements that a server counted, in one read-only transaction: the executor reads no catalog."""
    needs = f"it needs PostgreSQL, CREATE EXTENSION {LIVE}, and GRANT pg_read_all_stats to the role"
    if parse_address(url).kind != "postgresql":
        raise DataError(f"cannot read {LIVE} of {url}: {needs}")
    with needs_extra("postgresql", "a PostgreSQL database"):
        import psycopg
        from psycopg.rows import dict_row

        from text2sql_grpo.sql.postgres_database import connected
    try:
        with connected(url, row_factory=dict_row) as connection:
            connection.read_only = True
            connection.execute("SET LOCAL statement_timeout = '30s'")
            with suppress(psycopg.Error), connection.transaction():  # a role may not inherit its rights
                connection.execute("SET LOCAL ROLE pg_read_all_stats")
            return connection.execute(_LIVE_SQL).fetchall()
    except psycopg.Error as error:
        raise DataError(f"cannot read {LIVE}: {error} (of {url}); {needs}") from error


def _lines(path: Path) -> Iterator[str]:
    """Lines in UTF-8, else Latin-1, of any length of file."""
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            if "\0" in file.read(65_536):
                raise DataError(
                    f"a log must be text in UTF-8, got a binary file or UTF-16 (at {path}): give a .sql "
                    f"file, a history, PostgreSQL's log, .csv or .json of {LIVE}, or a dbt project"
                )
            file.seek(0)
            while line := file.readline(MAX_LINE):
                try:
                    line.encode()
                except UnicodeEncodeError:
                    line = line.encode(errors="surrogateescape").decode("latin-1")
                yield line.removeprefix("\ufeff").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"cannot read the log: {error} (at {path})") from error


def _sql_text(lines: Iterable[str], dialect: str) -> Iterator[Statement]:
    """Statements between semicolons, without the commands of a shell.

    Text that no semicolon ends is cut where a later line begins a query.
    """
    text = ""
    is_history = is_skipped = False
    for line in lines:
        is_history = is_history or line.startswith("_HiStOrY_V2_")
        if is_history:  # libedit writes a blank as \040
            line = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line)
        if is_skipped and not _START.match(line):
            is_skipped = not line.rstrip().endswith(";")
            continue
        if _META.match(line):
            continue
        is_skipped = False
        line = _END.sub(";", line.replace("\1", "\n"))  # psql writes a line break as ^A
        text += line
        if len(line) > MAX_CHARS:
            text, is_skipped = "", not line.rstrip().endswith(";")
            yield Statement("", reason=_TOO_LONG)
        if ";" in line and (line.rstrip().endswith(";") or len(text) < SHORT):
            found, text = split_statements(text, dialect)
            yield from map(Statement, found)
        if len(text) > MAX_PARSED_CHARS:
            start = _START.search(text, 1)
            text, is_skipped = text[start.start() :] if start else "", not start
            yield Statement("", reason=_TOO_LONG)
    found, text = split_statements(text, dialect)
    yield from map(Statement, [*found, text])


def _server_log(lines: Iterable[str], dialect: str) -> Iterator[Statement]:
    """Statements of PostgreSQL's log, with the values of their parameters."""
    found, values = list[str](), tuple[str | None, ...]()
    for level, text in _entries(lines):
        if level == "LOG":
            yield from (Statement(sql, values=values) for sql in found)
            logged = _LOGGED.match(text)
            ended, rest = split_statements(logged[1], dialect) if logged else ([], "")
            found, values = [*ended, rest], ()
        elif level == "DETAIL":
            values = tuple(
                None if one[1] is None else one[1].replace("''", "'") for one in _VALUES.finditer(text)
            )
    yield from (Statement(sql, values=values) for sql in found)


def _entries(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Level and text of each entry; the lines that continue one begin with a tab."""
    level, text = "", ""
    for line in lines:
        entry = None if line.startswith("\t") else _ENTRY.search(line)
        if entry:
            yield level, text
            level, text = entry[1], entry[2]
        elif len(text) <= MAX_PARSED_CHARS:
            text += line
    yield level, text


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(_lines(path))
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"cannot read CSV: {error} (at {path}:{reader.line_num})") from error


def _json_rows(path: Path) -> Iterator[Any]:
    rows = parsed_json("".join(_lines(path)), "the log as JSON", path)
    yield from rows if isinstance(rows, list) else [rows]


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path), start=1):
        yield parsed_json(line, "a JSON object", f"{path}:{number}") if line.strip() else {"query": ""}


_EXPORTS = {".csv": _csv_rows, ".json": _json_rows, ".jsonl": _json_lines, ".ndjson": _json_lines}


def _exported(rows: Iterable[Any], place: object) -> Iterator[Statement]:
    for row in rows:
        cells = row if isinstance(row, dict) else {}
        named = {str(name).strip().lower(): cell for name, cell in cells.items()}
        if "query" not in named:
            shown = ", ".join(named) or "none"
            raise DataError(f"a log of {LIVE} needs a column `query`, got the columns {shown} (at {place})")
        calls = re.match(r"\d+", str(named.get("calls") or 1))
        text = str(named["query"] or "").strip().rstrip(";")
        if text == "<insufficient privilege>":
            yield Statement("", reason="hidden from this role (GRANT pg_read_all_stats)")
        else:
            yield Statement(text, max(1, int(calls[0])) if calls else 1)


def _dbt_project(folder: Path) -> Iterator[Statement]:
    """Models of a dbt project, as dbt compiled them, else with their plain Jinja filled in."""
    project = folder / "dbt_project.yml"
    if not project.exists():
        raise DataError(f"a folder of logs must be a dbt project: it has no dbt_project.yml (at {folder})")
    jinja = SandboxedEnvironment(undefined=StrictUndefined)
    names = {"ref": lambda *names, **_: names[-1], "source": lambda *names: names[-1], "this": "this"}
    jinja.globals |= names | {"config": lambda *_, **__: "", "is_incremental": lambda: False}
    for model in sorted((folder / "models").rglob("*.sql")):
        compiled = sorted((folder / "target" / "compiled").glob(f"*/{model.relative_to(folder).as_posix()}"))
        text = "".join(_lines(compiled[0] if compiled else model))
        try:
            text = text if compiled else jinja.from_string(text).render()
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError):
            yield Statement("", reason="Jinja that dbt must compile (dbt compile)")
            continue
        yield Statement(text.strip().rstrip(";"))
    for file in sorted((folder / "models").rglob("*.y*ml")):
        try:
            n_tests = _count_tests(parse_yaml("".join(_lines(file))))
        except ValueError as error:
            raise DataError(f"cannot read the YAML: {error} (at {file})") from error
        yield from (Statement("", reason="a test of dbt") for _ in range(n_tests))


def _count_tests(node: Any) -> int:
    if isinstance(node, dict):
        own = (len(node[key]) for key in ("tests", "data_tests") if isinstance(node.get(key), list))
        return sum(own) + sum(map(_count_tests, node.values()))
    return sum(map(_count_tests, node)) if isinstance(node, list) else 0
