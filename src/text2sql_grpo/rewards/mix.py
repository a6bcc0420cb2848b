"""Weighted sum of named scores in which no wrong answer can out-score a right one."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.rewards.function import Results
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rewards.presets import PRESETS

ADJUSTMENT = "adjustment"
PENALTY = -1.0
_MASK, _PENALTY = "mask", "penalty"


class RewardMix:
    """Reward of an episode, from the section `rewards` of a config.

    Attributes:
        weights: Weight by name of reward function; a weight of 0 only logs the score. With `clip` or
            `on_error: penalty` also `adjustment`, weight 1: the change of the weighted sum.
        preset: Name of the preset; None for a custom mix.
        warning: Wrong answers paid by a preset that reproduces published work; else None.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read the settings and prove that every right answer earns more than any wrong one.

        Args:
            settings: Weights by name, and beside them, each optional: `preset`, with default weights;
                `clip`, the lowest and the highest reward; `on_error`: `mask`
                leaves out samples whose gold failed or whose episode was cut, `penalty` gives them -1.

        Raises:
            ConfigError: An unknown name, a weight that is not a finite number, or settings with which
                the best wrong answer could earn as much as the worst right one, unless they are an
                unchanged published preset.
        """
        given = dict(settings)
        self.preset: str | None = _known("preset", given.pop("preset", None), [None, *PRESETS])
        self._clip = _read_clip(given.pop("clip", None))
        self._penalises = _known("on_error", given.pop("on_error", _MASK), [_MASK, _PENALTY]) == _PENALTY
        if "turns" in given:
            raise ConfigError("rewards.turns was removed: it gained nothing measurable (docs/losses.md)")
        for name, weight in given.items():
            if name not in REWARD_FUNCTIONS:
                raise ConfigError(f"rewards: {_unknown(name, [*REWARD_FUNCTIONS, *_SETTINGS])}")
            if not _is_number(weight):
                raise ConfigError(f"rewards: {name} must be a finite number, got {weight!r}")
        preset = PRESETS[self.preset] if self.preset else None
        self._functions: dict[str, float] = {**(preset.weights if preset else {}), **given}
        self.weights = dict(self._functions)
        if self._clip or self._penalises:
            self.weights[ADJUSTMENT] = 1.0
        is_published = preset is not None and preset.is_reproduction and not given and not self._clip
        fault = self._fault()
        if fault and not is_published:
            raise ConfigError(fault)
        self.warning = self._warning() if fault else None

    def score(self, episode: Episode, verdict: Verdict, results: Results) -> dict[str, float] | None:
        """Scores by name; None for a sample that must not be trained on.

        An exception of a reward function is not caught.

        Raises:
            RunError: A score outside its function's declared range.
        """
        if episode.stop_reason == "error":  # an internal failure, not the model's
            return None
        if episode.is_masked or verdict.reason == "gold_failed":
            return dict.fromkeys(self._functions, 0.0) | {ADJUSTMENT: PENALTY} if self._penalises else None
        scores = {}
        for name in self._functions:
            reward = REWARD_FUNCTIONS[name]
            low, high = reward.range_when_right if verdict.strict else reward.range_when_wrong
            score = reward.function(episode, verdict, results)
            if not low <= score <= high:
                where = f"question {episode.example.id}, reason {verdict.reason}"
                raise RunError(f"reward {name} must be from {low} to {high}, got {score} ({where})")
            scores[name] = score
        if ADJUSTMENT in self.weights:
            plain = sum(weight * scores[name] for name, weight in self._functions.items())
            scores[ADJUSTMENT] = self._clipped(plain) - plain
        return scores

    def total(self, scores: Mapping[str, float]) -> float:
        """Weighted sum of the scores."""
        return sum(weight * scores[name] for name, weight in self.weights.items())

    def bounds(self) -> tuple[float, float]:
        """Highest reward of a wrong answer, lowest of a right one."""
        best_wrong, worst_right = self._bounds()
        return self._clipped(sum(best_wrong.values())), self._clipped(sum(worst_right.values()))

    def _clipped(self, reward: float) -> float:
        low, high = self._clip or (-math.inf, math.inf)
        return min(max(reward, low), high)

    def _fault(self) -> str:
        """Error text if a wrong answer may earn as much as a right one; else empty."""
        best_wrong, worst_right = self._bounds()
        highest_wrong, lowest_right = self.bounds()
        if highest_wrong < lowest_right:
            return ""
        culprits = [
            f"{name}: {weight}"
            for name, weight in self._functions.items()
            if best_wrong[name] > worst_right[name]
        ]
        advice = f"lower {', '.join(culprits)}, or raise execution" if culprits else "raise execution above 0"
        if self._clip and sum(best_wrong.values()) < sum(worst_right.values()):
            advice = f"widen clip: {list(self._clip)}"
        return (
            "rewards: every right answer must earn more than any wrong one, but a wrong one can "
            f"earn {highest_wrong:g} and a right one as little as {lowest_right:g}; {advice}"
        )

    def _bounds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Maximum that each score adds for a wrong answer, and minimum for a right one."""
        items = self._functions.items()
        best_wrong = {n: max(w * bound for bound in REWARD_FUNCTIONS[n].range_when_wrong) for n, w in items}
        worst_right = {n: min(w * bound for bound in REWARD_FUNCTIONS[n].range_when_right) for n, w in items}
        return best_wrong, worst_right

    def _warning(self) -> str:
        best_wrong, worst_right = self._bounds()
        paid: dict[str, list[str]] = {}
        for name, weight in self._functions.items():
            if weight and REWARD_FUNCTIONS[name].pays_wrong:
                paid.setdefault(REWARD_FUNCTIONS[name].pays_wrong, []).append(name)
        reasons = "; ".join(f"{', '.join(names)}: {what}" for what, names in paid.items())
        return (
            f"Preset {self.preset} reproduces published work and pays wrong answers, up to "
            f"{sum(best_wrong.values()):g}, a right one as little as {sum(worst_right.values()):g}. "
            f"Paid: {reasons}."
        )


def reward_mix(reward_funcs: Any) -> RewardMix:
    return RewardMix({"preset": "strict_neighbours"})


_SETTINGS = ("preset", "clip", "on_error")


def _known(setting: str, value: Any, known: Iterable[Any]) -> Any:
    names = list(known)
    if value not in names:
        raise ConfigError(
            f"rewards: {setting} must be one of {', '.join(filter(None, names))}, got {value!r}"
        )
    return value


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    return f"unknown name {name!r}: {hint}"


def _read_clip(clip: Any) -> tuple[float, float] | None:
    if clip is None:
        return None
    if not isinstance(clip, list | tuple) or len(clip) != 2 or not all(map(_is_number, clip)):
        raise ConfigError(f"rewards: clip must be two numbers, the lowest and the highest, got {clip!r}")
    low, high = clip
    if not low < high:
        raise ConfigError(f"rewards: clip must be two numbers, the lowest first, got {clip!r}")
    return (low, high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
