"""Log-probs of sampling: those of training by the engine `slots`, corrected where vLLM's differ."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl.models.utils import disable_gradient_checkpointing

from tests.rounding import assert_same
from tests.scripted_policy import ask
from tests.scripted_trainer import LOOK, RIGHT, WRONG, Bench
from tests.tiny_model import write_model
from text2sql_grpo import trl_compat
from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.training.log_probs import sampling_ratio
from text2sql_grpo.training.play import Rollouts
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer


def qwen_bench(folder: Path, *, lora: bool = False, **fields: Any) -> Bench:
    """A bench whose model ties its embeddings, with short turns."""
    adapter = LoraConfig(r=4, target_modules="all-linear") if lora else None
    model = write_model(folder / "model", architecture="qwen2", max_positions=2048)
    return Bench(folder, model=model, adapter=adapter, **{"engine": "auto", "max_turn_tokens": 12, **fields})


def log_probs_of_training(trainer: SQLGRPOTrainer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids, mask = (
        torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask")
    )
    with torch.no_grad():
        width = batch["completion_ids"].shape[1]
        return trl_compat.plain_log_probs(trainer, trainer.model, ids, mask, width)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_log_probs_at_sampling_are_those_of_training(tmp_path: Path, lora: bool) -> None:
    trainer = qwen_bench(tmp_path, lora=lora, bf16=False, temperature=0.7).trainer
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable()
    attention = trainer.model.config._attn_implementation

    episodes = trainer.rollouts.run([trainer.environment.sessions.session(ask("Lisbon?")) for _ in range(4)])

    assert trainer.model.training
    assert trainer.model.config._attn_implementation == attention
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
        with torch.no_grad():
            recomputed = trl_compat.plain_log_probs(
                trainer, trainer.model, ids, torch.ones_like(ids), len(episode.completion_ids)
            )
        sampled = torch.tensor(episode.completion_mask).bool()
        recorded = torch.tensor(episode.log_probs)
        assert_same(recorded[sampled], recomputed[0][sampled], layers=2, dtype=torch.float32)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_rollouts_leave_no_hooks_behind(tmp_path: Path, lora: bool) -> None:
    """transformers registers another hook whenever gradient checkpointing is switched on again."""
    trainer = qwen_bench(tmp_path, lora=lora, bf16=False).trainer
    trainer.model.gradient_checkpointing_enable()
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    before = len(hooks)
    for _ in range(3):
        with trl_compat.unwrapped_model(trainer):
            pass
        with disable_gradient_checkpointing(trainer.model):  # as TRL does around old log-probs
            pass
    assert len(hooks) == before > 0


@pytest.mark.usefixtures("rewards_with_spread")
def test_a_step_of_training_in_bfloat16(tmp_path: Path) -> None:
    """Weights cast for the rollouts are not those that the gradient then misses."""
    bench = qwen_bench(tmp_path, bf16=True, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in bench.trainer.model.named_parameters()}
    bench.trainer.train()
    moved = [name for name, p in bench.trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)
    rows = bench.rollouts()
    assert [len(row["log_probs"]) == sum(row["completion_mask"]) > 0 for row in rows] == [True] * 4


def test_settings_that_only_trl_s_own_generation_knows(tmp_path: Path) -> None:
    trainer = qwen_bench(tmp_path / "auto", repetition_penalty=1.2).trainer
    assert trainer.ways["rollouts"].startswith("generation: repetition_penalty")
    with pytest.raises(ModelError, match="repetition_penalty, generation_kwargs"):
        qwen_bench(tmp_path / "slots", engine="slots", generation_kwargs={"no_repeat_ngram_size": 3})


def test_sampling_is_the_trainer_s(tmp_path: Path) -> None:
    trainer = qwen_bench(tmp_path, temperature=0.8, top_p=0.9, top_k=20, min_p=0.1).trainer
    policy = trainer.rollouts.policy(trainer.model)
    assert isinstance(policy, SlotPolicy)
    sampling = policy.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.8, 0.9, 20, 0.1)


def test_the_loss_gets_log_probs_of_sampling_where_it_compares_them_rightly(tmp_path: Path) -> None:
    bench = qwen_bench(tmp_path, off_policy_mask_threshold=0.5, bf16=False)
    trainer, name = bench.trainer, "sampling_per_token_logps"
    batch = bench.batch(0)
    sampled = batch["tool_mask"].bool() if batch["tool_mask"].any() else batch[name] != 0
    assert sampled.sum() >= 4
    expected = log_probs_of_training(trainer, batch)[sampled]
    assert_same(batch[name][sampled], expected, layers=2, dtype=torch.float32)
    trainer.top_p = 0.9  # TRL's own log-probs are of the whole vocabulary
    assert name not in bench.batch(0)
    trainer.top_p, trainer.off_policy_mask_threshold = 1.0, None
    assert name not in bench.batch(0)
    trainer.off_policy_mask_threshold = 0.5
    bench.say([RIGHT], [WRONG], [WRONG], [WRONG])  # the script knows none
    assert name not in bench.batch(0)


class VLLM:
    """Stands for TRL's vLLM: says what a script does, by log-probs lower by `shift` than the policy's."""

    max_completion_length = 0

    def __init__(self, trainer: SQLGRPOTrainer, script: Any, shift: float) -> None:
        self._trainer, self._script, self._shift = trainer, script, shift
        self.limits: list[int] = []
        self.syncs = 0

    def sync_weights(self) -> None:
        self.syncs += 1

    def generate(self, *, prompts: list[list[int]], images: None, num_generations: int) -> Any:
        self.limits.append(self.max_completion_length)
        replies = self._script.generate(prompts, max_new_tokens=self.max_completion_length).ids
        model, found = self._trainer.model, []
        for prompt, reply in zip(prompts, replies, strict=True):
            ids = torch.tensor([prompt + reply])
            mask = torch.ones_like(ids)
            with torch.no_grad():
                (row,) = trl_compat.plain_log_probs(self._trainer, model, ids, mask, len(reply)).tolist()
            found.append([[value - self._shift, -9.0] for value in row])  # the second is of another token
        return prompts, replies, found, None


def vllm_bench(folder: Path, shift: float) -> tuple[Bench, VLLM]:
    bench = Bench(folder, bf16=False)
    trainer = bench.trainer
    bench.say([LOOK, RIGHT], [WRONG], [WRONG], [WRONG])
    vllm = VLLM(trainer, trainer.rollouts.policy(trainer.model), shift)
    trainer.use_vllm, trainer.vllm_generation = True, vllm
    trainer.rollouts = Rollouts(trainer, trainer.play, RolloutConfig(), stages=Stages())
    return bench, vllm


@pytest.mark.parametrize(("shift", "ratio"), [(0.0, 1.0), (math.log(2), 2.0), (math.log(9), 3.0)])
def test_vllm_s_other_probabilities_are_corrected_and_truncated(
    tmp_path: Path, shift: float, ratio: float
) -> None:
    bench, vllm = vllm_bench(tmp_path, shift)
    trainer = bench.trainer
    collected: dict[str, float] = {}
    trainer.collect = collected.update  # type: ignore[method-assign]
    batch = bench.batch(0)
    assert trainer.ways["rollouts"] == "generation: vLLM generates"
    assert (vllm.syncs, vllm.limits) == (1, [80, 80])
    trained = batch["tool_mask"].bool()
    expected = log_probs_of_training(trainer, batch)[trained] - shift
    assert_same(batch["sampling_per_token_logps"][trained], expected, layers=2, dtype=torch.float32)
    found = batch["importance_sampling_ratio"]
    torch.testing.assert_close(found[trained], torch.full_like(found[trained], ratio), rtol=1e-4, atol=0)
    assert collected["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio, rel=1e-4)
    corrected = bench.gradient(batch)
    trainer.use_vllm = False
    del batch["importance_sampling_ratio"]
    assert_same(corrected, ratio * bench.gradient(batch), layers=2, dtype=torch.float32)
    assert corrected.abs().max() > 0


def test_a_log_prob_that_vllm_does_not_know_corrects_nothing(tmp_path: Path) -> None:
    bench, vllm = vllm_bench(tmp_path, 1.0)
    generate = vllm.generate

    def without_first(**options: Any) -> Any:
        *rest, found, _ = generate(**options)
        return *rest, [[[None], *row[1:]] for row in found], None

    vllm.generate = without_first  # type: ignore[method-assign]
    batch = bench.batch(0)
    ratios = batch["importance_sampling_ratio"]
    assert ratios[:, 0].tolist() == [1.0] * 4
    assert ratios[:, 1].tolist() == pytest.approx([math.e] * 4, rel=1e-3)
    assert bench.gradient(batch).isfinite().all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 2.0, 3.0]]),
        ("token_mask", [[0.0, 2.0, 0.0]]),
        ("sequence_truncate", [[1.5]]),
        ("sequence_mask", [[1.5]]),
    ],
)
def test_ratios_of_each_mode_are_those_of_trl(mode: str, expected: list[list[float]]) -> None:
    trainer: Any = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=3.0,
    )
    found = sampling_ratio(trainer, torch.tensor([[0.15, 2.0, 5.0]]).log())
    torch.testing.assert_close(found, torch.tensor(expected))
