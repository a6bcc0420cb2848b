"""The update that forwards each distinct prefix once beside the plain way: log-probs, loss, gradients."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.kernels import ChunkedLogProbFunction

from tests.rounding import assert_same, in_float64
from tests.tiny_model import write_model
from text2sql_grpo.token_tree import attention
from text2sql_grpo.token_tree.tree import TokenTree
from text2sql_grpo.token_tree.update import LogProbs, group_rows, prompt_texts, rows_with_advantage, trimmed
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.parts import Play
from text2sql_grpo.training.trainer import RolloutGRPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
PAD = 256


class NoPlay(Play):
    def play(self, questions: Any, rollouts: Any) -> Any:
        raise AssertionError


class Updating(RolloutGRPOTrainer):
    """The trainer with its update alone."""

    def __init__(self, model: Any, arguments: SQLGRPOConfig, tokenizer: Any, **options: Any) -> None:
        super().__init__(
            model, arguments, num_questions=64, play=NoPlay(), processing_class=tokenizer, **options
        )
        self.current_gradient_accumulation_steps = 1
        self.model.train()


class Sharing(Updating):
    """The update of a tiny model, that may be switched off."""

    def __init__(
        self,
        folder: Path,
        *,
        architecture: str = "llama",
        lora: bool = False,
        dtype: torch.dtype = torch.float64,
        **fields: Any,
    ) -> None:
        of_model = {
            name: fields.pop(name)
            for name in ("sliding_window", "attention_dropout", "rope_parameters")
            if name in fields
        }
        model = write_model(folder / architecture, architecture=architecture, max_positions=512, **of_model)
        arguments = SQLGRPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=4,
            num_generations=4,
            use_cpu=True,
            report_to="none",
            **{"bf16": False, "gradient_checkpointing": False, **fields},
        )
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
        super().__init__(
            AutoModelForCausalLM.from_pretrained(model).to(dtype),
            arguments,
            AutoTokenizer.from_pretrained(model),
            peft_config=adapter,
        )
        self.precision = in_float64 if dtype == torch.float64 else nullcontext
        self.num_layers = self.model.config.num_hidden_layers

    def learn(self, batch: dict[str, Any], *, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient."""
        self.model.zero_grad()
        with self.precision():
            with set_to(self.update, is_on=shared):
                loss = self.compute_loss(self.model, batch)
            loss.backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return loss.detach(), torch.cat([p.grad.flatten() for p in parameters])


def batch_of(random_: random.Random, sizes: list[int], *, longest: int = 30) -> dict[str, Any]:
    """Ragged groups of such sizes in mixed order: prompts padded left, turns and replies padded right.

    Some prompts begin like another one, and some completions like another of their group.
    """

    def tokens(low: int, high: int, like: list[list[int]]) -> list[int]:
        start = random_.choice(like)[: random_.randint(0, high)] if like and random_.random() < 0.6 else []
        return start + [random_.randrange(250) for _ in range(random_.randint(low, high) - len(start))]

    rows = []
    for size in sizes:
        prompt = tokens(1, longest, [prompt for prompt, _, _ in rows])
        for _ in range(size):
            flags: list[int] = []
            for is_model in [1, 0] * random_.randint(0, 2) + [1]:
                flags += [is_model] * random_.randint(1, longest // 3)
            if random_.random() < 0.15:
                flags = [0] * len(flags)
            siblings = [completion for other, completion, _ in rows if other is prompt]
            rows.append((prompt, tokens(len(flags), len(flags), siblings), flags))
    random_.shuffle(rows)
    if len(rows) > 2:
        rows[0] = rows[1]
    width, length = max(len(p) for p, _, _ in rows), max(len(c) for _, c, _ in rows)
    left = [[0] * (width - len(p)) + [1] * len(p) for p, _, _ in rows]
    right = [[1] * len(c) + [0] * (length - len(c)) for _, c, _ in rows]
    scored = [flags + [1] * (length - len(flags)) for _, _, flags in rows]
    draw = torch.Generator().manual_seed(random_.randrange(10**6))
    return {
        "prompt_ids": torch.tensor([[PAD] * (width - len(p)) + p for p, _, _ in rows]),
        "prompt_mask": torch.tensor(left),
        "completion_ids": torch.tensor([c + [PAD] * (length - len(c)) for _, c, _ in rows]),
        "completion_mask": torch.tensor(right),
        "tool_mask": torch.tensor(scored),
        "advantages": torch.randn(len(rows), generator=draw),
        "num_items_in_batch": (torch.tensor(right) * torch.tensor(scored)).sum(),
    }


def assert_alike(trainer: Sharing, batch: dict[str, Any], plain: dict[str, Any] | None = None) -> None:
    loss, gradient = trainer.learn(batch, shared=True)
    expected_loss, expected = trainer.learn(plain or batch, shared=False)
    for one, other in ((loss, expected_loss), (gradient, expected)):
        assert_same(one, other, layers=trainer.num_layers, dtype=trainer.model.dtype)


def log_probs_of(trainer: Sharing, batch: dict[str, Any], **options: Any) -> LogProbs:
    with torch.no_grad(), trainer.precision():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            compute_entropy=True,
            **options,
        )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    return Sharing(tmp_path_factory.mktemp("shared"))


