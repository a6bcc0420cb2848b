"""Policies of a transformers model for the engines, and the choice of the engine."""

import copy
import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast
from weakref import WeakKeyDictionary

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.check import disagreement
from text2sql_grpo.rollout.merged_layers import is_worth_merging, merged_layers
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.rollout.slot_cache import ATTENTION, PrefillPass, SlotCache, StepPass, running
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.rollout.turns import Continuations

logger = logging.getLogger(__name__)

Engine = Literal["auto", "slots", "generation"]
_LENGTH_ROPES = ("dynamic", "longrope")  # the types that `dynamic_rope_update` of transformers acts on
_ROW_ADAPTERS = ("ADAPTION_PROMPT", "POLY", "XLORA")
# Not cuDNN's, which makes a plan for each new number of tokens; nearly every pass has one.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TRIAL_STEPS = torch.tensor([[3, 3, 3], [1, 2, 1], [2, 1, 2]])  # new tokens of each row in each pass
_TRIAL_WINDOW = 256  # windows up to this are filled
_TRIALS: MutableMapping[PreTrainedModel, str | None] = WeakKeyDictionary()


def obstacle(model: PreTrainedModel) -> str | None:
    """Reason against passes over shared prefixes, by a model's config and adapter; None if they show none.

    Its layers are not all attention, full or by a window, or the output of one sequence depends on the batch
    around it. `trial_obstacle` finds others by trying.
    """
    config = model.config.get_text_config()
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"some of its layers are of other kinds than attention: {', '.join(sorted(kinds))}"
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            return f"its adapter, {adapter.peft_type.value}, puts tokens before the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter, aLoRA, begins at a token of each prompt"
        if adapter.peft_type.value in _ROW_ADAPTERS:
            return f"its adapter, {adapter.peft_type.value}, depends on whole rows of a batch"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds_of_rope = (part for part in rope.values() if isinstance(part, dict))  # one for each kind of layer
    for kind in (rope, *kinds_of_rope):
        if any(name in kind.get("rope_type", "default") for name in _LENGTH_ROPES):
            return f"its rotary positions, {kind['rope_type']}, depend on the longest sequence of a batch"
    return None


def attention_of(config: PreTrainedConfig) -> str:
    """Name of a model's attention for `set_attn_implementation`; there is no public getter."""
    return str(config._attn_implementation)


