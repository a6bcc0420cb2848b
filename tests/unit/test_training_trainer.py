"""The trainer on a tiny random model: masks, baselines, rewards, and tokens as they were sampled."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig, PromptTuningConfig
from text2sql_grpo.training.advantages import zero_variance_by_prompt
from text2sql_grpo.training.step_times import STAGES
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.scripted_policy import ASSISTANT, ask, shop_environment
from tests.tiny_model import write_model, write_tokenizer
from tests.tiny_run import json_lines
from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rollout.engine import Continuations, SlotPolicy
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.token_tree.scored_tree import trimmed
from text2sql_grpo.training.trainer import SQLGRPOTrainer

GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LOOK, RIGHT, WRONG = (
    "<sql>SELECT code FROM branch</sql>",
    f"<answer>{GOLD}</answer>",
    "<answer>SELECT 8</answer>",
)
FAILS = "<answer>SELECT nothing FROM nowhere</answer>"
WEIGHTS = {"execution": 1.0, "executes": 0.25}
PORTO = ask("Porto?", "SELECT staff FROM branch WHERE code = 'OPO-01'")
LISBON, BROKEN = ask("Lisbon?", GOLD), ask("Broken?", "SELECT nothing FROM branch")


class Bench:
    """A trainer whose policy may be replaced by a script of whole episodes."""

    def __init__(
        self,
        folder: Path,
        examples: Sequence[Example],
        *,
        protocol: Any = "tags",
        parts: dict[str, Any] | None = None,
        model: Path | None = None,
        rewards: RewardMix | None = None,
        engine: str = "generation",  # a script stands in for its `generate`
        max_turn_tokens: int = 80,
        **arguments: Any,
    ) -> None:
        self.folder = folder
        model = model or write_model(folder / "model", max_positions=4096)
        tokenizer = AutoTokenizer.from_pretrained(model)
        if protocol == "native":
            template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
            tokenizer.chat_template = template.read_text("utf-8")
        settings = EnvironmentSettings(
            protocol=protocol, schema_text="compact", max_turns=3, instructions=False
        )
        self.trainer = SQLGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model),
            training_arguments(
                {
                    "per_device_train_batch_size": 4,
                    "num_generations": 4,
                    "max_steps": 1,
                    "save_strategy": "no",
                    "report_to": "none",
                    "disable_tqdm": True,
                    **arguments,
                },
                output_dir=str(folder / "run"),
                engine=engine,
                max_turn_tokens=max_turn_tokens,
                max_completion_length=1200,
            ),
            examples=examples,
            environment=shop_environment(folder, settings),
            rewards=rewards or RewardMix(WEIGHTS),
            grader=Grader(SQLExecutor()),
            processing_class=tokenizer,
            run_log=RunLog(folder / "run"),
            **(parts or {}),
        )

    def say(self, *episodes: Sequence[str], unfinished: str = "...") -> None:
        """The turns of each episode, in the order of the batch; `unfinished` never ends its turn."""
        trainer = self.trainer
        queue, taken = list(episodes), {}

        def generate(prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
            replies = []
            if len(prompts) == len(episodes):
                taken.update(enumerate(queue))
            active = [i for i in taken if taken[i]]
            for i, _ in zip(active, prompts, strict=True):
                turn, taken[i] = taken[i][0], taken[i][1:]
                ids = trainer._chat.turn_ids(turn)
                replies.append(ids[:-1] * 40 if turn == unfinished else ids)
            return Continuations([reply[:max_new_tokens] for reply in replies])

        trainer.generate = generate  # type: ignore[method-assign]

    def batch(self, *numbers: int) -> dict[str, Any]:
        """What TRL makes of one generation batch of these questions."""
        self.trainer.model.train()
        rows = [dict(self.trainer.train_dataset[number]) for number in numbers]
        return self.trainer._generate_and_score_completions(rows)

    def logged(self, name: str) -> float:
        return self.trainer._metrics["train"][name][-1]

    def gradient(self, batch: dict[str, Any]) -> torch.Tensor:
        self.trainer.model.zero_grad()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.compute_loss(self.trainer.model, batch).backward()
        return torch.cat([p.grad.flatten() for p in self.trainer.model.parameters() if p.grad is not None])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, [LISBON, BROKEN])


def test_observations_are_masked_out_of_the_loss(bench: Bench) -> None:
    bench.say([LOOK, RIGHT], [WRONG], [LOOK, WRONG], [RIGHT])
    batch = bench.batch(0, 0, 0, 0)
    tokenizer = bench.trainer.processing_class
    trained = batch["tool_mask"] * batch["completion_mask"]
    texts = [
        tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch["completion_ids"], trained, strict=True)
    ]
    end = tokenizer.eos_token
    assert texts == [
        LOOK + end + RIGHT + end,
        WRONG + end,
        LOOK + end + WRONG + end,
        RIGHT + end,
    ]
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
    batch = bench.batch(0, 0, 0, 0)
    without = bench.gradient({**batch, "advantages": batch["advantages"] * torch.tensor([0.0, 1, 1, 1])})
    only_observed = {**batch, "tool_mask": 1 - batch["tool_mask"]}
    assert not torch.allclose(bench.gradient(only_observed), without)  # else the mask would not matter
    emptied = {**batch, "tool_mask": batch["tool_mask"] * torch.tensor([[0], [1], [1], [1]])}
    torch.testing.assert_close(bench.gradient(emptied), without)


def test_rewards_are_weighted_and_logged_each_by_its_name(bench: Bench) -> None:
    bench.say([RIGHT], [WRONG], [FAILS], [LOOK, RIGHT])
    batch = bench.batch(0, 0, 0, 0)
    totals = torch.tensor([1.25, 0.25, 0.0, 1.25])
    expected = (totals - totals.mean()) / (totals.std() + 1e-4)
    torch.testing.assert_close(batch["advantages"].flatten(), expected)
    assert bench.logged("rewards/execution/mean") == pytest.approx(0.5)
    assert bench.logged("rewards/executes/mean") == pytest.approx(0.75)
    assert bench.logged("reward") == pytest.approx(totals.mean().item())
    assert bench.logged("accuracy/strict") == pytest.approx(0.5)
    assert bench.logged("episode/looks") == pytest.approx(0.25)
    rows = json_lines(bench.folder / "run" / "rollouts.jsonl")
    assert [row["reward"] for row in rows] == [1.25, 0.25, 0.0, 1.25]
    assert rows[1]["scores"] == {"execution": 0.0, "executes": 1.0}


def test_a_cut_episode_weighs_nothing_and_leaves_the_baseline_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.say([RIGHT], ["..."], [WRONG], [RIGHT])
    with caplog.at_level(logging.WARNING):
        batch = bench.batch(0, 0, 0, 0)
    scored = torch.tensor([1.25, 0.25, 1.25])
    expected = (scored - scored.mean()) / (scored.std() + 1e-4)
    torch.testing.assert_close(batch["advantages"].flatten()[[0, 2, 3]], expected)
    assert batch["advantages"].flatten()[1] == 0
    assert (batch["tool_mask"] * batch["completion_mask"])[1].sum() == 0
    assert bench.logged("episode/masked") == 0.25
    assert bench.logged("reward") == pytest.approx(scored.mean().item())
    assert caplog.text == ""
    row = json_lines(bench.folder / "run" / "rollouts.jsonl")[1]
    assert (row["is_masked"], row["stop_reason"], row["scores"], row["reward"]) == (
        True,
        "budget",
        None,
        None,
    )


def test_a_failing_gold_masks_its_whole_group(bench: Bench) -> None:
    bench.say([RIGHT], [WRONG], [LOOK, WRONG], [FAILS])
    batch = bench.batch(1, 1, 1, 1)
    assert batch["advantages"].tolist() == [0.0] * 4
    assert (batch["tool_mask"] * batch["completion_mask"]).sum() == 0
    assert bench.gradient(batch).abs().max() == 0
    rows = json_lines(bench.folder / "run" / "rollouts.jsonl")
    assert {row["reason"] for row in rows} == {"gold_failed"}


def test_an_error_in_a_reward_stops_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(episode: Any, verdict: Any, results: Any) -> float:
        return 1 / 0

    function = dataclasses.replace(REWARD_FUNCTIONS["executes"], function=broken)
    monkeypatch.setitem(REWARD_FUNCTIONS, "executes", function)
    bench.say([RIGHT], [WRONG], [WRONG], [WRONG])
    with pytest.raises(ZeroDivisionError) as stopped:
        bench.trainer.train()
    assert stopped.traceback[-1].name == "broken"


def test_a_score_out_of_its_range_stops_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    function = dataclasses.replace(REWARD_FUNCTIONS["executes"], function=lambda *_: 2.0)
    monkeypatch.setitem(REWARD_FUNCTIONS, "executes", function)
    bench.say([RIGHT], [WRONG], [WRONG], [WRONG])
    with pytest.raises(RunError, match=r"reward executes must be from 1 to 1, got 2\.0"):
        bench.trainer.train()


def test_metrics_of_hacks_and_of_zero_variance_groups(bench: Bench) -> None:
    bench.say([RIGHT], ["<answer>SELECT 7</answer>"], ["<answer>SELECT 9</answer>"], [LOOK, RIGHT])
    bench.batch(0, 0, 0, 0)
    assert bench.logged("accuracy/official_minus_strict") == 0  # this grader has no neighbours
    assert bench.logged("hack/no_table") == bench.logged("hack/rate") == 0.5
    assert bench.logged("hack/copied_literal") == 0.25
    assert bench.logged("group/no_spread") == 0
    flags = [row["flags"] for row in json_lines(bench.folder / "run" / "rollouts.jsonl")]
    assert flags == [[], ["no_table"], ["no_table"], ["copied_literal"]]
    bench.say([RIGHT], [RIGHT], ["..."], [RIGHT])
    bench.batch(0, 0, 0, 0)
    assert bench.logged("group/no_spread") == 1


def test_zero_variance_groups() -> None:
    prompts = [0, 0, 1, 1, 0]
    rewards = zip(prompts, [1.0, None, 0.5, 0.25, 1.0], strict=True)
    assert zero_variance_by_prompt(rewards) == {0: True, 1: False}
    rewards = zip(prompts, [1.0, 0.0, None, None, 1.0], strict=True)
    assert zero_variance_by_prompt(rewards) == {0: False, 1: True}


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_tokens_are_trained_as_they_were_sampled(tmp_path: Path, protocol: str) -> None:
    bench = Bench(tmp_path, [LISBON, ask("Porto?")], protocol=protocol, num_generations=2, bf16=False)
    trainer, sampled = bench.trainer, []
    generate = trainer.generate

    def recorded(prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        replies = generate(prompts, max_new_tokens=min(max_new_tokens, 12)).ids
        for i, reply in enumerate(replies):
            replies[i] = [
                *reply[:-1],
                trainer.processing_class.eos_token_id,
            ]  # malformed: another turn follows
        sampled.append((prompts, replies))
        return Continuations(replies)

    trainer.generate = recorded  # type: ignore[method-assign]
    batch = bench.batch(0, 0, 1, 1)
    rows = json_lines(tmp_path / "run" / "rollouts.jsonl")
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"] != rows[2]["prompt_ids"] == rows[3]["prompt_ids"]
    assert len(sampled) == 3
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        recomputed, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    for i, row in enumerate(rows):
        own = [token for _, replies in sampled for token in replies[i]]
        pairs = list(zip(row["completion_ids"], row["completion_mask"], strict=True))
        assert [token for token, is_sampled in pairs if is_sampled] == own
        # Each turn was sampled behind exactly the tokens that stand before it in the trained sequence.
        for prompts, replies in sampled:
            whole = row["prompt_ids"] + row["completion_ids"]
            assert whole[: len(prompts[i]) + len(replies[i])] == prompts[i] + replies[i]
        whole = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logits = trainer.model(whole).logits[0, :-1]
        plain = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[len(row["prompt_ids"]) - 1 :, 0]
        torch.testing.assert_close(recomputed[i, : len(plain)], plain, atol=2e-5, rtol=0)


def test_two_steps_of_real_training_move_the_weights_by_the_trained_tokens_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [LISBON], max_steps=2, learning_rate=1e-3)
    before = {name: p.detach().clone() for name, p in bench.trainer.model.named_parameters()}
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], ["..."])
    bench.trainer.train()
    moved = [name for name, p in bench.trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)
    rows = json_lines(tmp_path / "run" / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4
    assert not list((tmp_path / "run").glob("README.md"))
    assert all(ASSISTANT not in row["question"] for row in rows)


def test_a_whole_run_ends_with_the_weights_of_the_plain_update(tmp_path: Path) -> None:
    weights, logs = [], []
    for shares in (False, True):
        folder = tmp_path / str(shares)
        folder.mkdir()
        bench = Bench(
            folder,
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
            logging_steps=1,
        )
        assert bench.trainer._update.is_on == shares
        before = torch.cat([p.detach().flatten() for p in bench.trainer.model.parameters()])
        bench.say(
            [RIGHT], [WRONG], [LOOK, WRONG], ["?", LOOK, RIGHT], [LOOK, RIGHT], [WRONG], [WRONG], [FAILS]
        )
        bench.trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in bench.trainer.model.parameters()]) - before)
        logs.append([log for log in bench.trainer.state.log_history if "loss" in log])
    moved = weights[0].norm()
    assert moved > 1e-3
    assert (weights[1] - weights[0]).norm() < 1e-4 * moved
    assert len(logs[0]) == 2
    for plain, shared in zip(*logs, strict=True):
        assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert shared["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-6)
        # A mean of micro-batches' means, and they are made of whole groups here, of any rows there.
        assert shared["kl"] == pytest.approx(plain["kl"], rel=0.02, abs=1e-6)
    assert logs[0][1]["kl"] > 0  # the second pass over the same episodes is off the policy that wrote them


@pytest.mark.parametrize(
    ("is_lora", "options"),
    [
        (False, {"bf16": False}),
        (False, {"bf16": True, "loss_type": "grpo"}),
        (True, {"bf16": True}),
        (False, {"bf16": False, "shared_prefix": False}),
        (False, {"bf16": False, "num_iterations": 2}),
    ],
)
def test_gradient_noise_is_the_cosine_of_two_separate_backward_passes(
    tmp_path: Path, is_lora: bool, options: dict[str, Any]
) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if is_lora else None
    bench = Bench(
        tmp_path,
        [LISBON, PORTO],
        parts={"peft_config": lora},
        gradient_accumulation_steps=2,
        gradient_noise_every=1,
        learning_rate=0.0,
        max_grad_norm=1e-3,  # clipping comes after the measurement
        gradient_checkpointing=False,
        logging_steps=1,
        **options,
    )
    bench.say([RIGHT], [WRONG], [LOOK, WRONG], [FAILS], [LOOK, RIGHT], [WRONG], [WRONG], [FAILS])
    halves: list[Any] = []
    split = bench.trainer._prepare_inputs

    def keep(batch: Any) -> Any:
        inputs = split(batch)
        halves[:] = bench.trainer._buffered_inputs
        return inputs

    bench.trainer._prepare_inputs = keep
    bench.trainer.train()
    logged = bench.trainer.state.log_history[0]["grad/half_cosine"]
    first, second = (bench.gradient(half) for half in halves)
    assert logged == pytest.approx(torch.cosine_similarity(first, second, dim=0).item(), abs=1e-5)
    assert abs(logged) < 0.999


def test_gradient_noise_is_off_where_it_cannot_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bench = Bench(tmp_path, [LISBON], gradient_noise_every=1)
    assert bench.trainer._noise.every == 0
    assert "grad/half_cosine is not measured: a step is one micro-batch" in caplog.text


def test_a_noisy_gradient_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(
        tmp_path,
        [LISBON, PORTO],
        gradient_accumulation_steps=2,
        gradient_noise_every=2,
        logging_steps=1,
        max_steps=12,
    )
    trainer = bench.trainer
    trainer._noise._cosine = lambda half: 0.05  # type: ignore[method-assign]
    bench.say([RIGHT], [WRONG], [LOOK, WRONG], [FAILS], [LOOK, RIGHT], [WRONG], [WRONG], [FAILS])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    measured = [row["step"] for row in trainer.state.log_history if "grad/half_cosine" in row]
    assert measured == [1, 3, 5, 7, 9, 11]
    assert caplog.text.count("the gradient is mostly noise") == 1
    assert "0.05 (mean of 5 measurements, below 0.1)" in caplog.text


@pytest.mark.parametrize("is_shared", [False, True])
def test_each_optimiser_step_holds_the_strata(tmp_path: Path, is_shared: bool) -> None:
    examples = [ask(f"Stored {i}?", family="lookup") for i in range(2)] + [
        ask(f"City {i}?") for i in range(6)
    ]
    bench = Bench(
        tmp_path,
        examples,
        parts={"selection": SelectionConfig(strata={"lookup": 0.5})},
        shared_prefix=is_shared,
        num_generations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=2,  # one generation batch is split among two optimiser steps
        num_iterations=2,
        max_steps=8,
    )
    trainer, taught = bench.trainer, list[list[bool]]()
    prepare = trainer._prepare_inputs

    def note(batch: Any) -> Any:
        inputs = prepare(batch)
        texts = trainer.processing_class.batch_decode(inputs["prompt_ids"])
        taught.append(["Stored" in text for text in texts])
        return inputs

    trainer._prepare_inputs = note
    bench.say(*[[RIGHT], [WRONG]] * 4)
    trainer.train()
    assert len(taught) == 8
    assert [sum(step) for step in taught] == [2] * 8
    rows = json_lines(tmp_path / "run" / "rollouts.jsonl")
    others = [row["question"] for row in rows if row["family"] != "lookup"]
    assert len(others) == 8
    assert len(set(others)) == 4  # two generation batches, each with two others


def test_other_questions_are_played_for_groups_of_equal_verdicts(tmp_path: Path) -> None:
    """Kept rollouts are trained on; the metrics of all played ones stand beside theirs."""
    bench = Bench(
        tmp_path,
        [ask(f"{i}?", GOLD) for i in range(4)],
        parts={"selection": SelectionConfig(by="learnability", resample_flat=1)},
        num_generations=2,
        gradient_accumulation_steps=1,
    )
    trainer, rounds = bench.trainer, list[list[int]]()
    right, wrong = [[RIGHT], [LOOK, RIGHT]], [[RIGHT], [WRONG]]
    play = trainer._play_batch

    def played(batch: Sequence[int]) -> Any:
        bench.say(*(right if not rounds else wrong) * (len(batch) // 2))
        rounds.append(list(batch))
        return play(batch)

    trainer._play_batch = played
    batch = bench.batch(0, 0, 0, 0)
    first, second = rounds
    assert sorted({*first, *second}) == [0, 1, 2, 3]
    assert bench.logged("accuracy/strict") == 0.5
    assert bench.logged("accuracy/strict_played") == 0.75
    assert bench.logged("selection/episodes") == 8
    assert bench.logged("selection/frac_verdict_zero_std_played") == 0.5
    assert bench.logged("frac_reward_zero_std") == bench.logged("selection/frac_verdict_zero_std") == 0
    assert (batch["advantages"].abs() > 0.5).all()
    texts = trainer.processing_class.batch_decode(batch["prompt_ids"])
    assert [int(text[text.index("?") - 1]) for text in texts] == second
    assert len(json_lines(tmp_path / "run" / "rollouts.jsonl")) == 8


def test_a_question_whose_answers_contradict_its_gold_is_drawn_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_gold = ask("Staff in Lisbon?", PORTO.gold_sql)
    bench = Bench(
        tmp_path,
        [wrong_gold, *(ask(f"{i}?", GOLD) for i in range(9))],
        parts={"selection": SelectionConfig(quarantine_suspects=True)},
    )
    bench.trainer.model.train()
    bench.say([RIGHT], [RIGHT], [LOOK, RIGHT], [RIGHT])
    bench.trainer._play_batch([0] * 4)
    assert "question Staff in Lisbon? is drawn no more" in caplog.text
    assert bench.trainer.selection._quarantined == {0}
    bench.say([RIGHT], [RIGHT], [LOOK, RIGHT], [WRONG])
    bench.trainer._play_batch([1] * 4)
    assert bench.trainer.selection._quarantined == {0}


def test_the_stages_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    parts = {"selection": SelectionConfig(by="learnability")}
    bench = Bench(tmp_path, [LISBON, PORTO], engine="slots", max_turn_tokens=16, parts=parts, max_steps=2)
    began = time.perf_counter()
    bench.trainer.train()
    elapsed_s = time.perf_counter() - began
    steps = [row for row in bench.trainer.state.log_history if "time/step" in row]
    assert len(steps) == 2
    for row in steps:
        parts = {name: row[f"time/{name}"] for name in STAGES}
        assert sum(parts.values()) == pytest.approx(row["time/step"])
        assert min(parts[name] for name in ("select", "prefill", "decode", "grade", "update")) > 0
        assert row["time/step"] >= row["step_time"]  # TRL's, without the optimiser
    assert sum(row["time/step"] for row in steps) < elapsed_s


def test_a_stage_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stages = Stages()
    with stages.of(decode=1), stages.of(prefill=3, tools=1):
        pass
    assert stages.seconds() == {"rest": 3.0, "decode": 3.0, "prefill": 3.0, "tools": 1.0}


def test_looks_and_answers_are_logged_by_family(tmp_path: Path) -> None:
    examples = [ask("Lisbon?", family="lookup"), ask("Porto?", PORTO.gold_sql, family="count")]
    bench = Bench(tmp_path, examples, per_device_train_batch_size=8, scale_rewards="none")
    bench.say([LOOK, RIGHT], [WRONG], [LOOK, LOOK, RIGHT], ["..."], [LOOK, WRONG], [WRONG], [FAILS], [WRONG])
    bench.batch(0, 0, 0, 0, 1, 1, 1, 1)
    found = {
        name.removeprefix("family/"): values[-1]
        for name, values in bench.trainer._metrics["train"].items()
        if name.startswith("family/")
    }
    mean = (1.25 + 0.25 + 1.25) / 3
    assert found == pytest.approx(
        {
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
    )


def write_other_model(folder: Path, architecture: str) -> Path:
    """A model that learns without shared prefixes, with log-probs so low that their exp leaves float32."""
    torch.manual_seed(0)
    if architecture == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=304, n_positions=4096, n_embd=32, n_layer=2, n_head=4)
        )
        model.transformer.wpe.weight.data *= 20  # positions count
        model.lm_head.weight.data *= 60
    else:
        rope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [9.0] * 4,
        }
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


LONG = 270  # between the lengths of a padded batch and of its shorter micro-batch


@pytest.mark.parametrize("architecture", ["gpt2", "phi3"])
def test_the_slower_update_learns_what_trl_learns(tmp_path: Path, architecture: str) -> None:
    """Where positions count the padding: an unchanged policy has no KL, no clipping, and TRL's gradient."""
    longer = ask("Porto? " + "Of all branches, please. " * 4, PORTO.gold_sql)
    logs = []
    for shares in (False, True):
        folder = tmp_path / str(shares)
        folder.mkdir()
        bench = Bench(
            folder,
            [LISBON, longer],
            model=write_other_model(folder / "model", architecture),
            shared_prefix=shares,
            gradient_checkpointing=False,
            gradient_accumulation_steps=2,
            num_iterations=2,
            max_steps=2,
            beta=0.1,
            temperature=0.2,
            bf16=False,
            shuffle_dataset=False,
            optim="sgd",
            logging_steps=1,
        )
        assert not bench.trainer._update.is_on
        bench.say([RIGHT], [WRONG], [LOOK, WRONG], [LOOK, RIGHT], [WRONG], [LOOK, RIGHT], [WRONG], [FAILS])
        bench.trainer.train()
        logs.append([log for log in bench.trainer.state.log_history if "loss" in log])
    plain, ours = logs
    assert plain[0]["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm"):
        assert ours[0][name] == pytest.approx(plain[0][name], rel=1e-3, abs=1e-6), name
    assert ours[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert ours[0]["clip_ratio/region_mean"] == 0.0
    assert [log["step/skipped"] for log in ours] == [0.0, 0.0]


def test_one_column_is_not_taken_for_a_sequence() -> None:
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    batch = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": ids[:, :4],
        "completion_mask": mask[:, :4],
    }
    for prompts, width in ((True, 1), (False, 5)):
        cut = trimmed(batch, prompts=prompts)
        assert cut["completion_ids"].shape == cut["completion_mask"].shape == (2, 2)
        assert cut["prompt_ids"].shape == (2, width)


