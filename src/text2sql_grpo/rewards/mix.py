"""Weighted sum of named scores in which no wrong answer can out-score a right one."""

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ArgumentError, ConfigError
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.rewards.function import Results, RewardFunction, function_name, is_number, read_range
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rewards.presets import OWN_PRESET, PRESETS

Reward = str | RewardFunction | Callable[..., Any]

SETTINGS = ("preset", "clip", "on_error")  # names in the section `rewards` that are no rewards
ADJUSTMENT = "adjustment"
PENALTY = -1.0
DEFAULT_WEIGHTS = {"execution": 1.0}
OWN_WEIGHT = 0.1


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
        try:
            given, pairs = dict(settings), [(reward, weight) for reward, weight in functions]
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"rewards must be a mapping, and pairs of a reward and a weight: {error}"
            ) from error
        self.preset: str | None = _known("preset", given.pop("preset", None), [None, *PRESETS])
        clip = given.pop("clip", None)
        self._clip = (-math.inf, math.inf) if clip is None else read_range(clip, "clip")
        on_error = _known("on_error", given.pop("on_error", "mask"), ["mask", "penalty"])
        self._penalises = on_error == "penalty"
        if "turns" in given:
            raise ConfigError("rewards.turns was removed: it gained nothing measurable (docs/losses.md)")
        defaults = PRESETS[self.preset] if self.preset else DEFAULT_WEIGHTS
        weights: dict[str, float] = {}
        own: dict[str, RewardFunction] = {}
        for reward, weight in [*given.items(), *pairs]:
            function = reward_function(reward)
            name = function.name
            is_other = function is not REWARD_FUNCTIONS.get(name, function)
            if name in own or name == ADJUSTMENT or (is_other and name in defaults):
                raise ConfigError(f"rewards: the name {name} is taken by another score: rename the function")
            if not is_number(weight):
                raise ConfigError(f"rewards: the weight of {name} must be a finite number, got {weight!r}")
            own[name], weights[name] = function, weight
        self._functions = {name: REWARD_FUNCTIONS[name] for name in defaults} | own
        self.weights = {**defaults, **weights}
        # The most that each score adds for a wrong answer, and the least for a right one.
        self._best_wrong, self._worst_right = dict[str, float](), dict[str, float]()
        for name, function in self._functions.items():
            weight = self.weights[name]
            self._best_wrong[name] = max(weight * bound for bound in function.range_when_wrong)
            self._worst_right[name] = min(weight * bound for bound in function.range_when_right)
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
        best_wrong, worst_right = sum(self._best_wrong.values()), sum(self._worst_right.values())
        return self._clipped(best_wrong), self._clipped(worst_right)

    def _clipped(self, reward: float) -> float:
        low, high = self._clip
        return min(max(reward, low), high)

    def _fault(self) -> str:
        """Error text if a wrong answer may earn as much as a right one; else empty."""
        highest_wrong, lowest_right = self.bounds()
        if highest_wrong < lowest_right:
            return ""
        culprits = [
            f"{name}: {self.weights[name]}"
            for name in self._functions
            if self._best_wrong[name] > self._worst_right[name]
        ]
        advice = f"lower {', '.join(culprits)}, or raise execution" if culprits else "raise execution above 0"
        if sum(self._best_wrong.values()) < sum(self._worst_right.values()):
            advice = f"widen clip: {list(self._clip)}"
        return (
            "rewards: every right answer must earn more than any wrong one, but a wrong one can "
            f"earn {highest_wrong:g} and a right one as little as {lowest_right:g}; {advice}"
        )

    def _warning(self) -> str:
        paid: dict[str, list[str]] = {}
        for name, function in self._functions.items():
            if self.weights[name] and function.pays_wrong:
                paid.setdefault(function.pays_wrong, []).append(name)
        reasons = "; ".join(f"{', '.join(names)}: {what}" for what, names in paid.items())
        highest_wrong, lowest_right = self.bounds()
        return (
            f"Preset {self.preset} reproduces published work and pays wrong answers, up to "
            f"{highest_wrong:g}, a right one as little as {lowest_right:g}. Paid: {reasons}."
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


def reward_function(given: Reward) -> RewardFunction:
    """Make a `RewardFunction` of a function, a built-in name, or `module:function`.

    A module is imported from the Python path or the working folder. A function without a declared range must
    return scores in [0, 1].

    Raises:
        ConfigError: An unknown name, a module or function that cannot be imported, or see `RewardFunction`.
    """
    if isinstance(given, str):
        given = REWARD_FUNCTIONS.get(given) or _imported(given)
    return given if isinstance(given, RewardFunction) else RewardFunction(function_name(given), given)


def _imported(path: str) -> Any:
    module, colon, attribute = path.partition(":")
    if not colon:
        known = [*REWARD_FUNCTIONS, *SETTINGS]
        close = difflib.get_close_matches(path, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}, or module:function"
        raise ConfigError(f"rewards: unknown name {path!r}: {hint}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return attrgetter(attribute)(import_module(module))
    except Exception as error:  # of the user's module
        raise ConfigError(
            f"rewards: cannot import {path}: {type(error).__name__}: {error} (modules are found in the "
            "folder of the config file, in the working folder and by PYTHONPATH)"
        ) from error


def _known(setting: str, value: Any, known: Iterable[Any]) -> Any:
    names = list(known)
    if value not in names:
        raise ConfigError(
            f"rewards: {setting} must be one of {', '.join(filter(None, names))}, got {value!r}"
        )
    return value
