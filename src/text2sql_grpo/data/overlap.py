"""Overlap of each held-out question file with the files used for training."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlglot import exp

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import folded
from text2sql_grpo.data.question_files import only_name, read_questions
from text2sql_grpo.data.question_rows import Question
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.query import Unread, read_query

TRAINING_SETS = ("demonstrations", "train")
KEYS = ("question", "gold_sql", "combination", "literal", "template", "database", "stored_value")

Keys = Mapping[str, set[str]]


@dataclass(frozen=True)
class OverlapRow:
    """Overlap of one training file with one other file.

    Attributes:
        count: Number of questions in the other file.
        shares: For each of `KEYS`, among the questions that have such a key, the share (0 to 1) of those
            with one in the training file: the question or the gold (whatever its case and spaces), the
            combination of database, template and columns, a literal with its column, the template, the
            database, the stored value of a look-up question. None if no question has one.
    """

    training_set: str
    other_set: str
    count: int
    shares: Mapping[str, float | None]


def overlap(questions: Path, databases: Databases | None = None) -> list[OverlapRow]:
    """One row per pair of a training file and another file in the folder `questions`.

    Args:
        databases: Databases, in whose dialects the SQL is parsed; None for SQLite's.

    Raises:
        DataError: No training file, or a line that is not a question.
    """
    paths = sorted(path for path in questions.glob("*") if path.suffix in (".jsonl", ".csv", ".tsv"))
    only = only_name(databases) if databases else "the database"
    sets = {
        path.stem: [_keys(databases, question) for question in read_questions(path, database=only)]
        for path in paths
    }
    training_sets = [name for name in TRAINING_SETS if name in sets]
    if not training_sets:
        known = ", ".join(path.name for path in paths) or "no question files"
        raise DataError(
            f"no train.jsonl or demonstrations.jsonl (or .csv, .tsv), which the others are compared with: "
            f"{known} in the folder {questions}"
        )
    rows = []
    for name in training_sets:
        seen = {key: set[str]().union(*(keys[key] for keys in sets[name])) for key in KEYS}
        others = [other for other in sets if other not in TRAINING_SETS]
        for other in [*training_sets[1:], *others] if name == training_sets[0] else others:
            shares = {key: _share(key, seen[key], sets[other]) for key in KEYS}
            rows.append(OverlapRow(name, other, len(sets[other]), shares))
    return rows


def format_overlap(rows: list[OverlapRow]) -> str:
    """Rows as a printable table, in percent; `-` if there is nothing to compare."""
    header = ("training set", "other set", "questions", *(key.replace("_", " ") for key in KEYS))
    table = [header]
    for row in rows:
        cells = ["-" if share is None else f"{100 * share:.1f}%" for share in row.shares.values()]
        table.append((row.training_set, row.other_set, str(row.count), *cells))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    signs = ["<", "<", *">" * (len(widths) - 2)]  # names to the left, numbers to the right
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(form.format(*line) for line in table)


def _share(key: str, seen: set[str], questions: list[Keys]) -> float | None:
    found = [bool(keys[key] & seen) for keys in questions if keys[key]]
    return sum(found) / len(found) if found else None


def _keys(databases: Databases | None, read: Question) -> Keys:
    """Keys of one question that another may share."""
    example = read.example
    database, template = example.database, example.template
    try:
        dialect = databases.dialect(database) if databases else "sqlite"
        columns, literals = _parts(example.gold_sql, dialect)
        looked = _parts(example.look_sql, dialect)[0] if example.look_sql else ()
    except ValueError as error:
        hint = "" if databases else " (SQL of another engine than SQLite needs --databases)"
        raise DataError(f"SQL that cannot be parsed: {error}{hint} (at {read.place})") from error
    return {
        "question": {folded(example.question)},
        "gold_sql": {folded(example.gold_sql)},
        "combination": {f"{database} {template} {sorted(columns)}"} if template else set(),
        "literal": {f"{column} {value}" for column, value in literals},
        "template": {template} if template else set(),
        "database": {database},
        # Flags (`Y`, `0`) are the same everywhere, and no sign of memorisation.
        "stored_value": {
            value for column, value in literals if column in looked and len(value.strip("'")) > 1
        },
    }


@lru_cache(maxsize=50_000)
def _parts(sql: str, dialect: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Tables and `table.column`s of a query, and the (column, literal) pairs it compares."""
    query = read_query(sql, dialect)
    if isinstance(query, Unread):
        raise ValueError(query.reason)
    tree = query.tree
    aliases = {table.alias_or_name: table.name for table in tree.find_all(exp.Table)}
    only = next(iter(aliases.values())) if len(set(aliases.values())) == 1 else ""

    def place(column: exp.Column) -> str:
        return f"{aliases.get(column.table, column.table) or only}.{column.name}"

    literals = {
        (place(column), f"'{literal.name}'" if literal.is_string else literal.name)
        for predicate in tree.find_all(exp.Predicate)
        if not predicate.find(exp.Subquery)
        for column in predicate.find_all(exp.Column)
        for literal in predicate.find_all(exp.Literal)
    }
    columns = {place(column) for column in tree.find_all(exp.Column)}
    return columns | set(aliases.values()), literals
