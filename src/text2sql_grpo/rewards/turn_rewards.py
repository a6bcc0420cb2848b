"""Rewards of single turns, bounded so that they never lift a wrong answer above a right one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.errors import ConfigError

FAILED_CALL = "failed_call"


@dataclass(frozen=True)
class TurnRewards:
    """Weighted scores of each turn.

    `failed_call` is -1 for a query that fails or a turn that cannot be read, but for an MCP server's calls.

    Attributes:
        weights: Weight by name, >= 0.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {FAILED_CALL: 0.02})

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name == "gold_shown":
                raise ConfigError("rewards.turns.gold_shown was removed: it paid for names alone")
            if name != FAILED_CALL:
                raise ConfigError(f"rewards.turns: unknown name {name!r}: the only name is {FAILED_CALL}")
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
        # The last turn submits.
        lowest = lowest_right - (max_turns - 1) * self.weights.get(FAILED_CALL, 0.0)
        if not highest_wrong < lowest:
            raise ConfigError(
                "rewards.turns: every right episode must earn more than any wrong one, but with "
                f"max_turns {max_turns} a wrong one can earn {highest_wrong:g} and a right one as little as "
                f"{lowest:g}; lower {FAILED_CALL}"
            )

    def score(self, episode: Episode) -> dict[str, list[float]]:
        """Scores of each turn by name, 0 in masked episodes."""
        failed = [-float(_is_failed(action) and not episode.is_masked) for action in episode.actions]
        return {name: failed for name in self.weights}

    def total(self, scores: Mapping[str, list[float]]) -> list[float]:
        """Weighted scores of each turn."""
        return [self.weights[name] * score for name in self.weights for score in scores[name]]


def _is_failed(action: Action) -> bool:
    return action.kind == "malformed" or (action.outcome is not None and not action.outcome.is_ok)


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
