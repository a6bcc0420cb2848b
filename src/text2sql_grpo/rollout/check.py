"""Comparison of two ways to forward a model on a few rows, before the faster one is trusted with it."""

from collections.abc import Callable

import torch

from text2sql_grpo.errors import ModelError

_EXACT = 1e-3  # largest difference in float32 and float64
# Mean difference in other dtypes, absolute or relative to the mean log-prob: bfloat16 rounds logits to 1/128
# of their size. Measured on SmolLM2-135M: 0.07, or 1/200, by rounding; 0.5, or 1/28, at positions off by one.
_ROUNDED, _ROUNDINGS = 0.05, 2 * torch.finfo(torch.bfloat16).eps
# What the code of a model raises that does not know position ids or this package's attention and masks.
_FAILURES = (AttributeError, IndexError, KeyError, ModelError, RuntimeError, TypeError, ValueError)


def disagreement(
    model: torch.nn.Module,
    plain: Callable[[], torch.Tensor],
    fast: Callable[[], torch.Tensor],
    *,
    is_exact: bool,
) -> str | None:
    """Reason why a model cannot be forwarded the fast way, found by trying; None if both ways agree.

    Both return log-probs of the same rows; `plain` forwards each row whole by the model's own code.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found, expected = fast(), plain()
        errors = (found - expected).abs()
        error = float(errors.max() if is_exact else errors.mean())
        bound = _EXACT if is_exact else max(_ROUNDED, _ROUNDINGS * float(expected.abs().mean()))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as failure:
        return f"{type(failure).__name__}: {failure}"
    finally:
        model.train(was_training)
    if not error <= bound:
        return f"its log-probs differ by {error:.1e} from those of rows forwarded whole"
    return None
