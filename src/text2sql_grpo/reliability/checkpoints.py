"""Atomic checkpoints: written to a partial folder, synced, read back, then renamed."""

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from trl import GRPOTrainer

from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import PARTIAL, is_full_disk, read_json, sha256, write_json
from text2sql_grpo.phrases import many
from text2sql_grpo.reliability import ranks
from text2sql_grpo.run_folder import CONFIG

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RUN_CONFIG = "run_config.yaml"  # not CONFIG, by which a run folder is known
BEST_METRIC = "accuracy/strict"
SCHEDULED_METRIC = "eval_dev/accuracy/strict"  # measured at one step, on held-out questions
_REFERENCE = "reference.safetensors"


def saved_checkpoints(folder: Path) -> list[Path]:
    """List the folders `checkpoint-N`, the newest last; some may have damage (`find_damage`)."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def steps_done(checkpoint: Path) -> int:
    """Number of steps that the run had done."""
    return int(read_json(checkpoint / "trainer_state.json")["global_step"])


def is_finished(checkpoint: Path, max_steps: int) -> bool:
    """True if a run of `max_steps` has no step left; transformers would do one more.

    Not for -1, whole epochs, which transformers counts right.
    """
    return 0 < max_steps <= steps_done(checkpoint)


def find_damage(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint; None for one that a run can resume from.

    Compares every byte with the manifest. A checkpoint without one, of an earlier version, must be readable.
    """
    if not (checkpoint / "trainer_state.json").is_file():
        return "no trainer_state.json"
    manifest = checkpoint / MANIFEST
    try:
        if not manifest.is_file():
            _read_back(checkpoint)
            return None if any(checkpoint.glob("*.safetensors")) else "no weights"
        for name, entry in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
            path = checkpoint / name
            if not path.is_file():
                return f"no {name}"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {entry['bytes']}"
            if sha256(path) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, SafetensorError, zipfile.BadZipFile) as error:
        return f"not readable: {error}"
    return None


