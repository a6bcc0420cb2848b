"""Which weights a run merges where GRPO made the model worse, and that it warns."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main

# So high that one step of GRPO destroys the model, which gets some questions right before.
DESTRUCTIVE = 0.5


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_model: str) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, sft=None, model={"path": started_model, "dtype": "float32"})


def train(config: Path, *options: str) -> None:
    """Train two steps, each evaluated on all questions."""
    schedule = ["--data.dev", "questions.jsonl", "--evaluation.every", "1"]
    destructive = ["--grpo.learning_rate", str(DESTRUCTIVE)]
    assert main(["train", "--config", str(config), *schedule, *destructive, *options]) == 0


def scheduled(run: Path) -> list[float]:
    """Accuracy on `data.dev` of each step."""
    return [line["accuracy"]["accuracy"] for line in json_lines(run / "evaluation_schedule.jsonl")]


@pytest.mark.usefixtures("without_pictures", "rewards_with_spread")
@pytest.mark.parametrize("lora", [pytest.param("null", marks=pytest.mark.thorough), "{r: 4}"])
def test_the_weights_from_before_training_are_merged_if_no_step_was_as_good(
    config: Path, started_model: str, lora: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, "--evaluation.keep", "best", "--model.lora", lora, "--grpo.save_steps", "1")
    before, *after = scheduled(Path("run"))
    assert before > max(after)
    merged, start = (load_file(Path(folder, "model.safetensors")) for folder in ("run/merged", started_model))
    torch.testing.assert_close(merged, start, rtol=0, atol=0)
    assert json.loads(Path("run/evaluation.json").read_text())["step"] == 0
    printed = capsys.readouterr().out
    assert f"Kept the weights of step 0 of 2 (dev: step 0 {before:.1%}, step 2" in printed
    assert "warning: GRPO made the model worse" in printed and "the weights from before it" in printed


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures", "rewards_with_spread")
def test_a_last_step_that_is_worse_than_the_start_is_warned_of(
    config: Path, started_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, "--evaluation.keep", "last")
    merged, start = (load_file(Path(folder, "model.safetensors")) for folder in ("run/merged", started_model))
    assert any((merged[name] != start[name]).any() for name in start)
    assert "warning: GRPO made the model worse" in capsys.readouterr().out
    assert json.loads(Path("run/evaluation.json").read_text())["step"] == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures", "rewards_with_spread")
def test_a_run_resumes_from_step_0(config: Path) -> None:
    options = ("--evaluation.keep", "best", "--grpo.save_steps", "1", "--grpo.save_total_limit", "5")
    train(config, *options)
    run = Path("run")
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == [f"checkpoint-{n}" for n in range(3)]
    trained, known = load_file(run / "checkpoint-2" / "model.safetensors"), scheduled(run)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    train(config, *options, "--resume", "auto")
    again = load_file(run / "checkpoint-2" / "model.safetensors")
    torch.testing.assert_close(again, trained, rtol=0, atol=0)
    assert scheduled(run) == known
    train(config, *options, "--run.output_dir", "moved", "--resume", "run/checkpoint-1")
    assert scheduled(Path("moved")) == known
    assert json.loads(Path("moved/evaluation.json").read_text())["step"] == 0
