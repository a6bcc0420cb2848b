"""Runs of several seeds: trained one after the other, gone on with, and compared."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import needs_fork
from tests.tiny_run import write_config
from text2sql_grpo.commands import main

SHORT = ["--sft.max_steps", "2", "--grpo.max_steps", "1"]


@pytest.mark.thorough
def test_each_seed_is_trained_once_and_all_are_one_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--config", str(write_config(tmp_path)), "--seeds", "3", "4", *SHORT]
    argv += ["--evaluation.samples", "2"]
    assert main(argv) == 0
    out = capfd.readouterr().out
    assert "All of this is of one seed, 3." in out and "vote@2" in out
    assert "Strict accuracy in %, 2 runs" in out
    record = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert record["verdict"] in out
    folders = [tmp_path / "run" / f"seed-{seed}" for seed in (3, 4)]
    assert record["runs"] == [str(folder) for folder in folders]
    scores = [json.loads((folder / "evaluation.json").read_text()) for folder in folders]
    assert [one["sets"]["test_values"]["samples"]["samples"] for one in scores] == [2, 2]
    assert [one["before"]["sets"]["test_values"]["samples"]["samples"] for one in scores] == [2, 2]
    assert record["sets"]["test_values"]["after"] == [
        one["sets"]["test_values"]["overall"]["strict"]["accuracy"] for one in scores
    ]

    assert main(argv) == 0  # again: nothing is trained twice
    out = capfd.readouterr().out
    assert "seed 3: finished" in out and "seed 4: finished" in out and "GRPO" not in out
    assert main([*argv, "--grpo.learning_rate", "0.5"]) == 1
    assert "other settings: grpo.learning_rate 0.001 -> 0.5; leave" in capfd.readouterr().err
    assert main(["compare", *map(str, folders), str(folders[0]), "--out", str(tmp_path / "c.json")]) == 0
    assert "in the mean of 3 runs" in capfd.readouterr().out
    pages = json.loads((tmp_path / "c.report.json").read_text())
    assert [page["name"] for page in pages] == ["seed-3", "seed-4", "seed-3"]
    assert (tmp_path / "c.html").is_file()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["1"], "needs at least two different seeds"),
        (["1", "1"], "needs at least two different seeds"),
        (["1", "2", "--smoke"], "neither --smoke"),
        (["1", "2", "--data.test", "{}"], "set data.test"),
        (["1", "2", "--evaluation.before_training", "false"], "set data.test"),
    ],
)
def test_seeds_that_cannot_be_compared_are_refused(
    tmp_path: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(write_config(tmp_path)), "--seeds", *wrong]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "seed 1:" not in printed.out


@needs_fork
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_waits_for_the_checkpoint_of_the_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal sends Ctrl-C to the run too, SIGTERM only the parent."""
    run, stopped = tmp_path / "run.sh", tmp_path / "stopped"
    wait = f"sleep 1; kill -{name} $PPID; sleep 1"
    end = {"TERM": "exit 3", "INT": f"touch {stopped}; exit 130"}[name]
    run.write_text(f"#!/bin/sh\ntrap 'touch {stopped}; exit 130' TERM\n{wait}\n{end}\n")
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["train", "--config", str(write_config(tmp_path)), "--seeds", "3", "4", *SHORT]) == 130
    assert stopped.is_file()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_runs_without_figures_or_with_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def finished(name: str, total: int) -> str:
        scores = {
            "test": {"overall": {"strict": {"correct": 1, "total": total, "by_database": {"a": [1, total]}}}}
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(
            json.dumps({"sets": scores, "before": {"sets": scores}})
        )
        return str(tmp_path / name)

    runs = [finished("a", 4), finished("b", 4)]
    assert main(["compare", *runs, str(tmp_path)]) == 1
    assert "no finished run with accuracies before and after training" in capsys.readouterr().err
    assert main(["compare", *runs, finished("c", 5)]) == 1
    assert "answered other held-out sets than" in capsys.readouterr().err
    assert main(["compare", *runs, runs[0]]) == 0
    assert "+0.0 points in the mean of 3 runs" in capsys.readouterr().out
