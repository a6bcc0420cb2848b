"""The trainer's update, with each distinct token prefix of a micro-batch forwarded once.

Tokens behind the last scored one of a row are not forwarded, and only scored tokens get logits.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import Trainer
from trl import GRPOTrainer

from text2sql_grpo import trl_compat
from text2sql_grpo.reliability.ranks import any_reason
from text2sql_grpo.rollout.check import disagreement
from text2sql_grpo.rollout.slots import shared_length
from text2sql_grpo.token_tree.attention import TreePass, attend_to_trees, obstacle
from text2sql_grpo.token_tree.tree import TokenTree
from text2sql_grpo.trl_compat import LogProbs

logger = logging.getLogger(__name__)


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
        if reason is not None:
            self.is_on, self.way = False, f"TRL's: {reason}"
            logger.warning(
                "shared_prefix is off, so the update takes more memory, and more time on a CPU: %s", reason
            )

    def check(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], *, role: str) -> bool:
        """Return `is_on`; at the first call for a role, compare both ways on some rows.

        Args:
            role: `policy` or `reference`, which is another model, or the policy with another adapter.
        """
        if role in self._checked or not self.is_on:
            return self.is_on
        self._checked.add(role)
        input_ids, mask, width = whole_rows(inputs)
        rows = sorted({0, min(1, len(mask) - 1), len(mask) // 2, len(mask) - 1})
        # A column of padding shows whether positions count it. It replaces one: a context may be full.
        ids, mask = (functional.pad(each[rows, :-1], (1, 0)) for each in (input_ids, mask))
        width -= 1
        is_present, reason = mask[:, -width:] if width else mask[:, :0], None
        if is_present.any():
            reason = disagreement(
                model,
                lambda: trl_compat.plain_log_probs(self._trainer, model, ids, mask, width) * is_present,
                lambda: tree_log_probs(self._trainer, model, scored_tree(ids, mask, is_present))[0],
                is_exact=computes_exactly(self._trainer),
            )
        self._switch_off(any_reason(reason))
        if self.is_on:
            logger.info("shared_prefix is on: both ways of the update agree on %s rows", len(rows))
        return self.is_on

    def split(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Split a generation batch into micro-batches, prompts that begin alike together.

        A row next to the groups (`training.losses.joined`) goes where a prompt begins most like its own.
        """
        args = self._trainer.args
        prompts = prompt_texts(batch["prompt_ids"], batch["prompt_mask"])
        count = len(prompts) - (int(batch["is_beside"].sum()) if "is_beside" in batch else 0)
        rows = list(range(count))
        if self.is_on:
            steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
            rows = by_prompt(prompts[:count], parts=steps, is_shuffled=not self._keeps_order)
        elif not self._keeps_order:
            rows = torch.randperm(len(rows)).tolist()
        size = len(rows) // args.steps_per_generation
        parts = [rows[first : first + size] for first in range(0, len(rows), size)]
        added: list[list[int]] = [[] for _ in parts]
        for row in range(count, len(prompts)):
            shared = [max(shared_length(prompts[row], prompts[one]) for one in part) for part in parts]
            place = max(range(len(parts)), key=lambda part: (shared[part], -len(added[part])))
            added[place].append(row)
        return [
            {name: value[part + more] if value.ndim else value for name, value in batch.items()}
            for part, more in zip(parts, added, strict=True)
        ]

    def narrowed(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return inputs of a loss without padding; as they are for TRL's update.

        `tool_mask` is 0 for rows of zero-variance groups where they have no gradient.
        """
        if not self.check(model, inputs, role="policy"):
            return inputs
        inputs = trimmed(inputs)
        if may_skip_zero_variance(self._trainer):
            inputs = inputs | {"tool_mask": inputs["tool_mask"] * rows_with_advantage(inputs)}
        is_read = loss_tokens(inputs)
        # A token without a log-prob could have an infinite ratio, which survives any mask.
        known = ("old_per_token_logps", "ref_per_token_logps")
        return inputs | {name: inputs[name] * is_read for name in known if name in inputs}

    def log_probs(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        *,
        role: str = "policy",
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> LogProbs:
        """Return what TRL's `_get_per_token_logps_and_entropies` does, for rows with completions of K tokens.

        By token trees, it is 0 for tokens that the loss does not read.

        Args:
            batch_size: Rows of one forward pass; None for all.
        """
        wanted = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        ids, mask, width = whole_rows(inputs)
        if not self.check(model, inputs, role=role):
            return trl_compat.plain_outputs(self._trainer, model, ids, mask, width, batch_size, **wanted)
        chunks = zip(
            *(each.split(batch_size or len(ids)) for each in (ids, mask, loss_tokens(inputs))), strict=True
        )
        parts = [
            tree_log_probs(
                self._trainer,
                model,
                scored_tree(*rows, is_whole=compute_aux_loss),
                compute_aux_loss=compute_aux_loss,
            )
            for rows in chunks
        ]
        log_probs, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(log_probs),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )


def tree_obstacle(trainer: Trainer) -> str | None:
    """Reason why a trainer cannot forward token trees; None if none is known before it tries."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.use_liger_kernel or trainer.args.torch_compile:
        return "use_liger_kernel or torch_compile is set"
    return obstacle(model)


def computes_exactly(trainer: Trainer) -> bool:
    """True if the forward passes of training round no more than float32 does."""
    dtype = trainer.accelerator.unwrap_model(trainer.model).dtype
    return trainer.accelerator.mixed_precision == "no" and dtype in (torch.float32, torch.float64)


def may_skip_zero_variance(trainer: GRPOTrainer) -> bool:
    """True if rows without an advantage change no gradient, so that only metrics would read them.

    The loss type bnpo divides by the number of their tokens; a quantile of entropies is over all tokens.
    """
    has_bonus = trainer.entropy_coef or trainer.use_adaptive_entropy
    has_gradient = trainer.beta or has_bonus or trainer.aux_loss_enabled
    return not (has_gradient or trainer.loss_type == "bnpo" or trainer.top_entropy_quantile < 1)


def whole_rows(inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts with their completions, and the mask that is 0 for padding, both (B, P + K); and K."""
    ids, mask = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
    )
    return ids, mask, inputs["completion_ids"].shape[1]


def loss_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """1 for the completion tokens that GRPO's loss or the cross-entropy reads; shape (B, K)."""
    is_read = inputs["tool_mask"].bool()
    if "ce_weights" in inputs:
        is_read = is_read | (inputs["ce_weights"] != 0)
    return inputs["completion_mask"] * is_read


def rows_with_advantage(inputs: dict[str, Any]) -> torch.Tensor:
    """True for rows that have an advantage, or share a prompt with one that has; bool, shape (B, 1)."""
    advantages = inputs["advantages"]
    has_advantage = torch.zeros(len(advantages), 1, dtype=torch.bool)
    for rows in group_rows(prompt_texts(inputs["prompt_ids"], inputs["prompt_mask"])):
        has_advantage[rows] = bool(advantages[rows].any())
    return has_advantage.to(advantages.device)


def trimmed(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the columns of a micro-batch that are padding in every row, which shifts all tokens.

    At least two columns of completions stay: TRL reads a single one as a value of the whole sequence.
    """
    present = {name: inputs[f"{name}_mask"].any(0).nonzero()[:, 0] for name in ("prompt", "completion")}
    if not len(present["prompt"]) or not len(present["completion"]):
        return inputs
    columns = slice(int(present["prompt"][0]), int(present["prompt"][-1]) + 1)
    cut = {name: inputs[name][:, columns] for name in ("prompt_ids", "prompt_mask")}
    shape = inputs["completion_mask"].shape
    last = max(int(present["completion"][-1]), min(1, shape[1] - 1))
    for name, value in inputs.items():
        if name not in cut and value.shape == shape:
            cut[name] = value[:, : last + 1]
    return inputs | cut


def by_prompt(prompts: Sequence[bytes], *, parts: int, is_shuffled: bool) -> list[int]:
    """Order of the rows of a generation batch: prompts that begin alike meet in each of `parts` equal parts.

    Args:
        is_shuffled: Deal whole groups to the parts at random.
    """
    rows = list(range(len(prompts)))
    if is_shuffled:
        groups = group_rows(prompts)
        rows = [row for number in torch.randperm(len(groups)).tolist() for row in groups[number]]
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [
        row for one, other in pairwise(bounds) for row in sorted(rows[one:other], key=prompts.__getitem__)
    ]


def group_rows(prompts: Sequence[bytes]) -> list[list[int]]:
    """Group rows by prompt, in order of first occurrence."""
    rows_of = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[prompt].append(row)
    return list(rows_of.values())


def prompt_texts(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[bytes]:
    """Bytes of each prompt without padding; both arguments have shape (B, P)."""
    rows = zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)
    return [ids[mask].numpy().tobytes() for ids, mask in rows]


@dataclass(frozen=True)
class ScoredTree:
    """Tree of a micro-batch of B rows with completions of up to K tokens.

    Attributes:
        tree: The forwarded tokens.
        sources: Place of the token before each distinct scored token; shape (M,).
        targets: The distinct scored tokens; shape (M,).
        columns: Flat index of each scored token in (B, K); shape (S,).
        numbers: Index of its log-prob in `targets`; shape (S,).
        shape: (B, K).
    """

    tree: TokenTree
    sources: torch.Tensor
    targets: torch.Tensor
    columns: torch.Tensor
    numbers: torch.Tensor
    shape: torch.Size

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Scatter values of the distinct scored tokens to shape (B, K); 0 elsewhere."""
        empty = values.new_zeros(self.shape.numel())
        return empty.index_copy(0, self.columns, values[self.numbers]).view(self.shape)


def scored_tree(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, is_scored: torch.Tensor, *, is_whole: bool = False
) -> ScoredTree:
    """Make the tree of a micro-batch.

    Args:
        input_ids: Prompts and completions, padded anywhere; shape (B, P + K).
        attention_mask: 0 for padding; same shape.
        is_scored: 1 for completion tokens that need a log-prob; shape (B, K). If none does, the first token
            gets one, so that the result still depends on the weights.
        is_whole: Forward all tokens of all rows.
    """
    ids, present = input_ids.cpu().numpy(), attention_mask.bool().cpu().numpy()
    prompt_width = ids.shape[1] - is_scored.shape[1]
    scored = np.zeros_like(present)
    scored[:, prompt_width:] = is_scored.bool().cpu().numpy() & present[:, prompt_width:]
    if not scored.any():
        present = present.copy()
        present[0, prompt_width] = scored[0, prompt_width] = True
    # Tokens before the last scored one of their row.
    needed = present if is_whole else present & (scored[:, ::-1].cumsum(1)[:, ::-1] - scored > 0)
    tree = TokenTree.of([row[kept] for row, kept in zip(ids, needed, strict=True)])
    before = present.cumsum(1) - 2  # index in its row of the token before
    before_scored = [path[index[kept]] for path, index, kept in zip(tree.places, before, scored, strict=True)]
    rows, columns = scored.nonzero()
    pairs = np.stack([np.concatenate(before_scored), ids[rows, columns]])
    distinct, numbers = np.unique(pairs, axis=1, return_inverse=True)
    places = rows * is_scored.shape[1] + columns - prompt_width
    tensor = partial(torch.tensor, device=input_ids.device)
    fields = tensor(distinct[0]), tensor(distinct[1]), tensor(places), tensor(numbers.reshape(-1))
    return ScoredTree(tree, *fields, is_scored.shape)


def tree_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, batch: ScoredTree, *, compute_aux_loss: bool = False
) -> LogProbs:
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


@contextmanager
def keep_hidden_states(backbone: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Pass only the hidden states at `places` (flat indices over all rows) to the model's head."""

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[None, places]
        return output

    hook = backbone.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()