def find_whole(
    folder: Path, resume: str | Path | bool, *, show: Callable[[str], None] = logger.warning
) -> Path:
    """Checkpoint to resume from: a path, or for True and `auto` the newest undamaged one of a folder.

    Args:
        show: Called with a line for each damaged checkpoint that is skipped.

    Raises:
        ConfigError: There is none, or another number of processes saved it.
    """
    if not isinstance(resume, bool) and resume != "auto":
        damage = find_damage(Path(resume))
        if damage is not None:
            raise ConfigError(
                "resume_from_checkpoint or --resume names no checkpoint with trainer_state.json and weights: "
                f"{resume}: {damage}"
            )
        return _of_as_many_ranks(Path(resume))
    for checkpoint in reversed(saved_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            return _of_as_many_ranks(checkpoint)
        show(f"Skipped a damaged checkpoint: {checkpoint} ({damage})")
    raise ConfigError(
        f"no checkpoint to resume from in {folder}: it holds no undamaged checkpoint; start without one"
    )


def _of_as_many_ranks(checkpoint: Path) -> Path:
    """Return a checkpoint that holds the random states of every rank, or no states."""
    saved, here = len([*checkpoint.glob("rng_state*.pth")]), ranks.world_size()
    if saved not in (0, here):
        raise ConfigError(
            f"cannot resume {checkpoint} with {many(here, 'process')}: {saved} saved it, each with its own "
            f"random states; start as many with its launcher (accelerate launch --num_processes {saved})"
        )
    return checkpoint


def best_checkpoint(folder: Path) -> Path | None:
    """The best checkpoint according to the newest one; None if none is recorded, or it is gone."""
    saved = saved_checkpoints(folder)
    return best_by(saved[-1]) if saved else None


def best_by(checkpoint: Path) -> Path | None:
    """The best checkpoint of a folder according to one of its checkpoints; None as of `best_checkpoint`."""
    manifest = checkpoint / MANIFEST
    best = read_json(manifest)["best"] if manifest.is_file() else None
    path = checkpoint.parent / f"checkpoint-{best['step']}" if best else None
    return path if path is not None and path.is_dir() else None


def remove_left_over(checkpoint: Path, args: TrainingArguments) -> None:
    """Remove old checkpoints that a process killed before it did so left beside the newest one.

    Does nothing for another checkpoint than the newest of the output folder.
    """
    folder = Path(args.output_dir)
    newest = [path.resolve() for path in saved_checkpoints(folder)[-1:]]
    if args.should_save and newest == [checkpoint.resolve()]:
        _remove_old(folder, args.save_total_limit)


class Best(TypedDict):
    """The best checkpoint of a run.

    Attributes:
        value: Mean of the metric over the steps since the previous checkpoint; for a scheduled evaluation,
            its value at this step.
    """

    metric: str
    value: float
    step: int


class Checkpoints(TrainerCallback):
    """Callback that saves checkpoints and resumes from one, and logs every step that it saves.

    (The metrics of steps that are not logged yet are in no checkpoint.)

    Args:
        trainer: Its `state_dict`, if it has one, is saved too, on each rank.

    Attributes:
        partial: Folder for transformers to save into while a checkpoint is written; None otherwise.
        best: Best checkpoint; None before the first one.
        before_step: The trainer's `state_dict` at the beginning of the current step; empty before it.
        begun_at: Number of steps done at that moment; None before it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.partial: Path | None = None
        self.best: Best | None = None
        self.before_step: dict[str, Any] = {}
        self.begun_at: int | None = None
        self._trainer, self._has_state = trainer, hasattr(trainer, "state_dict")
        self._last_step = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what transformers saves inside the context into one checkpoint, atomically.

        Raises:
            RunError: The run folder cannot be written.
        """
        trainer = self._trainer
        folder, step = Path(trainer.args.output_dir), trainer.state.global_step
        partial, writes = folder / PARTIAL, bool(trainer.args.should_save)
        trainer.accelerator.wait_for_everyone()
        try:
            if writes:
                shutil.rmtree(partial, ignore_errors=True)  # a killed process left it
            trainer.accelerator.wait_for_everyone()
            self.partial = partial
            yield
            saved = partial / f"checkpoint-{step}"
            self._save_more(saved)
            trainer.accelerator.wait_for_everyone()
            self._note_best()
            if writes:
                _seal(saved, self.best)
                _put_in_place(saved, folder / saved.name)
                _remove_old(folder, trainer.args.save_total_limit)
        except Exception as error:
            reason = "disk full" if is_full_disk(error) else error
            if reason is error and not isinstance(error, OSError):
                raise
            newest = [str(path) for path in saved_checkpoints(folder)[-1:]] or ["none"]
            raise RunError(
                f"cannot write a checkpoint to {folder}: {reason}; the newest one is {newest[0]}"
            ) from error
        finally:
            self.partial = None
            if writes:
                shutil.rmtree(partial, ignore_errors=True)
        self._last_step = step
        trainer.accelerator.wait_for_everyone()

    def restore(self, checkpoint: Path) -> None:
        """Restore what `writing` saved next to the files of transformers.

        Call after weights, optimizer and `trainer.state` are restored.
        """
        trainer = self._trainer
        self._last_step = trainer.state.global_step
        best = best_by(checkpoint)
        if best is not None and (Path(trainer.args.output_dir) / best.name).is_dir():
            self.best = read_json(checkpoint / MANIFEST)["best"]
        _set_rates(trainer)
        more = checkpoint / _state_name(trainer)
        if self._has_state and more.is_file():
            trainer.load_state_dict(torch.load(more, map_location=trainer.args.device.type))
        elif self._has_state:
            logger.warning("the parts of a step start without state: the checkpoint lacks %s", more)
        if _moves_reference(trainer):
            if not (checkpoint / _REFERENCE).is_file():
                raise RunError(f"the checkpoint lacks the moving reference: no {checkpoint / _REFERENCE}")
            load_model(trainer.accelerator.unwrap_model(trainer.ref_model), checkpoint / _REFERENCE)
        remove_left_over(checkpoint, trainer.args)

    def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """Note the state of the trainer, for a checkpoint of the steps before a failure."""
        self.before_step = self._trainer.state_dict() if self._has_state else {}
        self.begun_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Log a step that is saved."""
        control.should_log |= control.should_save

    def _save_more(self, folder: Path) -> None:
        trainer = self._trainer
        if self._has_state:
            torch.save(trainer.state_dict(), folder / _state_name(trainer))
        config = Path(trainer.args.output_dir) / CONFIG
        if trainer.args.should_save and config.is_file():
            shutil.copy(config, folder / RUN_CONFIG)
        if _moves_reference(trainer) and trainer.args.should_save:
            save_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(folder / _REFERENCE))

    def _note_best(self) -> None:
        args, state = self._trainer.args, self._trainer.state
        metric = args.metric_for_best_model or BEST_METRIC
        after = state.global_step - 1 if metric == SCHEDULED_METRIC else self._last_step
        rows = [row for row in state.log_history if row["step"] > after]
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if not values:
            return
        value, sign = sum(values) / len(values), -1 if args.greater_is_better is False else 1
        # Of equal steps the first one is the best, but a trained one rather than step 0.
        best = self.best if self.best and self.best["metric"] == metric else None
        if best is None or (sign * value, best["step"] == 0) > (sign * best["value"], False):
            self.best = {"metric": metric, "value": value, "step": state.global_step}


def _set_rates(trainer: Trainer) -> None:
    """Set the learning rates of the next step by the schedule of this run.

    transformers restores the old rates for one step: 0 where the old schedule had come to its end.
    """
    scheduler = trainer.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})


def _remove_old(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one; None keeps all."""
    best = best_checkpoint(folder)
    for checkpoint in saved_checkpoints(folder)[: -keep if keep else 0]:
        if checkpoint != best:
            shutil.rmtree(checkpoint, ignore_errors=True)


def _state_name(trainer: Trainer) -> str:
    rank = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
    return f"step_parts{rank}.pt"


def _moves_reference(trainer: Trainer) -> bool:
    return isinstance(trainer, GRPOTrainer) and trainer.args.sync_ref_model


def _seal(folder: Path, best: Best | None) -> None:
    """Sync the files to the disk, read them back, and write their manifest."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for path in files.values():
        _sync(path)
    try:
        _read_back(folder)
    except (ValueError, SafetensorError, zipfile.BadZipFile) as error:
        raise RunError(f"the checkpoint cannot be read back: {error} ({folder})") from error
    sums = {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in files.items()}
    write_json(folder / MANIFEST, {"best": best, "files": sums})
    _sync(folder / MANIFEST)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync(path)


def _put_in_place(saved: Path, target: Path) -> None:
    """Move a checkpoint into place; a damaged one of the same step is moved away."""
    if target.exists():
        target.rename(saved.with_name("replaced"))
    saved.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Write a file or folder through to the disk, and drop it from the page cache."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_back(folder: Path) -> None:
    """Open safetensors (header), torch's zips (checksums) and JSON; a truncated or corrupt file raises."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                tensors.keys()
        elif path.suffix in (".pt", ".pth"):
            with zipfile.ZipFile(path) as archive:
                corrupt = archive.testzip()
            if corrupt is not None:
                raise ValueError(f"{corrupt} in {path.name} is corrupt")
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
