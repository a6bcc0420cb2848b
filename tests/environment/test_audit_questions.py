"""Audit of questions and their gold queries."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.databases import sqlite_file
from text2sql_grpo.audit.gold_stability import open_results
from text2sql_grpo.audit.questions import REASONS, QuestionAudit, audit_questions, counts, write_quarantine
from text2sql_grpo.audit.suspects import find_suspects, read_samples, write_suspects
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import read_quarantine
from text2sql_grpo.data.question_files import Question, read_questions
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.sql import Limits, SQLExecutor


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    script = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'x')"
    return Databases(sqlite_file(tmp_path / "databases" / "shop.sqlite", script).parent)


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(max_rows=50)) as executor:
        yield executor


def ask(id: str, gold_sql: str = "SELECT a FROM t", question: str | None = None, **fields: Any) -> Question:
    fields = {"database": "shop", "question": question or f"{id}?", **fields}
    return Question(Example(id=id, gold_sql=gold_sql, **fields), f"questions:{id}", True)


def audit(databases: Databases, executor: SQLExecutor, *questions: Question, **options: Any) -> QuestionAudit:
    environment = SQLEnvironment(databases, executor, EnvironmentSettings())
    return audit_questions(questions, environment, **options)


def found(result: QuestionAudit) -> list[tuple[str, str, str]]:
    return [(finding.id, finding.reason, finding.detail) for finding in result.findings]


def test_golds_that_read_hidden_columns(databases: Databases, executor: SQLExecutor) -> None:
    environment = SQLEnvironment(databases, executor, EnvironmentSettings(), hide=["t.b"])
    result = audit_questions(
        [ask("fine"), ask("b", "SELECT b FROM t"), ask("c", "SELECT c FROM t")], environment
    )
    (hidden, failed) = found(result)
    assert hidden[:2] == ("b", "hidden") and "column b is hidden" in hidden[2]
    assert failed[:2] == ("c", "error")
    assert [row["id"] for row in result.quarantine()] == ["b", "c"]


def test_golds_that_fail_or_find_nothing(databases: Databases, executor: SQLExecutor) -> None:
    result = audit(
        databases,
        executor,
        ask("fine"),
        ask("broken", "SELECT c FROM t"),
        ask("other", other_golds=("SELECT a FROM t", "DELETE FROM t")),
        ask("large", "SELECT 1 FROM t, t, t, t, t, t /* open"),
        ask("lost", database="gone"),
        ask("empty", "SELECT a FROM t WHERE a > 9"),
        ask("null", "SELECT max(a) FROM t WHERE a > 9"),
        ask("meant", "SELECT a FROM t WHERE a > 9", gold_is_empty=True),
        ask("tied", "SELECT a FROM t ORDER BY b LIMIT 1"),
    )

    assert found(result) == [
        ("broken", "error", "error: no such column: c"),
        ("other", "error", "denied: not allowed: DELETE; only queries that read the tables run"),
        ("large", "error", "cut after 50 rows"),
        ("lost", "error", f"unknown database 'gone' (in {databases.shown}); known: shop"),
        ("empty", "empty", "no rows"),
        ("null", "empty", "only NULLs"),
        ("tied", "tie_dependent", "the limit takes 1 of 2 rows that tie"),
    ]
    assert result.findings[0].place == "questions:broken"
    assert counts(result) == {"error": 4, "empty": 2, "tie_dependent": 1}
    assert [row["id"] for row in result.quarantine()] == ["broken", "other", "large", "lost", "empty", "null"]
    assert [row["id"] for row in result.quarantine(keep=["error", "empty"])] == ["tied"]


def test_a_database_that_cannot_be_read_fails_its_own_golds_alone(
    databases: Databases, executor: SQLExecutor, tmp_path: Path
) -> None:
    (tmp_path / "databases" / "bad.sqlite").write_text("no database " * 50)
    questions = ask("bad", database="bad"), ask("fine"), ask("empty", "SELECT a FROM t WHERE a > 9")
    result = audit(Databases(tmp_path / "databases"), executor, *questions)
    assert [finding[:2] for finding in found(result)] == [("bad", "error"), ("empty", "empty")]


def test_golds_without_test_databases_are_reported_and_kept(
    tmp_path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    suite = TestSuite(executor, tmp_path / "cache")
    result = audit(databases, executor, ask("fine"), ask("three", "SELECT 3"), suite=suite)

    assert found(result) == [("three", "gap", "it reads no table whose columns are known")]
    assert result.quarantine() == []


def test_copies_and_leaks(databases: Databases, executor: SQLExecutor) -> None:
    result = audit(
        databases,
        executor,
        ask("a", question="How many?"),
        ask("b", question=" how  MANY? "),
        ask("c", "SELECT b FROM t", question="How many?"),
        ask("d", "SELECT count(*) FROM t"),
        ask("e", "SELECT max(a) FROM t", split="dev"),
        ask("f", "SELECT  MAX(a) FROM t"),
        others={"test.jsonl": [ask("z", "SELECT COUNT(*) FROM t"), ask("y", "SELECT 1", database="other")]},
    )

    assert found(result) == [
        ("b", "duplicated", "asked as a, with the same gold"),
        ("c", "duplicated", "asked as a, with another gold"),
        ("d", "leaking", "gold also in test.jsonl"),
        ("e", "leaking", "gold also in split train"),
        ("f", "leaking", "gold also in split dev"),
    ]


def test_slow_golds_and_long_prompts(databases: Databases, executor: SQLExecutor) -> None:
    slow = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) "
        "SELECT NULL FROM n WHERE i = 300000"
    )
    long = ask("long", question="why " * 400)

    result = audit(databases, executor, ask("slow", slow), long, slow_s=0.01, max_prompt_tokens=400)

    assert [(finding.id, finding.reason) for finding in result.findings] == [
        ("slow", "empty"),
        ("slow", "slow"),
        ("long", "too_long"),
    ]
    assert result.findings[2].detail.startswith("about 55")


def test_several_reasons_are_one_row_that_training_honours(
    tmp_path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    result = audit(databases, executor, ask("a"), ask("b", "SELECT c FROM t", question="a?"))
    path = tmp_path / "new" / "quarantine.jsonl"

    write_quarantine(path, result.quarantine())

    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [
        {
            "id": "b",
            "reasons": ["error", "duplicated"],
            "details": ["error: no such column: c", "asked as a, with another gold"],
        }
    ]
    assert read_quarantine(path) == {"b"}


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the quarantine"):
        write_quarantine(tmp_path / "file" / "quarantine.jsonl", [])
    with pytest.raises(RunError, match="cannot write"):
        write_quarantine(tmp_path / ("long" * 100), [])


def test_every_reason_has_a_place_in_the_report(databases: Databases, executor: SQLExecutor) -> None:
    assert list(audit(databases, executor, ask("a")).ids_by_reason) == list(REASONS)


@pytest.mark.thorough
def test_part_of_spider_is_audited_fast(shared_data: Path, executor: SQLExecutor) -> None:
    """One in 80 of Spider's train questions; generous beside other work."""
    folder = shared_data / "spider"
    databases = Databases(folder / "database")
    questions = read_questions(folder / "train_spider.json")[::80]

    started = time.monotonic()
    with SQLExecutor(Limits(timeout_s=30)) as patient:
        result = audit(databases, patient, *questions, others={"dev": read_questions(folder / "dev.json")})

    assert time.monotonic() - started < 60
    assert counts(result)["leaking"] == 0
    assert counts(result)["empty"] > 0


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = (
        "CREATE TABLE t (a INTEGER PRIMARY KEY, b INTEGER, c TEXT, day TEXT);"
        "INSERT INTO t VALUES (1, 5, 'x', '2020-01-01'), (2, 5, 'y', '2021-01-01'), (3, 6, 'z', NULL);"
    )
    return sqlite_file(tmp_path_factory.mktemp("stability") / "d.sqlite", script)


