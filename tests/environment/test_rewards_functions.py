"""Every reward function."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, ActionKind, Episode
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import FLAGS, Results
from text2sql_grpo.rewards.episode_flags import episode_flags
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS, schema_items
from text2sql_grpo.sql import ExecutionOutcome, SQLExecutor

RIGHT = Verdict(official=True, strict=True, reason="equal", executes=True)
WRONG = Verdict(official=True, strict=False, reason="order", executes=True)
FAILED = Verdict(official=False, strict=False, reason="query_failed", executes=False)
TEST_DATABASE = Verdict(official=True, strict=False, reason="test_database", executes=True)
EMPTY = ExecutionOutcome("ok", ("a",))
ERROR = ExecutionOutcome("error", error="no such column")
GOLD = "SELECT name FROM emp WHERE age > 30"


def make_episode(
    *kinds: ActionKind, max_turns: int = 1, final_sql: str | None = None, gold_sql: str = GOLD
) -> Episode:
    example = Example(id="q1", database="d", question="Who?", gold_sql=gold_sql)
    return Episode(
        example, actions=[Action(kind) for kind in kinds], max_turns=max_turns, final_sql=final_sql
    )


def make_results(gold: ExecutionOutcome = EMPTY, predicted: ExecutionOutcome | None = EMPTY) -> Results:
    """Results that were run already."""
    results = Results(SQLExecutor(), Path("unread.sqlite"), make_episode())
    results.__dict__.update(gold=gold, predicted=predicted)
    return results


def score(
    name: str, episode: Episode | None = None, verdict: Verdict = WRONG, results: Results | None = None
) -> float:
    found = REWARD_FUNCTIONS[name].score(episode or make_episode(), verdict, results or make_results())
    assert found is not None
    return found


def test_names() -> None:
    assert all(name == reward.name for name, reward in REWARD_FUNCTIONS.items())


def test_execution_pays_the_strict_verdict_only() -> None:
    assert [score("execution", make_episode(), verdict) for verdict in (RIGHT, WRONG, FAILED)] == [1, 0, 0]


def test_executes() -> None:
    assert [score("executes", make_episode(), verdict) for verdict in (RIGHT, WRONG, FAILED)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), 0),
        (("submit_sql",), 1),
        (("run_sql", "submit_sql"), 1),
        (("malformed", "submit_sql"), 0.5),
        (("malformed", "malformed", "run_sql", "submit_sql"), 0.5),
        (("malformed",), 0),
        (("malformed", "run_sql", "run_sql", "run_sql", "run_sql", "submit_sql"), 0.5),  # idle turns
        (("malformed", "run_sql"), 0),
    ],
)
def test_format(kinds: tuple[ActionKind, ...], expected: float) -> None:
    assert score("format", make_episode(*kinds)) == expected


@pytest.mark.parametrize(
    ("n_turns", "max_turns", "expected"),
    [(1, 1, 0), (0, 5, 0), (1, 5, 0), (2, 5, -0.25), (4, 5, -0.75), (5, 5, -1), (2, 2, -1)],
)
def test_turn_cost(n_turns: int, max_turns: int, expected: float) -> None:
    assert score("turn_cost", make_episode(*["run_sql"] * n_turns, max_turns=max_turns)) == expected


@pytest.mark.parametrize(
    ("final_sql", "expected"),
    [
        (GOLD, 1),
        ("select E.NAME from EMP as e where e.AGE > 99", 1),
        ("WITH x AS (SELECT * FROM emp) SELECT name FROM x WHERE age > 1", 1),
        ("SELECT name FROM emp", 2 / 3),
        ("SELECT count(*) FROM emp", 1 / 3),
        ("SELECT name, pay FROM emp WHERE age > 30", 3 / 4),
        ("SELECT title FROM film", 0),
        ("SELECT 3", 0),
        ("SELECT (name FROM", 0),
        ("SELECT " + "(" * 1000, 0),
        ("", 0),
        (None, 0),
    ],
)
def test_schema_linking(final_sql: str | None, expected: float) -> None:
    assert score("schema_linking", make_episode(final_sql=final_sql)) == pytest.approx(expected)


def test_schema_linking_pays_nothing_for_a_gold_that_cannot_be_parsed() -> None:
    assert score("schema_linking", make_episode(final_sql=GOLD, gold_sql="SELECT (name FROM")) == 0
    assert score("schema_linking", make_episode(final_sql="SELECT 1", gold_sql="SELECT 1")) == 0


def result(*rows: tuple[object, ...], elapsed_s: float = 0.0) -> ExecutionOutcome:
    return ExecutionOutcome("ok", ("a", "b"), rows, elapsed_s=elapsed_s)  # type: ignore[arg-type]


def test_official_execution() -> None:
    assert [score("official_execution", verdict=v) for v in (RIGHT, TEST_DATABASE, FAILED)] == [1, 1, 0]


def test_well_formed_needs_a_submission_and_readable_turns() -> None:
    assert score("well_formed", make_episode("run_sql", "submit_sql", final_sql=GOLD)) == 1
    assert score("well_formed", make_episode("malformed", "submit_sql", final_sql=GOLD)) == 0
    assert score("well_formed", make_episode("run_sql")) == 0


def test_efficiency_compares_times_of_right_answers_above_the_noise() -> None:
    def of(gold_s: float, predicted_s: float, verdict: Verdict = RIGHT) -> float:
        results = make_results(result((1, 2), elapsed_s=gold_s), result((1, 2), elapsed_s=predicted_s))
        return score("efficiency", verdict=verdict, results=results)

    assert [of(1, 2), of(2, 1), of(1e-5, 9e-3)] == [0.5, 1, 1]
    assert of(1, 1, WRONG) == 0
    assert score("efficiency", verdict=RIGHT, results=make_results(EMPTY, None)) == 0


def test_length_cost_counts_sampled_tokens() -> None:
    episode = make_episode()
    assert score("length_cost", episode) == 0
    episode.completion_mask = [1, 0] * 512
    assert score("length_cost", episode) == -0.25
    episode.completion_mask = [1] * 9_000
    assert score("length_cost", episode) == -1


def test_sql_r1_length_leaves_thinking_out_of_the_first_part() -> None:
    episode = make_episode("submit_sql", final_sql="SELECT 1")
    thought = "<think>" + "x" * 4096 + "</think>"
    episode.messages = [{"role": "assistant", "content": f"{thought}\n<answer>SELECT 1</answer>"}]

    assert score("sql_r1_length", episode, RIGHT) == pytest.approx(8 / 25 + 0.5)
    assert score("sql_r1_length", episode, FAILED) == 0


def test_results_run_what_the_episode_says(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "d.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE emp (name TEXT, age INTEGER); INSERT INTO emp VALUES ('Ann', 31)"
        )
    with SQLExecutor() as executor:
        results = Results(executor, tmp_path / "d.sqlite", make_episode(final_sql="SELECT age FROM emp"))
        assert (results.gold.rows, results.predicted and results.predicted.rows) == ((("Ann",),), ((31,),))
        assert Results(executor, tmp_path / "d.sqlite", make_episode()).predicted is None


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [(0, 100, 0), (80, 100, 0), (90, 100, -0.5), (100, 100, -1), (9, None, 0)],
)
def test_overlong(tokens: int, limit: int | None, expected: float) -> None:
    episode = make_episode("submit_sql")
    episode.completion_ids, episode.max_tokens = [1] * tokens, limit
    assert score("overlong", episode, RIGHT) == pytest.approx(expected)


STAFF = "SELECT staff FROM branch WHERE code = 'LIS-02'"


def episode(
    final_sql: str | None, *rows: tuple[str | int, ...], question: str = "Lisbon?", gold_sql: str = STAFF
) -> Episode:
    outcome = ExecutionOutcome("ok", ("a",), rows)
    return Episode(
        Example(id="q", database="d", question=question, gold_sql=gold_sql),
        actions=[Action("run_sql", "SELECT ..", outcome)] if rows else [],
        final_sql=final_sql,
    )


def flags(played: Episode, verdict: Verdict = RIGHT) -> tuple[str, ...]:
    return episode_flags(played, verdict, max_rows_shown=2)


def test_each_flag() -> None:
    assert flags(episode("SELECT 7", (7,)), TEST_DATABASE) == FLAGS
    assert flags(episode("SELECT 7"), TEST_DATABASE) == ("official_only", "no_table")
    assert flags(episode(STAFF, ("LIS-02",))) == ("copied_literal",)
    assert flags(episode(STAFF, ("LIS-02",), question="Staff of LIS-02?")) == ()
    assert flags(episode(None, (7,))) == flags(episode(STAFF)) == ()


def test_rows_that_were_not_shown_cannot_be_copied() -> None:
    assert flags(episode(STAFF, ("a",), ("b",), ("LIS-02",))) == ()


def test_reading_no_table_is_fine_where_the_gold_reads_none() -> None:
    assert flags(episode("SELECT 1 + 1", gold_sql="SELECT 2")) == ()


LATE = ExecutionOutcome("timeout")
KNOWN = result((1, "x"), (2, "y"), (2, "y"), (3, None))
MEASURES = ("cell_precision", "cell_recall", "tuple_cardinality")


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (KNOWN, (1, 1, 1)),
        (result(("x", 1), ("y", 2), (None, 3), ("y", 2)), (1, 1, 1)),
        (result((1, "x"), (2, "y")), (1, 6 / 8, 2 / 4)),
        (result(*[(2, "y")] * 8), (1, 4 / 8, 4 / 8)),
        (result((1, "z")), (1 / 2, 1 / 8, 1 / 4)),
        (result(), (0, 0, 0)),
        (LATE, (0, 0, 0)),
    ],
)
def test_measures(predicted: ExecutionOutcome, expected: tuple[float, ...]) -> None:
    found = [score(name, results=make_results(KNOWN, predicted)) for name in MEASURES]
    assert found == pytest.approx(list(expected))


def test_two_empty_results() -> None:
    assert [score(name, results=make_results(result(), result())) for name in MEASURES] == [1, 1, 1]


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT count(*) AS n FROM t GROUP BY a ORDER BY n", {"t", "a"}),
        ("SELECT max(price) AS price FROM t", {"t", "price"}),
        ("SELECT t.* FROM t JOIN u ON t.id = u.t_id", {"t", "u", "id", "t_id"}),
        ("SELECT a FROM t UNION SELECT b FROM u", {"t", "u", "a", "b"}),
        ("SELECT a FROM t WHERE b IN (SELECT c FROM u)", {"t", "u", "a", "b", "c"}),
        ("SELECT x.n FROM (SELECT count(b) AS n FROM t) AS x", {"t", "b"}),
        ('SELECT "First Name" FROM `t`', {"t", "first name"}),
    ],
)
def test_schema_items(sql: str, names: set[str]) -> None:
    assert {name for _, name in schema_items(sql)} == names


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ("SELECT a FROM t", "select A from T ;", 1),
        ("SELECT a FROM t WHERE b = 'X y'", "SELECT a FROM t WHERE b = 'x y'", 6 / 8),
        ("SELECT a FROM t", "SELECT a FROM t WHERE b > 3", 3 / 7),
        ("SELECT a", "", 0),
        ("", "", 0),
        ("SELECT", "SELECT", 0),
    ],
)
def test_ngram_similarity(gold: str, predicted: str, expected: float) -> None:
    for left, right in ((gold, predicted), (predicted, gold)):
        found = score("ngrams", make_episode(final_sql=right, gold_sql=left))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(("gold", "predicted"), [("SELECT (", "SELECT a FROM t"), ("SELECT 1", "SELECT 1")])
def test_schema_linking_of_what_cannot_be_read(gold: str, predicted: str) -> None:
    assert score("schema_linking", make_episode(final_sql=predicted, gold_sql=gold)) == 0
