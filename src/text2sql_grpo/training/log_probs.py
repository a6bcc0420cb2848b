"""Log-probs of a generation batch with which the loss compares the policy: sampler, old policy, reference."""

from typing import TYPE_CHECKING

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from text2sql_grpo.training.parts import Batch

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer

Inputs = dict[str, torch.Tensor]


def other_log_probs(trainer: "RolloutGRPOTrainer", batch: Batch, inputs: Inputs) -> Inputs:
    """Log-probs that the loss reads next to the policy's, each of shape (B, K).

    `old_per_token_logps` if the policy changes before the batch is used up, `ref_per_token_logps` with a KL
    term, `sampling_per_token_logps` for TRL's off-policy mask and for its correction of vLLM's probabilities,
    and that correction, `importance_sampling_ratio`.

    Args:
        inputs: `Batch.tensors`.
    """
    found, args = dict[str, torch.Tensor](), trainer.args
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    lifetime = args.steps_per_generation * trainer.num_iterations  # micro-batches of a generation batch

    def log_probs(model: torch.nn.Module, role: str) -> torch.Tensor:
        size = args.per_device_train_batch_size
        return trainer.update.log_probs(model, inputs, role=role, batch_size=size)[0]

    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
        if args.gradient_accumulation_steps % lifetime or corrects:
            found["old_per_token_logps"] = log_probs(trainer.model, "policy")
        if trainer.beta and trainer.ref_model is not None:
            found["ref_per_token_logps"] = log_probs(trainer.ref_model, "reference")
        elif trainer.beta:
            model = trainer.accelerator.unwrap_model(trainer.model)
            with use_adapter(model, "ref" if "ref" in model.peft_config else None):  # TRL's copy of the start
                found["ref_per_token_logps"] = log_probs(trainer.model, "reference")
    # TRL's off-policy mask may read the sampler's only if they are of the whole vocabulary.
    is_whole = trainer.top_p == 1.0 and not trainer.top_k and trainer.min_p is None
    if not (corrects or (trainer.off_policy_mask_threshold is not None and is_whole)):
        return found
    sampled = batch.log_probs(inputs["completion_ids"])
    if sampled is None:
        return found
    found["sampling_per_token_logps"] = sampled
    if corrects:
        difference = ((found["old_per_token_logps"] - sampled) * inputs["tool_mask"]).nan_to_num(0.0)
        found["importance_sampling_ratio"] = ratio = sampling_ratio(trainer, difference)
        is_read = inputs["tool_mask"].bool()
        apart, ratios = difference.abs()[is_read], ratio.expand(sampled.shape)[is_read]
        if len(ratios):
            figures = {
                "sampling_logp_difference/mean": apart.mean(),
                "sampling_logp_difference/max": apart.max(),
                "importance_sampling_ratio/min": ratios.min(),
                "importance_sampling_ratio/mean": ratios.mean(),
                "importance_sampling_ratio/max": ratios.max(),
            }
            trainer.collect({f"sampling/{name}": float(value) for name, value in figures.items()})
    return found


def sampling_ratio(trainer: GRPOTrainer, difference: torch.Tensor) -> torch.Tensor:
    """Importance ratio of the old policy to the sampler, truncated or masked; shape (B, K) or (B, 1).

    Args:
        difference: Log-probs of the old policy less the sampler's, 0 for other tokens; shape (B, K).
    """
    mode = trainer.vllm_importance_sampling_mode
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    ratio = (difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    inside = ratio.clamp(min=low, max=high) if (low, high) != (None, None) else ratio
    return inside if mode.endswith("truncate") else ratio * (inside == ratio)