@contextmanager
def set_to(thing: Any, **fields: Any) -> Iterator[None]:
    """Attributes of a shared trainer for one test."""
    before = {name: getattr(thing, name) for name in fields}
    for name, value in fields.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@pytest.mark.thorough
@settings(max_examples=10)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([10, 30, 200]),
)
def test_log_probs_loss_and_gradient_are_those_of_the_plain_way(
    trainer: Sharing, random_: random.Random, sizes: list[int], longest: int
) -> None:
    batch = batch_of(random_, sizes, longest=longest)
    assert_alike(trainer, batch)
    with set_to(trainer.update, is_on=False):
        expected = log_probs_of(trainer, batch)
    for size in (None, 2):
        log_probs, entropies, _ = log_probs_of(trainer, batch, batch_size=size)
        assert_same(log_probs, expected[0], layers=trainer.num_layers)
        assert_same(entropies, expected[1], layers=trainer.num_layers)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("variant", ["on_policy", "off_policy", "kl", "sequence", "quantile", "bonus"])
def test_every_loss(trainer: Sharing, loss_type: str, variant: str) -> None:
    batch = batch_of(random.Random(LOSSES.index(loss_type)), [3, 1, 4])
    flat = max(group_rows(prompt_texts(batch["prompt_ids"], batch["prompt_mask"])), key=len)
    batch["advantages"][flat] = 0.0
    noise = torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(0))
    finite = -3 - noise.abs()
    known = finite.clone()
    known[:, 3] = -1_000.0  # beyond what a ratio can hold, wherever the loss does not read it
    known = torch.where((batch["tool_mask"] * batch["completion_mask"]).bool(), finite, known)
    plain = dict(batch)
    settings: dict[str, Any] = {"loss_type": loss_type}
    if variant in ("off_policy", "sequence"):
        batch["old_per_token_logps"], plain["old_per_token_logps"] = known, finite
        settings["importance_sampling_level"] = "token" if variant == "off_policy" else "sequence"
    if variant == "kl":
        batch["ref_per_token_logps"], plain["ref_per_token_logps"] = known, finite
        settings["beta"] = 0.1
    if variant == "quantile":
        settings["top_entropy_quantile"] = 0.4
    if variant == "bonus":
        settings |= {"_entropy_bonus_enabled": True, "entropy_coef": 0.05}
    with set_to(trainer, **settings):
        assert_alike(trainer, batch, plain)


