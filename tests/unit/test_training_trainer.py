"""The trainer on a tiny random model: masks, baselines, rewards, and tokens as they were sampled."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_policy import ASSISTANT, ask, shop_environment
from tests.tiny_model import write_model
from tests.tiny_run import json_lines
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import RunError
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.rollout_trainer import without_spread
from text2sql_grpo.training.run_log import RunLog
from text2sql_grpo.training.trainer import SQLGRPOTrainer

GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LOOK, RIGHT, WRONG = (
    "<sql>SELECT code FROM branch</sql>",
    f"<answer>{GOLD}</answer>",
    "<answer>SELECT 8</answer>",
)
FAILS = "<answer>SELECT nothing FROM nowhere</answer>"
WEIGHTS = {"execution": 1.0, "executes": 0.25}
LISBON, BROKEN = ask("Lisbon?", GOLD), ask("Broken?", "SELECT nothing FROM branch")


class Bench:
    """A trainer whose policy may be replaced by a script of whole episodes."""

    def __init__(
        self, folder: Path, examples: Sequence[Example], *, protocol: Any = "tags", **arguments: Any
    ) -> None:
        self.folder = folder
        model = write_model(folder / "model", max_positions=4096)
        tokenizer = AutoTokenizer.from_pretrained(model)
        if protocol == "native":
            template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
            tokenizer.chat_template = template.read_text("utf-8")
        settings = EnvironmentSettings(protocol=protocol, schema_text="compact", max_turns=3)
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
                engine="generation",  # a script stands in for its `generate`
                max_turn_tokens=80,
                max_completion_length=1200,
            ),
            examples=examples,
            environment=shop_environment(folder, settings),
            rewards=RewardMix(WEIGHTS),
            grader=Grader(SQLExecutor()),
            processing_class=tokenizer,
            run_log=RunLog(folder / "run"),
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
    with pytest.raises(RunError, match=r"reward executes: expected a score from 1 to 1, got 2\.0"):
        bench.trainer.train()


def test_what_a_step_says_of_hacks_and_of_groups_that_teach_nothing(bench: Bench) -> None:
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


def test_groups_without_spread() -> None:
    names = ["a", "a", "b", "b", "a"]
    rewards = zip(names, [1.0, None, 0.5, 0.25, 1.0], strict=True)
    assert without_spread(rewards) == {"a": True, "b": False}
    rewards = zip(names, [1.0, 0.0, None, None, 1.0], strict=True)
    assert without_spread(rewards) == {"a": False, "b": True}


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
    porto = ask("Porto?", "SELECT staff FROM branch WHERE code = 'OPO-01'")
    weights, logs = [], []
    for shares in (False, True):
        folder = tmp_path / str(shares)
        folder.mkdir()
        bench = Bench(
            folder,
            [LISBON, porto],
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
