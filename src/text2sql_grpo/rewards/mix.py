"""Weighted sum of named scores in which no wrong answer can out-score a right one."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.rewards.function import Results, RewardFunction, is_number, read_range
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rewards.named import Reward, reward_function
from text2sql_grpo.rewards.presets import OWN_PRESET, PRESETS

ADJUSTMENT = "adjustment"
PENALTY = -1.0
DEFAULT_WEIGHTS = {"execution": 1.0}
OWN_WEIGHT = 0.1
_MASK, _PENALTY = "mask", "penalty"


class RewardMix:
    """Reward of an episode, from the section `rewards` of a config or from functions.

    Attributes:
        weights: Weight by name of reward function; a weight of 0 only logs the score. With `clip` or
            `on_error: penalty` also `adjustment`, weight 1: the change of the weighted sum.
        preset: Name of the preset; None for a custom mix.
        warning: Wrong answers paid by a preset that reproduces published work; else None.
    """

    def __init__(self, settings: Mapping[Any, Any], functions: Iterable[tuple[Reward, float]] = ()) -> None:
        """Read the settings and prove that every right answer earns more than any wrong one.

        Args:
            settings: Weights by reward (see `reward_function`), and next to them, each optional: `preset`,
                with default weights; `clip`, the lowest and the highest reward; `on_error`: `mask` leaves out
                samples whose gold failed or whose episode was cut, `penalty` gives them -1. Without a preset
                the default is `execution: 1.0`.
            functions: Further rewards and their weights.

        Raises:
            ConfigError: An unknown name, two rewards of one name, a weight that is not a finite number, or
                settings with which the best wrong answer could earn as much as the worst right one, unless
                they are an unchanged published preset.
        """
        given = dict(settings)
        self.preset: str | None = _known("preset", given.pop("preset", None), [None, *PRESETS])
        clip = given.pop("clip", None)
        self._clip = (-math.inf, math.inf) if clip is None else read_range(clip, "clip")
        self._penalises = _known("on_error", given.pop("on_error", _MASK), [_MASK, _PENALTY]) == _PENALTY
        if "turns" in given:
            raise ConfigError("rewards.turns was removed: it gained nothing measurable (docs/losses.md)")
        weights: dict[str, float] = {}
        own: dict[str, RewardFunction] = {}
        for reward, weight in [*given.items(), *functions]:
            function = reward_function(reward)
            name = function.name
            if name in own or name == ADJUSTMENT:
                raise ConfigError(f"rewards: the name {name} is taken by another score: rename the function")
            if not is_number(weight):
                raise ConfigError(f"rewards: the weight of {name} must be a finite number, got {weight!r}")
            own[name], weights[name] = function, weight
        defaults = PRESETS[self.preset] if self.preset else DEFAULT_WEIGHTS
        self._functions = {name: REWARD_FUNCTIONS[name] for name in defaults} | own
        self._weights = {**defaults, **weights}
        self.weights = dict(self._weights)
        if clip is not None or self._penalises:
            self.weights[ADJUSTMENT] = 1.0
        is_published = self.preset not in (None, OWN_PRESET) and not own and clip is None
        fault = self._fault()
        if fault and not is_published:
            raise ConfigError(fault)
        self.warning = self._warning() if fault else None

    def score(self, episode: Episode, verdict: Verdict, results: Results) -> dict[str, float] | None:
        """Scores by name, without those that are left out; None for a sample that must not be trained on.

        Raises:
            RewardError: A function raised, or did not return a number in its range.
        """
        if episode.stop_reason == "error":  # an internal failure, not the model's
            return None
        if episode.is_masked or verdict.reason == "gold_failed":
            return dict.fromkeys(self._functions, 0.0) | {ADJUSTMENT: PENALTY} if self._penalises else None
        found = {name: one.score(episode, verdict, results) for name, one in self._functions.items()}
        scores = {name: score for name, score in found.items() if score is not None}
        if ADJUSTMENT in self.weights:
            plain = self.total(scores)
            scores[ADJUSTMENT] = self._clipped(plain) - plain
        return scores or None

    def total(self, scores: Mapping[str, float]) -> float:
        """Weighted sum of the scores."""
        return sum(self.weights[name] * score for name, score in scores.items())

    def bounds(self) -> tuple[float, float]:
        """Highest reward of a wrong answer, lowest of a right one."""
        best_wrong, worst_right = self._bounds()
        return self._clipped(sum(best_wrong.values())), self._clipped(sum(worst_right.values()))

    def _clipped(self, reward: float) -> float:
        low, high = self._clip
        return min(max(reward, low), high)

    def _fault(self) -> str:
        """Error text if a wrong answer may earn as much as a right one; else empty."""
        best_wrong, worst_right = self._bounds()
        highest_wrong, lowest_right = self.bounds()
        if highest_wrong < lowest_right:
            return ""
        culprits = [
            f"{name}: {weight}"
            for name, weight in self._weights.items()
            if best_wrong[name] > worst_right[name]
        ]
        advice = f"lower {', '.join(culprits)}, or raise execution" if culprits else "raise execution above 0"
        if sum(best_wrong.values()) < sum(worst_right.values()):
            advice = f"widen clip: {list(self._clip)}"
        return (
            "rewards: every right answer must earn more than any wrong one, but a wrong one can "
            f"earn {highest_wrong:g} and a right one as little as {lowest_right:g}; {advice}"
        )

    def _bounds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Maximum that each score adds for a wrong answer, and minimum for a right one."""
        best_wrong, worst_right = {}, {}
        for name, weight in self._weights.items():
            function = self._functions[name]
            best_wrong[name] = max(weight * bound for bound in function.range_when_wrong)
            worst_right[name] = min(weight * bound for bound in function.range_when_right)
        return best_wrong, worst_right

    def _warning(self) -> str:
        best_wrong, worst_right = self._bounds()
        paid: dict[str, list[str]] = {}
        for name, function in self._functions.items():
            if self._weights[name] and function.pays_wrong:
                paid.setdefault(function.pays_wrong, []).append(name)
        reasons = "; ".join(f"{', '.join(names)}: {what}" for what, names in paid.items())
        return (
            f"Preset {self.preset} reproduces published work and pays wrong answers, up to "
            f"{sum(best_wrong.values()):g}, a right one as little as {sum(worst_right.values()):g}. "
            f"Paid: {reasons}."
        )