def plays_by_slots(engine: Engine, reason: str | None) -> bool:
    """True if the engine is `slots`; `auto` falls back for a reason to `generation`, with one warning.

    Raises:
        ModelError: The engine is `slots`, and there is a reason against it.
    """
    if engine == "slots" and reason is not None:
        raise ModelError(f"the engine slots cannot play this model: {reason}; set rollout.engine: auto")
    if engine == "auto" and reason is not None:
        _warn_once(f"Rollouts by the slower engine, generation. slots cannot play this model: {reason}")
    return engine != "generation" and reason is None


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def model_policy(
    model: PreTrainedModel,
    chat: ChatFormat,
    *,
    temperature: float = 0.0,
    batch_size: int = 64,
    engine: Engine = "auto",
) -> "ModelPolicy | SlotPolicy":
    """Policy of a model outside a trainer, on its device, for `batch_size` episodes at once.

    Greedy at temperature 0; for the engine, see `plays_by_slots`.
    """
    if engine != "generation" and plays_by_slots(engine, obstacle(model) or trial_obstacle(model)):
        return SlotPolicy(model, Sampling(temperature), max_slots=batch_size)
    sampling = GenerationConfig(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    return ModelPolicy(model, chat, sampling=sampling if temperature > 0 else None, batch_size=batch_size)


@dataclass(frozen=True)
class SlotPolicy:
    """A transformers model for the engine `slots`, on its device and in its mode.

    Attributes:
        model: Model without an `obstacle`; may be wrapped by PEFT or accelerate.
        max_slots: Concurrent episodes; None for as many as memory allows.
        stages: Where the time of prefill and of waits for tools is counted.
    """

    model: PreTrainedModel
    sampling: Sampling = field(default_factory=Sampling)
    max_slots: int | None = None
    stages: Stages = field(default_factory=Stages)

    def __post_init__(self) -> None:
        plays_by_slots("slots", obstacle(self.model))

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Switch the model to the attention of `slot_cache`, without gradients, and merge LoRA on a GPU."""
        before = attention_of(self.model.config)
        self.model.set_attn_implementation(ATTENTION)
        merged = merged_layers(self.model) if is_worth_merging(self.model) else nullcontext()
        try:
            # Autocast does not cache cast weights in inference mode.
            with torch.no_grad(), merged, sdpa_kernel(_KERNELS):
                yield
        finally:
            self.model.set_attn_implementation(before)

    def new_cache(self, num_sessions: int, tokens: int) -> SlotCache:
        """Empty cache for `num_sessions` of at most `tokens` each, as far as memory allows."""
        config, device = self.model.config.get_text_config(), self.model.device
        dtype = self.model.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        rows = cache_bytes(device) // (tokens * cached_numbers(config) * dtype.itemsize)
        wanted = min(num_sessions, self.max_slots or num_sessions)
        if rows < wanted:
            _warn_once(f"Memory suffices for {max(1, rows)} of {wanted} episodes of {tokens} tokens at once")
        return SlotCache(max_rows=max(1, min(wanted, rows)), dtype=dtype, device=device)

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        slot_pass: PrefillPass | StepPass,
    ) -> torch.Tensor:
        """Logits after the tokens `keep` of a flat list, shape (len(keep), vocabulary)."""
        with running(slot_pass):
            output = self.model(
                input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def cache_bytes(device: torch.device) -> int:
    """Number of bytes for keys and values: half of what is free on a GPU, an eighth of `machine_memory`.

    What torch's allocator has reserved and does not use is free. The share of a CPU does not depend on
    other programs, so that equal runs have equal passes; ranks on one machine divide it.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + reserved) // 2
    return machine_memory() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def machine_memory(*, is_free: bool = False, root: Path = Path("/")) -> int:
    """Bytes of this machine's memory, or of what is free, but at most the limit of a container.

    Args:
        root: Folder of the kernel's `proc` and `sys`, which name and limit the process's control groups.
    """
    memory = psutil.virtual_memory()
    limits = [int(memory.available if is_free else memory.total)]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, kinds, group = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")
        own = root / "sys/fs/cgroup" / top / group.lstrip("/")  # in some containers absent, below the top
        texts = [(path / name).read_text().strip() for path in (own, *own.parents) if (path / name).is_file()]
        limits += [int(text) for text in texts if text != "max"]
    return min(limits)


def cached_numbers(config: PreTrainedConfig) -> int:
    """Estimated numbers in the keys and values of one token in all layers, by a text config."""
    total = 0
    # Absent before transformers gave layers configs of their own.
    for layer in getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        # Latent attention, as of DeepSeek, has names of its own; its keys and values are stored whole.
        key, value = (getattr(layer, name, None) or dim for name in ("qk_head_dim", "v_head_dim"))
        total += heads * (key + value)
    return total


def trial_obstacle(model: PreTrainedModel) -> str | None:
    """Reason against the engine `slots` found by trying, once for each model; None if there is none.

    Random tokens of three rows, two of them with a common prefix, go through a cache in prefill and decode
    passes. The log-probs after them are compared with those of each row forwarded whole.
    """
    if model not in _TRIALS:
        _TRIALS[model] = _trial(SlotPolicy(model))
    return _TRIALS[model]


