"""A training run's folder: check, archive of an earlier run, checkpoint to resume from."""

import dataclasses
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from text2sql_grpo.checked import adapter
from text2sql_grpo.config import Config, dump_config, load_config
from text2sql_grpo.data.shards import content_files
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import PARTIAL, fingerprint, locked, write_json, write_text
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.models.loaded_policy import resolved
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.checkpoints import (
    RUN_CONFIG,
    best_by,
    checkpoint_step,
    find_whole,
    saved_checkpoints,
    steps_done,
)
from text2sql_grpo.run_folder import (
    CONFIG,
    CURVE,
    ENERGY,
    EVALUATION,
    LOGS,
    METRICS,
    PAGE,
    PAGE_DATA,
    ROLLOUTS,
    RunLog,
    read_evaluation,
)
from text2sql_grpo.training.arguments import SQLGRPOConfig

# What the end of a run makes, and what is made of its model by default.
_RESULTS = (
    *("model", "adapter", "merged", CURVE, PAGE, PAGE_DATA),
    *("suspects.*", "evaluation.jsonl", "evaluation-merged.*", "comparison.*"),
)
_RUN_FILES = (
    *(CONFIG, METRICS, ROLLOUTS, ENERGY, "checkpoint-*", "sft", "wandb", "tensorboard", *_RESULTS),
    *("evaluation*.json", "evaluation*.jsonl", "comparison*.json", "comparison*.jsonl"),
)
_LENGTH = ("grpo.max_steps", "grpo.num_train_epochs", "sft.max_steps", "sft.epochs")
# What a resumed run may change: how long, how often and where it runs, not what is learned or measured.
_FREE = (
    *("run.output_dir", "alerts*", "rollout.*", "grading.server_url", "environment.mcp.url"),
    *("environment.mcp.token_variable", "environment.mcp.connections"),
    *("evaluation.batch_size", "evaluation.before_training", "evaluation.every", "evaluation.blend"),
    *("grpo.max_steps", "grpo.num_train_epochs", "grpo.save_*", "grpo.log*", "grpo.disable_tqdm"),
    *("grpo.report_to", "grpo.run_name", "grpo.project", "grpo.trackio_*", "grpo.shared_prefix"),
    *("grpo.per_device_train_batch_size", "grpo.gradient_accumulation_steps"),  # their product is kept
    *("grpo.steps_per_generation", "grpo.generation_batch_size"),
    *("grpo.gradient_checkpointing*", "grpo.activation_checkpointing*", "grpo.torch_*", "grpo.use_cpu"),
    *("grpo.dataloader_pin_memory", "grpo.ddp_*", "grpo.vllm_server_*", "grpo.vllm_group_port"),
    "grpo.vllm_gpu_memory_utilization",
)
# GRPO's, and what a part of SFT's: a stage before GRPO is found by its settings, so it keeps them all.
SFT_FREE = (
    *("sft.max_steps", "sft.epochs", "sft.save_steps", "sft.evaluate_every", "sft.max_tokens"),
    *("rewards*", "losses.*", "selection.*"),
)


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


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Check the run folder, and keep other runs out of it until the block ends. Call on every rank.

    Raises:
        RunError: Another run writes to the folder, or see `check_folder` and `ranks.check_shared`.
    """
    refusal = f"another run is writing to this run folder ({folder}): wait for its end, or choose another "
    lock = locked(folder / f".lock{PARTIAL}", f"{refusal}run.output_dir")

    def claim() -> None:
        check_folder(folder)
        claims.enter_context(lock)

    with ExitStack() as claims:
        ranks.from_main(claim)
        ranks.check_shared(folder, "run.output_dir")
        yield


def check_ranks(config: Config) -> None:
    """Fail early if a rank, on another machine, has other settings or files of questions than rank 0.

    Raises:
        ConfigError: A rank has.
    """
    if not ranks.is_distributed():
        return
    sources = [config.data.train, config.data.quarantine]
    sources += [config.sft.questions, config.sft.chats] if config.sft else []
    files = [file for source in sources if source is not None for file in content_files(source)]
    own = adapter(Config).dump_python(config, mode="json")
    own |= {"content of the questions": fingerprint(None, files)}
    changed = [f"{name} {old} -> {new}" for name, (old, new) in _changes(ranks.gather(own)[0], own)]
    reason = f"rank {ranks.rank()} has other settings than rank 0: {', '.join(changed)}" if changed else None
    if found := ranks.any_reason(reason):
        raise ConfigError(f"{found}; give every machine the same config and questions")


def find_checkpoint(
    config: Config, resume: str | None, console: Console, *, free: Sequence[str] = ()
) -> Path | None:
    """Find the checkpoint to resume from, undamaged and of the same settings; None to start afresh.

    `auto` is the newest undamaged one of the run folder.

    Args:
        free: Patterns of settings that may change, in addition to `_FREE`.

    Raises:
        ConfigError: There is none, or a setting differs that decides what is learned or measured.
    """
    if resume is None:
        return None
    show = partial(console.print, soft_wrap=True)

    def found() -> Path:
        checkpoint = find_whole(config.run.output_dir, resume, show=show)
        places = (checkpoint / RUN_CONFIG, checkpoint.parent / CONFIG)  # the second of an earlier version
        saved = next((path for path in places if path.is_file()), None)
        if saved is not None:
            _check_changes(changes(saved, config), checkpoint, (*_FREE, *free), console)
        return checkpoint

    return ranks.from_main(found)  # one rank reads gigabytes for all


def changes(saved: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings in which a config differs from a saved one: old and new value.

    The same file under another path does not differ, nor does one of the same name where the old one is gone.
    """
    config = dataclasses.replace(config, model=resolved(config.model, device_type()))
    return dict(_changes(_plain(load_config(saved)), _plain(config)))