CLOCK = "reads the clock, or calls a function that the engine declares volatile"


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT a FROM t", None),
        ("SELECT c FROM t ORDER BY b", None),
        ("SELECT b, count(*) FROM t GROUP BY b", None),
        ("SELECT strftime('%Y', day) FROM t", None),
        ("SELECT b, max(a), c FROM t GROUP BY b", None),  # SQLite takes c from the row of the maximum
        ("SELECT b FROM t ORDER BY b LIMIT 1", None),  # the rows that tie are alike
        ("SELECT c FROM t ORDER BY b DESC LIMIT 1", None),
        ("SELECT nope FROM t", None),
        ("SELECT c FROM t WHERE a > 9 ORDER BY b LIMIT 1", None),
        ("SELECT c FROM t ORDER BY b LIMIT 1", ("tie_dependent", "the limit takes 1 of 2 rows that tie")),
        ("SELECT c FROM t LIMIT 1", ("tie_dependent", "the limit takes 1 of 3 rows that tie")),
        (
            "SELECT a FROM t WHERE c = (SELECT c FROM t ORDER BY b LIMIT 1)",
            ("tie_dependent", "a limit inside cuts through rows that tie"),
        ),
        ("SELECT c FROM t GROUP BY b", ("non_deterministic", "other rows when tables are read backwards")),
        ("SELECT group_concat(c) FROM t", ("non_deterministic", "other rows when tables are read backwards")),
        ("SELECT random() FROM t", ("non_deterministic", "other rows when it runs again")),
        ("SELECT count(*) FROM t WHERE day < date('now')", ("time_dependent", CLOCK)),
        ("SELECT date()", ("time_dependent", CLOCK)),
        ("SELECT a AS known, 'random' AS now_date FROM t", None),
        ("SELECT CURRENT_DATE", ("time_dependent", CLOCK)),
    ],
)
def test_what_leaves_a_result_open(
    database: Path, executor: SQLExecutor, sql: str, reason: tuple[str, str] | None
) -> None:
    other = (database, "SELECT count(*) FROM t")
    golds = [other, (database, sql), other]

    assert open_results(golds, executor.execute_many(golds), executor) == [None, reason, None]


