"""The trainer on a tiny random model: masks, baselines, rewards, sampled tokens, parts, and resuming."""

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.rounding import assert_same
from tests.scripted_policy import ASSISTANT, ask
from tests.scripted_trainer import BROKEN, FAILS, LISBON, LOOK, PORTO, RIGHT, WRONG, Bench
from tests.tiny_model import write_model, write_tokenizer
from text2sql_grpo.config import LossesConfig, SelectionConfig
from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.rollout.engine import Continuations, SlotPolicy
from text2sql_grpo.token_tree.update import trimmed
from text2sql_grpo.training.arguments import SQLGRPOConfig, training_arguments
from text2sql_grpo.training.parts import Credit, Judged, Play, Record, Row, Select
from text2sql_grpo.training.record import STAGES
from text2sql_grpo.training.trainer import RolloutGRPOTrainer
from text2sql_grpo.trl_compat import plain_log_probs


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, [LISBON, BROKEN])


def test_observations_are_masked_out_of_the_loss(bench: Bench) -> None:
    bench.say([LOOK, RIGHT], [WRONG], [LOOK, WRONG], [RIGHT])
    batch = bench.batch(0)
    tokenizer = bench.trainer.processing_class
    trained = batch["tool_mask"] * batch["completion_mask"]
    texts = [
        tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch["completion_ids"], trained, strict=True)
    ]
    end = tokenizer.eos_token
    assert texts == [LOOK + end + RIGHT + end, WRONG + end, LOOK + end + WRONG + end, RIGHT + end]
    assert "OPO-01" in tokenizer.decode(batch["completion_ids"][0])
    assert batch["num_items_in_batch"] == trained.sum()

    before = bench.gradient(batch)
    assert before.abs().max() > 0
    masked = (trained == 0) & (torch.arange(trained.shape[1]) > trained.cumsum(1).argmax(1)[:, None])
    other = {**batch, "completion_ids": torch.where(masked, 7, batch["completion_ids"])}
    torch.testing.assert_close(bench.gradient(other), before)


def test_a_masked_label_has_no_gradient_of_its_own(bench: Bench) -> None:
    """The last environment token before an answer is read, never learned."""
    bench.say([LOOK, RIGHT], [WRONG], [WRONG], [WRONG])
    batch = bench.batch(0)
    without = bench.gradient({**batch, "advantages": batch["advantages"] * torch.tensor([0.0, 1, 1, 1])})
    only_observed = {**batch, "tool_mask": 1 - batch["tool_mask"]}
    assert not torch.allclose(bench.gradient(only_observed), without)  # else the mask would not matter
    emptied = {**batch, "tool_mask": batch["tool_mask"] * torch.tensor([[0], [1], [1], [1]])}
    torch.testing.assert_close(bench.gradient(emptied), without)


def test_rewards_are_weighted_and_logged_each_by_its_name(bench: Bench) -> None:
    bench.say([RIGHT], [WRONG], [FAILS], [LOOK, RIGHT])
    batch = bench.batch(0)
    totals = torch.tensor([1.25, 0.25, 0.0, 1.25])
    expected = (totals - totals.mean()) / (totals.std() + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected)
    logged = bench.metrics()
    assert logged["rewards/execution/mean"] == pytest.approx(0.5)
    assert logged["rewards/executes/mean"] == pytest.approx(0.75)
    assert logged["reward"] == pytest.approx(totals.mean().item())
    assert logged["reward_std"] == pytest.approx(totals.std().item())
    assert logged["accuracy/strict"] == pytest.approx(0.5)
    assert logged["episode/looks"] == pytest.approx(0.25)
    rows = bench.rollouts()
    assert [row["reward"] for row in rows] == [1.25, 0.25, 0.0, 1.25]
    assert rows[1]["scores"] == {"execution": 0.0, "executes": 1.0}


