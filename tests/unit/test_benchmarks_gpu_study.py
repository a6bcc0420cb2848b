"""benchmarks/gpu_study.py: files in parts, stages that are done, and what it refuses."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def study(repo_root: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "benchmarks"))
        yield importlib.import_module("gpu_study")


def test_a_file_is_joined_of_its_parts(study: Any, tmp_path: Path) -> None:
    file, parts = tmp_path / "weights.gguf", tmp_path / "parts"
    file.write_bytes(bytes(range(256)) * 10)
    assert [part.stat().st_size for part in study.split(file, parts, part_bytes=1_000)] == [1_000, 1_000, 560]
    study.join(parts, tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("damage", ["missing", "cut", "swapped"])
def test_parts_that_are_not_those_of_the_file_are_refused(study: Any, tmp_path: Path, damage: str) -> None:
    file, parts = tmp_path / "weights.gguf", tmp_path / "parts"
    file.write_bytes(bytes(range(200)))
    first, second = study.split(file, parts, part_bytes=100)
    if damage == "missing":
        second.unlink()
    elif damage == "cut":
        second.write_bytes(second.read_bytes()[:-1])
    else:
        lines = (parts / study.SUMS).read_text().splitlines()
        (parts / study.SUMS).write_text("\n".join([lines[1], lines[0], lines[2]]))
    with pytest.raises(SystemExit, match=f"{second.name}|split it again" if first else ""):
        study.join(parts, tmp_path / "joined.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "weights.gguf"]


def test_stages_that_are_done_are_not_run_again(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = {"correct": 3, "total": 8, "interval": [0.1, 0.7], "accuracy": 0.375}
    record = {"sets": {"dev": {"overall": {"strict": strict}}}}
    (tmp_path / "own" / "run" / "merged").mkdir(parents=True)
    (tmp_path / "own" / "run" / "merged" / "config.json").write_text("{}")
    (tmp_path / "own" / "zero_shot.json").write_text(json.dumps(record))
    (tmp_path / "own" / "run" / "evaluation.json").write_text(json.dumps({**record, "before": record}))
    assert study.main(["run", "--out", str(tmp_path), "--model", "own=nowhere"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {"dev": {"correct": 3, "total": 8, "interval": [0.1, 0.7]}}
    assert printed == {
        "right": {"own": dict.fromkeys(["zero-shot", "SFT", "SFT and GRPO"], expected)},
        "left": [],
    }


def test_without_time_everything_is_left(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run", "--out", str(tmp_path), "--minutes", "0.1"]
    assert study.main([*options, "--model", "own=nowhere"]) == 3
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["left"] == ["own zero-shot", "own SFT and GRPO"]
    with pytest.raises(SystemExit, match="no model: add --model"):
        study.main(options)