def test_groups_without_advantage_are_not_forwarded(trainer: Sharing) -> None:
    batch = batch_of(random.Random(5), [4, 4, 4])
    groups = group_rows(prompt_texts(batch["prompt_ids"], batch["prompt_mask"]))
    batch["advantages"][groups[1]] = 0.0
    batch["advantages"][groups[2][0]] = 0.0
    assert trainer.update.is_on
    assert_alike(trainer, batch)
    learns = rows_with_advantage(batch).flatten()
    assert learns.sum() == len(groups[0]) + len(groups[2])
    forwarded = []
    hook = trainer.model.base_model.register_forward_hook(
        lambda _, inputs, output: forwarded.append(output.last_hidden_state.shape[1])
    )
    trainer.learn(batch, shared=True)
    trainer.learn({name: each[learns] if each.ndim else each for name, each in batch.items()}, shared=True)
    hook.remove()
    assert forwarded[0] == forwarded[1]


def test_nothing_to_learn_from(trainer: Sharing) -> None:
    batch = batch_of(random.Random(1), [2, 2])
    only, both = dict[str, float](), dict[str, float]()
    trainer.log({})
    trainer.learn(batch, shared=True)
    trainer.log(only)
    trainer.learn(batch, shared=True)
    for blank in ({"advantages": torch.zeros(4)}, {"tool_mask": torch.zeros_like(batch["tool_mask"])}):
        loss, gradient = trainer.learn(batch | blank, shared=True)
        assert loss == 0
        assert gradient.abs().max() == 0
    trainer.log(both)
    assert {name: both[name] for name in only} == only  # micro-batches without a learning row do not count


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma", "mistral"])
def test_architectures(tmp_path: Path, architecture: str) -> None:
    trainer = Sharing(tmp_path, architecture=architecture, temperature=0.7)
    assert trainer.update.is_on
    assert_alike(trainer, batch_of(random.Random(2), [4, 2]))


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_one_fused_attention_with_a_mask_is_that_of_the_tiles(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA device attends so; mistral's layers have a window."""
    trainer = Sharing(tmp_path, architecture=architecture)
    fused = []
    plain = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "_is_fused", lambda device: True)
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda *args, **options: fused.append(1) or plain(*args, **options),
    )
    assert_alike(trainer, batch_of(random.Random(4), [4, 2]))
    assert len(fused) == 2 * trainer.num_layers  # again for the gradient: layers are checkpointed


