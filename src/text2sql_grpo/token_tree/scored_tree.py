"""Micro-batches as token trees: rows that begin alike share the forward pass of what they share.

Tokens behind the last scored one of a row are not forwarded, and only scored tokens get logits.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from text2sql_grpo.token_tree.tree import TokenTree


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


def rows_with_advantage(inputs: dict[str, Any]) -> torch.Tensor:
    """True for rows that have an advantage, or share a prompt with one that has; bool, shape (B, 1)."""
    advantages = inputs["advantages"]
    has_advantage = torch.zeros(len(advantages), 1, dtype=torch.bool)
    for rows in group_rows(inputs["prompt_ids"], inputs["prompt_mask"]):
        has_advantage[rows] = bool(advantages[rows].any())
    return has_advantage.to(advantages.device)


def by_prompt(batch: dict[str, Any], *, parts: int, is_shuffled: bool) -> list[int]:
    """Order of the rows of a generation batch: prompts that begin alike meet in each of `parts` equal parts.

    Args:
        is_shuffled: Deal whole groups to the parts at random.
    """
    prompts = prompt_texts(batch["prompt_ids"], batch["prompt_mask"])
    rows = list(range(len(prompts)))
    if is_shuffled:
        groups = group_rows(batch["prompt_ids"], batch["prompt_mask"])
        rows = [row for number in torch.randperm(len(groups)).tolist() for row in groups[number]]
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [
        row for one, other in pairwise(bounds) for row in sorted(rows[one:other], key=prompts.__getitem__)
    ]


def group_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """Group rows by prompt, in order of first occurrence; both arguments have shape (B, P)."""
    rows_of = defaultdict(list)
    for row, prompt in enumerate(prompt_texts(prompt_ids, prompt_mask)):
        rows_of[prompt].append(row)
    return list(rows_of.values())


def prompt_texts(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[bytes]:
    """Bytes of each prompt without padding."""
    rows = zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)
    return [ids[mask].numpy().tobytes() for ids, mask in rows]


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
