"""A merge checked by answers: the same for a right one, others for another model."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.tiny_model import write_adapter, write_model
from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.run.held_out import check_merge


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with an adapter, and its base beside it."""
    monkeypatch.chdir(tmp_path)
    environment = {"schema_text": "compact", "instructions": False, "max_turns": 2, "max_turn_tokens": 8}
    config = write_config(tmp_path, environment=environment)
    base = write_model(tmp_path / "base", max_positions=512)
    write_adapter(tmp_path / "run" / "adapter", base)
    config.rename(tmp_path / "run" / "config.yaml")
    return tmp_path / "run"


def test_the_verb_answers_questions_before_and_after(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--adapter", "run/adapter", "--num_samples", "3"]) == 0

    out = capsys.readouterr().out
    assert "largest change of a logit: merging" in out
    assert (
        "the same 3 questions, greedy: 0 with different SQL, 0 with different tokens; "
        "0 right before merging, 0 after"
    ) in " ".join(out.split())


def test_another_model_is_told_from_the_merged_one(run: Path, tmp_path: Path) -> None:
    bench = Bench.open(load_config(run / "config.yaml"))
    check = check_merge(
        run / "adapter",
        tmp_path / "base",
        bench,
        Console(file=io.StringIO()),
        num_samples=16,
        base=str(tmp_path / "base"),
        dtype="auto",
        quantization="none",
    )
    assert check.record()["other_words"] == check.before.total == 4  # all there are


def test_what_cannot_be_checked_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert main(["merge", *options]) == 1
        return capsys.readouterr().err

    assert "--config and settings need --num_samples" in refused(
        "--adapter", "run/adapter", "--run.seed", "1"
    )
    assert "compares an adapter with its merged model, but base holds none" in refused(
        "--adapter", "base", "--num_samples", "2", "--config", "run/config.yaml"
    )
    assert "data.test has no held-out sets" in refused(
        "--adapter", "run/adapter", "--num_samples", "2", "--data.test", "{}"
    )
