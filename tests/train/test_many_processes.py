"""Two processes on CPUs (gloo): they learn what one learns, none waits for ever, and they end together."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from trl.generation.vllm_generation import VLLMGeneration

from tests.processes import ended, fork, needs_fork, printed
from tests.rounding import assert_same
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.errors import RunError
from text2sql_grpo.reliability.checkpoints import find_damage, saved_checkpoints, steps_done
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.run import pipeline as job
from text2sql_grpo.run_folder import read_schedule
from text2sql_grpo.training.play import Rollouts, VLLMPolicy
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

pytestmark = [
    needs_fork,
    pytest.mark.usefixtures("own_cache"),
]
# What `accelerate launch` tells its processes.
WAYS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    },
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    },
}
# accelerate takes all but DDP for a thing of GPUs: with these it does not notice that there are none.
NO_GPU = {"ACCELERATE_TORCH_DEVICE": "cpu"}
ON_CPU = ("--grpo.use_cpu", "false", "--grpo.ddp_backend", "gloo", "--grpo.dataloader_pin_memory", "false")
DEEPSPEED = [
    pytest.param(
        way,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
        ],
    )
    for way in ("zero2", "zero3")
]
GRPO = {
    "bf16": False,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 0.003,
    "max_grad_norm": 1.0,
    "report_to": "none",
}
PATIENCE_S = 60.0  # of a test whose processes wait for each other for ever


@pytest.fixture(scope="module")
def started(started_model: str) -> dict[str, Any]:
    """Sections of a config whose policy has learned enough to learn more."""
    rewards = {
        "execution": 1.0,
        "executes": 0.1,
        "turn_cost": 0.1,
    }  # so that groups that look at times differ
    return {"model": {"path": started_model, "dtype": "float32"}, "sft": None, "rewards": rewards}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: dict[str, Any]) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, grpo=GRPO, **started)


def start(
    config: Path,
    folder: Path,
    *options: str,
    way: str = "ddp",
    count: int = 2,
    first: Callable[[int], None] = lambda number: None,
    own_options: dict[int, tuple[str, ...]] | None = None,
) -> list[int]:
    """The ids of the processes of one run, as torchrun would start them.

    Args:
        first: Called in each process with its number, before the run.
        own_options: Of a process alone, by its number.
    """
    if way != "ddp" and count > 1:
        options = (*options, *ON_CPU)

    def train(number: int) -> int:
        if way == "fsdp2":  # which it else takes for DDP, without a word
            PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
        first(number)
        own = (own_options or {}).get(number, ())
        return main(["train", "--config", str(config), "--run.output_dir", str(folder), *options, *own])

    return start_all(folder, train, way=way, count=count)


def start_all(folder: Path, job: Callable[[int], int], *, way: str = "ddp", count: int = 2) -> list[int]:
    """The ids of processes that do a job together, each with its number."""
    together = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        together["MASTER_PORT"] = str(probe.getsockname()[1])
    surroundings = {} if count == 1 else together | NO_GPU | WAYS[way]

    def begin(number: int) -> int:
        own = {"RANK": str(number), "LOCAL_RANK": str(number)} if count > 1 else {}
        return fork(output(folder, number), partial(job, number), surroundings | own)

    return [begin(number) for number in range(count)]


def output(folder: Path, number: int) -> Path:
    """The file, without its suffix, of what a process prints."""
    return folder.with_name(f"{folder.name}-{number}")


def wait_for(path: Path) -> None:
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begun < 5 * PATIENCE_S, f"no {path}"  # a launcher imports all there is
        time.sleep(0.01)


def said(folder: Path, number: int) -> str:
    """What a process printed, and what it died of."""
    return printed(output(folder, number))


def finish(config: Path, folder: Path, *options: str, **how: Any) -> None:
    pids = start(config, folder, *options, **how)
    codes = ended(pids)
    assert codes == [0] * len(pids), "\n".join(said(folder, number) for number in range(len(pids)))


def only_train(number: int = 0) -> None:
    """The run ends with its last step, unmerged and not evaluated. In a process of its own."""
    patch = pytest.MonkeyPatch()
    for name, result in {
        "accuracy_before": {},
        "save_and_merge": Path(),
        "load_policy": None,
        "held_out_accuracy": {},
        "report": None,
    }.items():
        patch.setattr(job, name, lambda *_, result=result, **__: result)


def unlike_ranks(number: int = 0) -> None:
    """As `only_train`, with settings that may differ."""
    only_train()
    pytest.MonkeyPatch().setattr(job, "check_ranks", lambda *_: None)


def same_luck(count: int) -> Callable[[int], None]:
    """Each episode draws by the same numbers, in whichever process it is played; nothing else is done."""

    def first(number: int) -> None:
        played = 0

        def uniforms(self: Sampling, num_sessions: int, num_tokens: int) -> torch.Tensor:
            nonlocal played
            played += 1
            luck = torch.Generator().manual_seed(played)
            drawn = torch.rand(num_sessions * count, num_tokens, generator=luck)
            return drawn[number * num_sessions : (number + 1) * num_sessions]

        Sampling.uniforms = uniforms  # type: ignore[method-assign]
        only_train()

    return first


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    newest = saved_checkpoints(folder)[-1]
    assert find_damage(newest) is None
    return load_file(newest / "model.safetensors")


def logged(folder: Path, name: str) -> list[Any]:
    """A metric step by step; -1 in a step without it, as that of a family that was not asked."""
    return [row.get(name, -1.0) for row in json_lines(folder / "metrics.jsonl")]


def assert_same_learning(one: Path, other: Path) -> None:
    """The same episodes and figures, and weights that moved alike."""
    learned, found = weights(one), weights(other)  # DeepSpeed saves tied weights twice
    assert sum(norm > 0.1 for norm in logged(one, "grad_norm")) >= len(logged(one, "grad_norm")) / 2
    layers = 2 * steps_done(saved_checkpoints(one)[-1])
    for name, weight in learned.items():
        assert_same(found[name], weight, layers=layers, dtype=torch.float32)
    episodes, others = (json_lines(folder / "rollouts.jsonl") for folder in (one, other))
    assert [row["completion_ids"] for row in others] == [row["completion_ids"] for row in episodes]
    assert [row["reward"] for row in others] == [row["reward"] for row in episodes]
    by_family = ("family/lookup/share", "family/lookup/reward", "family/other/abs_advantage")
    # Not TRL's entropy: a mean of the ranks' means, whatever the number of their tokens.
    whole = ("reward", "accuracy/strict", "episode/turns", "frac_reward_zero_std", "grad_norm")
    for name in (*whole, *by_family):
        assert_same(logged(other, name), logged(one, name), layers=layers, dtype=torch.float32)


# Of some gradients there is only rounding (keys' biases move no attention), which Adam would blow up.
SGD = ("--grpo.optim", "sgd", "--grpo.learning_rate", "0.1")
STRATA = ("--selection.strata.lookup", "0.25")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, started: dict[str, Any]) -> Callable[..., Path]:
    """The folder of a run of so many steps by one process, of as many episodes a step as by two."""
    folder = tmp_path_factory.mktemp("alone")
    config = write_config(folder, grpo=GRPO | {"per_device_train_batch_size": 16}, **started)

    @cache
    def run(n_steps: int, *options: str) -> Path:
        run_folder = folder / f"{n_steps}{''.join(options)}"
        finish(config, run_folder, *steps_of(n_steps), *options, count=1, first=same_luck(1))
        return run_folder

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ddp", "fsdp2", *DEEPSPEED])
@pytest.mark.parametrize("n_steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_two_processes_learn_what_one_learns(
    config: Path, tmp_path: Path, alone: Callable[..., Path], way: str, n_steps: int
) -> None:
    """The same questions, the same luck: the same episodes, rewards and weights."""
    finish(config, tmp_path / way, *steps_of(n_steps), way=way, first=same_luck(2))
    assert_same_learning(alone(n_steps), tmp_path / way)


@pytest.mark.thorough
def test_two_processes_add_the_cross_entropy_that_one_adds(
    config: Path, tmp_path: Path, alone: Callable[..., Path]
) -> None:
    """The same gold and kept rows next to the groups, in micro-batches too; both resume with them."""
    losses = ("--losses.gold", "1", "--losses.gold_share", "1", "--losses.kept", "1")
    losses += ("--losses.kept_share", "0.3", "--losses.kept_questions", "4")  # 5 rows a step, an odd number
    options = (*steps_of(2), *losses, "--grpo.save_steps", "1")
    options += ("--grpo.per_device_train_batch_size", "4", "--grpo.gradient_accumulation_steps", "2")
    one, two, resumed = alone(2, *losses), tmp_path / "two", tmp_path / "resumed"
    finish(config, two, *options, first=same_luck(2))

    assert_same_learning(one, two)
    for name in ("losses/wrong_groups", "losses/gold_rows", "losses/kept_rows", "losses/ce"):
        assert_same(logged(two, name), logged(one, name), layers=4, dtype=torch.float32)
    assert max(logged(two, "losses/gold_rows")) > 0
    assert logged(two, "losses/kept_rows") == [5 / 16] * 2

    undisturbed = tmp_path / "undisturbed"
    finish(config, undisturbed, *options, first=only_train)
    shutil.copytree(undisturbed, resumed)
    shutil.rmtree(resumed / "checkpoint-2")
    finish(config, resumed, *options, "--resume", "auto", first=only_train)
    assert_same_run(undisturbed, resumed)
    states = [torch.load(resumed / "checkpoint-2" / f"step_parts_{rank}.pt")["parts"] for rank in range(2)]
    assert states[0]["teach Kept"] == states[1]["teach Kept"]
    assert states[0]["teach Kept"]["rows"]


def steps_of(count: int) -> tuple[str, ...]:
    """Options of a run that is compared step by step."""
    return (*SGD, *STRATA, "--grpo.max_steps", str(count))


@pytest.mark.thorough
def test_ranks_select_the_same_questions(config: Path, tmp_path: Path) -> None:
    """Each plays the groups of its part; one state."""
    options = (*STRATA, "--grpo.num_generations", "8", "--grpo.max_steps", "3")
    finish(config, tmp_path / "run", *options, first=only_train)
    (newest, *_) = saved_checkpoints(tmp_path / "run")[::-1]
    one, other = (torch.load(newest / f"step_parts_{rank}.pt")["parts"] for rank in range(2))
    assert len(one["select"]["strata"]) == 2
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    rows = json_lines(tmp_path / "run" / "metrics.jsonl")
    episodes = json_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(episodes) == 3 * 16
    right = sum(row["accuracy/strict"] for row in rows) * 16
    assert right == pytest.approx(sum(episode["strict"] for episode in episodes))


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_scheduled_questions_are_shared(config: Path, tmp_path: Path, way: str) -> None:
    """Each of three questions is answered once, by one of two processes; both note the same best."""
    schedule = ("--data.dev", "questions.jsonl", "--evaluation.every", "1", "--evaluation.keep", "best")
    options = (*schedule, "--evaluation.schedule_samples", "3", "--grpo.max_steps", "1")
    options += ("--grpo.learning_rate", "1e-9")  # so that accuracy stays, on every processor
    finish(config, tmp_path / way, *options, way=way, first=only_train)
    records = read_schedule(tmp_path / way)
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        families = {name: part["accuracy"]["total"] for name, part in record["by_family"].items()}
        assert families == {"lookup": 2, "other": 1}
    assert "Kept the weights of step 1 of 1" in said(tmp_path / way, 0)
    assert "Kept" not in said(tmp_path / way, 1)


@pytest.mark.thorough
def test_a_whole_run_and_a_step_that_one_process_cannot_take(
    tmp_path: Path, rewards_with_spread: None
) -> None:
    """One writes and prints, both play and answer; weights stay alike where one alone skips a step."""
    config = write_config(tmp_path, grpo=GRPO, sft={"max_steps": 4, "batch_size": 4})  # by both
    folder = tmp_path / "run"

    def first(number: int) -> None:
        loss, end = SQLGRPOTrainer._compute_loss, SQLGRPOTrainer.save_model

        def diverging(self: SQLGRPOTrainer, *args: Any) -> torch.Tensor:
            is_bad = number == 1 and self.state.global_step == 0
            return loss(self, *args) * (float("nan") if is_bad else 1.0)

        def noted(self: SQLGRPOTrainer, *args: Any, **kwargs: Any) -> None:
            torch.save(self.model.state_dict(), tmp_path / f"weights-{number}.pt")
            end(self, *args, **kwargs)

        SQLGRPOTrainer._compute_loss = diverging  # type: ignore[method-assign]
        SQLGRPOTrainer.save_model = noted  # type: ignore[method-assign]

    finish(config, folder, "--grpo.max_steps", "2", first=first)

    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "rollouts.jsonl", "learning_curve.png", "checkpoint-2", "model"),
        *("report.html", "report.json"),
        *("evaluation.json", "evaluation-before.jsonl", "evaluation.jsonl", "merged", "sft"),
        *("suspects.jsonl", "suspects.md"),
    }
    assert said(folder, 1) == ""
    assert said(folder, 0).count("Evaluation after") == 1
    assert [row["step"] for row in json_lines(folder / "rollouts.jsonl")] == [0] * 16 + [1] * 16
    for step in (0, 1):
        rows = [row for row in json_lines(folder / "rollouts.jsonl") if row["step"] == step]
        names = [row["example"] for row in rows]
        assert names == [name for name in names[::4] for _ in range(4)]  # groups, each in one process
        assert len(set(names)) == 4
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["sets"]["test_values"]["overall"]["strict"]["total"] == 4
    asked = [row["id"] for row in json_lines(config.parent / "questions.jsonl")]
    assert [row["example"] for row in json_lines(folder / "evaluation.jsonl")] == asked

    assert logged(folder, "step/skipped") == [1.0, 0.0]
    one, other = (torch.load(tmp_path / f"weights-{number}.pt") for number in (0, 1))
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert logged(folder, "grad_norm")[1] > 0


@pytest.mark.parametrize("where", ["loss", pytest.param("rollout", marks=pytest.mark.slow)])
def test_a_process_that_fails_ends_all_with_its_cause(config: Path, tmp_path: Path, where: str) -> None:
    folder = tmp_path / "run"

    def first(number: int) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            if where == "loss":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            raise RunError("expected a database, got none")

        only_train()
        if number == 1:
            if where == "loss":
                SQLGRPOTrainer._compute_loss = fail  # type: ignore[method-assign]
            else:
                Rollouts.run = fail  # type: ignore[method-assign]

    pids = start(config, folder, first=first)
    assert ended(pids) == [1, 1]
    cause = {"loss": "does not fit into memory: CUDA out of memory.", "rollout": "expected a database"}
    assert cause[where] in said(folder, 1)
    assert "error: one of the 2 processes died or does not answer" in said(folder, 0)


@pytest.mark.parametrize(
    ("own", "first", "cause"),
    [
        (
            ("--grpo.learning_rate", "1"),
            only_train,
            "error: rank 1 has other settings than rank 0: grpo.learning_rate 0.003 -> 1;",
        ),
        pytest.param(
            ("--data.train", "shorter/questions.jsonl"),
            only_train,
            "content of the questions",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("--run.output_dir", "another"),
            unlike_ranks,
            "error: rank 1 does not see what rank 0 writes to ",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ranks_of_machines_that_differ_are_refused(
    config: Path, tmp_path: Path, own: tuple[str, ...], first: Callable[[int], None], cause: str
) -> None:
    lines = (tmp_path / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "shorter").mkdir()
    (tmp_path / "shorter" / "questions.jsonl").write_text("".join(lines[::-1]), encoding="utf-8")

    pids = start(config, tmp_path / "run", first=first, own_options={1: own})

    assert ended(pids) == [1, 1]
    assert all(cause in said(tmp_path / "run", number) for number in (0, 1))


@pytest.mark.thorough
def test_two_processes_without_a_gradient_warn_with_the_reason(tmp_path: Path) -> None:
    config = write_config(tmp_path, grpo=GRPO | {"max_steps": 1}, sft=None, rewards={"execution": 1.0})
    folder = tmp_path / "run"
    assert ended(start(config, folder, first=only_train)) == [0, 0]
    reason = "nothing was learned: no step had a gradient: all 16 episodes are masked (turn_length "
    assert reason in said(folder, 0) and reason not in said(folder, 1)
    assert "raise environment.max_turn_tokens" in said(folder, 0)


def test_processes_with_fewer_turns_ask_for_nothing_until_all_are_done(tmp_path: Path) -> None:
    """TRL's client of a vLLM server hands each process as many completions as it has prompts itself."""
    turns = {0: [[7, 8], [9], [10], [11]], 1: [[20, 21, 22], [23]], 2: []}

    def play(number: int) -> int:
        accelerator = Accelerator(cpu=True)
        trainer = trainer_of_a_server(accelerator)
        policy = VLLMPolicy(trainer)
        with policy.joined():
            for asked in turns[number]:
                written = policy.generate([[prompt] for prompt in asked], max_new_tokens=10 * (1 + number))
                assert [ids[0] for ids in written.ids] == asked
                assert all(ids[1] >= 10 * (1 + number) for ids in written.ids)  # the longest limit of all
                assert written.log_probs == [[-1.0, -1.0, -1.0] for _ in asked]
        assert trainer.vllm_generation.max_completion_length == 99
        return 0

    pids = start_all(tmp_path / "played", play, count=3)
    assert ended(pids) == [0, 0, 0], "".join(said(tmp_path / "played", number) for number in range(3))


