"""QATCH's three measures of a result. Pure functions of two results.

All are 0 if either query failed or nothing was submitted, and use cut rows as they are.
"""

from itertools import chain

from text2sql_grpo.sql.outcome import ExecutionOutcome


def cell_precision(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """QATCH: the share of predicted cells that are found anywhere in the gold's result, in [0, 1]."""
    return _share_found(predicted, gold)


def cell_recall(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """QATCH: the share of the gold's cells that are found anywhere in the predicted result, in [0, 1]."""
    return _share_found(gold, predicted)


def tuple_cardinality(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """QATCH: the smaller number of rows over the larger one, in [0, 1]."""
    if predicted is None or not (gold.is_ok and predicted.is_ok):
        return 0.0
    fewer, more = sorted((len(gold.rows), len(predicted.rows)))
    return fewer / more if more else 1.0


def _share_found(cells_of: ExecutionOutcome | None, within: ExecutionOutcome | None) -> float:
    """Share of cells found in the other result; 1 for two empty results, 0 for one."""
    if not (cells_of and cells_of.is_ok and within and within.is_ok):
        return 0.0
    cells = list(chain.from_iterable(cells_of.rows))
    known = set(chain.from_iterable(within.rows))
    if not cells or not known:
        return float(not cells and not known)
    return sum(cell in known for cell in cells) / len(cells)
