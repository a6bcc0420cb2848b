"""Comparison of both ways of an update on a few rows, before trees are trusted with a model."""

from collections.abc import Callable

import torch

from text2sql_grpo.errors import ModelError
from text2sql_grpo.reliability.ranks import gather

_EXACT, _ROUNDED = 1e-3, 0.05  # largest difference in float32; mean difference in other dtypes
# What the code of a model raises that does not know position ids or this package's masks.
_FAILURES = (AttributeError, IndexError, ModelError, RuntimeError, TypeError, ValueError)


def difference(
    model: torch.nn.Module,
    plain: Callable[[], torch.Tensor],
    by_tree: Callable[[], torch.Tensor],
    *,
    is_float32: bool,
) -> str | None:
    """Reason why a model cannot forward trees, found on any rank by trying; None if both ways agree.

    Args:
        plain: Function that returns log-probs of rows, each forwarded whole.
        by_tree: Function that returns the same of a tree.
    """
    was_training, reason = model.training, None
    model.eval()
    try:
        with torch.no_grad():
            expected = plain()
            errors = (by_tree() - expected).abs()
        error = float(errors.max() if is_float32 else errors.mean())
        if not error <= (_EXACT if is_float32 else _ROUNDED):
            reason = f"its log-probs differ by {error:.1e} where rows share a prefix or lie behind padding"
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as failure:
        reason = f"{type(failure).__name__}: {failure}"
    finally:
        model.train(was_training)
    reasons = [reason for reasons in gather([reason]) for reason in reasons if reason is not None]
    return reasons[0] if reasons else None
