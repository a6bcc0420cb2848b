"""Log-probs of completions, with each distinct prompt of a micro-batch forwarded once.

A prompt is followed by its completions in one flat list without padding (`shared_prefix_attention`). Tokens
behind the last scored one are not forwarded, and only scored tokens get logits.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from text2sql_grpo.training.shared_prefix_attention import PackedTokens, pack


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch of B rows with completions of up to K tokens.

    Attributes:
        tokens: The forwarded tokens.
        sources: Index of the forwarded token that predicts each scored token; shape (M,).
        targets: The scored tokens; shape (M,).
        places: Flat index of each scored token in (B, K); shape (M,).
        shape: (B, K).
    """

    tokens: PackedTokens
    sources: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    shape: torch.Size

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Scatter values of the scored tokens to shape (B, K); 0 elsewhere."""
        empty = values.new_zeros(self.shape.numel())
        return empty.index_copy(0, self.places, values).view(self.shape)


def pack_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, is_scored: torch.Tensor) -> PackedBatch:
    """Pack rows: one copy of each distinct prompt, followed by one copy of each distinct completion.

    Args:
        input_ids: Prompts and completions, padded anywhere; shape (B, P + K).
        attention_mask: 0 for padding; same shape.
        is_scored: 1 for completion tokens that need a log-prob; shape (B, K). If none does, the first token
            gets one, so that the result still depends on the weights.
    """
    width = is_scored.shape[1]
    ids, present, scored = input_ids.cpu(), attention_mask.bool().cpu(), is_scored.bool().cpu()
    prompt_width = ids.shape[1] - width
    scored = scored & present[:, prompt_width:]
    if not scored.any():
        scored = torch.zeros_like(scored).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(True))
        present = present.clone()
        present[0, prompt_width] = True
    groups, sources, places = [], [], []
    offset = 0
    for rows in group_rows(ids[:, :prompt_width], present[:, :prompt_width]):
        needed = [row for row in rows if scored[row].any()]
        if not needed:
            continue
        prompt = ids[needed[0], :prompt_width][present[needed[0], :prompt_width]].tolist()
        offset += len(prompt)
        end_of_prompt = offset - 1
        starts: dict[tuple[int, ...], int] = {}  # offset of each distinct continuation
        for row in needed:
            columns = present[row, prompt_width:].nonzero()[:, 0]
            numbers = scored[row, columns].nonzero()[:, 0]  # indices of scored tokens in the row
            continuation = tuple(ids[row, prompt_width + columns[: int(numbers[-1])]].tolist())
            if continuation not in starts:
                starts[continuation] = offset
                offset += len(continuation)
            sources.append(torch.where(numbers == 0, end_of_prompt, starts[continuation] + numbers - 1))
            places.append(row * width + columns[numbers])
        groups.append((prompt, [list(continuation) for continuation in starts]))
    place, device = torch.cat(places), input_ids.device
    targets = ids[:, prompt_width:].flatten()[place]
    return PackedBatch(
        pack(groups, device),
        torch.cat(sources).to(device),
        targets.to(device),
        place.to(device),
        scored.shape,
    )


def trimmed(inputs: dict[str, Any], *, prompts: bool = True) -> dict[str, Any]:
    """Cut the columns of a micro-batch that are padding in every row.

    At least two columns of completions stay: TRL reads a single one as a value of the whole sequence.

    Args:
        prompts: Trim prompts too, which shifts all tokens.
    """
    present = {name: inputs[f"{name}_mask"].any(0).nonzero()[:, 0] for name in ("prompt", "completion")}
    if not len(present["prompt"]) or not len(present["completion"]):
        return inputs
    cut: dict[str, Any] = {}
    if prompts:
        columns = slice(int(present["prompt"][0]), int(present["prompt"][-1]) + 1)
        cut |= {name: inputs[name][:, columns] for name in ("prompt_ids", "prompt_mask")}
    shape = inputs["completion_mask"].shape
    last = max(int(present["completion"][-1]), min(1, shape[1] - 1))
    for name, value in inputs.items():
        is_prompt = name in ("prompt_ids", "prompt_mask")
        if not is_prompt and isinstance(value, torch.Tensor) and value.shape == shape:
            cut[name] = value[:, : last + 1]
    return inputs | cut


def rows_with_advantage(inputs: dict[str, Any]) -> torch.Tensor:
    """True for rows that have an advantage, or share a prompt with one that has; bool, shape (B, 1)."""
    advantages = inputs["advantages"]
    has_advantage = torch.zeros(len(advantages), 1, dtype=torch.bool)
    for rows in group_rows(inputs["prompt_ids"], inputs["prompt_mask"]):
        has_advantage[rows] = bool(advantages[rows].any())
    return has_advantage.to(advantages.device)


def shuffled_groups(batch: dict[str, Any]) -> list[int]:
    """Order of the rows of a generation batch: whole groups, shuffled."""
    groups = group_rows(batch["prompt_ids"], batch["prompt_mask"])
    return [row for number in torch.randperm(len(groups)).tolist() for row in groups[number]]


def by_length(batch: dict[str, Any], *, parts: int = 1) -> list[int]:
    """Order of the rows of a generation batch: shortest first within each of `parts` equal parts."""
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    sizes = [len(lengths) * (part + 1) // parts - len(lengths) * part // parts for part in range(parts)]
    ordered, start = list[int](), 0
    for part in lengths.split(sizes):
        ordered += (start + part.argsort()).tolist()
        start += len(part)
    return ordered


def group_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """Group rows by prompt, in order of first occurrence; both arguments have shape (B, P)."""
    rows_of = defaultdict(list)
    for row, (ids, mask) in enumerate(zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)):
        rows_of[ids[mask].numpy().tobytes()].append(row)
    return list(rows_of.values())


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