@pytest.mark.parametrize(("kind", "warmup"), [("cosine", 3), ("linear", 0.4), ("constant_with_warmup", 2)])
def test_a_warm_up_wastes_no_step(tmp_path: Path, kind: str, warmup: float) -> None:
    bench = Bench(
        tmp_path, [LISBON], warmup_steps=warmup, lr_scheduler_type=kind, max_steps=5, learning_rate=1.0
    )
    trainer = bench.trainer
    trainer.create_optimizer_and_scheduler(5)
    rates = []
    for _ in range(5):
        rates += trainer.lr_scheduler.get_last_lr()[:1]
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    steps = warmup if warmup >= 1 else 2
    assert rates[: int(steps)] == pytest.approx([(i + 1) / steps for i in range(int(steps))])
    assert min(rates) > 0
    assert rates[int(steps) :] == sorted(rates[int(steps) :], reverse=True)


def test_variables_of_the_chat_template_reach_the_prompts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [LISBON], chat_template_kwargs={"add_marker": True})
    bench.trainer.processing_class.chat_template += "{{ 'MARKER' if add_marker }}"
    bench.say([RIGHT], [WRONG], [WRONG], [WRONG])
    batch = bench.batch(0, 0, 0, 0)
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
def test_an_adapter_that_slots_cannot_play_is_trained_by_generation(
    tmp_path: Path, adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bench = Bench(tmp_path, [LISBON], engine="auto", parts={"peft_config": adapter}, bf16=False)
    assert not bench.trainer._plays_by_slots
    assert not bench.trainer._update.is_on
    assert "its adapter, " in caplog.text
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
    bench.trainer.train()
    assert bench.trainer.state.log_history[0]["grad_norm"] > 0


def test_an_engine_that_differs_from_the_model_is_left_at_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "agrees", [LISBON], engine="auto", bf16=False)
    assert bench.trainer.ways == {"rollouts": "slots", "updates": "token trees"}
    bench.trainer.train()
    assert bench.trainer.ways == {"rollouts": "slots", "updates": "token trees"}
    step = bench.trainer.state.log_history[0]
    assert (step["fast/rollouts"], step["fast/updates"]) == (1, 1)

    forward = SlotPolicy.logits
    monkeypatch.setattr(SlotPolicy, "logits", lambda *inputs: 1.1 * forward(*inputs))
    bench = Bench(tmp_path / "differs", [LISBON], engine="auto", bf16=False, shared_prefix=False)
    bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
    bench.trainer.train()
    assert bench.trainer.ways["rollouts"].startswith("generation: its log-probs differ by")
    assert bench.trainer.ways["updates"] == "TRL's: grpo.shared_prefix is false"
    assert bench.trainer.state.log_history[0]["fast/rollouts"] == 0

    bench = Bench(tmp_path / "corrects", [LISBON], engine="auto", bf16=False, correct_sampling=True)
    with pytest.raises(ConfigError, match="correct_sampling needs the engine slots"):
        bench.trainer.train()