def trainer_of_a_server(accelerator: Accelerator) -> Any:
    """TRL's own way to a vLLM server, whose answer to a prompt is its first token and the limit of a turn."""

    class Server:
        def generate(self, prompts: list[list[int]], max_tokens: int, **_: Any) -> dict[str, Any]:
            ids = [[prompt[0], max_tokens, 2] for prompt in prompts]
            return {
                "prompt_ids": prompts,
                "completion_ids": ids,
                "logprobs": [[[-1.0]] * 3 for _ in prompts],
            }

    client = VLLMGeneration.__new__(VLLMGeneration)
    vars(client).update(mode="server", accelerator=accelerator, vllm_client=Server(), logprobs=0)
    vars(client).update(dict.fromkeys(["repetition_penalty", "temperature", "top_p", "top_k", "min_p"]))
    vars(client).update(generation_kwargs={}, structured_outputs_regex=None, max_completion_length=99)
    vars(client).update(sync_weights=lambda: None)
    return SimpleNamespace(
        vllm_mode="server",
        vllm_generation=client,
        eos_token_ids=[2],
        args=SimpleNamespace(vllm_tensor_parallel_size=1),
        state=SimpleNamespace(global_step=0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2", *DEEPSPEED])
def test_a_run_stopped_by_a_signal_to_one_process_goes_on_as_if_undisturbed(
    config: Path, tmp_path: Path, way: str
) -> None:
    """Bit for bit: each process with its own random states and its part of the questions."""
    one, other = tmp_path / "undisturbed", tmp_path / "stopped"
    options = ("--grpo.max_steps", "8", "--grpo.num_iterations", "2")
    finish(config, one, *options, way=way, first=only_train)
    pids = start(config, other, *options, way=way, first=only_train)
    wait_for(other / "metrics.jsonl")
    os.kill(pids[1], signal.SIGTERM)
    assert ended(pids) == [130, 130], said(other, 0) + said(other, 1)
    assert "Resume with the same launcher and 2 processes:" in said(other, 0)
    (stopped,) = saved_checkpoints(other)
    assert find_damage(stopped) is None
    assert steps_done(stopped) < 8

    finish(config, other, *options, "--resume", "auto", way=way, first=only_train)

    assert_same_run(one, other)


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_at_random_ends_as_if_undisturbed(
    config: Path, tmp_path: Path
) -> None:
    """Ten times one of the two is killed once it trains: the other one notices, and a new pair resumes."""
    one, other = tmp_path / "undisturbed", tmp_path / "killed"
    options = ("--grpo.max_steps", "24", "--grpo.save_steps", "1")
    finish(config, one, *options, first=only_train)
    seconds = (one / "checkpoint-24").stat().st_mtime - (one / "config.yaml").stat().st_mtime
    moment, n_killed = random.Random(0), 0
    while n_killed < 10:
        resume = ("--resume", "auto") if saved_checkpoints(other) else ()
        before = time.time_ns()
        pids = start(config, other, *options, *resume, first=only_train)
        while not (other / "config.yaml").exists() or (other / "config.yaml").stat().st_mtime_ns < before:
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 0.3) * seconds)
        os.kill(pids[n_killed % 2], signal.SIGKILL)
        codes = ended(pids)
        assert codes[1 - n_killed % 2] != -signal.SIGKILL, said(other, 1 - n_killed % 2)
        n_killed += codes[n_killed % 2] == -signal.SIGKILL
    finish(config, other, *options, "--resume", "auto", first=only_train)

    assert_same_run(one, other)


