"""The learning curve is drawn from whatever a run folder holds, and says what is wrong with it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.reporting import learning_curve
from text2sql_grpo.reporting.learning_curve import HEIGHT_INCHES, WIDTH_INCHES, plot_learning_curve
from text2sql_grpo.run_folder import SCHEDULE, RunLog

DPI = 50  # a coarser picture, in less time
SIZE = (round(WIDTH_INCHES * DPI), round(HEIGHT_INCHES * DPI))


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_curve, "DPI", DPI)


def steps(count: int, **values: float | None) -> list[dict[str, Any]]:
    return [{"step": step, **values} for step in range(1, count + 1)]


def entry(correct: int, total: int) -> dict[str, Any]:
    return {"strict": {"correct": correct, "total": total, "accuracy": correct / total}}


def held_out(lookups: int, others: int) -> dict[str, Any]:
    scores = {"overall": entry(lookups + others, 100), "by_family": {"lookup": entry(lookups, 40)}}
    return {"test_values": scores, "test_databases": scores}


def write_run(folder: Path, metrics: list[dict[str, Any]], evaluation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in metrics)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def picture(run: Path) -> bytes:
    path = plot_learning_curve(run)
    assert path == run / "learning_curve.png"
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == SIZE
    return content


CURVES = {"accuracy/strict": 0.5, "reward": 0.4, "episode/looks": 0.9, "elapsed_s": 1.5}
WHOLE = {"sets": held_out(28, 50), "before": {"sets": held_out(4, 49)}}
ACCURACY = {"correct": 2, "total": 4, "by_database": {"shop": [2, 2], "bank": [0, 2]}}


def test_every_part_of_a_whole_run_shows(tmp_path: Path) -> None:
    """The figures of the steps, the held-out sets before and after, and the schedule."""
    metrics = steps(9, **CURVES)
    drawn = [picture(write_run(tmp_path, metrics)), picture(write_run(tmp_path, metrics, WHOLE))]
    drawn.append(picture(write_run(tmp_path, metrics, {"sets": WHOLE["sets"]})))
    (tmp_path / "evaluation.json").unlink()
    rows = [{"step": step, "accuracy": ACCURACY, "look_share": step / 9} for step in (0, 3, 9)]
    RunLog(tmp_path).write(SCHEDULE, rows)
    assert len({*drawn, picture(tmp_path)}) == len(drawn) + 1 == 4


@pytest.mark.parametrize(
    "metrics",
    [
        steps(1, **CURVES),
        steps(3, reward=-0.2),
        steps(3, **{"episode/looks": 0.0}),
        [*steps(2, **CURVES), {"step": 3, "accuracy/strict": None, "reward": None}],
    ],
)
def test_a_run_with_parts_missing_is_drawn(tmp_path: Path, metrics: list[dict[str, Any]]) -> None:
    alone = picture(write_run(tmp_path, metrics))
    scores = {"sets": {"dev": {"overall": entry(0, 7)}, "mine": {"overall": entry(7, 7)}}}
    assert picture(write_run(tmp_path, metrics, scores)) != alone


def test_a_summary_line_takes_nothing_from_its_step_and_a_step_done_twice_counts_once(tmp_path: Path) -> None:
    drawn = picture(write_run(tmp_path, steps(6, **CURVES)))
    summary = {"step": 6, "train_runtime": 3.0}
    assert picture(write_run(tmp_path, [*steps(6, **CURVES), summary])) == drawn
    assert picture(write_run(tmp_path, [*steps(4, reward=0.9), *steps(6, **CURVES)])) == drawn


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "metrics.jsonl is missing"),
        ("", "training steps"),
        ('{"loss": 1.0}\n', "training steps"),
        ('{"step": 1}\n', "training steps"),
        ('{"step": 1, "rew', "one JSON object a line"),
    ],
)
def test_a_folder_without_steps_is_an_error(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=reason):
        plot_learning_curve(tmp_path)
    assert not (tmp_path / "learning_curve.png").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"sets": {"dev": {}}}', '{"sets": {"dev": 1}}'])
def test_an_evaluation_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, steps(2, **CURVES))
    (tmp_path / "evaluation.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"evaluation\.json"):
        plot_learning_curve(tmp_path)