def test_turns_earn_what_their_results_show_of_the_gold(tmp_path: Path) -> None:
    rewards = RewardMix({"execution": 1.0, "turns": {"gold_shown": 0.6, "failed_call": 0.1}})
    bench = Bench(tmp_path, [LISBON], rewards=rewards, turn_credit="rewards", scale_rewards="none")
    bench.say([LOOK, RIGHT], [FAILS.replace("answer", "sql"), RIGHT], [WRONG], [LOOK, LOOK, RIGHT])
    batch = bench.batch(0, 0, 0, 0)
    tokenizer = bench.trainer.processing_class
    look = 2 / 3 * 0.6  # the column `code` and its value, of these and `staff`
    to_go = [look, -0.1, 0.0, look]
    mean, expected = sum(to_go) / 4, [own - sum(to_go) / 4 for own in to_go]
    firsts = [(1.0 if i != 2 else 0.0) - 0.75 + own for i, own in enumerate(expected)]
    assert batch["advantages"][:, 0].tolist() == pytest.approx(firsts)
    assert mean > 0
    last = [int(row.nonzero()[-1]) for row in batch["completion_mask"] * batch["tool_mask"]]
    assert tokenizer.decode(batch["completion_ids"][0, last[0]]) == tokenizer.eos_token
    assert batch["advantages"][0, last[0]] == pytest.approx(0.25)  # nothing is shown from there on
    assert bench.logged("turn/gold_shown") == pytest.approx(2 / 3 / 2)
    assert bench.logged("turn/failed_call") == -0.25
    rows = json_lines(tmp_path / "run" / "rollouts.jsonl")
    assert rows[1]["turn_scores"] == {"gold_shown": [0.0, 0.0], "failed_call": [-1.0, 0.0]}
    assert bench.gradient(batch).abs().max() > 0


