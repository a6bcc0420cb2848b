"""Checkpoints on disk: whole, or named as broken; the best kept; nothing half-written left behind."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.file_limits import file_size_limit
from tests.scripted_policy import ask
from tests.scripted_trainer import Bench
from text2sql_grpo import trl_compat
from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.reliability.checkpoints import (
    Checkpoints,
    find_damage,
    find_whole,
    is_finished,
    saved_checkpoints,
)
from text2sql_grpo.training.selection import open_select
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SQLGRPOTrainer:
    """After five steps, each with a checkpoint."""
    trainer = Bench(
        tmp_path_factory.mktemp("trained"),
        [ask("Lisbon?")] * 5,
        engine="auto",
        max_turn_tokens=2,
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=5,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="score",
    ).trainer
    log, scores = trainer.log, iter([0.25, 0.75, 0.5, 0.125, 0.25, 0.0])
    trainer.log = lambda logs, *args: log(logs | {"score": next(scores)}, *args)  # type: ignore[method-assign]
    trainer.train()
    return trainer


def test_the_newest_and_the_best_are_kept(trained: SQLGRPOTrainer) -> None:
    folder = Path(trained.args.output_dir)
    assert [path.name for path in saved_checkpoints(folder)] == [f"checkpoint-{n}" for n in (2, 4, 5)]
    assert [find_damage(path) for path in saved_checkpoints(folder)] == [None] * 3
    manifest = json.loads((folder / "checkpoint-5" / "manifest.json").read_text())
    assert manifest["best"] == {"metric": "score", "value": 0.75, "step": 2}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "step_parts.pt"} <= set(
        manifest["files"]
    )
    assert not (folder / ".partial").exists()
    assert is_finished(folder / "checkpoint-5", 5)
    assert not is_finished(folder / "checkpoint-4", 5)
    assert not is_finished(folder / "checkpoint-5", -1)


def test_a_resumed_run_removes_what_a_kill_left_behind_the_newest(trained: SQLGRPOTrainer) -> None:
    folder = Path(trained.args.output_dir)
    left = folder / "checkpoint-3"
    shutil.copytree(folder / "checkpoint-4", left)
    resumed = Checkpoints(trained)
    resumed.restore(folder / "checkpoint-4")  # not the newest: others may still be wanted
    assert left.is_dir()
    resumed.restore(folder / "checkpoint-5")
    assert [path.name for path in saved_checkpoints(folder)] == [f"checkpoint-{n}" for n in (2, 4, 5)]


def test_a_selection_of_other_settings_begins_anew(
    trained: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = trained.state_dict()
    trained.load_state_dict(state)
    assert "starts without state" not in caplog.text
    changed = open_select([ask("Lisbon?")] * 5, SelectionConfig(strata={"other": 1.0}), seed=0)
    monkeypatch.setattr(trained, "select", changed)
    trained.load_state_dict(state)
    assert "select starts without state: the checkpoint holds that of another part" in caplog.text


def test_a_folder_without_the_right_to_write_is_said_and_left_as_it_was(trained: SQLGRPOTrainer) -> None:
    if not hasattr(os, "seteuid"):
        pytest.skip("needs users")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained_in, trained.args.output_dir = trained.args.output_dir, name
        folder.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # nobody: root may write everywhere
        try:
            with pytest.raises(RunError, match=r"cannot write a checkpoint to .*denied"):
                trl_compat.save_checkpoint(trained)
        finally:
            os.seteuid(user)
            trained.args.output_dir = trained_in
            folder.chmod(0o755)
        assert list(folder.iterdir()) == []


def test_a_full_disk_leaves_the_checkpoints_before_and_nothing_else(trained: SQLGRPOTrainer) -> None:
    folder = Path(trained.args.output_dir)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with (
        file_size_limit(50_000),
        pytest.raises(RunError, match=r"cannot write a checkpoint to .*: disk full; the newest one is .*-5"),
    ):
        trl_compat.save_checkpoint(trained)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_that_cannot_be_read_back_makes_no_checkpoint(
    trained: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(trained.args.output_dir)
    names = {path.name for path in folder.iterdir()}
    state = trained.state.global_step
    save = trained.save_model

    def tear(saved: str, **options: Any) -> None:
        save(saved, **options)
        weights = Path(saved) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])

    monkeypatch.setattr(trained, "save_model", tear)
    trained.state.global_step = 6
    try:
        with pytest.raises(RunError, match=r"the checkpoint cannot be read back: .*incomplete"):
            trl_compat.save_checkpoint(trained)
    finally:
        trained.state.global_step = state
    assert {path.name for path in folder.iterdir()} == names


def test_values_of_two_metrics_are_not_compared(
    trained: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"step": 6, "other": 0.1}
    monkeypatch.setattr(trained.args, "output_dir", str(tmp_path))
    monkeypatch.setattr(trained.args, "metric_for_best_model", "other")
    monkeypatch.setattr(trained.state, "global_step", 6)
    monkeypatch.setattr(trained.state, "log_history", [*trained.state.log_history, row])
    trl_compat.save_checkpoint(trained)
    manifest = json.loads((tmp_path / "checkpoint-6" / "manifest.json").read_text())
    assert manifest["best"] == {"metric": "other", "value": 0.1, "step": 6}


@pytest.fixture
def checkpoint(trained: SQLGRPOTrainer, tmp_path: Path) -> Path:
    """A whole checkpoint of step 5."""
    return Path(shutil.copytree(Path(trained.args.output_dir) / "checkpoint-5", tmp_path / "checkpoint-5"))


@pytest.mark.parametrize("has_manifest", [True, False], ids=["manifest", "without"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
@pytest.mark.parametrize("harm", ["absent", "cut", "empty", "changed"])
def test_what_is_broken_is_named(checkpoint: Path, name: str, harm: str, has_manifest: bool) -> None:
    assert find_damage(checkpoint) is None
    if not has_manifest:
        (checkpoint / "manifest.json").unlink()
        assert find_damage(checkpoint) is None
    path = checkpoint / name
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    if harm == "absent":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-3], "empty": b"", "changed": changed}[harm])
    found = find_damage(checkpoint)
    if has_manifest or (name == "trainer_state.json" and harm == "absent"):
        assert found is not None
        assert name in found
    elif harm in ("cut", "empty") or (name, harm) == ("model.safetensors", "absent"):
        assert found is not None


def test_a_torn_manifest_and_a_folder_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": {"mod')
    assert str(find_damage(checkpoint)).startswith("not readable: ")
    assert find_damage(tmp_path / "checkpoint-4") == "no trainer_state.json"
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-12").mkdir()
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-12"]


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_of_two_processes_is_not_resumed_by_one(checkpoint: Path, named: bool) -> None:
    resume = checkpoint if named else "auto"
    assert find_whole(checkpoint.parent, resume) == checkpoint
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")

    with pytest.raises(ConfigError, match=r"checkpoint-5 with 1 process: 2 saved it.*--num_processes 2"):
        find_whole(checkpoint.parent, resume)
