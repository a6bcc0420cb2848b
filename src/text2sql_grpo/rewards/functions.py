"""The named scores of a finished episode, each with its declared range."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.grading.strict import parse_query
from text2sql_grpo.grading.verdict import Verdict


@dataclass(frozen=True)
class RewardFunction:
    """One named score.

    Attributes:
        name: Its key in the config and in the logs.
        function: From an episode and its verdict to a float.
        range_when_wrong: Lowest and highest value where `verdict.strict` is false.
        range_when_right: The same where it is true.
    """

    name: str
    function: Callable[[Episode, Verdict], float]
    range_when_wrong: tuple[float, float]
    range_when_right: tuple[float, float]


def execution(episode: Episode, verdict: Verdict) -> float:
    """1 if the strict verdict holds, else 0."""
    return float(verdict.strict)


def executes(episode: Episode, verdict: Verdict) -> float:
    """1 if the submitted query runs, else 0 (also where nothing was submitted)."""
    return float(verdict.executes)


def format(episode: Episode, verdict: Verdict) -> float:
    """Share of turns that the protocol could read, in [0, 1]; 0 for an episode without turns."""
    if not episode.actions:
        return 0.0
    return sum(action.kind != "malformed" for action in episode.actions) / len(episode.actions)


def schema_linking(episode: Episode, verdict: Verdict) -> float:
    """Jaccard index of the tables and columns named by the submitted query and by the gold, in [0, 1].

    0 where nothing was submitted, or where either query cannot be parsed or names nothing.
    """
    if episode.final_sql is None:
        return 0.0
    gold, predicted = schema_items(episode.example.gold_sql), schema_items(episode.final_sql)
    return len(gold & predicted) / max(len(gold | predicted), 1)


def turn_cost(episode: Episode, verdict: Verdict) -> float:
    """0 for one turn, falling evenly to -1 at the episode's turn limit; 0 where the limit is one turn."""
    return -max(len(episode.actions) - 1, 0) / max(episode.max_turns - 1, 1)


@lru_cache(maxsize=8192)
def schema_items(sql: str) -> frozenset[tuple[str, str]]:
    """Pairs of `table` or `column` and its lower-cased name; empty if the text cannot be parsed.

    Columns go by their bare name. Names that the query makes itself (CTEs, aliases) are left out.

    >>> sorted(schema_items("SELECT count(*) AS n FROM Staff AS s WHERE s.Age > 3 ORDER BY n"))
    [('column', 'age'), ('table', 'staff')]
    """
    query = parse_query(sql)
    if query is None:
        return frozenset()
    ctes = {cte.alias.lower() for cte in query.find_all(exp.CTE)}
    aliases = {
        alias.alias.lower()
        for alias in query.find_all(exp.Alias)
        if alias.alias.lower() not in {column.name.lower() for column in alias.find_all(exp.Column)}
    }
    tables = {
        ("table", table.name.lower()) for table in query.find_all(exp.Table) if table.name.lower() not in ctes
    }
    columns = {
        ("column", column.name.lower())
        for column in query.find_all(exp.Column)
        if column.name.lower() not in aliases and not isinstance(column.this, exp.Star)
    }
    return frozenset(tables | columns)


REWARD_FUNCTIONS = {
    reward.name: reward
    for reward in (
        RewardFunction("execution", execution, range_when_wrong=(0, 0), range_when_right=(1, 1)),
        RewardFunction("executes", executes, range_when_wrong=(0, 1), range_when_right=(1, 1)),
        RewardFunction("format", format, range_when_wrong=(0, 1), range_when_right=(0, 1)),
        RewardFunction("schema_linking", schema_linking, range_when_wrong=(0, 1), range_when_right=(0, 1)),
        RewardFunction("turn_cost", turn_cost, range_when_wrong=(-1, 0), range_when_right=(-1, 0)),
    )
}