def test_a_cut_episode_weighs_nothing_and_leaves_the_baseline_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.say([RIGHT], ["..."], [WRONG], [RIGHT])
    with caplog.at_level(logging.WARNING):
        batch = bench.batch(0)
    scored = torch.tensor([1.25, 0.25, 1.25])
    expected = (scored - scored.mean()) / (scored.std() + 1e-4)
    torch.testing.assert_close(batch["advantages"][[0, 2, 3]], expected)
    assert batch["advantages"][1] == 0
    assert (batch["tool_mask"] * batch["completion_mask"])[1].sum() == 0
    assert bench.metrics()["episode/masked"] == 0.25
    assert bench.metrics()["reward"] == pytest.approx(scored.mean().item())
    assert caplog.text == ""
    row = bench.rollouts()[1]
    found = (row["is_masked"], row["stop_reason"], row["scores"], row["reward"])
    assert found == (True, "turn_length", None, None)
    assert row["messages"][-1]["role"] == "assistant" and row["messages"][-1]["content"]


def test_a_failing_gold_masks_its_whole_group(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.say([RIGHT], [WRONG], [LOOK, WRONG], [FAILS])
    batch = bench.batch(1)
    assert batch["advantages"].tolist() == [0.0] * 4
    assert (batch["tool_mask"] * batch["completion_mask"]).sum() == 0
    assert bench.gradient(batch).abs().max() == 0
    assert {row["reason"] for row in bench.rollouts()} == {"gold_failed"}
    assert "all 4 episodes are masked (gold_failed 4): fix the gold queries" in caplog.text


@pytest.mark.parametrize("value", [None, "many", torch.ones(2)])
def test_a_metric_that_is_not_a_number_is_named(value: Any, bench: Bench) -> None:
    with pytest.raises(RunError, match="own/x must be a number"):
        bench.trainer.collect({"own/x": value})


def test_hacks_are_flagged_and_counted(bench: Bench) -> None:
    bench.say([RIGHT], ["<answer>SELECT 7</answer>"], ["<answer>SELECT 9</answer>"], [LOOK, RIGHT])
    bench.batch(0)
    logged = bench.metrics()
    assert logged["accuracy/official_minus_strict"] == 0  # this grader has no test suite
    assert logged["hack/no_table"] == logged["hack/rate"] == 0.5
    assert logged["hack/copied_literal"] == 0.25
    flags = [row["flags"] for row in bench.rollouts()]
    assert flags == [[], ["no_table"], ["no_table"], ["copied_literal"]]


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ([[RIGHT]] * 4, [[WRONG]] * 4, 1.0),
        ([[RIGHT], ["..."], [RIGHT], [RIGHT]], [[WRONG], [RIGHT], [WRONG], [WRONG]], 0.5),
        ([["..."]] * 4, [[WRONG], [RIGHT], ["..."], [WRONG]], 0.5),
    ],
)
def test_two_groups_of_one_question_are_counted_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: Any, second: Any, share: float
) -> None:
    bench = Bench(tmp_path, [LISBON, PORTO], per_device_train_batch_size=8)
    bench.say(*first, *second)
    with caplog.at_level(logging.WARNING):
        batch = bench.batch(0, 0)
    assert bench.metrics()["frac_reward_zero_std"] == share
    assert bool(batch["advantages"].any()) == (share < 1)
    assert ("has no gradient: each of 2 groups has one reward" in caplog.text) == (share == 1)


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_tokens_are_trained_as_they_were_sampled(tmp_path: Path, protocol: str) -> None:
    bench = Bench(tmp_path, [LISBON, PORTO], protocol=protocol, num_generations=2, bf16=False)
    trainer, sampled = bench.trainer, list[tuple[list[list[int]], list[list[int]]]]()
    real = trainer.rollouts.policy

    def recorded(model: Any) -> Any:
        def generate(prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
            replies = real(model).generate(prompts, max_new_tokens=min(max_new_tokens, 12)).ids
            # Malformed, so that another turn follows.
            replies = [[*reply[:-1], trainer.processing_class.eos_token_id] for reply in replies]
            sampled.append((prompts, replies))
            return Continuations(replies)

        return SimpleNamespace(generate=generate)

    trainer.rollouts.policy = recorded  # type: ignore[method-assign]
    batch = bench.batch(0, 1)
    rows = bench.rollouts()
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"] != rows[2]["prompt_ids"] == rows[3]["prompt_ids"]
    assert len(sampled) == 3
    ids, mask = (
        torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask")
    )
    with torch.no_grad():
        width = batch["completion_ids"].shape[1]
        recomputed = plain_log_probs(trainer, trainer.model, ids, mask, width)
    for i, row in enumerate(rows):
        own = [token for _, replies in sampled for token in replies[i]]
        pairs = list(zip(row["completion_ids"], row["completion_mask"], strict=True))
        assert [token for token, is_sampled in pairs if is_sampled] == own
        # Each turn was sampled behind exactly the tokens that stand before it in the trained sequence.
        whole = row["prompt_ids"] + row["completion_ids"]
        for prompts, replies in sampled:
            assert whole[: len(prompts[i]) + len(replies[i])] == prompts[i] + replies[i]
        with torch.no_grad():
            logits = trainer.model(torch.tensor([whole])).logits[0, :-1]
        plain = logits.log_softmax(-1).gather(1, torch.tensor(whole)[1:, None])[:, 0]
        plain = plain[len(row["prompt_ids"]) - 1 :]
        assert_same(recomputed[i, : len(plain)], plain, layers=2, dtype=torch.float32)


def test_two_steps_of_real_training_move_all_weights(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_steps=2, learning_rate=1e-3)
    before = {name: p.detach().clone() for name, p in bench.trainer.model.named_parameters()}
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], ["..."])
    bench.trainer.train()
    moved = [name for name, p in bench.trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)
    rows = bench.rollouts()
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4
    assert not list((tmp_path / "run").glob("README.md"))
    assert all(ASSISTANT not in row["question"] for row in rows)
    # As in TRL, tokens of prompts and those that the loss reads.
    masks = [[] if row["is_masked"] else row["completion_mask"] for row in rows]
    tokens = [len(row["prompt_ids"]) + sum(mask) for row, mask in zip(rows, masks, strict=True)]
    assert [row["num_tokens"] for row in bench.steps()] == [sum(tokens[:4]), sum(tokens)]


