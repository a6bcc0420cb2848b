"""What real trackers hold after a short training, read back from their own files."""

import json
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.tiny_run import write_config
from tests.weave_server import running_weave
from text2sql_grpo.commands import main
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.reporting.trackers import (
    PROJECT,
    EpisodeTraces,
    check_installed,
    reported_by_transformers,
    trackers,
    tracking,
)

SETS = {
    "dev": {
        "overall": {"strict": {"accuracy": 0.25}, "official": {"accuracy": 0.5}},
        "looks_per_question": 1.5,
    }
}
REWARDS = {1: 0.125, 2: 0.75}
EVALUATION = {
    "eval/dev/accuracy/strict": 0.25,
    "eval/dev/accuracy/official": 0.5,
    "eval/dev/episode/looks": 1.5,
}


class Toy(torch.nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sum()}


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}


class Logs(TrainerCallback):
    """Logs our figures at each step, and writes its episodes, as the trainer does."""

    def __init__(self, episodes: Path | None = None) -> None:
        self.trainer: Trainer
        self._episodes = episodes

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._episodes is not None:
            with self._episodes.open("a") as file:
                file.write(json.dumps(EPISODE | {"step": state.global_step}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log({"reward": REWARDS[state.global_step], "accuracy/strict": 0.5})


EPISODE: dict[str, Any] = {
    "example": "q1",
    "question": "How many?",
    "database": "shop",
    "gold_sql": "SELECT 1",
    "messages": [{"role": "user", "content": "How many?"}],
    "final_sql": "SELECT 2",
    "stop_reason": "submitted",
    "strict": False,
    "official": True,
    "reason": "values",
    "flags": [],
    "scores": {"execution": 0.0, "format": 1.0},
    "reward": 0.125,
    "actions": [
        {"kind": "run_sql", "sql": "SELECT 3", "outcome": {"status": "ok", "rows": 1}},
        {"kind": "malformed", "sql": "", "error": "expected one action"},
        {"kind": "submit_sql", "sql": "SELECT 2"},
    ],
}


def train(folder: Path, names: list[str], *, episodes: Path | None = None) -> None:
    """Two steps of a toy, tracked, and an evaluation before and after."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        run_name="toy",
        project=PROJECT,
        report_to=reported_by_transformers(names),
        max_steps=2,
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    logs = Logs(episodes)
    with tracking(names, arguments) as opened:
        logs.trainer = Trainer(Toy(), arguments, train_dataset=Numbers(), callbacks=[logs, *opened.callbacks])
        logs.trainer.train()
        opened.log_evaluation({}, 0)
        opened.log_evaluation(SETS, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder, without keys or settings of trackers."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "run"


def test_what_is_asked_for() -> None:
    assert trackers(None) == ["wandb"]
    assert trackers("none") == [] and reported_by_transformers([]) == ["none"]
    assert trackers(["weave", "tensorboard"]) == ["weave", "tensorboard"]
    assert reported_by_transformers(["weave", "tensorboard"]) == ["tensorboard"]
    assert reported_by_transformers(["weave"]) == ["none"]
    assert trackers("mlflow") == ["mlflow"]  # of transformers
    for wrong in ("tensorbord", ["wandb", "weaver"], 5, "all"):
        with pytest.raises(
            ConfigError, match="must be a list of wandb, trackio, tensorboard, weave, or none"
        ):
            trackers(wrong)


def test_wandb_is_not_asked_for_where_neither_package_nor_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert trackers(None) == []
    monkeypatch.setenv("WANDB_API_KEY", "key")
    with pytest.raises(ConfigError, match="wandb, which is not installed"):
        check_installed(trackers(None))


def test_a_tracker_without_its_package_stops_the_run_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("trackio", "weave"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"names trackio and weave, .*: pip install '.*\[trackio,weave\]'"):
        check_installed(["wandb", "trackio", "weave"])

    config = write_config(tmp_path)
    assert main(["train", "--config", str(config), "--grpo.report_to", "[wandb, trackio]"]) == 1

    assert "pip install 'text2sql-grpo[trackio]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tensorboard_holds_every_figure_by_the_same_name(folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(folder, ["tensorboard"])

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    read = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert read["train/reward"] == REWARDS
    assert read["train/accuracy/strict"] == {1: 0.5, 2: 0.5}
    assert {name: read[name] for name in EVALUATION} == {name: {2: v} for name, v in EVALUATION.items()}
    assert {path.name for path in folder.iterdir()} == {"tensorboard"}


def test_trackio_holds_every_figure_by_the_same_name(folder: Path) -> None:
    pytest.importorskip("trackio", reason="needs trackio")
    from trackio.sqlite_storage import SQLiteStorage

    train(folder, ["trackio"])

    rows = SQLiteStorage.get_logs(PROJECT, "toy")
    assert {r["train/global_step"]: r["train/reward"] for r in rows if "train/reward" in r} == REWARDS
    (evaluated,) = [row for row in rows if "eval/dev/accuracy/strict" in row]
    assert {name: evaluated[name] for name in EVALUATION} == EVALUATION
    assert evaluated["train/global_step"] == 2


def test_wandb_without_a_key_stays_in_the_run_folder_with_every_figure(folder: Path) -> None:
    train(folder.parent / "before", ["wandb"])
    train(folder, ["wandb"])

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = list(history(file))
    assert {r["train/global_step"]: r["train/reward"] for r in rows if "train/reward" in r} == REWARDS
    (evaluated,) = [row for row in rows if "eval/dev/accuracy/strict" in row]
    assert {name: evaluated[name] for name in EVALUATION} == EVALUATION
    assert evaluated["train/global_step"] == 2


def history(file: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a W&B file: records in LevelDB's log format, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_weave_without_a_key_says_so_and_lets_the_run_go_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(folder, ["weave"])
    assert "Weave needs WANDB_API_KEY: no episode is sent to it; all of them are in" in caplog.text


@pytest.mark.skipif(find_spec("weave") is None, reason="needs weave")
@pytest.mark.filterwarnings("default")  # of its own libraries
def test_weave_is_sent_each_episode_with_its_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own SDK, to a server of this machine that speaks enough of its interface."""
    folder.mkdir()
    episodes = folder / "rollouts.jsonl"
    episodes.write_text(json.dumps(EPISODE | {"step": -1, "example": "sent by an earlier run"}) + "\n")
    with running_weave() as server:
        for name in ("WANDB_BASE_URL", "WF_TRACE_SERVER_URL"):
            monkeypatch.setenv(name, server.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        train(folder, ["weave"], episodes=episodes)
    calls = server.calls()
    roots = [call for call in calls if call["parent_id"] is None]
    assert [call["attributes"]["step"] for call in roots] == [0, 1]
    for root in roots:
        assert "/op/episode:" in root["op_name"]
        assert (root["attributes"]["run"], root["attributes"]["example"]) == ("toy", "q1")
        assert root["inputs"]["question"] == "How many?" and root["output"]["scores"]["format"] == 1.0
        assert root["output"]["reward"] == 0.125 and root["output"]["reason"] == "values"
        turns = [call for call in calls if call["parent_id"] == root["id"]]
        assert [(turn["op_name"].split("/")[-1].split(":")[0], turn["inputs"]["sql"]) for turn in turns] == [
            *(("run_sql", "SELECT 3"), ("malformed", ""), ("submit_sql", "SELECT 2")),
        ]
        assert turns[0]["output"] == {"status": "ok", "rows": 1}
        assert turns[1]["output"] == "expected one action"


@pytest.mark.skipif(find_spec("weave") is None, reason="needs weave")
@pytest.mark.filterwarnings("default")
def test_weave_that_cannot_be_reached_stops_the_run_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_BASE_URL", "WF_TRACE_SERVER_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with pytest.raises(ConfigError, match=r"(?s)cannot send traces to Weave: .*take weave out of"):
        train(folder, ["weave"])


class Client:
    """Stands where Weave's client does, to hold what episodes are made of it without its package."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.finished: list[Any] = []

    def create_call(self, op: str, inputs: dict[str, Any], **options: Any) -> int:
        self.calls.append((op, options))
        return len(self.calls)

    def finish_call(self, call: int, *, output: Any) -> None:
        self.finished.append(output)


def test_episodes_of_a_step_are_sent_once(tmp_path: Path) -> None:
    client, rollouts = Client(), tmp_path / "rollouts.jsonl"
    logs, traces = Logs(rollouts), EpisodeTraces(client, rollouts, "toy")
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True)
    logs.trainer = Trainer(Toy(), arguments, train_dataset=Numbers(), callbacks=[logs, traces])
    logs.trainer.train()
    assert [op for op, _ in client.calls] == ["episode", "run_sql", "malformed", "submit_sql"] * 2
    assert [options["attributes"]["step"] for op, options in client.calls if op == "episode"] == [0, 1]
    assert [options["parent"] for _, options in client.calls[1:4]] == [1, 1, 1]
    assert client.finished[:2] == [{"status": "ok", "rows": 1}, "expected one action"]