def _plain(config: Config) -> dict[str, Any]:
    """Plain values of a config, with the defaults of `grpo` and the sizes of its batches."""
    plain: dict[str, Any] = adapter(Config).dump_python(config, mode="json")
    grpo = {f.name: f.default for f in dataclasses.fields(SQLGRPOConfig)} | plain["grpo"]
    size, steps = grpo["per_device_train_batch_size"], grpo["gradient_accumulation_steps"]
    per_generation = grpo["generation_batch_size"] or size * (grpo["steps_per_generation"] or steps)
    products = {"gradient_accumulation_steps": size * steps, "steps_per_generation": per_generation}
    plain["grpo"] = grpo | {f"per_device_train_batch_size * {name}": n for name, n in products.items()}
    return plain


def _changes(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from _changes(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
    elif old != new and not _is_same_file(old, new):
        yield name, (old, new)


def _is_same_file(old: Any, new: Any) -> bool:
    if not isinstance(old, str) or not isinstance(new, str) or not os.path.exists(new):
        return False
    return os.path.samefile(old, new) if os.path.exists(old) else Path(old).name == Path(new).name


def _check_changes(
    changed: dict[str, tuple[Any, Any]], checkpoint: Path, free: Sequence[str], console: Console
) -> None:
    """Refuse a change of what is learned or measured; print the others."""
    shown = {name: f"{name} {old} -> {new}" for name, (old, new) in changed.items()}
    refused = [text for name, text in shown.items() if not any(fnmatch(name, one) for one in free)]
    if refused:
        merged = checkpoint.parent / "merged"
        start = f", from the trained model with --model.path {merged}" if merged.is_dir() else ""
        raise ConfigError(
            f"cannot resume {checkpoint} with other settings: {', '.join(refused)}; leave them as they were, "
            f"or start a new run in another folder (run.output_dir; of sft, --out){start}"
        )
    if shown:
        console.print(f"Changed since {checkpoint.name}: {', '.join(shown.values())}", soft_wrap=True)
    if any(name in _LENGTH for name in shown):
        console.print("The steps left have the learning rates of a run of the new length.", soft_wrap=True)


def prepare_folder(config: Config, checkpoint: Path | None, console: Console) -> None:
    """Prepare the run folder for a new or a resumed run, on rank 0.

    Archive an earlier run whole, so that no other run appends to its logs, and of a resumed run the results:
    only its figures before training still hold. Cut the logs of a resumed run back to its checkpoint; one
    that moves takes its logs and its best checkpoint along.
    """
    folder = config.run.output_dir
    if ranks.is_main():
        try:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            is_here = checkpoint is not None and checkpoint.resolve().parent == folder.resolve()
            if not is_here:
                _archive_earlier_run(folder, console)
            if checkpoint is not None:
                step = steps_done(checkpoint)
                if is_here:
                    _archive_results(folder, step, console)
                else:
                    _copy_run(checkpoint, folder)
                RunLog(folder).cut_back(step)
            write_text(folder / CONFIG, dump_config(config))
        except OSError as error:
            raise RunError(f"cannot write to the run folder: {error} ({folder})") from error
    ranks.barrier()


def _archive_earlier_run(folder: Path, console: Console) -> None:
    earlier = _matching(folder, _RUN_FILES)
    if [path.name for path in earlier] not in ([], [CONFIG]):  # a config alone: it had not begun
        target = _move(earlier, folder)
        console.print(f"Moved the earlier run of this folder to {target}", soft_wrap=True)


def _copy_run(checkpoint: Path, folder: Path) -> None:
    """Copy the logs next to a checkpoint, and the best checkpoint according to it."""
    for path in (checkpoint.parent / name for name in LOGS):
        if path.is_file():
            shutil.copy2(path, folder)
    best = best_by(checkpoint)
    if best is not None:
        shutil.copytree(best, folder / best.name)


def _archive_results(folder: Path, step: int, console: Console) -> None:
    """Archive results, and checkpoints newer than the resumed one, with config and logs as they were."""
    later = [path for path in saved_checkpoints(folder) if checkpoint_step(path) > step]
    results, figures = _matching(folder, _RESULTS), read_evaluation(folder)
    if "sets" in figures:
        results.append(folder / EVALUATION)
    if later or results:
        target = _move([*later, *results], folder)
        for path in (folder / name for name in (CONFIG, *LOGS)):
            if path.exists():
                shutil.copy2(path, target)
        if "before" in figures:
            write_json(folder / EVALUATION, {"before": figures["before"]})
        moved = "later checkpoints" if later else "the earlier results"
        console.print(f"Moved {moved} of this folder to {target}", soft_wrap=True)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


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
    config, count = shlex.quote(str(folder / CONFIG)), ranks.world_size()
    launched = "" if count == 1 else f" the same launcher and {count} processes"
    return f"Saved: {checkpoints[-1]}. Resume with{launched}:\n  {command} --config {config} --resume auto"
