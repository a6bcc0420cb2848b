"""Alerts of a stalled run: an evaluation during training is not a stall."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.models.loaded_policy import LoadedPolicy


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures", "rewards_with_spread")
def test_an_evaluation_longer_than_the_limit_is_not_alerted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, sft=None, evaluation={"before_training": False})
    printed: list[str] = []
    ready = LoadedPolicy.ready

    def slowly(self: LoadedPolicy) -> Any:
        if not printed:
            time.sleep(1.5)
            printed.append(capsys.readouterr().out)
        return ready(self)

    monkeypatch.setattr(LoadedPolicy, "ready", slowly)
    argv = ["train", "--config", str(config), "--alerts.stalled_s", "0.5", "--data.test", "{}"]
    assert main([*argv, "--data.dev", str(tmp_path / "questions.jsonl"), "--evaluation.every", "1"]) == 0
    assert "Run folder" in printed[0] and "alert" not in printed[0]
    assert "step 0: dev" in capsys.readouterr().out  # the slow one was that of step 0
