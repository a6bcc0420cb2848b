"""What a resumed run may change, and the learning rates of one that is extended."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.run import pipeline as job
from text2sql_grpo.run_folder import read_evaluation

pytestmark = pytest.mark.usefixtures("own_cache", "rewards_with_spread", "without_pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, started_model: str) -> Iterator[Path]:
    """Folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    model = {"path": started_model, "dtype": "auto"}
    config = write_config(folder, sft=None, model=model, evaluation={"before_training": False})
    config.write_text(config.read_text().replace(f"{folder}/", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "--config", str(config), "--run.output_dir", "run"]) == 0
    yield folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of the finished run."""
    shutil.copytree(finished, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    return Path("run")


def resume(*options: str) -> int:
    return main(["train", "--config", "run/config.yaml", "--resume", "auto", *options])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            ["--environment.max_turns", "1", "--grpo.learning_rate", "5e-3"],
            "environment.max_turns 2 -> 1, grpo.learning_rate 0.001 -> 0.005;",
        ),
        (["--grpo.max_steps", "4", "--grpo.beta", "0.1"], "settings: grpo.beta 0.0 -> 0.1;"),
        (["--sft", "{}"], "settings: sft None -> {"),
        (["--data.test_samples", "2"], "data.test_samples None -> 2;"),
        (["--rewards", "{preset: strict}"], "rewards.execution 1.0 -> None"),
        (
            ["--grpo.per_device_train_batch_size", "8"],
            "grpo.per_device_train_batch_size * gradient_accumulation_steps 16 -> 8",
        ),
    ],
)
def test_a_change_of_what_is_learned_or_measured_is_refused(
    run: Path, options: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert resume(*options) == 1
    error = capsys.readouterr().err
    assert "cannot resume run/checkpoint-2" in error and shown in error
    assert "--model.path run/merged" in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_edit_of_the_config_in_the_run_folder_is_a_change(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_turns: 2", "max_turns: 1"))
    assert resume() == 1
    assert "environment.max_turns 2 -> 1;" in capsys.readouterr().err


def test_an_extended_run_has_the_learning_rates_of_the_new_length(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("moved").mkdir()
    shutil.move("questions.jsonl", "moved")
    moved = [f"--data.{name}=moved/questions.jsonl" for name in ("train", "test.test_values")]
    batch = ["--grpo.per_device_train_batch_size", "8", "--grpo.gradient_accumulation_steps", "2"]
    measured = ["--evaluation.before_training", "true"]
    assert resume("--grpo.max_steps", "4", *batch, *moved, *measured) == 0
    out = capsys.readouterr().out
    assert "Evaluation before" in out
    assert "grpo.max_steps 2 -> 4" in out and "learning rates of a run of the new length" in out
    rates = [row["learning_rate"] for row in json_lines(run / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])

    assert resume() == 0  # nothing is left to do, and nothing has changed
    assert "Changed" not in capsys.readouterr().out
    other = ["--run.output_dir", "other", "--resume", "run/checkpoint-4"]
    assert main(["train", "--config", "run/config.yaml", *other]) == 0
    for log in ("metrics.jsonl", "rollouts.jsonl"):
        assert Path("other", log).read_bytes() == (run / log).read_bytes()


def test_a_resumed_run_has_no_results_before_its_end_and_compares_the_same_questions(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"merged", "model", "report.html", "evaluation.jsonl", "suspects.jsonl", "suspects.md"}
    with monkeypatch.context() as patch:
        patch.setattr(job, "train_on", Mock(side_effect=KeyboardInterrupt))
        assert resume("--grpo.max_steps", "3", "--evaluation.before_training", "true") == 130
    assert results <= {path.name for path in (run / "earlier-1").iterdir()}
    assert not results & {path.name for path in run.iterdir()}
    assert [read_evaluation(folder).keys() >= {"sets"} for folder in (run, run / "earlier-1")] == [
        False,
        True,
    ]

    questions = Path("questions.jsonl")
    questions.write_text(questions.read_text().replace("COUNT(*)", "COUNT(code)"))
    capsys.readouterr()
    assert resume() == 0
    assert "held-out questions have changed" in capsys.readouterr().out
    assert "change" in read_evaluation(run) and [*run.glob("earlier-*")] == [run / "earlier-1"]


def test_sft_keeps_its_settings_and_can_be_extended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sft", "--config", "run/config.yaml", "--out", "tuned", "--sft.learning_rate", "0.01"]
    assert main([*argv, "--sft.max_steps", "2"]) == 0
    argv += ["--resume", "auto", "--sft.max_steps", "4"]
    assert main([*argv, "--sft.batch_size", "4"]) == 1
    error = capsys.readouterr().err
    assert "sft.batch_size 16 -> 4; leave" in error and "sft.max_steps" not in error
    assert main(argv) == 0
    assert "sft.max_steps 2 -> 4" in capsys.readouterr().out
    rates = [row["learning_rate"] for row in json_lines(Path("tuned/metrics.jsonl"))]
    assert len(rates) == 4 and rates[2] > rates[3] > 0
