"""BIRD's execution accuracy, which stands beside each strict verdict."""

from text2sql_grpo.sql.outcome import ExecutionOutcome


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
    are_whole = not gold.is_truncated and not predicted.is_truncated
    return gold.is_ok and predicted.is_ok and are_whole and set(gold.rows) == set(predicted.rows)
