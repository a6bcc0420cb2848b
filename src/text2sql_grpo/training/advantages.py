"""Advantages: of single turns where these earn something of their own, and why a batch has none."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

_EPSILON = 1e-4  # TRL's


def turn_advantages(
    rows: Sequence[tuple[float | None, Sequence[float]]], *, group_size: int, scale: str
) -> list[list[float]]:
    """For each rollout, the advantage of each of its turns.

    A turn is credited with the reward of its rollout and with what was earned in it and later, each less its
    mean over the group (of the later, over rollouts that came so far): what was earned before a turn is not
    its merit. Without rewards of turns these are the advantages of GRPO.

    Args:
        rows: Of each rollout its reward (None if it must not count) and what each of its turns earned; groups
            stand together.
        group_size: Rollouts of one prompt.
        scale: As TRL's `scale_rewards`: advantages are divided by the deviation of whole sums in the `group`,
            in the `batch`, or not at all (`none`).

    >>> turn_advantages([(0.0, [1.0, 0.0]), (0.0, [0.0, 1.0])], group_size=2, scale="none")
    [[0.0, -0.5], [0.0, 0.5]]
    """
    deviation = _deviation(rows) if scale == "batch" else 0.0
    advantages: list[list[float]] = []
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        counted = [(reward, _later(turns)) for reward, turns in group if reward is not None]
        if scale == "group":
            deviation = _deviation(group)
        divisor = 1.0 if scale == "none" else deviation + _EPSILON
        mean = statistics.fmean(reward for reward, _ in counted) if counted else 0.0
        for reward, turns in group:
            if reward is None:
                advantages.append([0.0] * len(turns))
                continue
            means = [
                statistics.fmean(later[number] for _, later in counted if number < len(later))
                for number in range(len(turns))
            ]
            own = zip(_later(turns), means, strict=True)
            advantages.append([(reward - mean + later - usual) / divisor for later, usual in own])
    return advantages


def _later(turns: Sequence[float]) -> list[float]:
    """What was earned in each turn and after it."""
    sums: list[float] = []
    for earned in reversed(turns):
        sums.append(earned + (sums[-1] if sums else 0.0))
    return sums[::-1]


def _deviation(rows: Sequence[tuple[float | None, Sequence[float]]]) -> float:
    totals = [reward + sum(turns) for reward, turns in rows if reward is not None]
    return statistics.stdev(totals) if len(totals) > 1 else 0.0


def spread(
    advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], output: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Advantages of turns on their tokens, 0 on the others; shape (B, T) of the completions of `output`.

    Args:
        masks: Of each rollout, 1 for tokens that the policy wrote; each run of them is a turn.
    """
    spread_out = torch.zeros(output["completion_ids"].shape)
    for row, (turns, mask) in enumerate(zip(advantages, masks, strict=True)):
        number = -1
        before = 0
        for column, is_sampled in enumerate(mask):
            number += is_sampled and not before
            before = is_sampled
            if is_sampled:
                spread_out[row, column] = turns[number]
    return spread_out.to(output["advantages"])


def without_spread(rewards: Iterable[tuple[str, float | None]]) -> dict[str, bool]:
    """Of each question, whether all rewards of its group are alike, so that it teaches nothing.

    Args:
        rewards: Of each episode the question's id and the reward; masked ones (None) do not count.
    """
    groups: dict[str, set[float]] = {}
    for name, reward in rewards:
        groups.setdefault(name, set()).update(() if reward is None else (round(reward, 6),))
    return {name: len(found) < 2 for name, found in groups.items()}


def no_signal(rewards: Sequence[float | None], stop_reasons: Sequence[str], *, group_size: int) -> str | None:
    """Why no episode of a batch or run has an advantage, and what to change; None where one has.

    Args:
        rewards: Reward of each episode, groups side by side; None for a masked one.
        stop_reasons: Why each of them stopped.

    >>> no_signal([None, None], ["budget", "budget"], group_size=2)
    'all 2 episodes are masked (budget 2): raise environment.max_episode_tokens or max_turn_tokens'
    >>> no_signal([0.0, 0.0, 1.0, 1.0], ["submitted"] * 4, group_size=2).partition(":")[0]
    'each of 2 groups has one reward (0 in 1, 1 in 1; submitted 4)'
    >>> no_signal([0.0, 0.0, 1.0, 0.0], ["submitted"] * 4, group_size=2)
    """
    groups = [rewards[first : first + group_size] for first in range(0, len(rewards), group_size)]
    found = [{round(reward, 6) for reward in group if reward is not None} for group in groups]
    if any(len(values) > 1 for values in found):
        return None
    stops = ", ".join(f"{reason} {n}" for reason, n in Counter(stop_reasons).most_common())
    if not any(found):
        remedy = "raise environment.max_episode_tokens or max_turn_tokens"
        if "budget" not in stop_reasons:
            remedy = "see the error of each episode in rollouts.jsonl"
        return f"all {len(rewards)} episodes are masked ({stops}): {remedy}"
    values = Counter(value for values in found for value in values)
    shown = ", ".join(f"{value:g} in {n}" for value, n in values.most_common(3))
    return (
        f"each of {len(groups)} groups has one reward ({shown}; {stops}): train SFT first, raise "
        "grpo.temperature or num_generations, or take questions that are answered sometimes"
    )