def assert_same_run(one: Path, other: Path) -> None:
    """Weights bit for bit, and logs without a lost or double line."""
    torch.testing.assert_close(weights(other), weights(one), atol=0, rtol=0)
    metrics, others = (
        [
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("elapsed_s", "step_time", "time/"))
            }
            for row in rows
        ]
        for rows in (json_lines(folder / "metrics.jsonl") for folder in (one, other))
    )
    assert others == metrics
    episodes, others = (json_lines(folder / "rollouts.jsonl") for folder in (one, other))
    assert [row["completion_ids"] for row in others] == [row["completion_ids"] for row in episodes]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["slots", "generation"])
@pytest.mark.parametrize("way", ["fsdp2", *DEEPSPEED])
def test_no_process_waits_for_turns_that_another_one_does_not_take(
    config: Path, tmp_path: Path, engine: str, way: str
) -> None:
    folder = tmp_path / "run"
    options = ("--grpo.max_steps", "3", "--rollout.engine", engine)
    first_turn_alone = {1: ("--environment.max_turns", "1")}
    finish(config, folder, *options, way=way, first=unlike_ranks, own_options=first_turn_alone)

    rows = json_lines(folder / "rollouts.jsonl")
    turns = [[len(row["actions"]) for row in rows[i : i + 8]] for i in range(0, len(rows), 8)]
    assert max(map(max, turns[0::2])) == 2  # of the first process
    assert max(map(max, turns[1::2])) == 1


@pytest.mark.slow
def test_the_command_of_the_documents(
    config: Path, tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, which reaches a process of `accelerate launch` twice, saves; the run goes on to its end."""
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"),
        *("--config_file", str(repo_root / "config" / "accelerate" / "ddp.yaml")),
        *("--mixed_precision", "no", "--main_process_port", "0", str(repo_root / "scripts" / "train.py")),
        *("--config", str(config), "--run.output_dir", str(folder)),
    ]
    monkeypatch.setenv("PYTHONPATH", str(repo_root / "src"))
    launcher = subprocess.Popen([*command, "--grpo.max_steps", "2000"], start_new_session=True)
    wait_for(folder / "metrics.jsonl")
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(PATIENCE_S) != 0
    (stopped,) = saved_checkpoints(folder)
    assert find_damage(stopped) is None

    steps = str(steps_done(stopped) + 2)
    subprocess.run([*command, "--grpo.max_steps", steps, "--resume", "auto"], check=True)

    assert logged(folder, "step") == list(range(1, int(steps) + 1))
    assert (folder / "merged" / "model.safetensors").is_file()
