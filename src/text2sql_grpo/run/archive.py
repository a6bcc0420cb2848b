"""A training run's folder: check, archive of an earlier run, checkpoint to resume from."""

import itertools
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from text2sql_grpo.config import Config, dump_config, load_config
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import PARTIAL, write_text
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.checkpoints import checkpoint_step, find_whole, saved_checkpoints, steps_done
from text2sql_grpo.run_folder import CONFIG, CURVE, ENERGY, METRICS, PAGE, PAGE_DATA, ROLLOUTS, RunLog

_RUN_FILES = (
    *(CONFIG, METRICS, ROLLOUTS, CURVE, ENERGY, PAGE, PAGE_DATA),
    *("suspects.*", "evaluation*.json", "evaluation*.jsonl", "comparison*.json", "comparison*.jsonl"),
)
_RUN_FOLDERS = ("checkpoint-*", "model", "adapter", "merged", "sft", "wandb", "tensorboard")


def check_folder(folder: Path) -> None:
    """Fail early if the run folder cannot be written, or holds other files than those of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        names = [path.name for path in folder.iterdir() if not path.name.endswith(PARTIAL)]
        others = [] if (folder / CONFIG).exists() else names
    except OSError as error:
        raise RunError(f"cannot write to the run folder: {error} ({folder})") from error
    if others:
        raise RunError(
            f"the run folder holds other files than those of a run, such as {min(others)} ({folder}): "
            "choose another run.output_dir"
        )


def find_checkpoint(config: Config, resume: str | None, console: Console) -> Path | None:
    """Find the checkpoint to resume from, undamaged and of the same model; None to start afresh.

    `auto` is the newest undamaged one of the run folder.
    """
    if resume is None:
        return None
    show = partial(console.print, soft_wrap=True)
    # One rank reads gigabytes for all.
    checkpoint = ranks.from_main(lambda: find_whole(config.run.output_dir, resume, show=show))
    saved = checkpoint.parent / CONFIG
    if saved.is_file() and load_config(saved).model != config.model:
        raise ConfigError(f"{checkpoint} was saved with other settings of the section model ({saved})")
    return checkpoint


def prepare_folder(config: Config, checkpoint: Path | None, console: Console) -> None:
    """Prepare the run folder for a new or a resumed run, on rank 0.

    Archive an earlier run whole, so that no other run appends to its logs. Cut the logs of a resumed run back
    to its checkpoint.
    """
    folder = config.run.output_dir
    if ranks.is_main():
        try:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            if checkpoint is not None and checkpoint.resolve().parent == folder.resolve():
                step = steps_done(checkpoint)
                _archive_later_steps(folder, step, console)
                RunLog(folder).cut_back(step)
            else:
                _archive_earlier_run(folder, console)
            write_text(folder / CONFIG, dump_config(config))
        except OSError as error:
            raise RunError(f"cannot write to the run folder: {error} ({folder})") from error
    ranks.barrier()


def _archive_earlier_run(folder: Path, console: Console) -> None:
    earlier = [path for pattern in (*_RUN_FILES, *_RUN_FOLDERS) for path in folder.glob(pattern)]
    if [path.name for path in earlier] not in ([], [CONFIG]):  # a config alone: it had not begun
        target = _move(earlier, folder)
        console.print(f"Moved the earlier run of this folder to {target}", soft_wrap=True)


def _archive_later_steps(folder: Path, step: int, console: Console) -> None:
    """Archive checkpoints newer than the one being resumed, with their logs."""
    later = [path for path in saved_checkpoints(folder) if checkpoint_step(path) > step]
    if later:
        target = _move(later, folder)
        for path in (folder / METRICS, folder / ROLLOUTS):
            if path.exists():
                shutil.copy2(path, target)
        console.print(f"Moved later checkpoints of this folder to {target}", soft_wrap=True)


def _move(paths: Sequence[Path], folder: Path) -> Path:
    number = next(n for n in itertools.count(1) if not (folder / f"earlier-{n}").exists())
    target = folder / f"earlier-{number}"
    target.mkdir()
    for path in paths:
        path.rename(target / path.name)
    return target


def resume_hint(folder: Path, command: str = "text2sql-grpo train") -> str:
    """Message after Ctrl-C: the newest checkpoint, and the command that resumes from it."""
    checkpoints = saved_checkpoints(folder)
    if not checkpoints:
        return "No checkpoint was due yet. Run the same command again."
    config = shlex.quote(str(folder / CONFIG))
    return f"Saved: {checkpoints[-1]}. Resume with:\n  {command} --config {config} --resume auto"
