"""A run that is killed, and goes on: it ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import ended, fork, has_ended, needs_fork, printed
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.reliability.checkpoints import best_checkpoint, find_damage, saved_checkpoints
from text2sql_grpo.run import pipeline as job
from text2sql_grpo.run_folder import read_schedule

pytestmark = [
    pytest.mark.usefixtures("own_cache", "rewards_with_spread"),
    needs_fork,
]
# Four steps learn from one generation, and an epoch ends inside the run; the reference moves.
GRPO = {
    "per_device_train_batch_size": 4,
    "bf16": False,
    "num_generations": 2,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.003,
    "gradient_checkpointing": False,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.5,
    "logging_steps": 2,
    "save_steps": 1,
    "report_to": "none",
}
TIMES = ("elapsed_s", "step_time", "seconds")
# Two of the four questions a step, half of them look-ups.
TWO = ("--grpo.num_generations", "4", "--grpo.steps_per_generation", "2", "--grpo.num_iterations", "1")
SCHEDULE = ("--data.dev", "questions.jsonl", "--evaluation.every", "2")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run that ends with its last step, unmerged and not evaluated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "save_and_merge", lambda *_: Path())
    monkeypatch.setattr(job, "held_out_accuracy", lambda *_: {})
    monkeypatch.setattr(job, "load_policy", lambda *_: None)
    monkeypatch.setattr(job, "report", lambda *_: None)
    return write_config(
        tmp_path,
        sft=None,
        grpo=GRPO,
        selection={"strata": {"lookup": 0.5}},
        evaluation={"before_training": False},
    )


def start(config: Path, folder: Path, *options: str) -> int:
    """The process id of a training run; it goes on from its newest checkpoint if there is one."""
    if saved_checkpoints(folder):
        options = (*options, "--resume", "auto")
    argv = ["train", "--config", str(config), "--run.output_dir", str(folder), *options]
    return fork(folder, lambda: main(argv))


def killed(pid: int, folder: Path, *, after_s: float) -> bool:
    """Kills a run so long after it readied its folder; whether it was still running then."""
    config = folder / "config.yaml"
    before = config.stat().st_mtime_ns if config.exists() else 0
    begun = None
    while begun is None or time.monotonic() - begun < after_s:
        if has_ended(pid):
            break
        if begun is None and config.exists() and config.stat().st_mtime_ns != before:
            begun = time.monotonic()
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return ended([pid]) == [-signal.SIGKILL]


def finish(config: Path, folder: Path, *options: str) -> None:
    assert ended([start(config, folder, *options)], patience_s=600.0) == [0], printed(folder)


def content(folder: Path) -> dict[str, Any]:
    """What a run leaves, but for the times it took."""
    newest = saved_checkpoints(folder)[-1]
    episodes = json_lines(folder / "rollouts.jsonl")
    for action in (action for episode in episodes for action in episode["actions"]):
        action.get("outcome", {}).pop("elapsed_s", None)
    return {
        "name": newest.name,
        "weights": {path.name: load_file(path) for path in sorted(newest.glob("*.safetensors"))},
        "optimizer": torch.load(newest / "optimizer.pt"),
        "scheduler": torch.load(newest / "scheduler.pt"),
        "metrics": timeless(json_lines(folder / "metrics.jsonl")),
        "schedule": timeless(read_schedule(folder)),
        "episodes": episodes,
        "parts": torch.load(newest / "step_parts.pt"),
    }


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name not in TIMES and not name.startswith("time/")}
        for row in rows
    ]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    for name, part in one.items():
        if name in ("weights", "optimizer", "parts"):
            torch.testing.assert_close(part, other[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert part == other[name], name


LORA = ("--model.lora", "{r: 4}", "--grpo.sync_ref_model", "false")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n_kills", "n_steps", "more"),
    [
        pytest.param(2, 6, (), id="2"),
        pytest.param(10, 14, (), id="10", marks=pytest.mark.slow),
        pytest.param(10, 14, TWO, id="10-two", marks=pytest.mark.slow),
        pytest.param(10, 14, LORA, id="10-lora", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(
    config: Path, tmp_path: Path, n_kills: int, n_steps: int, more: tuple[str, ...]
) -> None:
    options = ("--grpo.max_steps", str(n_steps), *SCHEDULE, *more)
    one, other = tmp_path / "undisturbed", tmp_path / "killed"
    finish(config, one, *options)
    expected = content(one)
    assert expected["name"] == f"checkpoint-{n_steps}"
    seconds = (one / expected["name"]).stat().st_mtime - (one / "config.yaml").stat().st_mtime
    moment, n_killed = random.Random(n_kills), 0
    while n_killed < n_kills:
        after_s = moment.uniform(0, 0.6 if n_kills < 10 else 0.35) * seconds
        n_killed += killed(start(config, other, *options), other, after_s=after_s)
    finish(config, other, *options)

    assert_same(expected, content(other))
    assert [find_damage(path) for path in saved_checkpoints(other)] == [None] * 3
    archived = {path.name for path in other.glob("earlier-*")}  # of starts killed before the first checkpoint
    assert {path.name for path in other.iterdir()} - archived == {path.name for path in one.iterdir()}


def test_a_run_killed_before_it_removed_an_old_checkpoint_removes_it_later(
    config: Path, tmp_path: Path
) -> None:
    """Killed after its last checkpoint, so that no step is left when it goes on."""
    folder, options = tmp_path / "run", ("--grpo.max_steps", "3", "--grpo.save_total_limit", "1")
    finish(config, folder, *options)
    kept = saved_checkpoints(folder)  # the newest and the best
    removed = [folder / f"checkpoint-{step}" for step in (1, 2) if folder / f"checkpoint-{step}" not in kept]
    shutil.copytree(kept[-1], removed[0])

    finish(config, folder, *options)

    assert saved_checkpoints(folder) == kept


@pytest.mark.thorough
def test_a_resumed_run_selects_the_questions_of_an_undisturbed_one(config: Path, tmp_path: Path) -> None:
    """Killed in the middle of a generation batch."""
    options = (*TWO, "--grpo.max_steps", "5", "--grpo.save_total_limit", "5")
    finish(config, tmp_path / "undisturbed", *options)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "resumed")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "resumed" / f"checkpoint-{step}")
    finish(config, tmp_path / "resumed", *options)
    expected = content(tmp_path / "undisturbed")
    assert_same(expected, content(tmp_path / "resumed"))
    assert len(expected["parts"]["parts"]["select"]["strata"]) == 2


@pytest.mark.thorough
def test_evaluations_during_training_change_nothing_but_what_is_kept(config: Path, tmp_path: Path) -> None:
    options = ("--grpo.max_steps", "3", "--grpo.save_steps", "3")
    finish(config, tmp_path / "plain", *options)
    finish(config, tmp_path / "scheduled", *options, *SCHEDULE, "--evaluation.keep", "best")

    plain, scheduled = content(tmp_path / "plain"), content(tmp_path / "scheduled")
    assert [record["step"] for record in scheduled["schedule"]] == [0, 2, 3]
    assert [row["step"] for row in scheduled["metrics"] if "eval_dev/accuracy/strict" in row] == [0, 2, 3]
    assert_same({name: plain[name] for name in ("weights", "optimizer", "episodes")}, scheduled)
    best = best_checkpoint(tmp_path / "scheduled")
    assert best in saved_checkpoints(tmp_path / "scheduled")
    said = (tmp_path / "scheduled.txt").read_text()
    assert f"Kept the weights of step {best.name.removeprefix('checkpoint-')} of 3 (dev: step 0 " in said


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_skipped_and_later_ones_moved(config: Path, tmp_path: Path) -> None:
    """An adapter: its run goes on from the checkpoint before a torn one, and ends with the same weights."""
    folder = tmp_path / "run"
    options = ("--grpo.max_steps", "3", *LORA)
    finish(config, folder, *options)
    assert [path.name for path in saved_checkpoints(folder)][-2:] == ["checkpoint-2", "checkpoint-3"]
    weights = load_file(folder / "checkpoint-3" / "adapter_model.safetensors")
    metrics = [row["loss"] for row in json_lines(folder / "metrics.jsonl")]
    optimizer = folder / "checkpoint-3" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])

    finish(config, folder, *options)

    said = folder.with_suffix(".txt").read_text()
    assert f"Skipped a damaged checkpoint: {folder / 'checkpoint-3'} (optimizer.pt has " in said
    assert f"Moved later checkpoints of this folder to {folder / 'earlier-1'}" in said
    assert (folder / "earlier-1" / "checkpoint-3" / "optimizer.pt").is_file()
    again = load_file(folder / "checkpoint-3" / "adapter_model.safetensors")
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
    assert [row["loss"] for row in json_lines(folder / "metrics.jsonl")] == metrics

    before = (folder / "checkpoint-3" / "manifest.json").read_bytes()
    finish(config, folder, *options)  # nothing is left to do, so nothing is done
    assert (folder / "checkpoint-3" / "manifest.json").read_bytes() == before
    assert [row["loss"] for row in json_lines(folder / "metrics.jsonl")] == metrics


def test_sigterm_saves_and_ends_like_ctrl_c(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pid = start(config, folder, "--grpo.max_steps", "500", "--grpo.save_steps", "500")
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert not has_ended(pid)
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert ended([pid]) == [130]
    (checkpoint,) = saved_checkpoints(folder)
    assert find_damage(checkpoint) is None
    assert f"Stopped. Saved: {checkpoint}. Resume with:" in folder.with_suffix(".txt").read_text()
