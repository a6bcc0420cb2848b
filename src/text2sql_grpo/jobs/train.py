"""The main job: warm start or load, evaluate, GRPO, evaluate again, merge; all into one run folder."""

import json
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError, DataError, ModelError, RunError
from text2sql_grpo.evaluation.answers import write_answers
from text2sql_grpo.evaluation.blind import blind_cap
from text2sql_grpo.evaluation.evaluate import Answer, accuracy, answer_questions, summary
from text2sql_grpo.integrations.trackers import (
    PROJECT,
    Tracking,
    check_installed,
    reported_by_transformers,
    trackers,
    tracking,
)
from text2sql_grpo.jobs.doctor_checks import hardware
from text2sql_grpo.jobs.merge import check_merge
from text2sql_grpo.jobs.run_folder import (
    check_folder,
    find_checkpoint,
    how_to_go_on,
    prepare_folder,
    write_record,
)
from text2sql_grpo.jobs.setup import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.publishing.merge import merge_adapter
from text2sql_grpo.publishing.model_card import write_model_card
from text2sql_grpo.reporting.learning_curve import plot_learning_curve
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.policy import model_policy
from text2sql_grpo.training import processes, trl_compat
from text2sql_grpo.training.alerts import Alerts
from text2sql_grpo.training.arguments import SQLGRPOConfig, device_type, training_arguments
from text2sql_grpo.training.checkpoints import is_finished
from text2sql_grpo.training.demonstrations import looking_turns
from text2sql_grpo.training.policy import LoadedPolicy, load_policy, lora_config, resolved, tiny_policy
from text2sql_grpo.training.progress import StopOnInterrupt, TrainingProgress, progress_bar, stop_on_sigterm
from text2sql_grpo.training.run_log import RunLog
from text2sql_grpo.training.trainer import SQLGRPOTrainer

INTERRUPTED = 130


@dataclass
class _Run:
    """One run of the job, from an open workbench to a merged model.

    Attributes:
        alerts: One or none.
    """

    bench: Workbench
    console: Console
    alerts: list[Alerts]
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.bench.config

    @property
    def folder(self) -> Path:
        return self.config.run.output_dir

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage; the run prints all of them at its end."""
        started, cpu_started = time.monotonic(), time.process_time()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self.cpu_seconds[name] = round(time.process_time() - cpu_started, 1)


def train(config: Config, *, console: Console, resume: str | None = None) -> int:
    """Runs the main job.

    Args:
        config: The run.
        console: Where a person reads along.
        resume: A checkpoint folder, or `auto` for the newest of the run folder; None starts afresh.

    Returns:
        The exit code: 0, or 130 after Ctrl-C or SIGTERM, with a checkpoint saved if training had begun.

    Raises:
        RunError: Anything wrong with config, data, model or folder, said before work is lost.
    """
    with stop_on_sigterm():
        code = _train(config, console, resume)
    processes.end()
    return code


def _train(config: Config, console: Console, resume: str | None) -> int:
    arguments = run_arguments(config)  # from here on, the processes of a run know of each other
    processes.meet()
    if not processes.is_main():
        console = Console(quiet=True)
        logging.getLogger("text2sql_grpo").setLevel(logging.ERROR)
    config = replace(config, model=resolved(config.model, device_type()))
    names = trackers(config.grpo.get("report_to"))
    check_installed(names)
    name = str(arguments.run_name)
    alerts = [Alerts(config.alerts, console, run_name=name)] if config.alerts else []
    bench = open_workbench(config)
    questions = bench.load(config.data.train, limit=config.data.train_samples)
    check_fills_a_batch(questions, arguments)
    run = _Run(bench, console, alerts)
    checkpoint = find_checkpoint(config, resume, console)
    check_folder(run.folder)
    console.print(
        f"Run folder: {run.folder}   questions: {len(questions)}   databases: {len(bench.databases.names())}",
        soft_wrap=True,
    )
    try:
        with run.stage("warm start"):
            policy = _policy(run)
    except KeyboardInterrupt:
        console.print("Stopped. Run the same command again: a warm start goes on where it was.")
        return INTERRUPTED
    prepare_folder(config, checkpoint, console)
    try:
        with tracking(names, arguments) as tracked:
            return _improve(run, arguments, policy, questions, checkpoint, tracked)
    except KeyboardInterrupt:
        console.print(f"Stopped. {how_to_go_on(run.folder)}", soft_wrap=True)
        return INTERRUPTED


def _improve(
    run: _Run,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    checkpoint: Path | None,
    tracked: Tracking,
) -> int:
    """Evaluation, GRPO, merge, evaluation, report."""
    before = _before(run, policy, is_resumed=checkpoint is not None)
    progress = TrainingProgress(RunLog(run.folder), run.console)
    stopper = StopOnInterrupt(run.console)
    trainer = _trainer(
        run, arguments, policy, questions, [progress, stopper, *run.alerts, *tracked.callbacks]
    )
    try:
        with run.stage("GRPO"), stopper.listening():
            _learn(trainer, checkpoint)
    finally:
        progress.close()
        for alerts in run.alerts:
            alerts.close()
    if stopper.is_stopping:
        raise KeyboardInterrupt
    with run.stage("merge"):
        merged = _save_and_merge(run, trainer, policy)
    steps = trainer.state.global_step or arguments.max_steps  # 0 where all of it was done before
    del trainer
    with run.stage("evaluation after"):
        after = _evaluate(run, load_policy(str(merged)), "after")
        checked = _check_merge(run, policy, merged)
    if processes.is_main():
        _report(run, policy, merged, before | checked, after)
        tracked.log_evaluation(before.get("before", {}).get("sets", {}), 0)
        tracked.log_evaluation(after, steps)
    processes.wait()
    return 0


def _learn(trainer: SQLGRPOTrainer, checkpoint: Path | None) -> None:
    if checkpoint is not None and is_finished(checkpoint, trainer.args.max_steps):
        trl_compat.load_weights(trainer, checkpoint)
        return
    try:
        with processes.others_ending():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"expected training to fit into memory, got {error}: lower grpo.per_device_train_batch_size or "
            "environment.max_episode_tokens, or train with model.lora"
        ) from error


def run_arguments(config: Config) -> SQLGRPOConfig:
    """The training arguments of a run.

    Raises:
        ConfigError: See `training_arguments`.
    """
    environment = config.environment
    fields = {"project": PROJECT, "run_name": config.run.output_dir.absolute().name, **config.grpo}
    fields["report_to"] = reported_by_transformers(trackers(config.grpo.get("report_to")))
    return training_arguments(
        fields,
        output_dir=str(config.run.output_dir.absolute()),
        seed=config.run.seed,
        max_turn_tokens=environment.max_turn_tokens,
        max_completion_length=environment.max_episode_tokens,
        engine=config.rollout.engine,
        max_slots=config.rollout.max_slots,
        disable_tqdm=True,
    )


def check_fills_a_batch(questions: Sequence[Example], arguments: SQLGRPOConfig) -> None:
    """TRL drops a batch that is not full, and with it a whole run on few questions."""
    needed = arguments.generation_batch_size // arguments.num_generations
    if len(questions) < needed:
        raise DataError(
            f"expected at least {needed} questions for one batch (grpo: {arguments.generation_batch_size} "
            f"episodes, {arguments.num_generations} of each), got {len(questions)} (data.train): "
            "lower grpo.per_device_train_batch_size"
        )


def _policy(run: _Run) -> LoadedPolicy:
    config = run.config
    if config.model.path is not None:
        run.console.print(f"Loading {config.model.path} ...")
        return load_policy(
            config.model.path,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            attn_implementation=config.model.attn_implementation,
        )
    assert config.warm_start is not None and config.data.demonstrations is not None
    demonstrations = run.bench.load(config.data.demonstrations)
    with progress_bar(run.console, "facts") as bar:
        task = bar.add_task("Warm start", total=config.warm_start.steps, facts="")

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step, facts=f"loss {loss:.3f}")
            if not run.console.is_terminal and step % 100 == 0:
                run.console.print(f"Warm start {step}/{bar.tasks[0].total:.0f}  loss {loss:.3f}")

        policy = tiny_policy(config, demonstrations, run.bench.environment, on_step=on_step)
        bar.update(task, completed=config.warm_start.steps)
    run.console.print(
        f"Warm-started policy: {policy.folder} ({policy.model.num_parameters() / 1e6:.1f} M parameters)",
        soft_wrap=True,
    )
    return policy


def _trainer(
    run: _Run,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    callbacks: list[TrainerCallback],
) -> SQLGRPOTrainer:
    config = run.config
    rewards = RewardMix(config.rewards)
    if rewards.warning:
        run.console.print(Text(f"warning: {rewards.warning}"), soft_wrap=True)
    try:
        trainer = SQLGRPOTrainer(
            policy.model,
            arguments,
            examples=questions,
            environment=run.bench.environment,
            rewards=rewards,
            grader=run.bench.grader,
            processing_class=policy.tokenizer,
            peft_config=lora_config(config.model, policy.model.config),
            callbacks=callbacks,
            run_log=RunLog(run.folder),
        )
    except ValueError as error:  # TRL's objections to how its fields go together
        raise ConfigError(f"grpo: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _answer(
    run: _Run, policy: LoadedPolicy, sets: dict[str, list[Example]], title: str, *, force_look: bool = False
) -> dict[str, list[Answer]]:
    """The answers to all questions; each process that holds the whole model makes a share of them."""
    holds = [holds for (holds,) in processes.gathered([processes.holds_all_weights(policy.model)])]
    holders = [number for number, has_all in enumerate(holds) if has_all]
    if not holders:
        raise ConfigError(
            "expected a process that holds the whole model for the evaluation, got none (ZeRO-3 divides it "
            "while it is read): set evaluation.before_training: false, or accelerate's zero3_init_flag: false"
        )
    own: dict[str, list[Answer]] = {}
    if processes.number() in holders:
        first = holders.index(processes.number())
        share = {name: examples[first :: len(holders)] for name, examples in sets.items()}
        own = _own_answers(run, policy, share, title, force_look=force_look)
    everybody = processes.gathered([own])
    shares = [everybody[number][0] for number in holders]
    return {
        name: [shares[i % len(shares)][name][i // len(shares)] for i in range(len(examples))]
        for name, examples in sets.items()
    }


def _own_answers(
    run: _Run, policy: LoadedPolicy, sets: dict[str, list[Example]], title: str, *, force_look: bool
) -> dict[str, list[Answer]]:
    model, bench = policy.model, run.bench
    if not getattr(model, "is_quantized", False):  # else it was placed when it was loaded
        model.to(device_type())
    model.eval()
    chat = bench.chat(policy.tokenizer, model)
    settings = run.config.evaluation
    speaker = model_policy(
        model,
        chat,
        temperature=settings.temperature,
        batch_size=settings.batch_size,
        engine=run.config.rollout.engine,
    )
    answers = {}
    with progress_bar(run.console) as bar:
        task = bar.add_task(title, total=sum(map(len, sets.values())))
        for name, examples in sets.items():
            answers[name] = answer_questions(
                examples,
                speaker,
                chat,
                bench.environment,
                bench.grader,
                bench.budgets(model),
                first_turns=[looking_turns(example)[0] for example in examples] if force_look else None,
                on_answer=lambda: bar.advance(task),
            )
    return answers


def _held_out(run: _Run) -> dict[str, list[Example]]:
    return {
        name: evenly_spaced(examples, run.config.data.test_samples)
        for name, examples in run.bench.test.items()
    }


def _before(run: _Run, policy: LoadedPolicy, *, is_resumed: bool) -> dict[str, Any]:
    """Held-out accuracy before GRPO, the accuracy with the look forced, and the blind cap."""
    path = run.folder / "evaluation.json"
    if not run.config.evaluation.before_training or not run.bench.test:
        return {}
    is_known = processes.is_main() and is_resumed and path.exists()
    if processes.any_of(is_known):
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if is_known else {}
        return known
    with run.stage("evaluation before"):
        record = {"before": {"sets": _evaluate(run, policy, "before")}, "lookup": _lookup_marks(run, policy)}
    if processes.is_main():
        write_record(path, record)
    return record


def _evaluate(run: _Run, policy: LoadedPolicy, when: str) -> dict[str, Any]:
    answers = _answer(run, policy, _held_out(run), f"Evaluation {when}")
    if processes.is_main():
        write_answers(
            run.folder / ("evaluation.jsonl" if when == "after" else f"evaluation-{when}.jsonl"), answers
        )
    return {name: summary(answered) for name, answered in answers.items()}


def _lookup_marks(run: _Run, policy: LoadedPolicy) -> dict[str, Any]:
    """Per held-out set: look-up accuracy with the look forced, and what a blind policy can reach."""
    protocol_can_force = run.config.environment.protocol == "tags" and run.config.environment.max_turns > 1
    marks: dict[str, Any] = {}
    for name, examples in _held_out(run).items():
        asked = [example for example in examples if example.look_sql]
        if not asked:
            continue
        cap = blind_cap(asked, run.bench.databases, run.bench.grader)
        marks[name] = {"blind_cap": {"best": cap.best.record(), "any": cap.any.record()}}
        if protocol_can_force:
            forced = _answer(run, policy, {name: asked}, f"Look forced, {name}", force_look=True)[name]
            marks[name]["forced_look_before"] = accuracy(forced).record()
    gate = run.config.warm_start.min_forced_look_accuracy if run.config.warm_start else 0.0
    reached = [
        mark["forced_look_before"]["accuracy"] for mark in marks.values() if "forced_look_before" in mark
    ]
    if reached and max(reached) < gate:
        raise ModelError(
            f"expected the warm-started policy to answer {gate:.0%} of look-up questions when the look is "
            f"forced, got {max(reached):.0%}: GRPO would have nothing to choose; raise warm_start.steps"
        )
    return marks


def _save_and_merge(run: _Run, trainer: SQLGRPOTrainer, policy: LoadedPolicy) -> Path:
    """The trained adapter or model as it is, and merged."""
    config = run.config
    trained = run.folder / ("model" if config.model.lora is None else "adapter")
    trainer.save_model(str(trained))
    unset_hf_deepspeed_config()  # else ZeRO-3 divides what is read from now on too
    merged = run.folder / "merged"
    if processes.is_main():
        policy.tokenizer.save_pretrained(trained)
        report = merge_adapter(trained, merged, base=None if config.model.lora is None else policy.folder)
        run.console.print(str(report), soft_wrap=True)
    processes.wait()
    return merged


def _check_merge(run: _Run, policy: LoadedPolicy, merged: Path) -> dict[str, Any]:
    """The same questions answered by the adapter on its base and by the merged model, by one process."""
    config = run.config
    count = config.evaluation.merge_samples
    if config.model.lora is None or not count or not run.bench.test or not processes.is_main():
        return {}
    check = check_merge(
        run.folder / "adapter",
        merged,
        run.bench,
        run.console,
        num_samples=count,
        base=policy.folder,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
    )
    run.console.print(str(check), soft_wrap=True)
    return {"merge_check": check.record()}


def _report(
    run: _Run, policy: LoadedPolicy, merged: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    record = {**before, "sets": after, "model": str(merged), "temperature": run.config.evaluation.temperature}
    record |= {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "started_from": policy.folder}
    record["hardware"] = hardware()
    write_record(run.folder / "evaluation.json", record)
    picture = plot_learning_curve(run.folder)
    write_model_card(run.folder, merged)
    run.console.print(_table(before, after))
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.seconds.items())
    executor = run.bench.executor
    share = executor.seconds_in_sql / max(sum(run.seconds.values()), 0.1)
    run.console.print(
        f"Time: {stages}; in SQL {executor.seconds_in_sql:.1f} s ({share:.1%} of it) for "
        f"{executor.queries} queries, {executor.cache_hits} of them from the cache",
        soft_wrap=True,
    )
    for what, path in (
        ("merged model", merged),
        ("learning curve", picture),
        ("evaluation", run.folder / "evaluation.json"),
        ("every episode", run.folder / "rollouts.jsonl"),
        ("metrics", run.folder / "metrics.jsonl"),
    ):
        run.console.print(f"  {what:15} {path}", soft_wrap=True)
    command = f"python scripts/evaluate.py --model_path {shlex.quote(str(merged))} --num_samples 5"
    run.console.print(f"Look at its answers: {command}", soft_wrap=True)


def _table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Short enough for 80 columns; counts stand in `evaluation.json`."""
    table = Table(
        Column("held-out set", no_wrap=True),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="Strict accuracy with its 95% interval",
    )
    for column in ("before GRPO", "after GRPO", "look forced before", "blind cap"):
        table.add_column(column, justify="right")
    for name, entry in after.items():
        earlier = before.get("before", {}).get("sets", {}).get(name)
        marks = before.get("lookup", {}).get(name, {})
        rows: list[tuple[str, Any, Any, Any]] = [(name, entry["overall"], earlier and earlier["overall"], {})]
        if "lookup" in entry["by_family"]:
            was = earlier and earlier["by_family"]["lookup"]
            rows.append(("  look-up", entry["by_family"]["lookup"], was, marks))
        for title, now, was, marked in rows:
            table.add_row(
                f"{title} ({now['strict']['total']})",
                _shown(was and was["strict"]),
                _shown(now["strict"]),
                _shown(marked.get("forced_look_before")),
                _shown(marked.get("blind_cap", {}).get("best")),
            )
    return table


def _shown(record: dict[str, Any] | None) -> str:
    if not record:
        return "-"
    low, high = record["interval"]
    return f"{record['accuracy']:.0%} ({low:.0%}-{high:.0%})"
