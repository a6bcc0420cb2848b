"""Rewards of single turns, bounded so that they never lift a wrong answer above a right one."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sqlglot import exp

from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.grading.strict import parse_query
from text2sql_grpo.rewards.query_text import schema_items

GOLD_SHOWN, FAILED_CALL = "gold_shown", "failed_call"


@dataclass(frozen=True)
class TurnRewards:
    """Weighted sum of named scores of each turn.

    `gold_shown` is the share of the gold's columns, and of its texts that the question does not hold, that
    the result of this turn shows for the first time: the increase of a potential, so that each item pays
    once and an episode earns 1 at most. `failed_call` is -1 for a query that fails or a turn that cannot be
    read. Calls of an MCP server have neither.

    Attributes:
        weights: Weight by name, >= 0.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {GOLD_SHOWN: 0.2, FAILED_CALL: 0.02})

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in _SCORES:
                raise ConfigError(f"rewards.turns: unknown name {name!r}: the names are {', '.join(_SCORES)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ConfigError(f"rewards.turns.{name} must be a number >= 0, got {weight!r}")

    def check(self, highest_wrong: float, lowest_right: float, *, max_turns: int) -> None:
        """Prove that a right episode earns more than a wrong one, its turns included.

        Args:
            highest_wrong: Highest reward of a wrong answer without its turns.
            lowest_right: Lowest reward of a right one.

        Raises:
            ConfigError: It may not.
        """
        highest = highest_wrong + self.weights.get(GOLD_SHOWN, 0.0)
        # The last turn submits.
        lowest = lowest_right - (max_turns - 1) * self.weights.get(FAILED_CALL, 0.0)
        if not highest < lowest:
            raise ConfigError(
                "rewards.turns: every right episode must earn more than any wrong one, but with "
                f"max_turns {max_turns} a wrong one can earn {highest:g} and a right one as little as "
                f"{lowest:g}; lower {GOLD_SHOWN} or {FAILED_CALL}"
            )

    def score(self, episode: Episode, *, max_rows_shown: int, dialect: str) -> dict[str, list[float]]:
        """Scores of each turn by name, 0 in masked episodes."""
        if episode.is_masked:
            return {name: [0.0] * len(episode.actions) for name in self.weights}
        return {name: _SCORES[name](episode, max_rows_shown, dialect) for name in self.weights}

    def total(self, scores: Mapping[str, list[float]]) -> list[float]:
        """Weighted sums of the scores of each turn."""
        columns = zip(*(scores[name] for name in self.weights), strict=True)
        weights = list(self.weights.values())
        return [sum(map(operator.mul, weights, column)) for column in columns]


def _gold_shown(episode: Episode, max_rows_shown: int, dialect: str) -> list[float]:
    question = episode.example.question.lower()
    items = gold_items(episode.example.gold_sql, dialect)
    hidden = {(kind, name) for kind, name in items if kind == "column" or name not in question}
    total = max(len(hidden), 1)
    scores = []
    for action in episode.actions:
        shown = hidden & _items_shown(action, max_rows_shown)
        scores.append(len(shown) / total)
        hidden -= shown
    return scores


def _items_shown(action: Action, max_rows: int) -> set[tuple[str, str]]:
    """Columns and texts in the result of a turn, lower-cased."""
    outcome = action.outcome
    if outcome is None:
        return set()
    columns = {("column", name.lower()) for name in outcome.columns if outcome.rows}
    cells = {cell for row in outcome.rows[:max_rows] for cell in row}
    return columns | {("text", cell.lower()) for cell in cells if isinstance(cell, str)}


@lru_cache(maxsize=8192)
def gold_items(sql: str, dialect: str = "sqlite") -> frozenset[tuple[str, str]]:
    """Pairs of `column` or `text` and a lower-cased name or text of a query; empty if it cannot be parsed.

    >>> sorted(gold_items("SELECT age FROM staff WHERE city = 'Rome' AND age > 3"))
    [('column', 'age'), ('column', 'city'), ('text', 'rome')]
    """
    query = parse_query(sql, dialect)
    literals = [] if query is None else query.find_all(exp.Literal)
    texts = {("text", literal.name.lower()) for literal in literals if literal.is_string}
    columns = {(kind, name) for kind, name in schema_items(sql, dialect) if kind == "column"}
    return frozenset(columns | texts)


def _failed_call(episode: Episode, max_rows_shown: int, dialect: str) -> list[float]:
    def is_failed(action: Action) -> bool:
        return action.kind == "malformed" or (action.outcome is not None and not action.outcome.is_ok)

    return [-float(is_failed(action)) for action in episode.actions]


_SCORES: dict[str, Callable[[Episode, int, str], list[float]]] = {
    GOLD_SHOWN: _gold_shown,
    FAILED_CALL: _failed_call,
}


def read_turn_rewards(value: Any) -> TurnRewards:
    """Turn rewards of the field `rewards.turns`; None for the default weights.

    Raises:
        ConfigError: It is no mapping of known names to numbers >= 0.
    """
    if value is None:
        return TurnRewards()
    if not isinstance(value, Mapping):
        raise ConfigError(f"rewards.turns must be a mapping of names to weights, got {value!r}")
    return TurnRewards(dict(value))