def test_a_whole_run_ends_with_the_weights_of_the_plain_update(tmp_path: Path) -> None:
    moves, logs = [], []
    for shares in (False, True):
        bench = Bench(
            tmp_path / str(shares),
            [LISBON, PORTO],
            shared_prefix=shares,
            gradient_checkpointing=False,
            max_steps=2,
            num_iterations=2,
            gradient_accumulation_steps=2,
            beta=0.1,
            learning_rate=1e-2,
            optim="sgd",  # Adam makes of a gradient of nothing but rounding a whole step
            max_grad_norm=0.0,
            bf16=False,
            shuffle_dataset=False,
        )
        before = bench.weights()
        bench.say(
            [RIGHT], [WRONG], [LOOK, WRONG], ["?", LOOK, RIGHT], [LOOK, RIGHT], [WRONG], [WRONG], [FAILS]
        )
        bench.trainer.train()
        assert bench.trainer.update.is_on == shares
        moves.append(bench.weights() - before)
        logs.append(bench.steps())
    moved = moves[0].norm()
    assert moved > 1e-3
    assert (moves[1] - moves[0]).norm() < 1e-4 * moved
    assert len(logs[0]) == 2
    for plain, shared in zip(*logs, strict=True):
        assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert shared["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-6)
        # A mean of micro-batches' means, and they are made of whole groups here, of any rows there.
        assert shared["kl"] == pytest.approx(plain["kl"], rel=0.02, abs=1e-6)
    assert logs[0][1]["kl"] > 0  # the second pass over the same episodes is off the policy that wrote them


@pytest.mark.parametrize("is_shared", [False, True])
def test_each_optimiser_step_holds_the_strata(tmp_path: Path, is_shared: bool) -> None:
    stored = [ask(f"Stored {i}?", family="lookup") for i in range(2)]
    bench = Bench(
        tmp_path,
        stored + [ask(f"City {i}?") for i in range(6)],
        selection=SelectionConfig(strata={"lookup": 0.5}),
        shared_prefix=is_shared,
        num_generations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=2,  # one generation batch is split among two optimiser steps
        num_iterations=2,
        max_steps=8,
    )
    trainer, taught = bench.trainer, list[int]()
    narrowed = trainer.update.narrowed

    def noted(model: Any, inputs: Any) -> Any:
        texts = trainer.processing_class.batch_decode(inputs["prompt_ids"])
        taught.append(sum("Stored" in text for text in texts))
        return narrowed(model, inputs)

    trainer.update.narrowed = noted  # type: ignore[method-assign]
    bench.say(*[[RIGHT], [WRONG]] * 4)
    trainer.train()
    assert taught == [2] * 8
    others = [row["question"] for row in bench.rollouts() if row["family"] != "lookup"]
    assert len(others) == 8
    assert len(set(others)) == 4  # two generation batches, each with two others


def test_the_page_of_metrics_names_what_a_run_logs(tmp_path: Path, repo_root: Path) -> None:
    page = (repo_root / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = [re.escape(name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    known = [re.compile(re.sub(r"NAME|STAGE|FAMILY|\\\*", "[^/]+", name)) for name in names]
    bench = Bench(
        tmp_path,
        [LISBON, PORTO],
        engine="slots",
        max_turn_tokens=16,
        losses=LossesConfig(gold=0.5, kept=0.5, kept_questions=2),
        max_steps=1,
        beta=0.1,
    )
    bench.trainer.train()
    logged = {name for row in bench.steps() for name in row}
    assert "losses/gold_rows" in logged
    assert {name for name in logged if not any(one.fullmatch(name) for one in known)} == set()


def test_the_stages_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    selection = SelectionConfig(strata={"other": 1.0})
    bench = Bench(
        tmp_path, [LISBON, PORTO], engine="slots", max_turn_tokens=16, selection=selection, max_steps=2
    )
    began = time.perf_counter()
    bench.trainer.train()
    elapsed_s = time.perf_counter() - began
    steps = bench.steps()
    assert len(steps) == 2
    for row in steps:
        parts = {name: row[f"time/{name}"] for name in STAGES}
        assert sum(parts.values()) == pytest.approx(row["time/step"])
        assert min(parts[name] for name in ("select", "prefill", "decode", "grade", "update")) > 0
        assert row["time/step"] >= row["step_time"]  # TRL's, without the optimiser
    assert sum(row["time/step"] for row in steps) < elapsed_s


def test_looks_and_answers_are_logged_by_family(tmp_path: Path) -> None:
    examples = [ask("Lisbon?", family="lookup"), ask("Porto?", PORTO.gold_sql, family="count")]
    bench = Bench(tmp_path, examples, per_device_train_batch_size=8, scale_rewards="none")
    bench.say([LOOK, RIGHT], [WRONG], [LOOK, LOOK, RIGHT], ["..."], [LOOK, WRONG], [WRONG], [FAILS], [WRONG])
    bench.batch(0, 1)
    logged = bench.metrics().items()
    found = {name.removeprefix("family/"): value for name, value in logged if name.startswith("family/")}
    mean = (1.25 + 0.25 + 1.25) / 3
    expected = {
        "lookup/share": 0.5,
        "lookup/looks": 0.75,
        "lookup/look_share": 0.5,
        "lookup/strict": 0.5,
        "lookup/reward": mean,
        "lookup/abs_advantage": (2 * (1.25 - mean) + (mean - 0.25)) / 4,
        "lookup/look_advantage": 1.25 - mean,
        "count/share": 0.5,
        "count/looks": 0.25,
        "count/look_share": 0.25,
        "count/strict": 0.0,
        "count/reward": 0.1875,
        "count/abs_advantage": (3 * 0.0625 + 0.1875) / 4,
        "count/look_advantage": 0.0625,
    }
    assert found == pytest.approx(expected)


LONG = 270  # between the lengths of a padded batch and of its shorter micro-batch


def write_other_model(folder: Path, architecture: str) -> Path:
    """A model that learns without shared prefixes, with log-probs so low that their exp leaves float32."""
    torch.manual_seed(0)
    if architecture == "gpt2":
        config = GPT2Config(vocab_size=304, n_positions=4096, n_embd=32, n_layer=2, n_head=4)
        model: Any = GPT2LMHeadModel(config)
        model.transformer.wpe.weight.data *= 20  # positions count
        model.lm_head.weight.data *= 60
    else:
        rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
        config = Phi3Config(
            vocab_size=304,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            original_max_position_embeddings=LONG,
            rope_parameters=rope | {"original_max_position_embeddings": LONG},
            initializer_range=0.4,
            pad_token_id=0,
        )
        model = Phi3ForCausalLM(config)
        model.lm_head.weight.data *= 6
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("architecture", ["gpt2", "phi3"])
def test_where_positions_count_the_padding_an_unchanged_policy_has_no_kl(
    tmp_path: Path, architecture: str
) -> None:
    """The update is TRL's, and all log-probs of a row are computed with the same padding."""
    longer = ask("Porto? " + "Of all branches, please. " * 4, PORTO.gold_sql)
    bench = Bench(
        tmp_path,
        [LISBON, longer],
        model=write_other_model(tmp_path / "model", architecture),
        gradient_checkpointing=False,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=2,
        beta=0.1,
        temperature=0.2,
        bf16=False,
        shuffle_dataset=False,
        optim="sgd",
    )
    assert not bench.trainer.update.is_on
    bench.say([RIGHT], [WRONG], [LOOK, WRONG], [LOOK, RIGHT], [WRONG], [LOOK, RIGHT], [WRONG], [FAILS])
    bench.trainer.train()
    first, _ = bench.steps()
    assert first["grad_norm"] > 1e-3
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["clip_ratio/region_mean"] == 0.0
    assert [row["step/skipped"] for row in bench.steps()] == [0.0, 0.0]


def test_one_column_is_not_taken_for_a_sequence() -> None:
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[1, 0, 0, 0, 0]] * 2)
    batch = {"prompt_ids": ids, "prompt_mask": mask}
    batch |= {"completion_ids": ids[:, :4], "completion_mask": mask[:, :4]}
    cut = trimmed(batch)
    assert cut["completion_ids"].shape == cut["completion_mask"].shape == (2, 2)
    assert cut["prompt_ids"].shape == (2, 1)


def test_variables_of_the_chat_template_reach_the_prompts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, chat_template_kwargs={"add_marker": True})
    bench.trainer.processing_class.chat_template += "{{ 'MARKER' if add_marker }}"
    bench.say([RIGHT], [WRONG], [WRONG], [WRONG])
    batch = bench.batch(0)
    assert bench.trainer.processing_class.decode(batch["prompt_ids"][0]).endswith("assistant\nMARKER")
    with pytest.raises(ConfigError, match="chat_template_kwargs must not set tools"):
        training_arguments({"chat_template_kwargs": {"tools": []}}, output_dir=str(tmp_path))


@pytest.mark.parametrize(
    "adapter",
    [
        PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", alora_invocation_tokens=[258]),
    ],
)
def test_an_adapter_that_slots_cannot_play_is_trained_by_generation(tmp_path: Path, adapter: Any) -> None:
    bench = Bench(tmp_path, engine="auto", adapter=adapter, bf16=False)
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
    bench.trainer.train()
    assert bench.trainer.ways["rollouts"].startswith("generation: its adapter, ")
    assert bench.trainer.ways["updates"].startswith("TRL's: its adapter, ")
    assert bench.steps()[0]["grad_norm"] > 0


def test_an_engine_that_differs_from_the_model_is_left_at_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "agrees", engine="auto", bf16=False)
    bench.trainer.train()
    assert bench.trainer.ways == {"rollouts": "slots", "updates": "token trees"}
    step = bench.steps()[0]
    assert (step["fast/rollouts"], step["fast/updates"]) == (1, 1)

    forward = SlotPolicy.logits
    monkeypatch.setattr(SlotPolicy, "logits", lambda *inputs: 1.1 * forward(*inputs))
    bench = Bench(tmp_path / "differs", engine="auto", bf16=False, shared_prefix=False)
    assert bench.trainer.ways["rollouts"] == "slots"
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
    bench.trainer.train()
    assert bench.trainer.ways["rollouts"].startswith("generation: its log-probs differ by")
    assert bench.trainer.ways["updates"] == "TRL's: grpo.shared_prefix is false"
    assert bench.steps()[0]["fast/rollouts"] == 0


