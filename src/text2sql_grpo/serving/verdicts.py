"""File of reviewed questions, in the form of Snowflake's verified queries, and its summary."""

import getpass
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_rows import EDITED, Question
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.evaluation.answers import Judged, read_answers
from text2sql_grpo.evaluation.statistics import Accuracy, prediction_powered
from text2sql_grpo.files import read_jsonl, write_jsonl
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.verdict import Submission

VERDICTS = ("right", "wrong", "edit", "skip")
VERIFIED, QUARANTINE = "verified.jsonl", "quarantine.jsonl"
_OF_ITS_SQL = ("look_sql", "guess_sql", "check_sql", "other_golds", "gold_is_empty")

Record = dict[str, Any]


def login_name() -> str:
    """Login name; empty if the system has none, as in some containers."""
    with suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return ""


def verdict_of(example: Example, question: str, sql: str, fields: Record) -> Record:
    """Line of the file: a question after its review, with the example's fields that still hold."""
    kept = {name: value for name, value in asdict(example).items() if value not in (None, False, ())}
    was = {"question": kept.pop("question"), "sql": kept.pop("gold_sql")}
    if sql != was["sql"]:
        kept = {name: value for name, value in kept.items() if name not in _OF_ITS_SQL}
    record = {"id": kept.pop("id"), "question": question, "sql": sql, **fields, **kept}
    return record | ({"was": was} if fields["verdict"] == "edit" else {})


def read_verdicts(folder: Path) -> dict[str, Record]:
    """Verdicts by id of the question; of several on one the latest, with the names of all who gave one.

    Raises:
        DataError: The file cannot be read, or a line is wrong.
    """
    path = folder / VERIFIED
    lines = read_jsonl(path, "verified questions", convert=_line, skip_blank=True) if path.exists() else ()
    return _merged(lines)


def save_verdict(folder: Path, record: Record) -> dict[str, Record]:
    """Merge one verdict into the file, and write ids of wrong and corrected questions to the quarantine.

    Safe if several processes do so at once. The quarantine keeps the lines of other sources.

    Returns:
        All verdicts.

    Raises:
        RunError: A file cannot be read or written.
    """
    try:
        with FileLock(folder / f".{VERIFIED}.lock", timeout=10):
            verdicts = _merged([*read_verdicts(folder).values(), record])
            write_jsonl(folder / VERIFIED, verdicts.values())
            path, reasons = folder / QUARANTINE, ["review"]
            lines = read_jsonl(path, "ids in quarantine", skip_blank=True) if path.exists() else ()
            others = [line for line in lines if line.get("reasons") != reasons]
            bad = [line for line in verdicts.values() if line["verdict"] in ("wrong", "edit")]
            own = [{"id": line["id"], "reasons": reasons, "details": [line["verdict"]]} for line in bad]
            if own or path.exists():
                write_jsonl(path, [*others, *own])
    except OSError as error:  # a timeout of the lock too
        raise DataError(f"cannot lock {VERIFIED}: {error} (at {folder})") from error
    return verdicts


def check_same_questions(verdicts: Mapping[str, Record], questions: Iterable[Question], folder: Path) -> None:
    """Refuse verdicts on different questions with the same ids, as when questions were made again.

    Raises:
        DataError: See above.
    """
    for question in questions:
        example, record = question.example, verdicts.get(question.example.id)
        made = record and (record.get("was") or record)
        if made and (made["question"], made["sql"]) != (example.question, example.gold_sql):
            raise DataError(
                f"{folder / VERIFIED} has a verdict on a different question with the id {example.id}: the "
                f"questions were made again; move it away (at {question.place})"
            )


def _line(row: Record) -> Record:
    if row["verdict"] not in VERDICTS or not isinstance(row["verified_at"], int):
        raise ValueError(f"verdict {row['verdict']!r}, verified_at {row['verified_at']!r}")
    if not all(isinstance(row[name], str) for name in ("id", "question", "sql", "verified_by")):
        raise TypeError("id, question, sql and verified_by must be texts")
    return row


