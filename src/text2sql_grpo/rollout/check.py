"""Comparison of two ways to forward a model on a few rows, before the faster one is trusted with it."""

from collections.abc import Callable

import torch

from text2sql_grpo.errors import ModelError

_EXACT, _ROUNDED = 1e-3, 0.05  # largest difference in float32; mean difference in other dtypes
# What the code of a model raises that does not know position ids or this package's attention and masks.
_FAILURES = (AttributeError, IndexError, KeyError, ModelError, RuntimeError, TypeError, ValueError)


def disagreement(
    model: torch.nn.Module,
    plain: Callable[[], torch.Tensor],
    fast: Callable[[], torch.Tensor],
    *,
    is_float32: bool,
) -> str | None:
    """Reason why a model cannot be forwarded the fast way, found by trying; None if both ways agree.

    Args:
        plain: Function that returns log-probs of rows, each forwarded whole by the model's own code.
        fast: Function that returns the same by the fast way.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            errors = (fast() - plain()).abs()
        error = float(errors.max() if is_float32 else errors.mean())
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as failure:
        return f"{type(failure).__name__}: {failure}"
    finally:
        model.train(was_training)
    if not error <= (_EXACT if is_float32 else _ROUNDED):
        return f"its log-probs differ by {error:.1e} from those of rows forwarded whole"
    return None
