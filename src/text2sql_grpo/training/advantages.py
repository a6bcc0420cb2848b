"""Advantages of single turns: from their rewards, by subtree, by a value; the reason why a batch has none."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

_EPSILON = 1e-4  # TRL's
GAE_LAMBDA = 0.95

TurnRow = tuple[float | None, Sequence[float]]  # reward of a rollout (None if masked), rewards of its turns


def turn_advantages(rows: Sequence[TurnRow], *, group_size: int, scale: str) -> list[list[float]]:
    """Advantage of each turn of each rollout.

    A turn is credited with the reward of its rollout and with its reward-to-go (turn rewards from this turn
    on), each less its mean over the group; the mean of a reward-to-go is over rollouts that have this turn.
    Without turn rewards these are the advantages of GRPO.

    Args:
        rows: Reward (None if masked) and turn rewards of each rollout; groups are contiguous.
        group_size: Rollouts of one prompt.
        scale: TRL's `scale_rewards`: divide by the deviation of total rewards in the `group`, in the `batch`,
            or not at all (`none`).

    >>> turn_advantages([(0.0, [1.0, 0.0]), (0.0, [0.0, 1.0])], group_size=2, scale="none")
    [[0.0, -0.5], [0.0, 0.5]]
    """
    deviation = _deviation(rows) if scale == "batch" else 0.0
    advantages: list[list[float]] = []
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        counted = [(reward, _rewards_to_go(turns)) for reward, turns in group if reward is not None]
        if scale == "group":
            deviation = _deviation(group)
        divisor = 1.0 if scale == "none" else deviation + _EPSILON
        mean = statistics.fmean(reward for reward, _ in counted) if counted else 0.0
        for reward, turns in group:
            if reward is None:
                advantages.append([0.0] * len(turns))
                continue
            means = [
                statistics.fmean(to_go[turn] for _, to_go in counted if turn < len(to_go))
                for turn in range(len(turns))
            ]
            own = zip(_rewards_to_go(turns), means, strict=True)
            advantages.append([(reward - mean + to_go - usual) / divisor for to_go, usual in own])
    return advantages


def _rewards_to_go(turns: Sequence[float]) -> list[float]:
    """Sums of the rewards of each turn and all later ones."""
    sums: list[float] = []
    for earned in reversed(turns):
        sums.append(earned + (sums[-1] if sums else 0.0))
    return sums[::-1]


def tree_advantages(
    rows: Sequence[TurnRow], *, group_size: int, subtree_size: int, scale: str
) -> list[list[float]]:
    """Advantage of each turn of each rollout, where rollouts of a subtree share their first turn.

    The first turn is credited with the mean reward of its subtree less that of the group, later turns with
    the reward of the rollout less the mean of its subtree (Tree-GRPO, arXiv:2509.21240). Both add up to the
    advantage of GRPO.

    Args:
        rows: See `turn_advantages`; rewards of turns do not count. Subtrees are contiguous.
        subtree_size: Rollouts of one first turn; a divisor of `group_size`.
        scale: See `turn_advantages`.

    >>> tree_advantages([(r, [0, 0]) for r in (1, 0, 0, 0)], group_size=4, subtree_size=2, scale="none")
    [[0.25, 0.5], [0.25, -0.5], [-0.25, 0.0], [-0.25, 0.0]]
    """
    plain = turn_advantages([(reward, [0.0]) for reward, _ in rows], group_size=group_size, scale=scale)
    advantages: list[list[float]] = []
    for start in range(0, len(rows), subtree_size):
        whole = range(start, start + subtree_size)
        counted = [plain[i][0] for i in whole if rows[i][0] is not None]
        first = statistics.fmean(counted) if counted else 0.0
        for i in whole:
            reward, turns = rows[i]
            later = plain[i][0] - first
            own = [later if turn else first for turn in range(len(turns))]
            advantages.append([0.0] * len(turns) if reward is None else own)
    return advantages


def gae(reward: float, values: Sequence[float]) -> list[float]:
    """Generalised advantage estimates of the turns of one rollout, with gamma 1.

    Schulman et al. 2016 (arXiv:1506.02438), over turns in place of time steps. If values are between the
    highest reward of a wrong rollout and the lowest of a right one, and `GAE_LAMBDA ** (turns - 1)` is above
    1/2, a turn of a right rollout has a higher advantage than one of a wrong rollout from a state of the same
    value.

    Args:
        reward: Reward at the end of the last turn.
        values: Value of the state in which each turn starts.

    >>> gae(1.0, [0.5])
    [0.5]
    """
    advantages: list[float] = []
    after, advantage = reward, 0.0
    for value in reversed(values):
        advantage = after - value + GAE_LAMBDA * advantage
        advantages.append(advantage)
        after = value
    return advantages[::-1]


def whitened(advantages: Sequence[Sequence[float]], *, scale: str) -> list[list[float]]:
    """Shift the advantages of all turns to mean 0, and to deviation 1 unless `scale` is `none`.

    Args:
        advantages: Advantages of the turns of each rollout; empty for masked ones.
    """
    values = [value for row in advantages for value in row]
    if not values:
        return [list(row) for row in advantages]
    mean, divisor = statistics.fmean(values), 1.0
    if scale != "none":
        divisor = statistics.pstdev(values) + _EPSILON
    return [[(value - mean) / divisor for value in row] for row in advantages]


def _deviation(rows: Sequence[TurnRow]) -> float:
    totals = [reward + sum(turns) for reward, turns in rows if reward is not None]
    return statistics.stdev(totals) if len(totals) > 1 else 0.0


def token_advantages(
    advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], output: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Spread the advantages of turns over their sampled tokens; shape (B, T), 0 for other tokens.

    Args:
        advantages: Advantages of the turns of each rollout; empty for 0 everywhere.
        masks: See `turn_spans`.
    """
    by_token = torch.zeros(output["completion_ids"].shape)
    for row, (turns, mask) in enumerate(zip(advantages, masks, strict=True)):
        for turn, (start, end) in enumerate(turn_spans(mask) if turns else []):
            by_token[row, start:end] = turns[turn]
    return by_token.to(output["advantages"])


def turn_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """First column of each turn and the column after it.

    Args:
        mask: 1 for each sampled token of a rollout; each run of them is a turn.

    >>> turn_spans([1, 1, 0, 1])
    [(0, 2), (3, 4)]
    """
    ends = [column for column, pair in enumerate(pairwise([0, *mask, 0])) if pair[0] != pair[1]]
    return list(zip(ends[::2], ends[1::2], strict=True))


def zero_variance_by_prompt(rewards: Iterable[tuple[int, float | None]]) -> dict[int, bool]:
    """Map each prompt to True if its group has zero variance.

    TRL's `frac_reward_zero_std` does not count groups with fewer than two rewards, and takes the
    deviation of the whole batch under `scale_rewards: batch`.

    Args:
        rewards: Prompt index and reward of each episode; masked ones (None) do not count.
    """
    groups: dict[int, set[float]] = {}
    for name, reward in rewards:
        groups.setdefault(name, set()).update(() if reward is None else (round(reward, 6),))
    return {name: len(found) < 2 for name, found in groups.items()}


def no_signal(rewards: Sequence[float | None], stop_reasons: Sequence[str], *, group_size: int) -> str | None:
    """Reason why no episode of a batch or run has an advantage, with a remedy; None if one has.

    Args:
        rewards: Reward of each episode, None if masked; groups are contiguous.
        stop_reasons: Stop reason of each episode.

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