@pytest.mark.parametrize("fields", [{}, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_lora_with_gradient_checkpointing(tmp_path: Path, fields: dict[str, Any]) -> None:
    checkpointing = {"gradient_checkpointing": bool(fields), "gradient_checkpointing_kwargs": fields or None}
    # Layers that are recomputed outside autograd's functions leave `in_float64`.
    dtype = torch.float32 if fields == {"use_reentrant": False} else torch.float64
    trainer = Sharing(tmp_path, architecture="qwen2", lora=True, dtype=dtype, **checkpointing)
    if fields:
        trainer.model.gradient_checkpointing_enable(fields)
        trainer.model.enable_input_require_grads()
    batch = batch_of(random.Random(3), [4, 3])
    assert_alike(trainer, batch)
    if not fields:
        with trainer.model.disable_adapter():
            shared = log_probs_of(trainer, batch)[0]
            with set_to(trainer.update, is_on=False):
                plain = log_probs_of(trainer, batch)[0]
        assert_same(shared, plain, layers=trainer.num_layers)


def test_tokens_forwarded(trainer: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    """No padding, each distinct prefix once, nothing behind the last scored token, equal ones scored once."""
    batch = batch_of(random.Random(4), [5, 3, 4])
    prefixes, scored_prefixes = set(), set()
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        flags = (batch["completion_mask"] * batch["tool_mask"])[row]
        for last in flags.nonzero()[:, 0].tolist():
            ids = (*prompt, *batch["completion_ids"][row, : last + 1].tolist())
            scored_prefixes.add(ids)
            prefixes |= {ids[:length] for length in range(1, len(ids))}
    trainer.learn(batch, shared=True)  # the first batch is forwarded in both ways
    forwarded = []
    hook = trainer.model.base_model.register_forward_hook(
        lambda _, inputs, output: forwarded.append(output.last_hidden_state.shape[1])
    )
    scored = []
    apply = ChunkedLogProbFunction.apply
    monkeypatch.setattr(
        ChunkedLogProbFunction,
        "apply",
        lambda hidden, *rest: scored.append(len(hidden)) or apply(hidden, *rest),
    )
    trainer.learn(batch, shared=True)
    hook.remove()
    assert forwarded == [len(prefixes)]
    assert scored == [len(scored_prefixes)]
    assert len(scored_prefixes) < int((batch["completion_mask"] * batch["tool_mask"]).sum())


def test_bfloat16_errs_no_more_than_the_plain_way(tmp_path: Path) -> None:
    trainer = Sharing(tmp_path, architecture="qwen2", bf16=True, dtype=torch.float32)
    batch = batch_of(random.Random(6), [8, 8], longest=60)
    gradients = {shared: trainer.learn(batch, shared=shared)[1] for shared in (True, False)}
    with set_to(trainer.accelerator, autocast=nullcontext):
        exact = trainer.learn(batch, shared=False)[1]
    errors = {shared: (gradients[shared] - exact).norm() / exact.norm() for shared in gradients}
    assert 0 < errors[True] < 1.5 * errors[False]


def test_padding_that_nobody_reads_is_cut_off(trainer: Sharing) -> None:
    batch = batch_of(random.Random(7), [2, 2])
    wide = {"prompt_ids": (5, 0), "prompt_mask": (5, 0), "completion_ids": (0, 7), "completion_mask": (0, 7)}
    wide["tool_mask"] = (0, 7)
    padded = batch | {name: functional.pad(batch[name], sides) for name, sides in wide.items()}
    back = trimmed(padded)
    assert all(torch.equal(back[name], batch[name]) for name in wide)
    per_token = torch.randn(padded["completion_ids"].shape)
    assert trimmed(padded | {"advantages": per_token})["advantages"].shape == batch["completion_ids"].shape
    for shared in (True, False):
        loss, gradient = trainer.learn(batch, shared=shared)
        other_loss, other = trainer.learn(padded, shared=shared)
        assert_same(other_loss, loss, layers=trainer.num_layers)
        assert_same(other, gradient, layers=trainer.num_layers)


def test_a_generation_batch_is_split_with_groups_together(trainer: Sharing) -> None:
    batch = batch_of(random.Random(8), [4, 4, 4])
    batch["label"] = torch.arange(12)
    parts = {"steps_per_generation": 3, "gradient_accumulation_steps": 3}
    for shared in (True, False):
        with set_to(trainer.args, **parts), set_to(trainer.update, is_on=shared):
            micro_batches = trainer.update.split(batch)
        assert [len(part["label"]) for part in micro_batches] == [4, 4, 4]
        rows = torch.cat([part["label"] for part in micro_batches])
        assert sorted(rows.tolist()) == list(range(12))
        advantages = torch.cat([part["advantages"] for part in micro_batches])
        assert torch.equal(advantages, batch["advantages"][rows])
        assert all(part["num_items_in_batch"] == batch["num_items_in_batch"] for part in micro_batches)
        prompts = [tuple(batch["prompt_ids"][row].tolist()) for row in rows]
        changes = sum(one != other for one, other in itertools.pairwise(prompts))
        assert (changes == len(set(prompts)) - 1) == shared  # TRL's own way deals rows at random


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary positions"),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"torch_compile": True}, "torch_compile"),
    ],
    ids=str,
)
def test_what_cannot_share_goes_the_plain_way_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], why: str
) -> None:
    trainer = Sharing(tmp_path, dtype=torch.float32, **fields)
    assert not trainer.update.is_on
    assert [record.message for record in caplog.records if why in record.message]
    batch = batch_of(random.Random(9), [2, 2])
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.isfinite()


