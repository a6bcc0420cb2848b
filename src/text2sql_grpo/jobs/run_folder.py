"""A training run's folder: tried before work, an earlier run put aside, and where to go on from."""

import itertools
import shlex
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from text2sql_grpo.config import Config, dump_config, load_config
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import PARTIAL, write_text
from text2sql_grpo.reliability import ranks
from text2sql_grpo.run_folder import CONFIG, CURVE, METRICS, ROLLOUTS, START
from text2sql_grpo.training.checkpoints import checkpoint_step, find_damage, saved_checkpoints, steps_done
from text2sql_grpo.training.run_log import RunLog

_RUN_FILES = (
    *(CONFIG, METRICS, ROLLOUTS, CURVE, START),
    *("evaluation*.json", "evaluation*.jsonl", "comparison*.json", "comparison*.jsonl"),
)
_RUN_FOLDERS = ("checkpoint-*", "model", "adapter", "merged", "sft", "wandb", "tensorboard")


def check_folder(folder: Path) -> None:
    """The run folder is tried before minutes of work; a folder that holds other things is left alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        names = [path.name for path in folder.iterdir() if not path.name.endswith(PARTIAL)]
        others = [] if (folder / CONFIG).exists() else names
    except OSError as error:
        raise RunError(f"expected a run folder that can be written, got {error} ({folder})") from error
    if others:
        raise RunError(
            f"expected a new run folder or that of an earlier run, got one with other files, such as "
            f"{min(others)} ({folder}): choose another run.output_dir"
        )


def find_checkpoint(config: Config, resume: str | None, console: Console) -> Path | None:
    """The folder to go on from, saved whole by a run of the same model; None to start afresh.

    Args:
        resume: A checkpoint folder, or `auto` for the newest whole one of the run folder. Broken ones are
            named and passed over.
    """
    if resume is None:
        return None
    # One process reads gigabytes for all.
    found = [_find(config.run.output_dir, resume, console)] if ranks.is_main() else []
    checkpoint = ranks.gather(found)[0][0]
    if isinstance(checkpoint, str):
        raise RunError(checkpoint)
    saved = checkpoint.parent / CONFIG
    if saved.is_file() and load_config(saved).model != config.model:
        raise ConfigError(
            f"expected the model settings with which {checkpoint} was saved, got others ({saved})"
        )
    return checkpoint


def _find(folder: Path, resume: str, console: Console) -> Path | str:
    """The checkpoint, or why there is none."""
    if resume != "auto":
        wrong = find_damage(Path(resume))
        if wrong is None:
            return Path(resume)
        expected = "expected --resume to name a checkpoint (trainer_state.json and weights)"
        return f"{expected}, got {resume}: {wrong}"
    n_broken = 0
    for checkpoint in reversed(saved_checkpoints(folder)):
        wrong = find_damage(checkpoint)
        if wrong is None:
            return checkpoint
        console.print(f"Passed over a broken checkpoint: {checkpoint} ({wrong})", soft_wrap=True)
        n_broken += 1
    broken = f"{n_broken} broken" if n_broken else "none"
    return f"expected a checkpoint to resume from, got {broken} (in {folder}): start without --resume"


def prepare_folder(config: Config, checkpoint: Path | None, console: Console) -> None:
    """Readies the run folder for a run that starts afresh or goes on from a checkpoint; one process does it.

    An earlier run is put aside: its logs are never appended to by another, and nothing of it is lost. The
    logs of a run that goes on are cut back to its checkpoint.
    """
    folder = config.run.output_dir
    is_same_run = checkpoint is not None and checkpoint.resolve().parent == folder.resolve()
    if ranks.is_main():
        try:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            if checkpoint is not None and is_same_run:
                step = steps_done(checkpoint)
                _put_aside_later_steps(folder, step, console)
                RunLog(folder).cut_back(step)
            else:
                _put_aside_earlier_run(folder, console)
            write_text(folder / CONFIG, dump_config(config))
        except OSError as error:
            raise RunError(f"expected a run folder that can be written, got {error} ({folder})") from error
    ranks.barrier()


def _put_aside_earlier_run(folder: Path, console: Console) -> None:
    earlier = [path for pattern in (*_RUN_FILES, *_RUN_FOLDERS) for path in folder.glob(pattern)]
    if [path.name for path in earlier] in ([], [CONFIG]):  # it had not begun
        return
    target = _new_folder(folder)
    for path in earlier:
        path.rename(target / path.name)
    console.print(f"Put the earlier run of this folder aside: {target}", soft_wrap=True)


def _put_aside_later_steps(folder: Path, step: int, console: Console) -> None:
    """Else later checkpoints than the one to go on from would be taken for this run's, and their logs."""
    later = [path for path in saved_checkpoints(folder) if checkpoint_step(path) > step]
    if not later:
        return
    target = _new_folder(folder)
    for path in later:
        path.rename(target / path.name)
    for path in (folder / METRICS, folder / ROLLOUTS):
        if path.exists():
            shutil.copy2(path, target)
    console.print(f"Put later checkpoints of this folder aside: {target}", soft_wrap=True)


def _new_folder(folder: Path) -> Path:
    number = next(n for n in itertools.count(1) if not (folder / f"earlier-{n}").exists())
    target = folder / f"earlier-{number}"
    target.mkdir()
    return target


def how_to_go_on(folder: Path, command: str = "text2sql-grpo train") -> str:
    """Message after Ctrl-C: the newest checkpoint, and the command that resumes from it."""
    checkpoints = saved_checkpoints(folder)
    if not checkpoints:
        return "No checkpoint was due yet. Run the same command again."
    config = shlex.quote(str(folder / CONFIG))
    return f"Saved: {checkpoints[-1]}. Go on with:\n  {command} --config {config} --resume auto"