RIGHT = "SELECT name FROM pet WHERE kg > 10"


@pytest.fixture
def zoo(tmp_path: Path) -> Databases:
    script = """
        CREATE TABLE pet (id INTEGER PRIMARY KEY, name TEXT, kg INTEGER);
        INSERT INTO pet (name, kg) VALUES ('Ada', 3), ('Bo', 10), ('Cy', 25), ('Di', 31), ('Ed', 4);
    """
    return Databases(sqlite_file(tmp_path / "databases" / "zoo.sqlite", script).parent)


def suspects(
    zoo: Databases,
    executor: SQLExecutor,
    gold: str,
    answers: list[Any],
    *others: str,
    hide: Sequence[str] = (),
) -> list[dict[str, Any]]:
    example = Example("q", "zoo", "Pets over 10 kg?", gold, other_golds=others)
    samples = {"q": [a if isinstance(a, dict) else {"example": "q", "final_sql": a} for a in answers]}
    sessions = SQLEnvironment(zoo, executor, EnvironmentSettings(), hide=hide)
    return find_suspects([example], samples, sessions, Grader(executor))


def test_gold_that_most_answers_contradict_is_listed_with_a_small_database(
    zoo: Databases, executor: SQLExecutor, tmp_path: Path
) -> None:
    answers = [RIGHT, RIGHT, "SELECT name FROM pet WHERE kg >= 11", "SELECT nope"]
    (found,) = suspects(zoo, executor, "SELECT name FROM pet WHERE kg < 10", answers)
    assert (found["share"], found["answers"], found["on"]) == (0.75, 4, "database")
    assert found["answer_sql"] == RIGHT
    rows = found["tables"]["pet"].splitlines()
    assert rows[0] == "id | name | kg" and len(rows) == 2  # one row is enough to differ
    assert found["answer_result"].splitlines()[1] in rows[1] and "(no rows)" in found["gold_result"]

    write_suspects(tmp_path / "suspects.jsonl", [found])
    assert read_quarantine(tmp_path / "suspects.jsonl") == {"q"}
    page = (tmp_path / "suspects.md").read_text()
    assert "75% of 4 answers contradict the gold on the database" in page and f"    {RIGHT}\n" in page


def test_gold_that_agrees_on_the_database_by_chance_is_listed(
    zoo: Databases, executor: SQLExecutor, tmp_path: Path
) -> None:
    (found,) = suspects(zoo, executor, "SELECT name FROM pet WHERE kg > 24", [RIGHT] * 4)
    assert found["on"] == "variants" and found["gold_result"] != found["answer_result"]


@pytest.mark.parametrize("gold", ["SELECT kg FROM pet WHERE kg < 10", "SELECT kg FROM pet WHERE kg > 24"])
def test_suspects_show_nothing_hidden(zoo: Databases, executor: SQLExecutor, gold: str) -> None:
    (found,) = suspects(
        zoo, executor, gold, ["SELECT kg, name FROM pet WHERE kg > 10"] * 4, hide=["pet.name"]
    )
    assert "column name is hidden" in found["answer_result"] and "kg" in found["gold_result"]
    assert found["tables"]["pet"].splitlines()[0] == "id | kg"


@pytest.mark.parametrize(
    ("gold", "answers", "others"),
    [
        ("SELECT name FROM pet WHERE kg >= 11", [RIGHT] * 4, ()),  # the same query in other words
        ("SELECT 1", [RIGHT] * 4, (RIGHT,)),
        ("SELECT 1", [RIGHT] * 3, ()),  # too few answers
        ("SELECT 1", [RIGHT, RIGHT, None, "SELECT 2"], ()),  # too few of them agree
        ("SELECT 1", ["SELECT name FROM pet WHERE kg > 99"] * 4, ()),  # a guess that finds nothing
        ("SELECT nope", [RIGHT] * 4, ()),  # a broken gold is found without answers
        (
            "SELECT 1",
            [{"example": "q", "final_sql": RIGHT, "strict": True, "gold_sql": "SELECT 1"}] * 4,
            (),
        ),  # judged right
        ("SELECT 1", ["(" * 3_000, "\x00", "\ud800", "DROP TABLE pet", "WITH", RIGHT], ()),
    ],
)
def test_golds_without_evidence_are_not_listed(
    zoo: Databases,
    executor: SQLExecutor,
    tmp_path: Path,
    gold: str,
    answers: list[Any],
    others: tuple[str, ...],
) -> None:
    assert suspects(zoo, executor, gold, answers, *others) == []


def test_answers_are_read_from_episodes_and_predictions(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    episode = {"example": "q", "database": "zoo", "question": "?", "gold_sql": RIGHT, "final_sql": None}
    episode |= {"is_masked": False, "strict": False, "messages": []}
    rows = [episode, {**episode, "is_masked": True}, {"id": "p", "sql": "SELECT 1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {id: len(found) for id, found in read_samples(path).items()} == {"q": 1, "p": 1}
    path.write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match=r"answers\.jsonl"):
        read_samples(path)