def test_a_tree_plays_each_first_turn_twice_and_credits_it_with_its_mean(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [LISBON], turn_credit="tree", scale_rewards="none")
    calls: list[int] = []

    def generate(prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        turns = [LOOK, "<sql>SELECT 1</sql>"] if not calls else [RIGHT, FAILS, WRONG, FAILS]
        calls.append(len(prompts))
        return Continuations([bench.trainer._chat.turn_ids(turn) for turn in turns])

    bench.trainer.generate = generate  # type: ignore[method-assign]
    batch = bench.batch(0, 0, 0, 0)
    assert calls == [2, 4]
    # rewards: 1.25 and 0, 0.25 and 0; means .625, .125 and .375
    trained = batch["completion_mask"] * batch["tool_mask"]
    last = [
        float(row[int(mask.nonzero()[-1])]) for row, mask in zip(batch["advantages"], trained, strict=True)
    ]
    assert batch["advantages"][:, 0].tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert last == pytest.approx([0.625, -0.625, 0.125, -0.125])
    assert (batch["advantages"] * (1 - trained)).abs().max() == 0
    assert bench.gradient(batch).abs().max() > 0


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"tree_first_turns": 3}, r"a divisor of it \(4\), got 3"),
        ({"tree_first_turns": 4}, "below num_generations"),
        ({"num_generations": 5, "per_device_train_batch_size": 5}, r"a divisor of it \(5\), got 1"),
        ({"turn_credit": "none", "tree_first_turns": 2}, "tree_first_turns needs turn_credit: tree"),
        ({"turn_credit": "trees"}, "turn_credit"),
    ],
)
def test_trees_that_do_not_divide_a_group_are_refused(fields: dict[str, Any], fault: str) -> None:
    settings = {"turn_credit": "tree", "num_generations": 4, "per_device_train_batch_size": 4} | fields
    with pytest.raises(ConfigError, match=fault):
        training_arguments(settings, output_dir="unused")