def test_shared_prefixes_are_checked_with_the_adapter_too(tmp_path: Path) -> None:
    """The reference, computed first, is the model without it; here the adapter alone counts tokens."""
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    bench = Bench(tmp_path, adapter=adapter, beta=0.1, bf16=False)
    for name, module in bench.trainer.model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *of: of[2] + torch.arange(of[2].shape[-2])[:, None])
        if name.endswith("lora_B.default"):
            torch.nn.init.normal_(module.weight, std=0.1)
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
    batch = bench.batch(0)
    assert bench.trainer.ways["updates"] == "token trees"  # as the reference allows it
    bench.gradient(batch)
    assert bench.trainer.ways["updates"].startswith("TRL's: its log-probs differ by")


class Counted:
    """State of a part: the number of its batches."""

    batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


class EveryOther(Counted, Select):
    """Every other question."""

    def draw(self, count: int) -> list[int]:
        drawn = [2 * (self.batches * count + i) % 10 for i in range(count)]
        self.batches += 1
        self.figures = {"own/first": numpy.float32(drawn[0])}
        return drawn


class Tokens(Play):
    """Rollouts of given tokens, all with one reward."""

    def play(self, questions: Sequence[int], rollouts: Any) -> list[Row]:
        rows = []
        for row, question in enumerate(questions):
            tokens = {"completion_ids": [5, 6, 7 + row], "completion_mask": [1, 0, 1]}
            judged = Judged(question, {"score": 1.0}, 1.0, "submitted")
            rows.append(Row(Rollout(prompt_ids=[3, question], **tokens), judged))
        return rows


