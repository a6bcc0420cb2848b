"""Loading of question files, with a check of every gold on its database."""

import glob
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_files import only_name, read_questions
from text2sql_grpo.data.question_rows import Question, Source, is_hub_id, source_name
from text2sql_grpo.errors import DataError, check_type
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.phrases import many
from text2sql_grpo.sql import ExecutionOutcome, SQLExecutor
from text2sql_grpo.sql.address import Database

MAX_GOLDS_SHOWN = 5
GOLDS_PER_BATCH = 64  # their rows are in memory together
LINE_EVERY_S = 15.0  # between lines of progress

_logger = logging.getLogger(__name__)


def load_examples(
    source: Source,
    databases: Databases,
    executor: SQLExecutor,
    *,
    limit: int | None = None,
    check_gold: bool = True,
    leave_out: Collection[str] = (),
    leaves_out_large: bool = False,
    keep: Callable[[Example], bool] = lambda example: True,
    refusal: Callable[[str, str], str] | None = None,
) -> list[Example]:
    """Load questions of a file, a dataset or rows, in order; see `read_questions`.

    Args:
        databases: Databases of the questions; a row needs no name of a database if there is one only.
        limit: Only the first n questions, of those that are kept; None for all.
        check_gold: Run each gold, also the other accepted ones, and refuse one that fails, one that is cut
            at a limit and that the database cannot compare with itself either, and one that returns no
            rows without `gold_is_empty` (or rows with it). Of a row with neither this field nor `gold_sql`,
            `gold_is_empty` is set from the result.
        leave_out: Ids of questions to skip, broken ones too.
        leaves_out_large: Skip questions with a gold that is cut at a limit and cannot be compared, with a
            warning, instead of refusing them.
        keep: Function that chooses among these questions; databases and golds of others are not looked at.
        refusal: Function of a database's name and a query that says why a question must not hold the query,
            such as `Environment.refusal`; empty if it may.

    Raises:
        DataError: The file, a line, a database or a gold is wrong, or no question is left; names the
            place.
    """
    check_type("databases", databases, Databases)
    left_out, where = [], source_name(source)

    def is_wanted(example: Example) -> bool:
        if example.id in leave_out:
            left_out.append(example.id)
        return example.id not in leave_out and keep(example)

    questions = read_questions(source, limit=limit, database=only_name(databases), keep=is_wanted)
    if leave_out:
        _logger.warning("left out %s in quarantine (%s)", many(len(left_out), "question"), where)
    if left_out and not questions:
        raise DataError(f"every question is in quarantine (at {where})")
    large: dict[str, None] | None = {} if leaves_out_large else None
    examples = [question.example for question in questions]
    if check_gold:
        examples = list(checked_golds(questions, databases, executor, large=large))
    if refusal is not None:  # behind the golds: one that fails is at fault itself
        refuse_hidden(questions, refusal)
    if not large:
        return examples
    warn_large(large, len(examples), executor, where)
    return [example for example in examples if example.id not in large]


def warn_large(large: Collection[str], count: int, executor: SQLExecutor, where: str) -> None:
    """Warn that the questions with these ids, of `count`, are left out, as their golds are cut at a limit.

    Raises:
        DataError: None is left.
    """
    if len(large) == count:
        raise DataError(f"every gold returns more rows than environment.limits allows: raise them ({where})")
    _logger.warning(
        "left out %d of %s: a gold returns more rows than environment.limits allows "
        "(max_rows: %d, max_bytes: %d); raise them to keep: %s (%s)",
        *(len(large), many(count, "question"), executor.limits.max_rows, executor.limits.max_bytes),
        *(", ".join(large), where),
    )


def read_quarantine(path: Path) -> frozenset[str]:
    """Ids of a quarantine file: one JSON object a line, with a string `id`; other fields are skipped.

    Raises:
        DataError: The file cannot be read, or a line is wrong.
    """
    return frozenset(read_jsonl(path, "ids in quarantine", convert=_string_id, skip_blank=True))


def _string_id(row: dict[str, object]) -> str:
    if not isinstance(row["id"], str):
        raise TypeError(f"id {row['id']!r}")
    return row["id"]


