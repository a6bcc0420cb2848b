"""Supervised fine-tuning: seeded batches, each distinct prefix forwarded once, loss on assistant tokens."""

import logging
import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl.trainer.utils import pad

from text2sql_grpo import trl_compat
from text2sql_grpo.config import SFTSettings
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.reliability.checkpoints import Checkpoints
from text2sql_grpo.reliability.ranks import any_rank, any_reason, gather
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.check import disagreement
from text2sql_grpo.rollout.demonstrations import Demonstration, weighted_demonstrations
from text2sql_grpo.rollout.slots import shared_length
from text2sql_grpo.token_tree.attention import TreePass, attend_to_trees
from text2sql_grpo.token_tree.tree import TokenTree
from text2sql_grpo.token_tree.update import computes_exactly, keep_hidden_states, tree_obstacle
from text2sql_grpo.training.arguments import SQLGRPOConfig

logger = logging.getLogger(__name__)

# Arguments of GRPO that SFT shares and its result depends on.
RESULT_FIELDS = ("bf16", "fp16", "optim", "max_grad_norm", "weight_decay")
_BLANK = Demonstration([0, 0], [0.0, 1.0])  # forwarded with weight 0 by a rank whose batch is empty


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass over N tokens, M of which have a loss.

    Attributes:
        inputs: Keyword arguments of the model, or the pass over a tree that makes them.
        sources: Index (of N) of the token before each scored token; shape (M,).
        targets: The scored tokens; shape (M,).
        weights: Weights of the scored tokens in the loss; shape (M,).
    """

    inputs: dict[str, Any] | TreePass
    sources: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def forward_pass(
    demonstrations: Sequence[Demonstration], device: torch.device, *, shares_prefixes: bool
) -> ForwardPass:
    """Forward each distinct prefix of the demonstrations once, without padding; or pad to the longest."""
    inputs: dict[str, Any] | TreePass
    indices: Sequence[np.ndarray] | np.ndarray  # place of each token of each demonstration
    if shares_prefixes:
        last_scored = [max(i for i, weight in enumerate(one.weights) if weight) for one in demonstrations]
        tree = TokenTree.of(
            [np.array(one.ids[:last]) for one, last in zip(demonstrations, last_scored, strict=True)]
        )
        inputs, indices = TreePass(tree, device), tree.places
    else:
        ids = pad([torch.tensor(one.ids) for one in demonstrations])
        mask = pad([torch.ones(len(one.ids), dtype=torch.long) for one in demonstrations])
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        indices = np.arange(ids.numel()).reshape(ids.shape)
    scored = [
        (int(index[place - 1]), one.ids[place], weight)
        for one, index in zip(demonstrations, indices, strict=True)
        for place, weight in enumerate(one.weights)
        if weight
    ]
    return ForwardPass(inputs, *(torch.tensor(column, device=device) for column in zip(*scored, strict=True)))


def split(
    demonstrations: Sequence[Demonstration], max_tokens: int, *, shares_prefixes: bool
) -> list[list[Demonstration]]:
    """Split into non-empty parts of about `max_tokens` forwarded tokens, with shared prefixes together."""
    ordered = sorted(demonstrations, key=lambda demonstration: demonstration.ids)
    parts: list[list[Demonstration]] = []
    tokens = longest = 0
    for demonstration in ordered:
        length = len(demonstration.ids)
        if parts:
            added = length - shared_length(parts[-1][-1].ids, demonstration.ids)
            padded = max(longest, length) * (len(parts[-1]) + 1)
            if (tokens + added if shares_prefixes else padded) <= max_tokens:
                parts[-1].append(demonstration)
                tokens, longest = tokens + added, max(longest, length)
                continue
        parts.append([demonstration])
        tokens = longest = length
    return parts


class SFTData(Dataset[list[Demonstration]]):
    """SFT batches of one rank, drawn by seed and epoch and made on access.

    Args:
        chats: Collected chats, each with the name of its database.
        batch_size: Number of questions and chats in one batch.
        longest: Maximum number of tokens, the model's context; longer demonstrations are left out and
            counted, so that a batch may be empty.

    Attributes:
        left_out: Ids of the questions that were too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        chats: Sequence[tuple[str, Demonstration]],
        settings: SFTSettings,
        *,
        environment: SQLEnvironment,
        chat: ChatFormat,
        seed: int,
        batch_size: int,
        longest: int,
    ) -> None:
        self.left_out: set[str] = set()
        self._examples, self._chats, self._settings = examples, chats, settings
        self._environment, self._chat, self._seed = environment, chat, seed
        self._batch_size, self._longest = batch_size, longest
        self._databases = [example.database for example in examples] + [name for name, _ in chats]
        self._order = lru_cache(2)(self._draw_order)

    def __len__(self) -> int:
        whole = self._settings.batch_size  # of one optimiser step, on all ranks
        drawn = math.ceil(self._settings.epochs * len(self._databases))
        return (self._settings.max_steps or math.ceil(drawn / whole)) * (whole // self._batch_size)

    def __getitem__(self, batch: int) -> list[Demonstration]:
        places = range(batch * self._batch_size, (batch + 1) * self._batch_size)
        numbers = [
            self._order(place // len(self._databases))[place % len(self._databases)] for place in places
        ]
        return [made for number in numbers for made in self._demonstrations(number)]

    def check_fits(self) -> None:
        """Fail if no demonstration of any batch is short enough.

        Raises:
            DataError: None is.
        """
        if not any(self[batch] for batch in range(len(self))):
            raise DataError(
                f"no demonstration has at most {self._longest} tokens, the model's context: lower "
                "environment.max_schema_tokens, or take a model with a longer context"
            )

    def _demonstrations(self, number: int) -> list[Demonstration]:
        if number >= len(self._examples):
            return [self._chats[number - len(self._examples)][1]]
        example = self._examples[number]
        made = weighted_demonstrations(example, self._environment, self._chat, self._settings)
        if max(len(one.ids) for one in made) <= self._longest:
            return made
        self.left_out.add(example.id)
        return []

    def _draw_order(self, epoch: int) -> list[int]:
        rng = random.Random(f"{self._seed}-{epoch}")
        rows_of: dict[str, list[int]] = defaultdict(list)
        for row, database in enumerate(self._databases):
            rows_of[database].append(row)
        groups = []
        for rows in rows_of.values():
            rng.shuffle(rows)
            size = self._settings.group_size
            groups += [rows[first : first + size] for first in range(0, len(rows), size)]
        rng.shuffle(groups)
        return [row for group in groups for row in group]


class SFTStageTrainer(Trainer):
    """transformers' `Trainer` on batches of demonstrations.

    What changes: a batch is a token tree where the model allows it, in passes of about `max_tokens`; the
    loss is the weighted mean over all scored tokens of the optimiser step, on all ranks; checkpoints are
    atomic. TRL's `SFTTrainer` adds data, collator, chat template and loss, all of which differ here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        data: SFTData,
        *,
        max_tokens: int,
        processing_class: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(
            model,
            args,
            train_dataset=data,
            data_collator=lambda batches: batches[0],
            processing_class=processing_class,
        )
        for printer in (PrinterCallback, ProgressCallback):
            self.remove_callback(printer)
        self._max_tokens = max_tokens
        self._is_checked = False
        self.obstacle = tree_obstacle(self)
        if self.obstacle is None:
            attend_to_trees(trl_compat.causal_lm(self, self.model))
        self._checkpoints = Checkpoints(self)
        self.add_callback(self._checkpoints)

    def training_step(
        self, model: torch.nn.Module, inputs: list[Demonstration], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Add the gradient of one optimiser step; return its loss, in nats a token.

        Raises:
            DataError: See `SFTData.check_fits`.
        """
        model.train()
        is_empty = not any_rank(bool(inputs))
        if is_empty:
            self.train_dataset.check_fits()
        forwarded = inputs or [_BLANK]
        if self.obstacle is None and not self._is_checked and not is_empty:
            self._check(model, forwarded)
        limit = sys.maxsize if self.is_deepspeed_enabled else self._max_tokens  # it steps at each backward
        parts = split(forwarded, limit, shares_prefixes=self.obstacle is None)
        facts = len(parts), sum(sum(one.weights) for one in inputs), sum(len(one.ids) for one in inputs)
        counts, weights, tokens = zip(*gather(facts), strict=True)
        scale = len(counts) / sum(weights) if inputs else 0.0  # gradients are averaged over ranks
        # The same number of passes on each rank, since each pass gathers sharded weights.
        scales = [scale] * len(parts) + [0.0] * (max(counts) - len(parts))
        total = torch.zeros((), device=self.args.device)
        for number, scale in enumerate(scales):
            part = parts[min(number, len(parts) - 1)]
            made = forward_pass(part, self.args.device, shares_prefixes=self.obstacle is None)
            loss = (self._losses(model, made) * made.weights).sum() * scale
            self.accelerator.backward(loss)
            total += loss.detach()
        self.state.num_input_tokens_seen += sum(tokens)
        return total

    def _check(self, model: torch.nn.Module, demonstrations: Sequence[Demonstration]) -> None:
        """Pad instead of sharing prefixes if the two differ on some demonstrations."""
        self._is_checked = True
        first, device = sorted(demonstrations, key=lambda one: one.ids)[:4], self.args.device

        def mean(*, shares_prefixes: bool) -> torch.Tensor:
            made = forward_pass(first, device, shares_prefixes=shares_prefixes)
            return self._losses(model, made).sum()[None] / len(made.targets)

        reason = disagreement(
            model,
            partial(mean, shares_prefixes=False),
            partial(mean, shares_prefixes=True),
            is_exact=computes_exactly(self),
        )
        self.obstacle = any_reason(reason)
        if self.obstacle is not None:
            logger.warning("SFT pads sequences instead of sharing prefixes: %s", self.obstacle)

    def _losses(self, model: torch.nn.Module, made: ForwardPass) -> torch.Tensor:
        lm, inputs = trl_compat.causal_lm(self, model), made.inputs
        with (
            trl_compat.autocast(self, model),
            keep_hidden_states(lm.base_model, made.sources),
            inputs.running(lm) if isinstance(inputs, TreePass) else nullcontext(inputs) as arguments,
        ):
            logits = model(**arguments, use_cache=False).logits[0]
        return functional.cross_entropy(logits.float(), made.targets, reduction="none")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log also the number of tokens trained on so far."""
        super().log(logs | {"tokens": self.state.num_input_tokens_seen}, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoints.partial or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._checkpoints.writing():
            super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._checkpoints.restore(Path(checkpoint))


def stage_arguments(
    settings: SFTSettings, grpo: SQLGRPOConfig, folder: Path, *, steps: int, is_adapter: bool
) -> TrainingArguments:
    """Make transformers' arguments of SFT, with precision, optimiser and devices of `grpo`."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,  # a batch of demonstrations is one row of the data
        learning_rate=settings.learning_rate or (2e-4 if is_adapter else 2e-5),
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_learning_rate_ratio},
        warmup_steps=math.ceil(settings.warmup_ratio * steps),
        save_steps=settings.save_steps,
        save_total_limit=grpo.save_total_limit,
        metric_for_best_model=grpo.metric_for_best_model,
        logging_steps=1,
        seed=grpo.seed,
        report_to="none",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
        **{
            name: getattr(grpo, name)
            for name in (
                *RESULT_FIELDS,
                *("use_cpu", "ddp_backend", "dataloader_pin_memory"),
                *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
            )
        },
    )
