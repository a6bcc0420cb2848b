"""BIRD's metrics: execution accuracy, soft F1 and the reward-based valid efficiency score."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from text2sql_grpo.sql.outcome import ExecutionOutcome, Row

VES_REPEATS = 100


def bird_execution_accuracy(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> bool:
    """BIRD's execution accuracy (EX): the two results are equal as sets of rows.

    Source: `evaluation.py` of the BIRD benchmark (arXiv:2305.03111),
    `set(predicted_rows) == set(ground_truth_rows)`.

    Quirks, kept on purpose: row order and duplicates are ignored (so is DISTINCT), column names
    too; two empty results are equal whatever their columns; Python equality, so 1 equals 1.0 and
    '1' does not, NULL equals NULL, and 0.1 + 0.2 differs from 0.3.

    Returns:
        False if either query failed, or if rows were cut (the official code has no row limit).
    """
    return _can_compare(gold, predicted) and set(gold.rows) == set(predicted.rows)


def bird_soft_f1(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> float:
    """BIRD's soft F1, in [0, 1]: share of cells that agree, row by row.

    Source: `evaluation_f1.py` of BIRD mini-dev (github.com/bird-bench/mini_dev).

    Duplicate rows are dropped and the rest paired by position. With n cells in the gold's row, a pair
    adds to tp the predicted cells found anywhere in the gold's row, over n; to fp those not found, over
    n; to fn the gold's cells not found in the predicted row, over n. A gold row without partner adds 1
    to fn, a predicted one 1 to fp. F1 is taken of the sums.

    Quirks, kept on purpose: two empty results score 1; row order matters, column order does not; a cell
    repeated in the predicted row counts each time, so tp may exceed the gold's cells; Python equality.

    Returns:
        0 if either query failed, or if rows were cut.
    """
    if not _can_compare(gold, predicted):
        return 0.0
    if not gold.rows and not predicted.rows:
        return 1.0
    gold_rows, predicted_rows = list(dict.fromkeys(gold.rows)), list(dict.fromkeys(predicted.rows))
    pairs = [_row_scores(g, p) for g, p in zip(gold_rows, predicted_rows, strict=False)]
    tp = sum(pair[0] for pair in pairs)
    fp = sum(pair[1] for pair in pairs) + max(len(predicted_rows) - len(gold_rows), 0)
    fn = sum(pair[2] for pair in pairs) + max(len(gold_rows) - len(predicted_rows), 0)
    if tp == 0:
        return 0.0
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    return 2 * precision * recall / (precision + recall)


def _row_scores(gold: Row, predicted: Row) -> tuple[float, float, float]:
    matches = sum(cell in gold for cell in predicted)
    missed = sum(cell not in predicted for cell in gold)
    return matches / len(gold), (len(predicted) - matches) / len(gold), missed / len(gold)


def bird_time_ratio(
    time_gold: Callable[[], float], time_predicted: Callable[[], float], *, repeats: int = VES_REPEATS
) -> float:
    """Speed-up of the prediction: mean ratio of gold to predicted time.

    Source: `evaluation_ves.py` of BIRD mini-dev. The two run in turn, the prediction first, `repeats`
    times; ratios outside the mean ± 3 standard deviations are dropped before the mean is taken.

    Difference: where all ratios are the same none is dropped (the official code drops all of them,
    divides by zero and scores 0; only a clock that is too coarse shows it).

    Args:
        time_gold: Runs the gold once and returns its seconds, > 0. Must not answer from a cache.
        time_predicted: The same for the prediction.
        repeats: Runs of each, >= 1.
    """
    ratios = []
    for _ in range(repeats):
        predicted_s = time_predicted()
        ratios.append(time_gold() / predicted_s)
    mean, deviation = fmean(ratios), pstdev(ratios)
    kept = [ratio for ratio in ratios if mean - 3 * deviation < ratio < mean + 3 * deviation]
    return fmean(kept or ratios)


def bird_ves_reward(time_ratio: float) -> float:
    """Reward of a right prediction that is `time_ratio` times as fast as the gold.

    >>> [bird_ves_reward(ratio) for ratio in (2.0, 1.0, 0.5, 0.25, 0.1)]
    [1.25, 1.0, 0.75, 0.5, 0.25]
    """
    for threshold, reward in ((2, 1.25), (1, 1.0), (0.5, 0.75), (0.25, 0.5)):
        if time_ratio >= threshold:
            return reward
    return 0.25


def bird_r_ves(rewards: Sequence[float]) -> float:
    """Reward-based valid efficiency score (R-VES), in [0, 111.8]: mean square root, times 100.

    Args:
        rewards: `bird_ves_reward` of every question, or 0 if the prediction is wrong by EX.

    >>> bird_r_ves([1.0, 0.25, 0.0, 1.0])
    62.5
    """
    return fmean(math.sqrt(reward) for reward in rewards) * 100


def _can_compare(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> bool:
    return gold.is_ok and predicted.is_ok and not gold.is_truncated and not predicted.is_truncated