def check_file(source: str | Path, field: str, databases: Databases | None) -> None:
    """Refuse a source that does not exist, by the name of its field; read a file of questions, not its golds.

    Args:
        databases: Databases of the questions; None for a file of something else.

    Raises:
        DataError: There is no such source, a question is wrong, or its database is unknown.
    """
    if not (is_hub_id(source) or Path(source).exists() or glob.glob(str(source), recursive=True)):
        raise DataError(f"cannot read the questions: no such file: {source} ({field})")
    if databases is not None and Path(source).is_file():
        for question in read_questions(source, database=only_name(databases)):
            _place_named(databases.source, question)


def _place_named(find: Callable[[str], Database], question: Question) -> Database:
    try:
        return find(question.example.database)
    except DataError as error:
        raise DataError(f"{error}, for the question at {question.place}") from error


def refuse_hidden(questions: Iterable[Question], refusal: Callable[[str, str], str]) -> None:
    """Refuse questions with a query that reads what is hidden; see `load_examples`.

    Raises:
        DataError: One does; names its place.
    """
    for question in questions:
        one = question.example
        queries = (one.gold_sql, *one.other_golds, one.look_sql, one.guess_sql, one.check_sql)
        for sql in filter(None, queries):
            if reason := refusal(one.database, sql):
                raise DataError(
                    f"a query of {one.id} is refused, as data.hide hides a part of its database: {reason}: "
                    f"leave the question out, or the name out of data.hide ([] hides nothing): {sql} "
                    f"(at {question.place})"
                )


def checked_golds(
    questions: Iterable[Question],
    databases: Databases,
    executor: SQLExecutor,
    *,
    large: dict[str, None] | None = None,
) -> Iterator[Example]:
    """Examples of the questions; their golds are run in batches.

    Args:
        large: Filled with the ids of questions with a gold that is cut at a limit and cannot be compared;
            None to refuse them.

    Raises:
        DataError: At the end, if any gold is wrong; see `load_examples`.
    """
    faults, num_golds, last_line = [], 0, time.monotonic()
    questions = iter(questions)
    while batch := list(islice(questions, GOLDS_PER_BATCH)):
        asked = [
            (question, _place_named(databases.address, question), sql, number == 0)
            for question in batch
            for number, sql in enumerate((question.example.gold_sql, *question.example.other_golds))
        ]
        num_golds += len(asked)
        outcomes = executor.execute_many([(database, sql) for _, database, sql, _ in asked])
        if time.monotonic() - last_line > LINE_EVERY_S:
            last_line = time.monotonic()
            _logger.info("Gold queries run: %d", num_golds)
        for (question, database, sql, is_first), outcome in zip(asked, outcomes, strict=True):
            example = question.example
            if outcome.is_truncated and GoldResult.of(executor, database, sql).is_usable:
                outcome = outcome._replace(is_truncated=False)  # the database itself compares its rows
            if not question.has_gold_is_empty:
                example = replace(example, gold_is_empty=not outcome.rows)
            fault = _gold_fault(example, outcome)
            if large is not None and outcome.is_truncated:
                large[example.id] = None
            elif fault:
                faults.append(f"{example.id} (at {question.place}): {fault}")
            if is_first:
                yield example
    if faults:
        shown = "\n  ".join(faults[:MAX_GOLDS_SHOWN])
        more = f"\n  and {len(faults) - MAX_GOLDS_SHOWN} more" if len(faults) > MAX_GOLDS_SHOWN else ""
        counts = f"{len(faults)} of {num_golds}"
        raise DataError(f"gold queries must run and return rows, {counts} do not:\n  {shown}{more}")


def _gold_fault(example: Example, outcome: ExecutionOutcome) -> str:
    if not outcome.is_ok:
        hint = "; raise environment.limits.timeout_s" if outcome.status == "timeout" else ""
        return f"{outcome.status}: {outcome.error}{hint}"
    if outcome.is_truncated:
        return f"more than the limits allow; cut after {len(outcome.rows)} rows"
    if bool(outcome.rows) == example.gold_is_empty:
        found = f"{len(outcome.rows)} rows although" if outcome.rows else "no rows and not"
        return f"{found} marked gold_is_empty"
    return ""