def _roll(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.1 * output.roll(1, dims=1)


def _count_from_left(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.01 * torch.arange(output.shape[1])[None, :, None]


@pytest.mark.parametrize("mixer", [_roll, _count_from_left])
def test_the_first_batch_shows_that_a_model_cannot_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mixer: Any
) -> None:
    """A layer mixes tokens without attention, or counts the padding: all losses are TRL's."""
    # Another dtype is checked by mean differences.
    trainer, plain = (
        Sharing(tmp_path, dtype=torch.float32, shared_prefix=shares) for shares in (True, False)
    )
    for one in (trainer, plain):
        one.model.base_model.layers[0].mlp.register_forward_hook(mixer)
    batch = batch_of(random.Random(10), [3, 2])
    assert trainer.update.is_on
    loss = trainer.compute_loss(trainer.model, batch)
    assert not trainer.update.is_on
    assert "log-probs differ by" in caplog.text
    assert torch.equal(loss, plain.compute_loss(plain.model, batch))


def test_trees_and_their_tiles() -> None:
    """Each distinct prefix has one place; each token attends to its prefix, in windows too."""
    draw = np.random.default_rng(0)
    rows: list[np.ndarray] = []
    for _ in range(60):
        start = rows[draw.integers(len(rows))][: draw.integers(300)] if rows else np.empty(0, np.int64)
        rows.append(np.concatenate([start, draw.integers(0, 3, draw.integers(0, 200))]))
    tree = TokenTree.of(rows)
    prefixes = {row[:length].tobytes() for row in rows for length in range(1, len(row) + 1)}
    assert len(tree.ids) == len(tree.depths) == len(tree.ends) == len(prefixes)
    assert tree.counts.sum() == sum(map(len, rows))
    assert all(np.array_equal(tree.ids[path], row) for path, row in zip(tree.places, rows, strict=True))
    for window in (None, 1, 50, 10_000):
        tiles = tree.tiles(window)
        seen = [set[int]() for _ in tree.ids]
        for tile in tiles:
            keys = np.concatenate([np.arange(part.start, part.stop) for part in tile.keys])
            hidden = np.zeros((len(tile.hidden), len(keys)), bool)
            hidden[:, len(keys) - tile.hidden.shape[1] :] = tile.hidden
            for query, row in zip(range(tile.queries.start, tile.queries.stop), hidden, strict=True):
                assert not seen[query]
                seen[query] = set(keys[~row].tolist())
        for path in tree.places:
            for depth, place in enumerate(path.tolist()):
                assert seen[place] == set(path[max(0, depth + 1 - (window or 10_000)) : depth + 1].tolist())
        pairs = sum(map(len, seen))
        if window is None:
            assert sum(tile.scores for tile in tiles) < pairs + 300 * len(tree.ids)


@pytest.mark.parametrize("keeps_order", [False, True])
def test_like_prompts_meet_within_an_optimiser_step(trainer: Sharing, keeps_order: bool) -> None:
    prompts = [(1, 2, 3), (7, 7, 7), (1, 2, 4), (7, 7, 8)] * 2
    rows = [prompt for prompt in prompts[:4] for _ in range(2)] + [
        prompt for prompt in prompts[4:] for _ in range(2)
    ]
    batch = {
        "prompt_ids": torch.tensor(rows),
        "prompt_mask": torch.ones(16, 3),
        "label": torch.arange(16),
    }
    steps = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
    with set_to(trainer.args, **steps), set_to(trainer.update, _keeps_order=keeps_order):
        micro_batches = trainer.update.split(batch)
    labels = [label for part in micro_batches for label in part["label"].tolist()]
    halves = [labels[:8], labels[8:]]
    assert sorted(labels) == list(range(16))
    if keeps_order:
        assert [sorted(half) for half in halves] == [list(range(8)), list(range(8, 16))]
    for half in halves:
        starts = [rows[row][0] for row in half]
        assert sum(one != other for one, other in itertools.pairwise(starts)) <= 1