class Alternating(Counted, Credit):
    """N and -N in turns in the batch N."""

    def advantages(self, batch: Any, inputs: Any, trainer: Any) -> torch.Tensor:
        self.batches += 1
        return torch.tensor([self.batches * (-1.0) ** row for row in range(len(batch.rows))])


class Seen(Counted, Record):
    """Number of batches, and the greatest advantage."""

    def record(self, batch: Any, inputs: Any, step: int) -> None:
        self.batches += 1
        self.figures = {"own/batches": self.batches, "own/advantage": inputs["advantages"].max().item()}


def test_parts_of_a_user_are_used_logged_saved_and_restored(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")

    def steps_of(max_steps: int, checkpoint: str | None = None) -> list[dict[str, float]]:
        args = SQLGRPOConfig(
            output_dir=str(tmp_path / "run"),
            max_steps=max_steps,
            save_steps=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=4,
            num_generations=2,
        )
        trainer = RolloutGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model),
            args,
            num_questions=10,
            play=Tokens(),
            select=EveryOther(),
            credit=Alternating(),
            record=[Seen()],
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return [row for row in trainer.state.log_history if "loss" in row]

    steps_of(2)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    steps = steps_of(4, checkpoint)
    names = ("own/first", "own/advantage", "own/batches", "reward")
    assert [[row[name] for name in names] for row in steps] == [
        [0, 1, 1, 1],
        [4, 2, 2, 1],
        [8, 3, 3, 1],
        [2, 4, 4, 1],
    ]
    assert min(row["grad_norm"] for row in steps) > 0  # by the advantages alone: rewards are equal


@pytest.mark.thorough
@pytest.mark.usefixtures("rewards_with_spread")
def test_a_run_resumes_within_a_generation_batch(tmp_path: Path) -> None:
    def trained(name: str, checkpoint: Path | None = None) -> Bench:
        bench = Bench(
            tmp_path / name,
            [ask(f"{i}?") for i in range(6)],
            engine="slots",
            max_turn_tokens=6,
            bf16=False,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            num_iterations=2,
            max_steps=6,  # four of them on one generation batch
            save_strategy="steps",
            save_steps=1,
            save_total_limit=6,
            learning_rate=0.01,
        )
        bench.trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        return bench

    whole = trained("whole")
    for step in (1, 3):
        resumed = trained(f"from {step}", tmp_path / "whole" / "run" / f"checkpoint-{step}")
        torch.testing.assert_close(resumed.weights(), whole.weights(), rtol=0, atol=0)
        assert len(resumed.rollouts()) == len(whole.rollouts()) // 2  # the second batch alone was played
