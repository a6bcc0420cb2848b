"""The weighted sum of named scores, in which no wrong answer can out-score a right one."""

import math
from collections.abc import Mapping

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS


class RewardMix:
    """Weights by name of reward function; a weight of 0 only logs the score.

    Raises:
        ConfigError: An unknown name, a weight that is not a finite number, or weights with which the
            best wrong answer would earn as much as the worst right one.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if name not in REWARD_FUNCTIONS:
                known = ", ".join(REWARD_FUNCTIONS)
                raise ConfigError(f"reward weights: expected names among {known}; got {name!r}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(f"reward weights: {name} must be a finite number, got {weight!r}")
        self.weights = dict(weights)
        _check_right_beats_wrong(self.weights)

    def score(self, episode: Episode, verdict: Verdict) -> dict[str, float] | None:
        """Each score by its name; None for a sample that must not be trained on.

        An exception of a reward function is not caught.

        Raises:
            RunError: A score outside its function's declared range.
        """
        if episode.is_masked or verdict.reason == "gold_failed":
            return None
        scores = {}
        for name in self.weights:
            reward = REWARD_FUNCTIONS[name]
            low, high = reward.range_when_right if verdict.strict else reward.range_when_wrong
            score = reward.function(episode, verdict)
            if not low <= score <= high:
                where = f"question {episode.example.id}, reason {verdict.reason}"
                raise RunError(f"reward {name}: expected a score from {low} to {high}, got {score} ({where})")
            scores[name] = score
        return scores

    def total(self, scores: Mapping[str, float]) -> float:
        """The weighted sum of what `score` returned."""
        return sum(weight * scores[name] for name, weight in self.weights.items())


def _check_right_beats_wrong(weights: Mapping[str, float]) -> None:
    best_wrong = {
        name: max(weight * bound for bound in REWARD_FUNCTIONS[name].range_when_wrong)
        for name, weight in weights.items()
    }
    worst_right = {
        name: min(weight * bound for bound in REWARD_FUNCTIONS[name].range_when_right)
        for name, weight in weights.items()
    }
    highest_wrong, lowest_right = sum(best_wrong.values()), sum(worst_right.values())
    if highest_wrong < lowest_right:
        return
    culprits = [f"{name}: {weights[name]}" for name in weights if best_wrong[name] > worst_right[name]]
    advice = f"lower {', '.join(culprits)}, or raise execution" if culprits else "raise execution above 0"
    raise ConfigError(
        "reward weights: expected every right answer to earn more than any wrong one, but a wrong one can "
        f"earn {highest_wrong:g} and a right one as little as {lowest_right:g}; {advice}"
    )
