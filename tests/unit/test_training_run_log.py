import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ask, shop_environment
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import RunError
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import episode_metrics
from text2sql_grpo.run_folder import METRICS, ROLLOUTS, RunLog, read_metrics

RIGHT = Verdict(official=True, strict=True, reason="equal", executes=True)
GOLD_FAILED = Verdict(official=False, strict=False, reason="gold_failed", executes=False)


def lines(path: Path) -> list[Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text("utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constants) for line in text.split("\n")[:-1]]


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "one")

    log.write(ROLLOUTS, [{"a": "line\nbreak\u2028"}, {"b": 1}])
    RunLog(log.folder).write(ROLLOUTS, [{"c": None}])

    assert lines(log.folder / "rollouts.jsonl") == [{"a": "line\nbreak\u2028"}, {"b": 1}, {"c": None}]


def test_metrics_are_read_back(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert read_metrics(log.folder) == []

    log.write(METRICS, [{"step": 1, "loss": 0.5}])
    log.write(
        METRICS, [{"step": 2, "loss": math.nan, "parts": {"kl": -math.inf, "n": 3}, "name": "a\u2028b"}]
    )

    assert read_metrics(log.folder) == lines(tmp_path / "metrics.jsonl")
    assert read_metrics(log.folder) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": None, "parts": {"kl": None, "n": 3}, "name": "a\u2028b"},
    ]


def test_lone_surrogates_and_other_odd_text(tmp_path: Path) -> None:
    odd = "\ud800 \udcff \0 \x1b é 漢 😀"

    RunLog(tmp_path).write(ROLLOUTS, [{"text": odd, odd: 1}])

    assert lines(tmp_path / "rollouts.jsonl") == [{"text": odd, odd: 1}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_said_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: .*No space"):
        RunLog(tmp_path).write(METRICS, [{"step": 1}])


def played(folder: Path) -> Episode:
    session = shop_environment(folder, EnvironmentSettings(instructions=False, max_turns=4)).session(
        ask("Lisbon?", family="lookup")
    )
    session.start()
    session.step("<sql>SELECT x'00ff' AS raw, 1e999 AS big, cast(x'ff' AS TEXT) AS odd, NULL</sql>")
    session.step("?")
    session.step("<sql>SELECT nowhere</sql>")
    session.step("<answer>SELECT staff FROM branch</answer>")
    episode = session.episode
    episode.prompt_ids, episode.completion_ids, episode.completion_mask = [1, 2], [3, 4, 5], [1, 0, 1]
    episode.log_probs = [-0.1234567, 0.0, math.nan]
    return episode


def test_metrics_of_an_episode(tmp_path: Path) -> None:
    metrics = episode_metrics(played(tmp_path), RIGHT, ["copied_literal"])

    assert metrics == {
        **{"accuracy/strict": 1, "accuracy/official": 1, "accuracy/official_minus_strict": 0},
        "grading/uncovered": 0,
        **{"hack/rate": 0, "hack/official_only": 0, "hack/no_table": 0, "hack/copied_literal": 1},
        **{"episode/turns": 4, "episode/looks": 2, "episode/malformed": 1, "episode/masked": 0},
        **{"stop/submitted": 1, "stop/max_turns": 0, "stop/budget": 0, "stop/context": 0, "stop/error": 0},
    }


@pytest.mark.parametrize(
    ("is_masked", "verdict", "masked"), [(False, RIGHT, 0), (True, RIGHT, 1), (False, GOLD_FAILED, 1)]
)
def test_masked_is_counted(is_masked: bool, verdict: Verdict, masked: int) -> None:
    episode = Episode(ask("Lisbon?"), actions=[Action("malformed")], is_masked=is_masked)

    assert episode_metrics(episode, verdict)["episode/masked"] == masked
