"""Generator of questions with checked golds from any databases, in separate splits."""

import logging
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from text2sql_grpo.data.databases import WHAT_IS_READ, Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import read_json, read_jsonl, refuse_edited, sha256, write_json, write_jsonl
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql import SQLExecutor, schema
from text2sql_grpo.sql.address import Database as Address
from text2sql_grpo.sql.query import lexemes
from text2sql_grpo.synthesis.candidates import Draft, Drafter, Side, stable_number
from text2sql_grpo.synthesis.profile import TIMEOUT_S, Profile
from text2sql_grpo.synthesis.templates import BUNDLED, OWN, Template, templates
from text2sql_grpo.synthesis.words import Database, Source, with_words
from text2sql_grpo.synthesis.words_file import read_words

MANIFEST = "made.json"
PERSONAL = ("personal",)  # the default of `data.hide`
MAX_ROWS = 50
MAX_FAILURES = 60
MAX_TIMEOUTS = 3
MAX_NAMED = 6  # columns, or reasons of tables, in one line
MAX_SHARE = 0.1  # largest share of a file that one template gives, where ten or more can be used
MIN_EACH = 20  # questions of a template, and of a table, in a file that nothing cuts

_RANKED = re.compile(r"SELECT .*? (FROM .*) ORDER BY (.*?)( DESC)?(?: LIMIT (\d+))?")
_Streams = Mapping[Drafter, Iterator[Example]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionSet:
    """Plan of one question file.

    Attributes:
        databases: Split of its databases.
        lookup_share: Minimum share of the look-up family.
        side: Literals and columns held out for `test_values`, the others, or any.
        gold_thirds: Thirds of all gold SQL (by a hash) that it may use.
    """

    name: str
    databases: str
    count: int
    lookup_share: float
    side: Side
    is_held_out_templates: bool = False
    gold_thirds: tuple[int, ...] = (0, 1, 2)


QUESTION_SETS = (
    QuestionSet("test_databases", "test", 400, 0.42, "any"),
    QuestionSet("dev", "dev", 300, 0.42, "any"),
    QuestionSet("test_values", "train", 300, 0.42, "held_out"),
    QuestionSet("test_templates", "train", 300, 0.42, "seen", is_held_out_templates=True),
    QuestionSet("train", "train", 3000, 0.46, "seen", gold_thirds=(0,)),
    QuestionSet("demonstrations", "train", 6000, 0.46, "seen", gold_thirds=(1, 2)),
)


@dataclass
class Taken:
    """Questions and golds in the files so far; no other file repeats them.

    Attributes:
        tables: Number of questions by database and table.
        timeouts: Number of drafts whose queries took too long, likewise.
        named: Names in lower case in the gold queries, likewise.
        on_question: Called after each question.
    """

    questions: set[str] = field(default_factory=set)
    golds: dict[str, str] = field(default_factory=dict)
    tables: Counter[tuple[str, str]] = field(default_factory=Counter)
    timeouts: Counter[tuple[str, str]] = field(default_factory=Counter)
    named: defaultdict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    on_question: Callable[[], object] = int

    def add(self, draft: Draft, question_set: str) -> None:
        """Note a draft that a file takes."""
        self.questions.add(draft.example.question)
        self.golds[draft.example.gold_sql] = question_set
        names = {one.value.lower() for one in lexemes(draft.example.gold_sql) if one.kind in ("word", "name")}
        for table in draft.tables:
            self.tables[draft.example.database, table] += 1
            self.named[draft.example.database, table] |= names
        self.on_question()


@dataclass(frozen=True)
class TableReport:
    """Questions of one table.

    Attributes:
        n_rows: Number of its rows; None for a view and a hidden table.
        n_questions: Number of questions whose gold query reads it.
        reason: Why there is none, or which of its columns are not asked about, and which of its foreign keys
            are not joined by; empty if all are.
    """

    database: str
    table: str
    n_rows: int | None
    n_questions: int
    reason: str


@dataclass(frozen=True)
class Made:
    """Result of `make_questions`.

    Attributes:
        files: Number of questions by question set, 0 for one that was asked for and came out empty.
        wanted: Number of questions that each set asks for.
        tables: A report for each table.
    """

    files: Mapping[str, int]
    wanted: Mapping[str, int]
    tables: Sequence[TableReport]

    @property
    def n_questions(self) -> int:
        return sum(self.files.values())

    @property
    def lacks(self) -> list[str]:
        """Tables with rows that got no question, and sets that got none."""
        bare = [f"{one.database}.{one.table}" for one in self.tables if one.n_rows and not one.n_questions]
        return bare + [f"{name}.jsonl" for name, count in self.files.items() if not count]


def make_questions(
    databases: Address,
    out: Path,
    *,
    seed: int = 0,
    question_sets: Sequence[QuestionSet] = QUESTION_SETS,
    words: Path | None = None,
    hide: Sequence[str] = PERSONAL,
    on_question: Callable[[], object] = int,
) -> Made:
    """Write one JSONL file per question set for some databases.

    A file that was edited since it was made is never written over: `made.json` in the folder holds a
    fingerprint of each.

    Args:
        databases: Folder of databases, or a file, a folder of rows or a URL. The templates are those of
            `templates.yaml` next to the folder, or of the package's `own_templates.yaml` if there is none.
        out: Folder of the files. Sets without databases are not written; sets that the databases cannot
            fill are shorter.
        seed: Random seed; held-out columns and literals do not depend on it.
        question_sets: The files to write; no two share a question or a gold.
        words: Words of the one database (see `Words`), or a folder with a file for each, `shop.yaml` or
            `shop.json`. None: the databases' own folder. A database without words counts as `train`.
        hide: Tables and columns that are not asked about, as `data.hide`.
        on_question: Called after each question.

    Raises:
        DataError: No databases, or one that cannot be read; or none of which a question can be made; or
            a file to write was edited.
    """
    found = Databases(databases)
    if not found.names():
        raise DataError(f"no databases (at {databases}): give {WHAT_IS_READ}")
    folder = Path(databases)  # nothing is there of a URL
    beside = folder.resolve().parent / BUNDLED.name
    every = templates(beside if beside.exists() else OWN)
    taken = Taken(on_question=on_question)
    given = {name: _words_file(found, name, folder, words) for name in found.names()}
    with SQLExecutor() as executor:
        opened = []
        for name, file in given.items():
            profile, known = Profile(executor, found.address(name), hide), read_words(file)
            opened.append(with_words(profile, name, known, place=file))
            for pattern in profile.unmatched if len(given) == 1 else ():
                _log.warning("--hide: no table or column of %s is named %s", name, pattern)
        splits = {database.split for database in opened}
        question_sets = [one for one in question_sets if one.databases in splits]
        before = _refuse_others(out, [f"{one.name}.jsonl" for one in question_sets], found.names())
        made = {one.name: _examples(opened, one, taken, every, seed) for one in question_sets}
    reports = [report for database in opened for report in _reports(database, taken)]
    if not taken.questions:
        reasons = [f"{one.table}: {one.reason}" for one in reports] or ["it has no tables that can be read"]
        raise DataError(
            f"no question can be made of {', '.join(found.names())}: {listed(reasons, MAX_NAMED)}"
            f" (at {databases})"
        )
    out.mkdir(parents=True, exist_ok=True)
    paths = {out / f"{name}.jsonl": examples for name, examples in made.items() if examples}
    for path, examples in paths.items():
        write_jsonl(path, map(_row, examples))
    write_json(out / MANIFEST, {path.name: sha256(path) for path in paths})
    for path in set(before) - set(paths):
        path.unlink()
    files = {name: len(examples) for name, examples in made.items()}
    wanted = {one.name: one.count for one in question_sets}
    return Made(files, wanted, reports)


def _refuse_others(out: Path, names: Sequence[str], databases: Sequence[str]) -> list[Path]:
    """Files of an earlier run.

    Raises:
        DataError: One was edited since, not made here, or made of other things.
    """
    manifest = out / MANIFEST
    made = read_json(manifest) if manifest.exists() else {}
    present = [name for name in {**dict.fromkeys(names), **made} if (out / name).is_file()]
    files = [out / name for name in present]
    refuse_edited(files, made)
    asked = {row["database"] for name in present for row in read_jsonl(out / name, "questions")}
    if strange := sorted(asked - set(databases)):
        what = f"holds questions about {', '.join(strange)}"
    elif more := sorted(set(present) - set(names)):
        what = f"holds {', '.join(more)}, made with the others by `init`"
    else:
        return files
    raise DataError(f"{out} {what}: nothing is written. Give another folder with --out")


def _words_file(found: Databases, name: str, folder: Path, words: Path | None) -> Path | None:
    """File of a database's words, None if it has none; DataError if the one that the user named is absent."""
    if words is not None and not words.is_dir():
        if not words.exists():
            raise DataError(f"no file of words (at {words}): `text2sql-grpo data words` writes one")
        if len(found.names()) > 1:
            raise DataError(f"words of {len(found.names())} databases: give a folder with a file for each")
        return words
    if words is None and found.source(name) == folder.absolute():
        return None  # JSON files are rows
    files = [(words or folder) / f"{name}{suffix}" for suffix in (".yaml", ".json")]
    return next((file for file in files if file.is_file()), None)


def _reports(database: Database, taken: Taken) -> Iterator[TableReport]:
    for name, profile in database.profile.tables.items():
        count = taken.tables[database.name, name]
        table = database.tables.get(name)
        reason = ""
        if not profile.n_rows:
            reason = "no rows"
        elif table is None:
            reason = "left out by the words"
        elif table.is_link:
            reason = "" if count else "it only links two tables, of which a join asks nothing"
        elif taken.timeouts[database.name, name] and not count:
            reason = f"gold queries take more than {TIMEOUT_S:g} s"
        elif not any(column.roles for column in table.columns):
            reason = (
                "no column to ask about: keys, one value, long or mixed values, or a name that says no more"
            )
        elif not count:
            reason = "no draft had a plain answer"
        else:
            silent = _silent_columns(profile.table, taken.named[database.name, name])
            parts = {"not asked about": silent, "not joined by": _unjoined(profile.table, database)}
            reason = "; ".join(f"{what}: {listed(each, MAX_NAMED)}" for what, each in parts.items() if each)
        yield TableReport(database.name, name, profile.n_rows, count, reason)
    for one in database.profile.ambiguous:
        name = f"{one.namespace}.{one.name}"
        yield TableReport(database.name, name, one.n_rows, 0, "another schema has a table of this name")
    for name in database.profile.hidden_tables:
        yield TableReport(database.name, name, None, 0, "hidden")
    for view in database.profile.schema.views:
        yield TableReport(database.name, view.name, None, 0, "views are not asked about, only tables")


def _silent_columns(table: schema.Table, named: set[str]) -> list[str]:
    """Columns that no gold query names, keys aside: of one value, long or mixed ones, amounts as text."""
    keys = {name for key in (*table.keys, *(one.columns for one in table.foreign_keys)) for name in key}
    others = [column.name for column in table.columns if not column.is_primary_key]
    return [name for name in others if name not in keys and name.lower() not in named]


def _unjoined(table: schema.Table, database: Database) -> list[str]:
    """Foreign keys by which no question joins: to the table itself, of several columns, or ambiguous ones."""
    joined = {pair for source in database.sources for pair in source.pairs}
    return [
        " + ".join(key.columns)
        for key in table.foreign_keys
        if key.table in database.tables
        and {(table.name, key.columns[0]), *((key.table, one) for one in key.references)} not in joined
    ]


def _examples(
    databases: Sequence[Database],
    question_set: QuestionSet,
    taken: Taken,
    every: Sequence[Template],
    seed: int,
) -> list[Example]:
    """Examples of one set, shuffled; `taken` holds the examples of earlier sets, and grows."""
    rng = random.Random(f"{seed}-{question_set.name}")
    used = [database for database in databases if database.split == question_set.databases]
    fitting = [one for one in every if one.is_held_out == question_set.is_held_out_templates]
    is_plain = bool(fitting) and fitting[0].is_plain
    parts: list[tuple[Database, Template, Sequence[Source]]]
    if is_plain:
        sources = [(database, source) for database in used for source in database.sources]
        parts = [(database, template, [source]) for database, source in sources for template in fitting]
    else:
        parts = [(database, template, database.sources) for template in fitting for database in used]
    drafters = (Drafter(*part, side=question_set.side) for part in parts)
    streams = {
        drafter: _accepted(drafter, question_set, taken, rng)
        for drafter in drafters
        if drafter.sources or not is_plain  # the bundled questions were shuffled with all
    }
    drawn = (_balanced if is_plain else _weighted)(streams, question_set, rng)
    rng.shuffle(drawn)
    return [
        replace(example, id=f"{question_set.name}-{number:05}", split=question_set.name)
        for number, example in enumerate(drawn)
    ]


def _balanced(streams: _Streams, question_set: QuestionSet, rng: random.Random) -> list[Example]:
    """Examples spread over the schema: the next is of the table, then the join path, then the template with
    the fewest so far.

    A template that has `MAX_SHARE` of the examples, or its share if few fit, waits until others have more. A
    table gives no more examples than it holds different values, but `MIN_EACH`.
    """
    by_table: dict[tuple[str, str], list[Drafter]] = {}
    for drafter in streams:
        by_table.setdefault((drafter.database.name, drafter.sources[0].tables[""].name), []).append(drafter)
    n_templates = len({drafter.template.name for drafter in streams})
    share = max(MAX_SHARE, 1.5 / max(1, n_templates))
    drawn: list[Example] = []
    counts: Counter[Any] = Counter()
    most = {}
    for table, drafters in by_table.items():
        columns = drafters[0].database.profile.tables[table[1]].columns.values()
        most[table] = max(MIN_EACH, sum(len(column.values) for column in columns))
    order = list(by_table)
    rng.shuffle(order)

    def path(drafter: Drafter) -> tuple[str, str]:
        return drafter.database.name, drafter.sources[0].sql

    def used(drafter: Drafter) -> tuple[int, float]:
        return counts[path(drafter)], counts[drafter.template.name] / drafter.template.weight

    while len(drawn) < question_set.count:
        cap = max(MIN_EACH, share * (len(drawn) + 1))
        waiting = (
            (table, drafter)
            for table in sorted(order, key=lambda one: counts[one])
            if counts[table] < most[table]
            for drafter in sorted(by_table[table], key=used)
            if counts[drafter.template.name] < cap
        )
        for table, drafter in waiting:
            if example := next(streams[drafter], None):
                drawn.append(example)
                counts.update((table, path(drafter), drafter.template.name))
                break
            by_table[table].remove(drafter)
        else:
            break
    return drawn


def _weighted(streams: _Streams, question_set: QuestionSet, rng: random.Random) -> list[Example]:
    """Examples evenly over databases, over templates by their weights, a share of them look-ups.

    If one is exhausted, the others fill in.
    """
    drawn: list[Example] = []
    quota = math.ceil(question_set.count * question_set.lookup_share)
    for is_lookup, total in ((True, quota), (False, question_set.count)):
        alive = [drafter for drafter in streams if (drafter.template.family == "lookup") == is_lookup]
        while alive and len(drawn) < total:
            rng.shuffle(alive)
            for drafter in list(alive):
                found = list(islice(streams[drafter], min(drafter.template.weight, total - len(drawn))))
                drawn += found
                if not found:
                    alive.remove(drafter)
    return drawn


def _row(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if value not in (None, False, ())}


def _accepted(
    drafter: Drafter, question_set: QuestionSet, taken: Taken, rng: random.Random
) -> Iterator[Example]:
    """Good examples of a set, until `MAX_FAILURES` draws in a row fail or `MAX_TIMEOUTS` take too long."""
    template, profile = drafter.template, drafter.database.profile
    is_good: dict[str, bool] = {}
    used: set[str] = set()
    failures = timeouts = 0
    while drafter.sources and failures < MAX_FAILURES and timeouts < MAX_TIMEOUTS:
        failures += 1
        draft = drafter.draw(rng)
        if draft is None or draft.example.question in taken.questions:
            continue
        gold = draft.example.gold_sql
        if taken.golds.get(gold, question_set.name) != question_set.name:
            continue
        is_bare = template.is_plain and not template.slots
        if gold in used and (failures < MAX_FAILURES // 2 or is_bare):
            continue  # a second question with the same gold only if new golds are rare
        if stable_number("gold", gold) % 3 not in question_set.gold_thirds:
            continue
        native = None
        try:
            if gold not in is_good:
                is_good[gold] = _is_good(profile, draft)
            if is_good[gold]:
                native = _native(draft.example, profile)
        except TimeoutError:
            is_good[gold] = False
            timeouts += 1
            taken.timeouts.update((drafter.database.name, table) for table in draft.tables)
        if native:
            failures = 0
            used.add(gold)
            taken.add(draft, question_set.name)
            yield native


def _native(example: Example, profile: Profile) -> Example | None:
    """Example in the SQL of its database; None if one of its queries cannot be said or run there.

    May raise `TimeoutError`.
    """
    names = ("gold_sql", "look_sql", "guess_sql")
    found: dict[str, Any] = {name: profile.native(sql) for name in names if (sql := getattr(example, name))}
    check = example.check_sql
    if check and not profile.rows(check):
        check = None  # no LIKE on the labels of an enum
    if None in found.values():
        return None
    return replace(example, **found, check_sql=check and profile.native(check))


def _is_good(profile: Profile, draft: Draft) -> bool:
    """True for a plain answer: some rows, not many, no zero, no tie cut in two, no group of missing values.

    May raise `TimeoutError`.
    """
    gold, look, guess = draft.example.gold_sql, draft.example.look_sql, draft.example.guess_sql
    rows = profile.rows(gold)
    if not rows or len(rows) > (1 if draft.is_single else MAX_ROWS):
        return False
    if rows == ((0,),) or all(cell is None for row in rows for cell in row):
        return False
    if " GROUP BY " in gold and any(row[0] is None for row in rows):
        return False
    whole, having, _ = gold.partition(" HAVING ")
    if having and profile.rows(whole) == rows:
        return False  # it leaves no group out
    if ranked := _RANKED.fullmatch(gold):
        source, key, direction, limit = ranked.groups()
        taken = int(limit) + 1 if limit else len(rows)
        query = f"SELECT {key} {source} ORDER BY {key}{direction or ''} LIMIT {taken}"
        keys = profile.rows(query) or ()
        if (None,) in keys or len(keys) < taken or (limit and len(set(keys)) < taken):
            return False
    if look is not None and not profile.rows(look):
        return False
    return guess is None or Counter(profile.rows(guess) or ()) != Counter(rows)
