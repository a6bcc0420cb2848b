import pytest

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, ActionKind, Episode
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import REWARD_FUNCTIONS
from text2sql_grpo.rewards.functions import schema_items

RIGHT = Verdict(official=True, strict=True, reason="equal", executes=True)
WRONG = Verdict(official=True, strict=False, reason="order", executes=True)
FAILED = Verdict(official=False, strict=False, reason="query_failed", executes=False)
GOLD = "SELECT name FROM emp WHERE age > 30"


def make_episode(
    *kinds: ActionKind, max_turns: int = 1, final_sql: str | None = None, gold_sql: str = GOLD
) -> Episode:
    example = Example(id="q1", database="d", question="Who?", gold_sql=gold_sql)
    return Episode(
        example, actions=[Action(kind) for kind in kinds], max_turns=max_turns, final_sql=final_sql
    )


def score(name: str, episode: Episode, verdict: Verdict = WRONG) -> float:
    return REWARD_FUNCTIONS[name].function(episode, verdict)


def test_names() -> None:
    assert list(REWARD_FUNCTIONS) == ["execution", "executes", "format", "schema_linking", "turn_cost"]
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
