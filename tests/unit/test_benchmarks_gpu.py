"""benchmarks/gpu.py on a CPU: its parts with a tiny model, its limits, its counts, its refusal."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, as a user sees them


@pytest.fixture(scope="module")
def gpu(repo_root: Path) -> Any:
    """The module, with its neighbours importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "benchmarks"))
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(write_model(path, vocab_size=4_200, max_positions=8_192))


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


@needs_no_gpu
def test_a_machine_without_cuda_is_refused_in_one_line(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--quick"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "CUDA" in line and "--device cpu" in line and printed.out == ""


@pytest.mark.thorough
@needs_no_gpu
def test_both_sides_of_rollouts_and_updates_are_measured(gpu: Any, folder: str) -> None:
    size = gpu.SIZES["tiny"]
    for part in (gpu.rollouts, gpu.updates):
        found = part(folder, size)
        assert found["ratio"] > 0 and found.get("disagreement") is None
        assert found["trl_s"] > 0 and found["ours_s"] > 0


@needs_no_gpu
def test_continuous_batching_plays_the_same_turns(gpu: Any, folder: str) -> None:
    found = gpu.continuous_batching(folder, gpu.SIZES["tiny"])
    assert found["ratio"] > 0 and found["one_turn_ratio"] > 0
    assert found["turns_2"]["sampled_tokens"] > found["turns_1"]["sampled_tokens"]


@needs_no_gpu
def test_vllm_that_cannot_run_has_a_reason(gpu: Any, folder: str) -> None:
    assert "vllm" in gpu.vllm(folder, gpu.SIZES["tiny"])["skipped"].lower()


def test_a_part_that_fails_hangs_or_dies_leaves_an_error(gpu: Any, tmp_path: Path) -> None:
    def run(code: str, limit_s: float = 20) -> Any:
        return gpu.run_limited([sys.executable, "-c", code], tmp_path / "result.json", limit_s=limit_s)

    assert "limit of 1 s" in run("import time; time.sleep(60)", 1)["error"]
    assert "code 3: no memory" in run("import sys; print('no memory'); sys.exit(3)")["error"]
    assert "no time" in run("", 0)["error"]
    gpu.run_here("update", str(tmp_path), gpu.SIZES["tiny"], tmp_path / "here.json")  # a folder, no model
    assert "error" in json.loads((tmp_path / "here.json").read_text())


def test_the_last_line_holds_every_part(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "tiny_model", lambda folder: str(folder / "tiny"))
    monkeypatch.setattr(gpu, "run_limited", fake_part)
    for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "DEVICE_TYPE", "TRL_EXPERIMENTAL_SILENCE"):
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--model", str(tmp_path), "--out", str(out)]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert [title for title, found in record["parts"].items() if "error" in found] == ["step tiny"]
    assert {"machine", "tests", "rollout tiny", f"rollout {tmp_path.name}", "vllm"} < set(record["parts"])


def fake_part(command: list[str], result: Path, *, limit_s: float) -> dict[str, Any]:
    is_wrong = "step" in command and "tiny" in Path(command[command.index("--part_model") + 1]).name
    return {"error": "out of memory"} if is_wrong else {"ratio": 2.0}


def test_tests_are_counted_from_the_report(gpu: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="b"><failure/></testcase><testcase classname="a" name="c"/>'
        "</testsuite></testsuites>"
    )
    counts = gpu.test_counts(report)
    assert counts["passed"] == counts["failed"] == counts["skipped_tests"] == 1
    assert counts["names_failed"] == ["a::b"] and gpu.failed(counts)
