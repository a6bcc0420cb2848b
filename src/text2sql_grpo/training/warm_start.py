"""Supervised warm start of a tiny policy, with the prompt prefix of a database forwarded once.

Demonstrations over one database begin with the same tokens (the schema text): these are forwarded
once a row, with the row's demonstrations packed behind them. Only tokens that the policy itself would
write count in the loss.
"""

import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from text2sql_grpo.config import WarmStartConfig
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed, pack

logger = logging.getLogger(__name__)


def _common_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with; each keeps at least its last token for itself."""
    shortest = min(map(len, prompts)) - 1
    for position in range(shortest):
        if len({prompt[position] for prompt in prompts}) > 1:
            return position
    return shortest


def shared_prefix_loss(model: PreTrainedModel, rows: Sequence[Sequence[Episode]]) -> torch.Tensor:
    """Mean cross-entropy, in nats, over the tokens that the policy itself wrote. 0-dim.

    Args:
        model: One that can `attend_to_packed`.
        rows: Episodes with prompts that begin alike, row by row.
    """
    groups, targets = [], []
    for row in rows:
        cut = _common_prefix([episode.prompt_ids for episode in row])
        continuations = []
        targets += [-100] * cut
        for episode in row:
            ids = episode.prompt_ids[cut:] + episode.completion_ids
            counts = [0] * (len(episode.prompt_ids) - cut) + episode.completion_mask
            continuations.append(ids[:-1])
            targets += [token if counted else -100 for token, counted in zip(ids, counts, strict=True)][1:]
        groups.append((row[0].prompt_ids[:cut], continuations))
    tokens = pack(groups, model.device)
    target = torch.tensor(targets, device=model.device)
    hidden = model.base_model(use_cache=False, **tokens.inputs).last_hidden_state[0]
    counted = target != -100
    logits = model.get_output_embeddings()(hidden[counted])
    return functional.cross_entropy(logits.float(), target[counted])


@dataclass(frozen=True)
class Demonstrations:
    """Episodes of the two habits, by question; `looking[i]` and `guessing[i]` answer the same one.

    For questions that need no look both are the same episode.
    """

    looking: Sequence[Episode]
    guessing: Sequence[Episode]

    @cached_property
    def by_database(self) -> dict[str, list[int]]:
        """Positions of the questions of each database, sorted by its name."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, episode in enumerate(self.looking):
            found[episode.example.database].append(i)
        return dict(sorted(found.items()))

    def row(self, rng: random.Random, *, count: int, look_share: float) -> list[Episode]:
        """Episodes over one database, drawn at random."""
        chosen = rng.choices(self.by_database[rng.choice(list(self.by_database))], k=count)
        return [(self.looking if rng.random() < look_share else self.guessing)[i] for i in chosen]


def _draw(
    log: Demonstrations, copies: Demonstrations | None, settings: WarmStartConfig, step: int, seed: int
) -> list[list[Episode]]:
    """The rows of one step; depends on seed and step alone, so that a resumed run goes on alike."""
    rng = random.Random(f"{seed}-{step}")
    is_practice = step < settings.practice_steps
    look_share = settings.practice_look_share if is_practice else settings.look_share
    rows = []
    for _ in range(settings.rows_per_step):
        takes_copy = copies is not None and rng.random() < settings.copy_share
        source = copies if copies is not None and takes_copy else log
        rows.append(source.row(rng, count=settings.demonstrations_per_row, look_share=look_share))
    return rows


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: warm-up over a twentieth of the steps, then cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def _optimizers(model: PreTrainedModel, settings: WarmStartConfig) -> list[torch.optim.Optimizer]:
    """Muon for weight matrices (Jordan et al. 2024), AdamW for embeddings, norms and biases."""
    embeddings = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embeddings]
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98)),
    ]


def warm_start(
    model: PreTrainedModel,
    log: Demonstrations,
    copies: Demonstrations | None,
    settings: WarmStartConfig,
    *,
    seed: int,
    unfinished: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Trains the model in place.

    Args:
        log: Demonstrations on the training databases.
        copies: The same on renamed copies, for practice; None without them.
        seed: Of the order of demonstrations.
        unfinished: File for the state of an interrupted warm start; taken up again if it is there.
        on_step: Called with the number of steps done and the loss of the last (nats per token).
    """
    optimizers = _optimizers(model, settings)
    peaks = [settings.matrix_learning_rate, settings.learning_rate]
    first = 0
    if unfinished.exists():
        state = torch.load(unfinished, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        logger.info("going on with the warm start at step %d", first)
    done = first
    attention = model.config._attn_implementation
    attend_to_packed(model)
    model.train()
    try:
        for step in range(first, settings.steps):
            rows = _draw(log, copies, settings, step, seed)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = shared_prefix_loss(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * _schedule(step, settings.steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            on_step(done, loss.item())
    except KeyboardInterrupt:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        states = [optimizer.state_dict() for optimizer in optimizers]
        partial = unfinished.with_name(f"{unfinished.name}.partial")
        torch.save({"model": model.state_dict(), "optimizers": states, "step": done}, partial)
        partial.replace(unfinished)
        raise
    unfinished.unlink(missing_ok=True)
    model.set_attn_implementation(attention)
    model.eval()
