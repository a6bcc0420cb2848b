"""The trainer's update, with each distinct token prefix of a micro-batch forwarded once."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from text2sql_grpo import trl_compat
from text2sql_grpo.reliability.ranks import any_reason
from text2sql_grpo.rollout.check import disagreement
from text2sql_grpo.token_tree.attention import TreePass, attend_to_trees, obstacle
from text2sql_grpo.token_tree.scored_tree import (
    ScoredTree,
    by_prompt,
    keep_hidden_states,
    rows_with_advantage,
    scored_tree,
    trimmed,
)

logger = logging.getLogger(__name__)
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LossTokens:
    """Tokens whose log-probs the loss reads.

    Attributes:
        is_scored: 1 for completion tokens that need a log-prob; shape (B, K).
        needs_gradient: True for rows whose log-probs need a gradient; bool, shape (B, 1).
    """

    is_scored: torch.Tensor
    needs_gradient: torch.Tensor

    @classmethod
    def all_of(cls, inputs: Mapping[str, torch.Tensor]) -> "LossTokens":
        """All tokens that the loss of a batch reads (`training.parts.Batch.tensors`)."""
        is_scored = inputs["completion_mask"] * inputs["tool_mask"]
        return cls(is_scored, torch.ones_like(is_scored[:, :1], dtype=torch.bool))


class TokenTreeUpdate:
    """Update without repeated prefixes, padding and zero-variance rows.

    It is TRL's where settings or the model do not allow that.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: False for TRL's plain update.
        keeps_order: Keep the order of the generation batch, which decides the optimiser step of a group.

    Attributes:
        is_on: True if prefixes are shared. The first batch may show that they cannot be.
        way: Name of the way in which updates are computed, with the reason if it is TRL's.
    """

    def __init__(self, trainer: GRPOTrainer, *, is_wanted: bool, keeps_order: bool = False) -> None:
        self._trainer = trainer
        self._keeps_order = keeps_order
        self._checked: set[str] = set()
        self.is_on = is_wanted
        self.way = "token trees" if is_wanted else "TRL's: grpo.shared_prefix is false"
        if is_wanted:
            self._switch_off(tree_obstacle(trainer))
        if self.is_on:
            trl_compat.shrink_logit_tiles(trainer)
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    attend_to_trees(trl_compat.causal_lm(trainer, model))

    def _switch_off(self, reason: str | None) -> None:
        """Fall back to TRL's update if there is a reason."""
        if reason is not None:
            self.is_on, self.way = False, f"TRL's: {reason}"
            logger.warning(
                "shared_prefix is off, so the update takes more memory, and more time on a CPU: %s", reason
            )

    def check(
        self, model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, width: int, *, role: str
    ) -> bool:
        """Return `is_on`; at the first call for a role, compare both ways on some rows.

        Args:
            input_ids: Prompts and completions, shape (B, P + K).
            mask: 0 for padding; same shape.
            width: K.
            role: `policy` or `reference`, which is another model, or the policy with another adapter.
        """
        if role in self._checked or not self.is_on:
            return self.is_on
        self._checked.add(role)
        rows = sorted({0, min(1, len(mask) - 1), len(mask) // 2, len(mask) - 1})
        # A column of padding shows whether positions count it. It replaces one: a context may be full.
        ids, mask = (functional.pad(each[rows, :-1], (1, 0)) for each in (input_ids, mask))
        width -= 1
        is_present, reason = mask[:, -width:] if width else mask[:, :0], None
        if is_present.any():
            tree = partial(tree_log_probs, self._trainer, model)
            reason = disagreement(
                model,
                lambda: trl_compat.plain_log_probs(self._trainer, model, ids, mask, width) * is_present,
                lambda: tree(scored_tree(ids, mask, is_present))[0],
                is_float32=computes_in_float32(self._trainer),
            )
        self._switch_off(any_reason(reason))
        if self.is_on:
            logger.info("shared_prefix is on: both ways of the update agree on %s rows", len(rows))
        return self.is_on

    def split(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Split a generation batch into micro-batches, prompts that begin alike together."""
        args = self._trainer.args
        if self.is_on:
            steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
            rows = by_prompt(batch, parts=steps, is_shuffled=not self._keeps_order)
            batch = {name: value[rows] if value.ndim else value for name, value in batch.items()}
        elif not self._keeps_order:
            batch = shuffle_sequence_dict(batch)
        micro_batches: list[dict[str, torch.Tensor]] = split_tensor_dict(batch, args.steps_per_generation)
        return micro_batches

    def narrowed(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], LossTokens | None]:
        """Return inputs of a loss without padding, and the tokens that it reads; None for TRL's update."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")
        )
        if not self.check(model, ids, mask, inputs["completion_mask"].shape[1], role="policy"):
            return inputs, None
        inputs = trimmed(inputs)
        tokens = LossTokens.all_of(inputs)
        if may_skip_zero_variance(self._trainer):
            tokens = replace(tokens, needs_gradient=rows_with_advantage(inputs))
        # A token without a log-prob could have an infinite ratio, which survives any mask.
        known = ("old_per_token_logps", "ref_per_token_logps")
        masked = {name: inputs[name] * tokens.is_scored for name in known if name in inputs}
        return inputs | masked, tokens

    def log_probs(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokens: LossTokens,
        *,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> LogProbs:
        """Return what TRL's `_get_per_token_logps_and_entropies` does; 0 for tokens that are not scored."""
        size = batch_size or len(input_ids)
        columns = (input_ids, attention_mask, tokens.is_scored, tokens.needs_gradient)
        chunks = zip(*(column.split(size) for column in columns), strict=True)
        parts = [self._chunk(model, *rows, compute_aux_loss=compute_aux_loss) for rows in chunks]
        log_probs, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(log_probs),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _chunk(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        is_scored: torch.Tensor,
        needs_gradient: torch.Tensor,
        *,
        compute_aux_loss: bool,
    ) -> LogProbs:
        """Log-probs, entropies and the router's loss, with a gradient only where it is needed."""
        batch = scored_tree(input_ids, attention_mask, is_scored * needs_gradient, is_whole=compute_aux_loss)
        log_probs, entropies, aux_loss = tree_log_probs(
            self._trainer, model, batch, compute_aux_loss=compute_aux_loss
        )
        if (is_scored * ~needs_gradient).any():
            batch = scored_tree(input_ids, attention_mask, is_scored * ~needs_gradient)
            # Without the wrapper of distributed training, which would wait for the same pass on other ranks.
            model = self._trainer.accelerator.unwrap_model(model)
            with torch.no_grad():
                other_log_probs, other_entropies, _ = tree_log_probs(self._trainer, model, batch)
            log_probs = torch.where(needs_gradient, log_probs, other_log_probs)
            if entropies is not None and other_entropies is not None:
                entropies = torch.where(needs_gradient, entropies, other_entropies)
        return log_probs, entropies, aux_loss


def tree_obstacle(trainer: Trainer) -> str | None:
    """Reason why a trainer cannot forward token trees; None if none is known before it tries."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.use_liger_kernel or trainer.args.torch_compile:
        return "use_liger_kernel or torch_compile is set"
    return obstacle(model)


def tree_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, batch: ScoredTree, *, compute_aux_loss: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probs and entropies of scored tokens by TRL's fused head, shape (B, K); loss of the router.

    A reference has no entropies.
    """
    lm, tree_pass = trl_compat.causal_lm(trainer, model), TreePass(batch.tree, batch.targets.device)
    router = {"output_router_logits": True} if compute_aux_loss else {}
    with (
        trl_compat.autocast(trainer, model),
        keep_hidden_states(lm.base_model, batch.sources),
        tree_pass.running(lm) as inputs,
    ):
        output = model(**inputs, **router, shift_labels=batch.targets[None], fused_lm_head=True)
    entropy = None if output.entropy is None else batch.unpack(output.entropy[0])
    return batch.unpack(output.log_probs[0]), entropy, output.aux_loss if compute_aux_loss else None


def computes_in_float32(trainer: Trainer) -> bool:
    """True if the forward passes of training round to float32."""
    dtype = trainer.accelerator.unwrap_model(trainer.model).dtype
    return bool(trainer.accelerator.mixed_precision == "no" and dtype == torch.float32)


def may_skip_zero_variance(trainer: GRPOTrainer) -> bool:
    """True if rows of zero-variance groups have no gradient, and may have a forward pass of their own.

    With sharded weights, each pass waits for the same pass on the other ranks.
    """
    args, plugin = trainer.args, trainer.accelerator.state.deepspeed_plugin
    has_bonus = args.entropy_coef or args.use_adaptive_entropy
    has_gradient = trainer.beta or has_bonus or trainer.aux_loss_enabled
    is_zero3 = plugin is not None and plugin.zero_stage == 3
    return not (has_gradient or trainer.is_fsdp_enabled or is_zero3)
