"""The trainer's rollouts by the engine `slots`: what TRL's own generation would have seen and left behind."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models.utils import disable_gradient_checkpointing

from tests.rounding import assert_same
from tests.scripted_policy import ask, shop_environment
from tests.tiny_model import write_model
from tests.tiny_run import json_lines
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError, ModelError
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.engine import Budgets
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.run_log import RunLog
from text2sql_grpo.training.trainer import SQLGRPOTrainer


def make_trainer(
    folder: Path, *, lora: bool = False, engine: str = "auto", staleness: int = 0, **fields: Any
) -> SQLGRPOTrainer:
    model = write_model(folder / "model", architecture="qwen2", max_positions=2048)
    settings = EnvironmentSettings(instructions=False, schema_text="compact", max_turns=2)
    batch = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1, "save_strategy": "no"}
    return SQLGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        training_arguments(
            {**batch, "report_to": "none", "disable_tqdm": True, **fields},
            output_dir=str(folder / "run"),
            max_turn_tokens=12,
            max_completion_length=300,
            engine=engine,
            staleness=staleness,
            same_draws=staleness > 0,
        ),
        examples=[ask("Lisbon?")],
        environment=shop_environment(folder, settings),
        rewards=RewardMix({"execution": 1.0}),
        grader=Grader(SQLExecutor()),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        run_log=RunLog(folder / "run"),
    )


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_log_probs_at_sampling_are_those_of_training(tmp_path: Path, lora: bool) -> None:
    trainer = make_trainer(tmp_path, lora=lora, bf16=False, temperature=0.7)
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable()
    attention = trainer.model.config._attn_implementation
    sessions = [trainer.environment.session(ask("Lisbon?")) for _ in range(4)]

    episodes = trainer._play(sessions)

    assert trainer.model.training
    assert trainer.model.config._attn_implementation == attention
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
        with torch.no_grad():
            recomputed, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(episode.completion_ids)
            )
        sampled = torch.tensor(episode.completion_mask).bool()
        recorded = torch.tensor(episode.log_probs)
        assert_same(recorded[sampled], recomputed[0][sampled], layers=2, dtype=torch.float32)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_rollouts_leave_no_hooks_behind(tmp_path: Path, lora: bool) -> None:
    """transformers registers another hook whenever gradient checkpointing is switched on again."""
    trainer = make_trainer(tmp_path, lora=lora, bf16=False)
    trainer.model.gradient_checkpointing_enable()
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    before = len(hooks)
    for _ in range(3):
        with trl_compat.unwrapped_model(trainer):
            pass
        with disable_gradient_checkpointing(trainer.model):  # as TRL does around old log-probs
            pass
    assert len(hooks) == before > 0


def test_a_step_of_training_in_bfloat16(tmp_path: Path) -> None:
    """Weights cast for the rollouts are not those that the gradient then misses."""
    trainer = make_trainer(tmp_path, bf16=True, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    sampled_in = []
    generate = trainer._play

    def play(sessions: Any) -> Any:
        episodes = generate(sessions)
        sampled_in.extend(episodes)
        for (
            episode
        ) in episodes:  # a random model earns nothing: let all turns end well and one answer be right
            episode.is_masked, episode.final_sql = False, "SELECT 1"
        episodes[0].final_sql = episodes[0].example.gold_sql
        return episodes

    trainer._play = play  # type: ignore[method-assign]

    trainer.train()

    assert [len(episode.log_probs) == len(episode.completion_ids) for episode in sampled_in] == [True] * 4
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)
    assert len(json_lines(tmp_path / "run" / "rollouts.jsonl")) == 4


def test_settings_that_only_trl_s_own_generation_knows(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, repetition_penalty=1.2)
    assert "repetition_penalty" in str(trl_compat.slots_obstacle(trainer))
    assert not trainer._plays_by_slots

    trainer.repetition_penalty = 1.0
    assert trl_compat.slots_obstacle(trainer) is None
    trainer.use_vllm = True
    assert trl_compat.slots_obstacle(trainer) == "vLLM generates"


def test_slots_wanted_where_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="repetition_penalty or generation_kwargs are set"):
        make_trainer(tmp_path, engine="slots", generation_kwargs={"no_repeat_ngram_size": 3})


def test_trl_is_handed_log_probs_where_it_compares_them_rightly(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, off_policy_mask_threshold=0.5, bf16=False)
    known = Episode(ask("Lisbon?"), completion_ids=[1, 2], log_probs=[-1.0, 0.0])
    empty, unknown = Episode(ask("Lisbon?")), Episode(ask("Lisbon?"), completion_ids=[1, 2])

    assert trl_compat.sampling_log_probs(trainer, [known, empty]) == [[-1.0, 0.0], [0.0]]
    assert trl_compat.sampling_log_probs(trainer, [known, unknown]) is None
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        recomputed, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    handed = batch["sampling_per_token_logps"]
    sampled = (handed != 0) & batch["completion_mask"].bool()
    assert sampled.sum() >= 4
    assert_same(handed[sampled], recomputed[sampled], layers=2, dtype=torch.float32)
    trainer.top_p = 0.9  # TRL's own log-probs are of the whole vocabulary
    assert trl_compat.sampling_log_probs(trainer, [known]) is None
    trainer.top_p, trainer.off_policy_mask_threshold = 1.0, None
    assert trl_compat.sampling_log_probs(trainer, [known]) is None


def test_vllm_s_log_probs_come_through(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, engine="generation")
    chat = trainer._chat
    written = [chat.turn_ids("<sql>SELECT 1</sql>"), chat.turn_ids("<answer>SELECT 2</answer>")]

    def generate(prompts: list[list[int]], *_: Any) -> Any:
        ids = written.pop(0)
        return [ids for _ in prompts], [[None, *[-0.5] * (len(ids) - 1)] for _ in prompts]

    trainer._generate_single_turn = generate
    trainer._budgets = Budgets(60, 300, 2_000)
    (episode,) = trainer._play([trainer.environment.session(ask("Lisbon?"))])

    assert episode.stop_reason == "submitted"
    sampled = [p for p, flag in zip(episode.log_probs, episode.completion_mask, strict=True) if flag]
    assert len(sampled) == sum(episode.completion_mask)
    assert [p for p in sampled if p == p] == [-0.5] * (len(sampled) - 2)
    assert trl_compat.sampling_log_probs(trainer, [episode]) is None
    trainer.use_vllm = True
    assert trl_compat.sampling_log_probs(trainer, [episode]) == [episode.log_probs]


def test_sampling_is_the_trainer_s(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, temperature=0.8, top_p=0.9, top_k=20, min_p=0.1)

    sampling = trl_compat.sampling(trainer)

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.8, 0.9, 20, 0.1)


def off_policy_batch(folder: Path, shift: float, **fields: Any) -> tuple[SQLGRPOTrainer, dict[str, Any]]:
    """A batch whose sampling log-probs are lower by `shift` than they were."""
    trainer = make_trainer(
        folder,
        bf16=False,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        correct_sampling=True,
        **fields,
    )
    play = trainer._play

    def shifted(sessions: Any) -> Any:
        episodes = play(sessions)
        for i, episode in enumerate(episodes):
            episode.is_masked, episode.final_sql = False, "SELECT 1" if i else episode.example.gold_sql
            pairs = zip(episode.log_probs, episode.completion_mask, strict=True)
            episode.log_probs = [value - shift if is_sampled else 0.0 for value, is_sampled in pairs]
        return episodes

    trainer._play = shifted  # type: ignore[method-assign]
    trainer.model.train()
    torch.manual_seed(0)
    rows = [dict(trainer.train_dataset[0]) for _ in range(8)]
    return trainer, trainer._generate_and_score_completions(rows)


def gradient(trainer: SQLGRPOTrainer, batch: dict[str, Any]) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("shift", "ratio"), [(0.0, 1.0), (math.log(2), 2.0), (math.log(9), 3.0)])
def test_other_probabilities_at_sampling_are_corrected_and_truncated(
    tmp_path: Path, shift: float, ratio: float
) -> None:
    trainer, batch = off_policy_batch(tmp_path, shift)
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    found = batch["importance_sampling_ratio"]
    # The error of a ratio is that of log-probs, which are as large as 10.
    rounded: Any = {"layers": 2, "dtype": torch.float32, "scale": 10.0}
    assert_same(found[trained], torch.full_like(found[trained], ratio), **rounded)
    logged = trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"]
    assert_same(logged, [ratio], **rounded)
    assert not trainer.use_vllm
    corrected = gradient(trainer, batch)
    del batch["importance_sampling_ratio"]
    assert_same(corrected, ratio * gradient(trainer, batch), layers=2, dtype=torch.float32)
    assert corrected.abs().max() > 0


def test_sampling_is_corrected_where_wanted(tmp_path: Path) -> None:
    for number, (fields, is_corrected) in enumerate(
        [
            ({}, False),
            ({"steps_per_generation": 2}, False),
            ({"correct_sampling": True}, True),
            ({"num_iterations": 2, "correct_sampling": True}, True),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert make_trainer(folder, **fields)._corrects_sampling == is_corrected, fields
    (tmp_path / "refused").mkdir()
    with pytest.raises(ConfigError, match=r"correct_sampling compares .*: leave out top_p"):
        make_trainer(tmp_path / "refused", correct_sampling=True, top_p=0.9)