def _trial(policy: SlotPolicy) -> str | None:
    model, device = policy.model, policy.model.device
    config = model.config.get_text_config()
    count, draw = int(_TRIAL_STEPS[:, 0].sum()), torch.Generator().manual_seed(0)
    window = getattr(config, "sliding_window", None) or 0
    length = min(context_length(model) - count, 8 + (window if window <= _TRIAL_WINDOW else 0))

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(config.vocab_size, shape, generator=draw).to(device)

    prefixes, own = [tokens(length), tokens(max(1, length - 2))], tokens(3, count)

    def plain() -> torch.Tensor:
        rows = [torch.cat([prefixes[max(0, row - 1)], own[row]])[None] for row in range(3)]
        logits = [model(input_ids=row, use_cache=False).logits[0, -count:] for row in rows]
        return torch.stack(logits).float().log_softmax(-1)

    def by_cache() -> torch.Tensor:
        found = []
        with policy.attending():
            cache = policy.new_cache(3, length + count)
            cache.add_prefixes([len(prefix) for prefix in prefixes])
            positions = torch.cat([torch.arange(len(prefix), device=device) for prefix in prefixes])
            policy.logits(torch.cat(prefixes), positions, positions[:1], PrefillPass(cache, [0, 1]))
            if len(cache.prefixes.layers) < config.num_hidden_layers:
                raise ModelError("not all of its layers use transformers' attention")
            for number in (0, 0, 1):
                cache.add_row(number)
            starts = torch.tensor(cache.prefix_lengths, device=device)[cache.prefix]
            for number, sizes in enumerate(_TRIAL_STEPS):
                several = (sizes > 1).nonzero()[:, 0].tolist()
                singles = (sizes == 1).nonzero()[:, 0].to(device)
                step = StepPass(cache, singles, several, sizes[several].tolist(), num_short=number)
                ids, positions = own[step.rows, step.positions], starts[step.rows] + step.positions
                logits = policy.logits(ids, positions, torch.arange(len(ids), device=device), step)
                found.append((step.rows * count + step.positions, logits))
                cache.length += sizes.to(device)
        places, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
        log_probs: torch.Tensor = logits[places.argsort()].view(3, count, -1).float().log_softmax(-1)
        return log_probs

    is_exact = model.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(device.type)
    return disagreement(model, plain, by_cache, is_exact=is_exact)


class ModelPolicy:
    """A transformers model for the engine `generation`, on its device and in batches.

    Args:
        sampling: How tokens are sampled; None is greedy.
        batch_size: Rows of one `generate` call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chat: ChatFormat,
        *,
        sampling: GenerationConfig | None = None,
        batch_size: int = 64,
    ) -> None:
        self._model = model
        self._eos = sorted(chat.eos_token_ids)
        pad = chat.tokenizer.pad_token_id
        self._pad = self._eos[0] if pad is None else cast(int, pad)
        self._sampling = sampling or GenerationConfig(do_sample=False)
        self._batch_size = batch_size

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """One continuation per prompt, up to and with the first end-of-turn token."""
        config = copy.deepcopy(self._sampling)
        config.update(max_new_tokens=max_new_tokens, eos_token_id=self._eos, pad_token_id=self._pad)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        replies: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(by_length), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            for i, reply in zip(chosen, self._continue([prompts[i] for i in chosen], config), strict=True):
                replies[i] = reply
        return Continuations(replies)

    def _continue(self, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
        rows, device = [torch.tensor(prompt) for prompt in prompts], self._model.device
        ids = pad_sequence(rows, True, self._pad, "left")
        attention = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
        # Fields not set in `config` would come from the model's: its repetition penalty, its top_k.
        own, self._model.generation_config = self._model.generation_config, GenerationConfig()
        try:
            with torch.inference_mode():
                out = self._model.generate(
                    ids.to(device),
                    attention_mask=attention.to(device),
                    generation_config=config,
                    synced_gpus=False,  # each rank has whole weights
                )
        finally:
            self._model.generation_config = own
        replies = out[:, ids.shape[1] :].tolist()
        ends = (next((i for i, token in enumerate(row) if token in self._eos), len(row)) for row in replies)
        return [row[: end + 1] for row, end in zip(replies, ends, strict=True)]


def context_length(model: PreTrainedModel) -> int:
    """Maximum sequence length of the model in tokens; a million if its config has none."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1_000_000)
