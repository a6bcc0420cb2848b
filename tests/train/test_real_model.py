"""The quickstart's own model, data and settings, in as few and small steps as show that it learns."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.scripted_policy import SHOP
from tests.tiny_run import write_questions
from text2sql_grpo.commands import main
from text2sql_grpo.rollout.policy import trial_obstacle

REPO_ROOT = Path(__file__).parents[2]


def fine_tune(out: Path, *options: str) -> list[dict[str, float]]:
    """Optimiser steps in `metrics.jsonl` of a stage by the quickstart with options like "--name value"."""
    given = [part for option in options for part in option.split(" ", 1)]
    config = ["--config", str(REPO_ROOT / "config" / "quickstart.yaml"), "--out", str(out)]
    assert main(["sft", *config, *given]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)


@pytest.mark.thorough
def test_two_small_steps_of_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    (tmp_path / "databases" / "shop.sql").write_text(SHOP, encoding="utf-8")
    questions = write_questions(tmp_path / "questions.jsonl")
    first, second = fine_tune(
        tmp_path / "sft",
        f"--model.path {smollm2}",
        f"--data.databases {tmp_path / 'databases'}",
        f"--data.train {questions}",
        f"--sft.questions {questions}",
        "--data.dev null",
        "--sft.max_steps 2",
        "--sft.batch_size 2",
        "--sft.group_size 2",
        "--sft.warmup_ratio 0",
        "--data.test {}",
        "--evaluation.every null",
        "--evaluation.keep last",
    )
    assert 1.0 < first["loss"] < 8.0 and second["loss"] != first["loss"]
    assert first["grad_norm"] > 0.01
    weights = load_file(tmp_path / "sft" / "adapter" / "adapter_model.safetensors")
    learned = [bool(weight.any()) for name, weight in weights.items() if "lora_B" in name]  # they start at 0
    assert len(learned) == 210 and all(learned)


def test_the_fast_engine_plays_the_real_model_in_bfloat16(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    assert trial_obstacle(PeftModel.from_pretrained(model, REPO_ROOT / "data" / "start")) is None


@pytest.mark.slow
def test_the_shipped_start_is_made_again(smollm2: Path, tmp_path: Path) -> None:
    """The first steps of `make sft` have the losses that stand beside the shipped adapter."""
    start = REPO_ROOT / "data" / "start"
    recorded = [json.loads(line) for line in (start / "metrics.jsonl").read_text().splitlines()]
    # A stage of as many steps, for its learning rate, of which three are taken.
    made = fine_tune(
        tmp_path,
        f"--model.path {smollm2}",
        "--sft.evaluate_every 3",
        "--evaluation.schedule_samples 1",
    )
    assert len(made) == 3
    for row, expected in zip(made, recorded, strict=False):
        assert row["tokens"] == expected["tokens"]
        assert round(row["learning_rate"], 9) == expected["learning_rate"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=0.02)  # on any processor


def test_the_shipped_start_is_small_and_whole() -> None:
    start = REPO_ROOT / "data" / "start"
    assert sum(file.stat().st_size for file in start.iterdir()) < 10e6
    config = json.loads((start / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m" and config["r"] == 16
    weights = load_file(start / "adapter_model.safetensors")
    assert len(weights) == 420 and all(weight.isfinite().all() for weight in weights.values())
    assert all(weight.dtype == torch.bfloat16 and weight.any() for weight in weights.values())
