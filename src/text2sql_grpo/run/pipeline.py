"""The main job: SFT, evaluate, GRPO, evaluate again, merge; all into one run folder."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from peft import PeftModel
from rich.console import Console
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from text2sql_grpo.checked import adapter
from text2sql_grpo.config import Config, ModelConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError, OutOfMemoryError, RunError, check_type, needs_extra
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.models.hardware import device_type, keep_one_heap, release_memory
from text2sql_grpo.models.loaded_policy import (
    LoadedPolicy,
    freeze_layers,
    load_policy,
    lora_config,
    name_base,
    resolved,
)
from text2sql_grpo.phrases import many
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.alerts import Alerts
from text2sql_grpo.reliability.checkpoints import SCHEDULED_METRIC
from text2sql_grpo.reliability.signals import StopOnInterrupt, stop_on_sigterm
from text2sql_grpo.reporting.progress import TrainingProgress
from text2sql_grpo.reporting.terminal import TextConsole
from text2sql_grpo.reporting.trackers import PROJECT, Tracking, check_installed, trackers, tracking
from text2sql_grpo.run.archive import check_ranks, claimed, find_checkpoint, prepare_folder, resume_hint
from text2sql_grpo.run.run_report import report
from text2sql_grpo.run.sft_stage import save_and_merge, stage_folder, started_policy, train_on
from text2sql_grpo.run.stage import Run, accuracy_before, held_out_accuracy, wrong_stages
from text2sql_grpo.run_folder import ROLLOUTS, RunLog, read_metrics
from text2sql_grpo.training.arguments import SQLGRPOConfig, training_arguments
from text2sql_grpo.training.blend import blend, trained_weights
from text2sql_grpo.training.parts import Select
from text2sql_grpo.training.record import no_signal
from text2sql_grpo.training.schedule import EvaluationSchedule, keep_best
from text2sql_grpo.training.selection import open_select
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

_WEIGHTS = shutil.ignore_patterns("model", "adapter")
_LESS_MEMORY = (
    "lower grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps as much, or start a "
    "new run with a lower environment.max_episode_tokens or with model.lora"
)


@dataclass(frozen=True)
class RunResult:
    """Result of a run of the main job.

    Attributes:
        folder: The run folder.
        merged: The merged model; None if the run was stopped, and can be resumed.
        before: Strict accuracy before GRPO by held-out set; empty if it was not measured.
        after: The same of the merged model.
    """

    folder: Path
    merged: Path | None = None
    before: Mapping[str, Accuracy] = field(default_factory=dict)
    after: Mapping[str, Accuracy] = field(default_factory=dict)


def train(config: Config, *, console: Console | None = None, resume: str | None = None) -> RunResult:
    """Run the main job: SFT if configured, evaluation, GRPO, evaluation, merge into `run.output_dir`/merged.

    Args:
        console: Where progress is printed; None for standard output.
        resume: A checkpoint folder, or `auto` for the newest of the run folder; None starts afresh.

    Returns:
        The result; without a merged model after Ctrl-C or SIGTERM, with a checkpoint saved if training had
        begun.

    Raises:
        RunError: Anything wrong with config, data, model or folder, raised before work is lost.
    """
    check_type("config", config, Config)
    with stop_on_sigterm(), ExitStack() as claims:
        result = _train(config, console or TextConsole(), resume, claims)
    ranks.destroy_group()
    return result


def _train(config: Config, console: Console, resume: str | None, claims: ExitStack) -> RunResult:
    keep_one_heap()
    config.reward_mix()  # fails before anything is loaded
    arguments = run_arguments(config)  # initialises the process group
    ranks.create_group()
    if not ranks.is_main():
        console = Console(quiet=True)
        logging.getLogger("text2sql_grpo").setLevel(logging.ERROR)
    config = replace(config, model=resolved(config.model, device_type()))
    check_ranks(config)
    for reason in wrong_stages(config, ranks.world_size(), is_sharded=arguments.deepspeed is not None):
        raise ConfigError(reason)
    names = trackers(config.grpo.get("report_to"))
    check_installed(names)
    if arguments.use_vllm:
        with needs_extra("vllm", "grpo.use_vllm"):
            import_module("vllm")
    alerts = [Alerts(config.alerts, console, run_name=str(arguments.run_name))] if config.alerts else []
    bench = Bench.open(config)
    questions = bench.load(config.data.train, limit=config.data.train_samples)
    select = select_questions(questions, bench, arguments)
    run = Run(bench, console, alerts)
    if shared := bench.shared(questions, config.data.train):
        run.warn(shared)
    checkpoint = find_checkpoint(config, resume, console)
    claims.enter_context(claimed(run.folder))
    facts = f"questions: {len(questions)}   databases: {len(bench.environment.databases.names())}"
    facts += f"   processes: {ranks.world_size()}" if ranks.is_distributed() else ""
    console.print(f"Run folder: {run.folder}   {facts}", soft_wrap=True)
    resumed_run = run.folder if checkpoint is None else checkpoint.parent
    try:
        with run.stage("SFT" if config.sft else "loading"):
            stage = None if config.sft is None else stage_folder(bench, arguments, resumed_run)
            is_resumed = checkpoint is not None
            policy = started_policy(bench, arguments, console, folder=stage, is_resumed=is_resumed)
            _check_frozen_layers(config.model, policy, arguments)
    except KeyboardInterrupt:
        more = ": SFT resumes at its last checkpoint" if config.sft else ""
        console.print(f"Stopped. Run the same command again{more}.")
        return RunResult(run.folder)
    prepare_folder(config, checkpoint, console)
    if stage is not None and ranks.is_main():
        shutil.copytree(stage, run.folder / "sft", ignore=_WEIGHTS, dirs_exist_ok=True)
    try:
        plain = adapter(Config).dump_python(config, mode="json")
        with bench, run.keeping_warnings(), tracking(names, arguments, plain) as tracked:
            return _improve(run, arguments, policy, questions, select, checkpoint, tracked)
    except KeyboardInterrupt:
        console.print(f"Stopped. {resume_hint(run.folder)}", soft_wrap=True)
        return RunResult(run.folder)


def _check_frozen_layers(settings: ModelConfig, policy: LoadedPolicy, arguments: SQLGRPOConfig) -> None:
    """Fail before an evaluation takes minutes.

    Raises:
        ConfigError: No layer would be trained, or a reference adapter would thaw the frozen ones.
    """
    count, n_layers = settings.frozen_layers, policy.model.config.get_text_config().num_hidden_layers
    if count >= n_layers:
        raise ConfigError(f"model.frozen_layers {count}: of {n_layers} layers one must be left")
    if count and settings.lora is not None and arguments.beta:
        raise ConfigError("model.frozen_layers needs grpo.beta: 0 with model.lora")


def _improve(
    run: Run,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    select: Select,
    checkpoint: Path | None,
    tracked: Tracking,
) -> RunResult:
    """Evaluation, GRPO, merge, evaluation, report."""
    before = accuracy_before(run, policy, is_measured=checkpoint is not None)
    progress = TrainingProgress(RunLog(run.folder), run.console)
    stopper = StopOnInterrupt(run.console)
    callbacks = [progress, stopper, *run.alerts, *tracked.callbacks]
    trainer = grpo_trainer(run, arguments, policy, questions, callbacks, select)
    share = run.config.evaluation.blend
    start = trained_weights(trainer.model) if share < 1 else {}
    trainer.rollouts.on_episode = progress.show_episodes
    evaluation = run.config.evaluation
    if evaluation.every is not None:
        trainer.add_callback(
            EvaluationSchedule(
                trainer,
                run.bench.answer,
                run.bench.dev,
                every=evaluation.every,
                saves_start=evaluation.keep == "best",
                console=run.console,
            )
        )
    try:
        with run.stage("GRPO"), stopper.listening():
            train_on(trainer, checkpoint, needs_less=_LESS_MEMORY)
    except OutOfMemoryError as error:
        raise RunError(f"{error}; {trainer.saved_steps()}") from error
    finally:
        progress.close()
        for alerts in run.alerts:
            alerts.close()
    if ranks.any_rank(stopper.is_stopping):
        raise KeyboardInterrupt
    _warn_of_steps_without_gradient(trainer, run)
    step = keep_best(run.config.evaluation.keep, trainer, run.folder, run.console)
    if share < 1 and step:
        blend(trainer.model, start, share)
        run.console.print(f"Blend: {share:.0%} of the way from the start to the weights of step {step}")
    with run.stage("merge"):
        release_memory()
        merged = save_and_merge(trainer, policy, run.config, run.console)
    ways = trainer.ways
    del trainer
    with run.stage("evaluation after"):
        after = held_out_accuracy(run, load_policy(str(merged)), "after")
    sets_before = before.get("before", {}).get("sets", {})
    if ranks.is_main():
        report(run, policy, merged, before | {"step": step, "ways": ways}, after)
        tracked.log_evaluation(sets_before, 0)
        tracked.log_evaluation(after, step)
        files = [run.config.data.train, *run.config.data.test.values()]
        tracked.log_outcome(run.folder, merged, [Path(path) for path in files if Path(path).is_file()], step)
    ranks.barrier()
    strict = (
        {name: Accuracy.read(scores["overall"]["strict"]) for name, scores in sets.items()}
        for sets in (sets_before, after)
    )
    return RunResult(run.folder, merged, *strict)


def _warn_of_steps_without_gradient(trainer: SQLGRPOTrainer, run: Run) -> None:
    """Count them, also those before the checkpoint of a resumed run; add the reason if it is every step."""
    rows = [*trainer.state.log_history, *read_metrics(run.folder)]
    has_gradient = {
        row["step"]: row.get("step/skipped", 0) < 1
        and (row.get("grad_norm") or row["frac_reward_zero_std"] < 1)
        for row in rows
        if "frac_reward_zero_std" in row
    }
    if ranks.any_rank(any(has_gradient.values()) or not has_gradient):
        if flat := sum(not each for each in has_gradient.values()):
            run.warn(f"{flat} of {many(len(has_gradient), 'step')} had no gradient")
        return
    episodes = read_jsonl(run.folder / ROLLOUTS, "episodes")
    played = [(row["reward"], (row["stop_reason"], row["reason"])) for row in episodes]
    rewards, ends = zip(*played, strict=True)
    size = trainer.num_generations
    groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
    reason = no_signal(groups, ends, has_sft=run.config.sft is not None)
    reason = reason or "each was not finite and skipped: lower grpo.learning_rate"
    run.warn(f"nothing was learned: no step had a gradient: {reason}; merging the model as it was")


def run_arguments(config: Config) -> SQLGRPOConfig:
    """Make the training arguments of a run.

    Raises:
        ConfigError: See `training_arguments`.
    """
    folder = config.run.output_dir.absolute()
    fields = {"project": PROJECT, "run_name": folder.name, "disable_tqdm": True, **config.grpo}
    # transformers does not know Weave.
    names = [name for name in trackers(config.grpo.get("report_to")) if name != "weave"]
    fields["report_to"] = names or ["none"]
    if config.evaluation.every is not None:
        fields.setdefault("metric_for_best_model", SCHEDULED_METRIC)
    return training_arguments(fields, output_dir=str(folder), seed=config.run.seed)


def select_questions(questions: Sequence[Example], bench: Bench, arguments: SQLGRPOConfig) -> Select:
    """Make the selection of questions, which must suit the sections `grpo`, `selection` and `grading`.

    Raises:
        DataError: They do not fill one generation batch; or see `training.selection.open_select`.
        ConfigError: Test databases are asked for, and cannot be made on this machine.
    """
    arguments.check_questions(len(questions))
    select = open_select(
        questions, bench.config.selection, seed=arguments.seed, shuffle=arguments.shuffle_dataset
    )
    suite = bench.environment.grader.suite
    if suite is None:
        return select
    databases = bench.environment.databases
    for name in databases.names():
        if any(question.database == name for question in questions):
            try:
                suite.check(databases.address(name))
            except ConfigError as error:
                raise ConfigError(
                    f"no test databases of {name!r} can be made: {error}; fix that, set "
                    "grading.server_url, or set grading.test_databases: 0 and rewards: {execution: 1.0}: an "
                    "answer that is right by accident is then paid like a right one"
                ) from error
    return select


def grpo_trainer(
    run: Run,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    callbacks: list[TrainerCallback],
    select: Select | None = None,
) -> SQLGRPOTrainer:
    """Make the trainer of a run, which prints nothing itself."""
    config = run.config
    is_adapted = isinstance(policy.model, PeftModel)  # by SFT: GRPO continues on the same adapter
    rewards = config.reward_mix()
    if rewards.warning:
        run.warn(rewards.warning)
    trainer = SQLGRPOTrainer(
        policy.model,
        run.bench.environment,
        train_dataset=questions,
        reward_funcs=rewards,
        args=arguments,
        processing_class=policy.tokenizer,
        peft_config=None if is_adapted else lora_config(config.model, policy.model.config),
        callbacks=callbacks,
        rollout=config.rollout,
        select=select,
        losses=config.losses,
    )
    name_base(trainer.model, policy)
    freeze_layers(trainer.model, config.model.frozen_layers)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer
