import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Seed, config_with_files
from text2sql_grpo.config import Config, RunConfig
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run_folder import CONFIG, read_evaluation


def train(
    *,
    config: Path | None = None,
    resume: str | None = None,
    smoke: bool = False,
    seeds: list[Seed] | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Train, evaluate and merge a model.

    Supervised fine-tuning if the config has it, evaluation, GRPO, evaluation, merge. Example: `text2sql-grpo
    train --config shop/config.yaml --smoke`

    Args:
        config: YAML of the run; default: the quickstart's.
        resume: Checkpoint to resume from; auto: the newest of the run.
        smoke: One step of 8 short episodes, into the folder RUN-smoke, to show that everything works: about a
            minute with a small model.
        seeds: One run for each seed, one after the other, into the folders RUN/seed-N, and then how far they
            agree. Given again, it goes on where it was stopped.
    """
    config = options.config_or_quickstart(config)
    if seeds is not None:
        return _train_each(config, seeds, settings, smoke=smoke, resume=resume)
    run = config_with_files(config, settings, is_trained=True)
    if smoke:
        place = f"--run.output_dir={json.dumps(f'{run.run.output_dir}-smoke')}"
        run = config_with_files(config, [*_smoke_settings(run), *settings, place], is_trained=True)
    with options.writing_to(run.run.output_dir):
        console = options.quiet_console()
        with options.importing():
            from text2sql_grpo.run import pipeline

        result = pipeline.train(run, resume=resume, console=console)
    return 0 if result.merged else options.INTERRUPTED


def _train_each(
    config: Path, seeds: Sequence[int], settings: Sequence[str], *, smoke: bool, resume: str | None
) -> int:
    """Train once for each seed, in a process of its own: a run's memory is given back whole."""
    from text2sql_grpo.commands.compare import compare_runs

    if smoke or resume or len(set(seeds)) < 2:
        raise ConfigError("--seeds needs at least two different seeds, and neither --smoke nor --resume")
    run = config_with_files(config, settings, is_trained=True)
    if not (run.data.test and run.evaluation.before_training):
        raise ConfigError("--seeds compares accuracies: set data.test, and evaluation.before_training: true")
    folder = run.run.output_dir
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    for seed, own in folders.items():
        is_finished = "sets" in read_evaluation(own)
        if is_finished and not _has_changed(own, replace(run, run=RunConfig(own, seed))):
            print(f"seed {seed}: finished ({own})", flush=True)
            continue
        command = [sys.executable, "-m", "text2sql_grpo", "train", "--config", str(config), *settings]
        command += ["--run.seed", str(seed), "--run.output_dir", str(own)]
        print(f"seed {seed}: {shlex.join(command[1:])}", flush=True)
        command += ["--resume", "auto"] if is_finished or any(own.glob("checkpoint-*")) else []
        code = _exit_code(command)
        if code:
            print(
                f"seed {seed} stopped with exit code {code}: the same command goes on there", file=sys.stderr
            )
            return code
    return compare_runs(list(folders.values()))


def _exit_code(command: Sequence[str]) -> int:
    """Run a command; it gets SIGTERM from here, but Ctrl-C from the terminal: twice would stop it at once."""
    child = subprocess.Popen(command)
    handlers = {signal.SIGTERM: lambda *_: child.terminate(), signal.SIGINT: lambda *_: None}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return child.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _has_changed(folder: Path, run: Config) -> bool:
    """True if the settings of a finished run differ, so that it is extended or refused like a resumed one."""
    with options.importing():
        from text2sql_grpo.run.archive import changes

    return (folder / CONFIG).is_file() and bool(changes(folder / CONFIG, run))


def _smoke_settings(run: Config) -> list[str]:
    """Settings that make a run short; those of the command line come after them."""
    episode = run.environment
    short = {
        "data.train_samples": 64,
        "data.test_samples": 2,
        "environment.max_turn_tokens": min(episode.max_turn_tokens, 72),
        "selection": {},
        "losses.kept_questions": 8,
        "evaluation": {"before_training": False},
        "alerts": None,
    }
    grpo = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "report_to": "none"}
    grpo |= {"gradient_accumulation_steps": 1, "generation_batch_size": None, "steps_per_generation": None}
    short |= {f"grpo.{name}": value for name, value in grpo.items()}
    if run.sft is not None and run.sft.adapter is None:
        short |= {"sft.max_steps": 2, "sft.batch_size": 4}
    return [f"--{name}={json.dumps(value)}" for name, value in short.items()]