def _merged(records: Iterable[Record]) -> dict[str, Record]:
    merged: dict[str, Record] = {}
    for record in records:
        known = merged.get(record["id"])
        if known is None:
            merged[record["id"]] = record
            continue
        first, last = sorted((known, record), key=lambda one: int(one["verified_at"]))  # stable
        names = [name for one in (first, last) for name in one["verified_by"].split(", ")]
        merged[record["id"]] = last | {"verified_by": ", ".join(dict.fromkeys(names))}
    return merged


def summary(
    verdicts: Mapping[str, Record],
    evaluation: Path | None = None,
    *,
    databases: Databases | None = None,
    grader: Grader | None = None,
) -> Record:
    """Shares of right questions, and with an evaluation of right answers of its model, with 95% intervals.

    An answer is right by review if it agrees with a query that a person found right, or wrote. An answer to
    a wrong question is not. Skipped questions count nowhere.

    Args:
        evaluation: `evaluation.jsonl` of a model; None for none.
        databases: Databases of corrected questions, on which answers are graded again; None for none.
        grader: Grades these answers.

    Raises:
        RunError: The evaluation cannot be read, answers a question twice, or shares fewer than two with the
            review.
    """
    counts = Counter(record["verdict"] for record in verdicts.values())
    judged = counts.total() - counts["skip"]
    record: Record = {
        "verdicts": {name: counts[name] for name in VERDICTS},
        "questions": _share(Accuracy(counts["right"], judged)),
    }
    if evaluation is None:
        return record
    reviewed, others = dict[str, tuple[Judged, Record]](), list[Judged]()
    for answer in read_answers(evaluation):
        one = verdicts.get(answer.example.removesuffix(EDITED))
        if one is None or one["verdict"] == "skip" or not _is_on(one, answer):
            others.append(answer)
        elif answer.example in reviewed:
            raise DataError(f"{evaluation} answers the reviewed question {answer.example} more than once")
        else:
            reviewed[answer.example] = answer, one
    labels = [float(_is_right(answer, one, databases, grader)) for answer, one in reviewed.values()]
    paired = [float(answer.strict) for answer, _ in reviewed.values()]
    sets = {answer.set for answer, _ in reviewed.values()}
    rest = [float(answer.strict) for answer in others if answer.set in sets]
    if len(labels) < 2 or len(rest) < 2:
        raise DataError(
            f"{evaluation} answers {len(labels)} reviewed questions and {len(rest)} others of the same sets, "
            "at least 2 of each are needed: review the questions that it answers, with --file"
        )
    joined = prediction_powered(labels, paired, rest)
    return record | {
        "reviewed": _share(Accuracy(int(sum(labels)), len(labels))),
        "automatic": _share(Accuracy(int(sum(rest)), len(rest))),
        "rectifier": joined.rectifier,
        "joined": {"share": joined.mean, "interval": list(joined.interval)},
    }


def _share(accuracy: Accuracy) -> Record:
    return {
        "right": accuracy.correct,
        "total": accuracy.total,
        "share": accuracy.accuracy,
        "interval": list(accuracy.naive_interval),
    }


def _is_on(record: Record, answer: Judged) -> bool:
    """True if a verdict is on the question of an answer, as it is or as it was before an edit."""
    texts = {record["question"], record.get("was", record)["question"]}
    return answer.question in texts and answer.database == record.get("database")


def _is_right(answer: Judged, record: Record, databases: Databases | None, grader: Grader | None) -> bool:
    if record["verdict"] == "wrong":
        return False
    if record["verdict"] == "right" or answer.gold_sql == record["sql"]:
        return answer.strict
    if databases is None or grader is None:
        raise ConfigError(f"question {answer.example} was corrected: name its database with --db")
    submission = Submission(databases.address(answer.database), record["sql"], answer.final_sql)
    return grader.grade_many([submission])[0].strict
