"""What real trackers hold after a run, read back from their own files."""

import json
import os
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from tests.weave_server import running_weave
from text2sql_grpo.commands import main
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.reporting.trackers import EpisodeTraces, check_installed, trackers, tracking

VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "TENSORBOARD_LOGGING_DIR")
NAMES = ("reward", "accuracy/strict", "completions/mean_length")
RUN_NAME = "a tracked run"

pytestmark = pytest.mark.thorough  # its one run takes seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, started_model: str) -> Path:
    """Folder of a run of two steps, with every tracker that works without a key."""
    folder = tmp_path_factory.mktemp("tracked")
    config = write_config(folder, model={"path": started_model, "dtype": "float32"}, sft=None)
    names = [name for name in ("wandb", "tensorboard", "trackio") if find_spec(name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in VARIABLES:
            patch.setenv(name, "")
        (folder / "held_out").mkdir()
        test = write_questions(folder / "held_out" / "questions.jsonl", QUESTIONS[::-1])  # named like train's
        options = ["--grpo.report_to", json.dumps(names), "--grpo.run_name", RUN_NAME]
        options += ["--data.test.test_values", str(test)]
        assert main(["train", "--config", str(config), *options]) == 0
    return folder / "run"


def expected(run: Path) -> dict[str, dict[int, float]]:
    """Values of each figure by step, from the run folder."""
    rows = json_lines(run / "metrics.jsonl")
    figures = {f"train/{name}": {row["step"]: row[name] for row in rows} for name in NAMES}
    sets = json_lines(run / "evaluation.jsonl"), json_lines(run / "evaluation-before.jsonl")
    last = max(row["step"] for row in rows)
    for grading in ("strict", "official"):
        after, before = (sum(answer[grading] for answer in answers) / len(answers) for answers in sets)
        figures[f"eval/test_values/accuracy/{grading}"] = {0: before, last: after}
    return figures


def by_step(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {row["train/global_step"]: row[name] for row in rows if name in row}


def test_tensorboard_holds_every_figure_by_the_same_name(run: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for name, values in expected(run).items():
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(values)
    assert events.Scalars("eval/test_values/episode/looks")


def test_trackio_holds_every_figure_by_the_same_name(run: Path) -> None:
    pytest.importorskip("trackio", reason="needs trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("text2sql-grpo", RUN_NAME)
    for name, values in expected(run).items():
        assert by_step(rows, name) == pytest.approx(values)


def test_wandb_without_a_key_stays_in_the_run_folder_with_every_figure(run: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    rows = list(history(file))
    for name, values in expected(run).items():
        assert by_step(rows, name) == pytest.approx(values)


def test_wandb_holds_the_config_the_tables_and_the_files_under_the_run_s_id(run: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    found = list(records(file))
    (own,) = {record.run.run_id for record in found if record.HasField("run")}
    assert own == (run / "wandb" / "run_id").read_text() and own in file.name
    configs = [item for record in found if record.HasField("config") for item in record.config.update]
    configs += [item for record in found if record.HasField("run") for item in record.run.config.update]
    values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in configs}
    assert values["config"] == yaml.safe_load((run / "config.yaml").read_text())
    kinds = {record.request.log_artifact.artifact.type or record.artifact.type for record in found}
    assert {"report", "questions", "model"} <= kinds
    assert {"episodes/_type", "held_out/_type"} <= {name for row in history(file) for name in row}
    (table,) = run.glob("wandb/offline-run-*/files/media/table/episodes*.json")
    shown = json.loads(table.read_text())
    episodes = json_lines(run / "rollouts.jsonl")
    steps = [row[shown["columns"].index("step")] for row in shown["data"]]
    assert steps == sorted(steps) and set(steps) == {row["step"] + 1 for row in episodes}
    assert max(steps.count(step) for step in steps) == 8


def test_tensorboard_and_trackio_hold_the_config_and_the_tables(run: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    pytest.importorskip("trackio", reason="needs trackio")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from trackio.sqlite_storage import SQLiteStorage

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    texts = {
        name: events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()
        for name in ("config", "episodes", "held_out")
    }
    assert '"num_generations": 4' in texts["config"]
    assert texts["held_out"].startswith("| set | example | database |")
    assert len(texts["held_out"].splitlines()) == 2 + 4
    rows = SQLiteStorage.get_logs("text2sql-grpo", RUN_NAME)
    assert {"episodes", "held_out"} <= {name for row in rows for name in row}


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")
    seen = set()
    for _ in range(2):
        with tracking(["wandb"], weave_arguments(tmp_path)):
            seen.add((os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]))
    assert len(seen) == 1 and seen.pop()[1] == "allow"
    assert not os.environ.get("WANDB_RUN_ID")


def history(file: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a W&B file."""
    for record in records(file):
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def records(file: Path) -> Iterator[Any]:
    """Records of a W&B file, in LevelDB's log format, after 7 bytes."""
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
            yield Record.FromString(parts)
            parts = b""


def test_trackers_by_default_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trackers("none") == []
    assert trackers(["weave", "tensorboard"]) == ["weave", "tensorboard"]
    assert trackers("mlflow") == ["mlflow"]  # of transformers
    for wrong in ("tensorbord", ["wandb", "weaver"], 5, "all"):
        with pytest.raises(ConfigError, match="wandb, trackio, tensorboard, weave"):
            trackers(wrong)
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
    config = write_config(tmp_path)
    assert main(["train", "--config", str(config), "--grpo.report_to", "[trackio, weave]"]) == 1
    assert "pip install 'text2sql-grpo[trackio,weave]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    assert main(["train", "--config", str(config), "--grpo.report_to", "codecarbon"]) == 1
    assert "codecarbon, which cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Client:
    """Weave's client, which notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.finished: list[Any] = []

    def create_call(self, op: str, inputs: dict[str, Any], **options: Any) -> int:
        self.calls.append((op, {"inputs": inputs, **options}))
        return len(self.calls)

    def finish_call(self, call: int, *, output: Any) -> None:
        self.finished.append(output)


def weave_arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), run_name="tracked", project="text2sql-grpo", report_to="none", use_cpu=True
    )


def send(traces: Any, run: Path, copy: Path) -> list[Any]:
    """Send the episodes of a run as those of its steps, after an interrupted run's; returns them."""
    arguments, state = weave_arguments(copy.parent), SimpleNamespace(is_world_process_zero=True)
    lines = (run / "rollouts.jsonl").read_text("utf-8").splitlines(keepends=True)
    copy.write_text(lines[0], "utf-8")
    traces.on_train_begin(arguments, state, None)
    for line in lines[1:]:
        with copy.open("a", encoding="utf-8") as file:
            file.write(line)
        traces.on_step_end(arguments, state, None)
    return [json.loads(line) for line in lines[1:]]


def test_weave_is_sent_each_episode_once_with_its_turns(run: Path, tmp_path: Path) -> None:
    client, rollouts = Client(), tmp_path / "rollouts.jsonl"
    episodes = send(EpisodeTraces(client, rollouts, "tracked"), run, rollouts)
    kinds = [[action["kind"] for action in episode["actions"]] for episode in episodes]
    assert [op for op, _ in client.calls] == [op for turns in kinds for op in ("episode", *turns)]
    roots = [options for op, options in client.calls if op == "episode"]
    assert [root["inputs"]["question"] for root in roots] == [episode["question"] for episode in episodes]
    assert [root["attributes"]["step"] - 1 for root in roots] == [episode["step"] for episode in episodes]
    assert [output["reward"] for output in client.finished if output and "reward" in output] == [
        episode["reward"] for episode in episodes
    ]


def test_weave_without_a_key_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with tracking(["weave"], weave_arguments(tmp_path)) as opened:
        assert opened.callbacks == []
    assert "Weave needs WANDB_API_KEY" in caplog.text


@pytest.mark.skipif(find_spec("weave") is None, reason="needs weave")
@pytest.mark.filterwarnings("default")  # of its own libraries
def test_weave_s_own_sdk_sends_to_a_server_of_this_machine(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with running_weave() as server:
        for name in ("WANDB_BASE_URL", "WF_TRACE_SERVER_URL"):
            monkeypatch.setenv(name, server.url)
        with tracking(["weave"], weave_arguments(tmp_path)) as opened:
            episodes = send(opened.callbacks[0], run, tmp_path / "rollouts.jsonl")
    roots = [call for call in server.calls() if call["parent_id"] is None]
    assert [root["output"]["reward"] for root in roots] == [episode["reward"] for episode in episodes]
    for name in ("WANDB_BASE_URL", "WF_TRACE_SERVER_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with (
        pytest.raises(ConfigError, match="cannot send traces to Weave"),
        tracking(["weave"], weave_arguments(tmp_path)),
    ):
        pass
