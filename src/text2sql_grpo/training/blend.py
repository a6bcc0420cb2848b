"""Blend of the weights before and after training."""

from collections.abc import Mapping

import torch

Weights = Mapping[str, torch.Tensor]


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights that are trained, by name."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


@torch.no_grad()
def blend(model: torch.nn.Module, start: Weights, share: float) -> None:
    """Move the trained weights back to this share of the way from the start.

    WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903): a blend mostly keeps what training gained, and regains
    what the start could do. Factors of LoRA are blended one by one; of an adapter that began as zero only the
    factor that was zero, which scales it.

    Args:
        start: `trained_weights` before training.
        share: In (0, 1]; 1 leaves the weights as they are.
    """
    weights = dict(model.named_parameters())
    for name, first in start.items():
        other = name.replace("lora_A", "lora_B")
        if other != name and not start[other].any():
            continue
        weights[name].copy_(torch.lerp(first.to(weights[name].device), weights[name], share))
