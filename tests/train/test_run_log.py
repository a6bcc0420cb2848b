import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from text2sql_grpo.config import Config, DataConfig, ModelConfig, RunConfig
from text2sql_grpo.errors import RunError
from text2sql_grpo.files import write_json
from text2sql_grpo.run.archive import prepare_folder
from text2sql_grpo.run_folder import METRICS, ROLLOUTS, SCHEDULE, RunLog, read_metrics


def lines(path: Path) -> list[Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text("utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constants) for line in text.split("\n")[:-1]]


def test_lines_are_appended_whole_with_any_text(tmp_path: Path) -> None:
    log, odd = RunLog(tmp_path / "runs" / "one"), "\ud800 \udcff \0 \x1b é 漢 😀"
    log.write(ROLLOUTS, [{"a": "line\nbreak\u2028"}, {odd: odd}])
    RunLog(log.folder).write(ROLLOUTS, [{"c": None}])
    assert lines(log.folder / "rollouts.jsonl") == [{"a": "line\nbreak\u2028"}, {odd: odd}, {"c": None}]


def test_metrics_are_read_back(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert read_metrics(log.folder) == []

    log.write(METRICS, [{"step": 1, "loss": 0.5}])
    log.write(
        METRICS,
        [
            {
                "step": 2,
                "loss": math.nan,
                "parts": {"kl": [-math.inf, {"x": math.nan}], "n": 3},
                "name": "a\u2028b",
            }
        ],
    )

    assert read_metrics(log.folder) == lines(tmp_path / "metrics.jsonl")
    assert read_metrics(log.folder) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": None, "parts": {"kl": [None, {"x": None}], "n": 3}, "name": "a\u2028b"},
    ]


def test_later_steps_are_archived_with_their_logs(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_json(tmp_path / f"checkpoint-{step}" / "trainer_state.json", {"global_step": step})
        log.write(METRICS, [{"step": step}])
        log.write(SCHEDULE, [{"step": step}])
    model, data = ModelConfig("m", dtype="float32"), DataConfig("databases", "train.jsonl")
    config = Config(model, data, RunConfig(tmp_path))

    prepare_folder(config, tmp_path / "checkpoint-1", Console(quiet=True))

    for name in (METRICS, SCHEDULE):
        assert lines(tmp_path / name) == [{"step": 1}]
        assert lines(tmp_path / "earlier-1" / name) == [{"step": 1}, {"step": 2}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_said_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: .*No space"):
        RunLog(tmp_path).write(METRICS, [{"step": 1}])
