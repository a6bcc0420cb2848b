"""Runs of several seeds: trained one after the other, gone on with, and compared."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import needs_fork
from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.files import write_jsonl

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
    pages = json.loads((tmp_path / "run" / "comparison.report.json").read_text())
    assert [page["name"] for page in pages] == ["seed-3", "seed-4"]
    assert (tmp_path / "run" / "comparison.html").is_file()


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


@pytest.fixture
def finished(tmp_path: Path) -> Callable[..., str]:
    """Run folder whose model gained the first n of some questions, with other fields of the last one."""

    def write(name: str, gained: int, total: int = 20, **last: str) -> str:
        (tmp_path / name).mkdir()
        rows = [answered(f"q{n}", strict=n < gained) for n in range(total)]
        rows[-1] |= last
        (tmp_path / name / "evaluation.json").write_text("{}")
        write_jsonl(tmp_path / name / "evaluation.jsonl", rows)
        write_jsonl(tmp_path / name / "evaluation-before.jsonl", [row | {"strict": False} for row in rows])
        return str(tmp_path / name)

    return write


def answered(id: str, *, strict: bool) -> dict[str, Any]:
    return {
        **{"set": "test", "example": id, "database": "shop", "family": "other", "difficulty": "easy"},
        **{"question": f"{id}?", "gold_sql": "SELECT 1", "final_sql": "SELECT 1", "messages": []},
        **{"strict": strict, "official": strict, "reason": "equal" if strict else "values"},
    }


def test_runs_without_answers_or_with_others_are_refused(
    finished: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [finished("a", 1), finished("b", 1)]
    assert main(["compare", *runs, str(tmp_path)]) == 1
    assert "no finished run with answers before and after training" in capsys.readouterr().err
    assert main(["compare", *runs, f"{runs[0]}/../a"]) == 1
    assert "each run folder once" in capsys.readouterr().err
    others = [{"set": "dev"}, {"example": "r"}, {"question": "Who?"}, {"gold_sql": "SELECT 2"}]
    for number, other in enumerate(others):
        assert main(["compare", *runs, finished(f"other{number}", 1, **other)]) == 1
        assert "answered different held-out questions" in capsys.readouterr().err
    assert main(["compare", *runs, finished("longer", 1, 21)]) == 1
    assert "such as q20 in test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gained", "interval"),
    [
        ((5, 5, 5), "+25.0 points in the mean of 3 runs (+3.8 to +46.9, by question;"),
        ((0, 5, 10), "+25.0 points in the mean of 3 runs (-37.1 to +87.1, by Student's t between the runs;"),
    ],
)
def test_runs_that_agree_by_chance_have_the_interval_by_question(
    finished: Callable[..., str], capsys: pytest.CaptureFixture[str], gained: tuple[int, ...], interval: str
) -> None:
    assert main(["compare", *(finished(f"run{n}", count) for n, count in enumerate(gained))]) == 0
    out = capsys.readouterr().out
    assert interval in out and "on the same 20 questions" in out