def reward_mix(
    reward_funcs: RewardMix | Reward | list[Any] | tuple[Reward, float] | Mapping[Any, Any] | None,
) -> RewardMix:
    """Make a mix of a trainer's argument `reward_funcs`.

    Args:
        reward_funcs: A list of rewards, each with the weight 0.1, or 1.0 for `execution`, or of pairs of a
            reward and its weight; one of these; or a mapping, see `RewardMix`. A reward is a function, a
            `RewardFunction`, or a name, see `reward_function`. None for `execution` alone.

    Raises:
        ConfigError: See `RewardMix`.
    """
    if isinstance(reward_funcs, RewardMix):
        return reward_funcs
    if isinstance(reward_funcs, Mapping):
        return RewardMix(reward_funcs)
    items: list[Any] = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    pairs: list[tuple[Reward, float]] = []
    for item in items if reward_funcs is not None else []:
        if isinstance(item, tuple) and len(item) == 2:
            pairs.append(item)
        else:
            function = reward_function(item)
            pairs.append((function, DEFAULT_WEIGHTS.get(function.name, OWN_WEIGHT)))
    return RewardMix({}, pairs)


def _known(setting: str, value: Any, known: Iterable[Any]) -> Any:
    names = list(known)
    if value not in names:
        raise ConfigError(
            f"rewards: {setting} must be one of {', '.join(filter(None, names))}, got {value!r}"
        )
    return value
