"""Supervised fine-tuning (SFT): as a stage before GRPO, with its result in the cache, or alone."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from peft import PeftModel
from rich.console import Console
from rich.text import Text
from transformers import Trainer
from transformers.integrations import unset_hf_deepspeed_config

from text2sql_grpo import trl_compat
from text2sql_grpo.config import Config, SFTSettings
from text2sql_grpo.data.databases import CACHE_VARIABLE, cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.shards import content_files
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.errors import ConfigError, DataError, OutOfMemoryError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.sampler import session_chat
from text2sql_grpo.files import draft, fingerprint, read_jsonl
from text2sql_grpo.models.hardware import device_type, release_memory
from text2sql_grpo.models.loaded_policy import (
    LoadedPolicy,
    load_policy,
    lora_config,
    name_base,
    resolved,
    with_adapter,
)
from text2sql_grpo.phrases import many
from text2sql_grpo.publishing.merging import merge_adapter
from text2sql_grpo.reliability import checkpoints, ranks
from text2sql_grpo.reliability.signals import StopOnInterrupt, stop_on_sigterm
from text2sql_grpo.reporting.progress import TrainingProgress, sft_facts
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import Demonstration, chat_demonstration
from text2sql_grpo.rollout.policy import context_length
from text2sql_grpo.run.archive import (
    SFT_FREE,
    check_ranks,
    claimed,
    find_checkpoint,
    prepare_folder,
    resume_hint,
)
from text2sql_grpo.run.stage import wrong_batch_size
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.sft.sft_trainer import RESULT_FIELDS, SFTData, SFTStageTrainer, stage_arguments
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.schedule import EvaluationSchedule


def sft(
    config: Config, out: Path, arguments: SQLGRPOConfig, *, console: Console, resume: str | None = None
) -> Path | None:
    """Fine-tune `model.path` by the section `sft`, whole or with LoRA, and merge it.

    Args:
        out: Folder to write: `model` or `adapter`, `merged`, checkpoints, `metrics.jsonl` and `config.yaml`.
        arguments: Arguments of GRPO, for precision and optimiser.

    Returns:
        The merged model; None after Ctrl-C or SIGTERM, with a checkpoint saved if training had begun.

    Raises:
        RunError: Anything wrong with model, config, data or folder.
    """
    ranks.create_group()
    if not ranks.is_main():
        console = Console(quiet=True)
    settings = config.sft or SFTSettings()
    config = replace(
        config,
        sft=settings,
        model=resolved(config.model, device_type()),
        run=replace(config.run, output_dir=out),
    )
    check_ranks(config)
    if reason := wrong_batch_size(settings, arguments.world_size):
        raise ConfigError(reason)
    bench = Bench.open(config)
    checkpoint = find_checkpoint(config, resume, console, free=SFT_FREE)
    with claimed(out), stop_on_sigterm(), bench:
        policy = base_policy(config)
        trainer = stage_trainer(bench, policy, out, arguments, console)
        prepare_folder(config, checkpoint, console)
        try:
            _train(trainer, out, checkpoint, console)
        except KeyboardInterrupt:
            command = f"text2sql-grpo sft --out {shlex.quote(str(out))}"
            console.print(f"Stopped. {resume_hint(out, command)}", soft_wrap=True)
            return None
        merged = save_and_merge(trainer, policy, config, console)
    command = f"text2sql-grpo evaluate --model_path {shlex.quote(str(merged))}"
    console.print(f"Its accuracy: {command}", soft_wrap=True)
    ranks.destroy_group()
    return merged


def started_policy(
    bench: Bench,
    arguments: SQLGRPOConfig,
    console: Console,
    *,
    folder: Path | None = None,
    is_resumed: bool = False,
) -> LoadedPolicy:
    """Make the policy that GRPO starts from: after SFT, if configured, run now or taken from the cache.

    With LoRA it is the base with the trained adapter, on which GRPO continues.

    Args:
        folder: `stage_folder`, if it is known.
        is_resumed: The run resumes from a checkpoint, so that the stage it started from is taken, also where
            a database is on a server, whose rows may have changed.

    Raises:
        KeyboardInterrupt: SFT was stopped; the same call resumes it.
    """
    config = bench.config
    if config.sft is None:
        return base_policy(config)
    folder = folder or stage_folder(bench, arguments)
    is_same_data = is_resumed or not _servers(bench)
    with _lock(folder, console):
        is_trained = ranks.gather(is_same_data and folder.exists())
        if not all(is_trained):
            ranks.check_shared(cache_folder("locks"), CACHE_VARIABLE)
        if not any(is_trained):
            if config.sft.adapter is not None:
                _copy_adapter(config, config.sft.adapter, folder)
            else:
                _run_stage(bench, folder, arguments, console)
            ranks.barrier()
    console.print(f"SFT: {folder}", soft_wrap=True)
    if config.model.lora is None:
        trained = replace(config.model, path=str(folder / "model"), revision=None)
        return base_policy(replace(config, model=trained))
    base = base_policy(config)
    model = PeftModel.from_pretrained(base.model, folder / "adapter", is_trainable=True)
    return LoadedPolicy(model, base.tokenizer, base.folder)


@contextmanager
def _lock(folder: Path, console: Console) -> Iterator[None]:
    """Let one run at a time train a stage, by a lock of its rank 0."""
    if not ranks.is_main():
        yield
        return
    lock = FileLock(cache_folder("locks") / f"{folder.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        console.print("Waiting for another run that trains this SFT stage ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def stage_trainer(
    bench: Bench, policy: LoadedPolicy, folder: Path, arguments: SQLGRPOConfig, console: Console
) -> SFTStageTrainer:
    """Make the SFT trainer; add an adapter if the config has one and the policy has none.

    Raises:
        RunError: Anything wrong with questions or chats.
    """
    config, settings = bench.config, bench.config.sft
    assert settings is not None
    sessions, longest = bench.environment.sessions, context_length(policy.model)
    options = config.grpo.get("chat_template_kwargs")
    chat = session_chat(policy.tokenizer, policy.model, sessions, template_options=options)
    chats = [] if settings.chats is None else _chats(settings.chats, bench, chat, longest, console)
    data = SFTData(
        _questions(bench, settings, console),
        chats,
        settings,
        environment=sessions.counted_by(chat.count_tokens),
        chat=chat,
        seed=config.run.seed,
        batch_size=settings.batch_size // arguments.world_size,
        longest=longest,
    )
    model, adapter = policy.model, lora_config(config.model, policy.model.config)
    if adapter is not None and not isinstance(model, PeftModel):
        model = with_adapter(model, adapter)
        name_base(model, policy)
        if arguments.gradient_checkpointing:
            model.enable_input_require_grads()
    steps = len(data) // arguments.world_size
    training = stage_arguments(settings, arguments, folder, steps=steps, is_adapter=adapter is not None)
    trainer = SFTStageTrainer(
        model, training, data, max_tokens=settings.max_tokens, processing_class=policy.tokenizer
    )
    every = config.evaluation.every and (settings.evaluate_every or config.evaluation.every)
    if every is not None:
        trainer.add_callback(
            EvaluationSchedule(trainer, bench.answer, bench.dev, every=every, console=console)
        )
    if trainer.obstacle is not None:
        console.print(f"SFT pads sequences instead of sharing prefixes: {trainer.obstacle}", soft_wrap=True)
    return trainer


def stage_folder(bench: Bench, arguments: SQLGRPOConfig, run: Path | None = None) -> Path:
    """Folder of SFT's result in the cache, by a hash of settings, code, and contents of data and model.

    The rows on a server cannot be hashed: its stages belong to one run. Call on every rank; one reads.

    Args:
        run: Folder of the run that is resumed; None for the run folder of the config.
    """
    return ranks.from_main(lambda: _stage_folder(bench, arguments, run))


def _stage_folder(bench: Bench, arguments: SQLGRPOConfig, run: Path | None) -> Path:
    config, settings = bench.config, bench.config.sft
    assert settings is not None
    model, databases, servers = Path(config.model.path), bench.environment.databases, _servers(bench)
    what = {
        "sft": asdict(replace(settings, save_steps=1, evaluate_every=None)),  # they change no weight
        "model": asdict(replace(config.model, frozen_layers=0)) | ({"path": None} if model.is_dir() else {}),
        "environment": asdict(config.environment),
        "seed": config.run.seed,
        "data": [config.data.train_samples, config.data.dev_databases, config.data.hide],
        "grpo": {name: getattr(arguments, name) for name in RESULT_FIELDS},
        "template": arguments.chat_template_kwargs,
        "versions": torch.__version__,
        "databases": databases.names(),
        "servers": [servers, (run or config.run.output_dir).resolve()] if servers else [],
    }
    files = [file for name in databases.names() for file in databases.files(name)]
    for path in (settings.questions or config.data.train, settings.chats, config.data.quarantine):
        files += content_files(path) if path is not None else []
    for path in (model, settings.adapter):
        if path is not None:
            files += sorted(file for file in (path, *path.glob("*")) if file.is_file())
    for pattern in ("sft/*.py", "rollout/demonstrations.py", "token_tree/*.py"):
        files += sorted(Path(__file__).parents[1].glob(pattern))
    return cache_folder("sft") / fingerprint(what, files)


def _servers(bench: Bench) -> dict[str, str]:
    """URLs of the databases that are on a server, by name."""
    databases = bench.environment.databases
    return {name: str(databases.address(name)) for name in databases.names() if not databases.files(name)}


def base_policy(config: Config) -> LoadedPolicy:
    """Load the base model by the section `model`."""
    model = config.model
    return load_policy(
        model.source,
        dtype=model.dtype,
        quantization=model.quantization,
        attn_implementation=model.attn_implementation,
        copies=4 if model.lora is None and "optim" not in config.grpo else 1,
        is_trained=True,
    )


def _copy_adapter(config: Config, adapter: Path, folder: Path) -> None:
    """Use a given adapter instead of SFT; merge it if GRPO trains all weights."""
    if not ranks.is_main():
        return
    if not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"sft.adapter holds no LoRA adapter: no adapter_config.json in {adapter}")
    with draft(folder) as scratch:
        if config.model.lora is None:
            merge_adapter(adapter, scratch / "model", base=config.model.source)
        else:
            shutil.copytree(adapter, scratch / "adapter")


def _run_stage(bench: Bench, folder: Path, arguments: SQLGRPOConfig, console: Console) -> None:
    """Train in a folder next to `folder`, resuming an unfinished stage, and rename it at the end."""
    work = folder.with_suffix(".unfinished")
    saved = reversed(checkpoints.saved_checkpoints(work))
    undamaged = (one for one in saved if checkpoints.find_damage(one) is None)
    checkpoint = ranks.from_main(lambda: next(undamaged, None))
    step = 0 if checkpoint is None else checkpoints.steps_done(checkpoint)
    if checkpoint is not None:
        console.print(f"Resuming SFT after step {step}")
    if ranks.is_main():
        RunLog(work).cut_back(step)
    policy = base_policy(bench.config)
    trainer = stage_trainer(bench, policy, work, arguments, console)
    _train(trainer, work, checkpoint, console)
    _save(trainer, policy, bench.config, work)
    del trainer, policy
    release_memory()
    if ranks.is_main():
        for path in checkpoints.saved_checkpoints(work):
            shutil.rmtree(path)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, on a server's rows of that time
        work.rename(folder)


def _questions(bench: Bench, settings: SFTSettings, console: Console) -> Sequence[Example]:
    if settings.questions is not None:
        questions = bench.load(settings.questions)
        if shared := bench.shared(questions, settings.questions):
            console.print(Text(f"warning: {shared}"), soft_wrap=True)
        return questions
    if settings.chats is not None:
        return []
    return bench.load(bench.config.data.train, limit=bench.config.data.train_samples)


def _chats(
    path: Path, bench: Bench, chat: ChatFormat, longest: int, console: Console
) -> list[tuple[str, Demonstration]]:
    usual_tools = TOOLS if bench.config.environment.protocol == "native" else None
    found, count = [], 0
    for count, record in enumerate(read_jsonl(path, "chats"), 1):
        tools = record.get("tools", usual_tools)
        if tools != chat.tools:
            options = bench.config.grpo.get("chat_template_kwargs")
            chat = ChatFormat(chat.tokenizer, tools=tools, template_options=options)
        try:
            made = chat_demonstration(record, chat)
        except DataError as error:
            raise DataError(f"{error} ({path}, line {count})") from error
        if len(made.ids) <= longest:
            found.append((str(record.get("database")), made))
    if not found:
        raise DataError(f"no chat of at most {longest} tokens among {count} ({path})")
    if len(found) < count:
        console.print(f"{count - len(found)} of {count} chats are longer than the model's context: left out")
    return found


def train_on(trainer: Trainer, checkpoint: Path | None, *, needs_less: str) -> None:
    """Train from a checkpoint to the last step; load the weights of one that has done it.

    `needs_less` is the advice if the memory does not suffice.
    """
    if checkpoint is not None and trl_compat.load_finished(trainer, checkpoint):
        return
    try:
        with ranks.collective_errors():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"training does not fit into memory: {error}: {needs_less}") from error


def _train(trainer: SFTStageTrainer, folder: Path, checkpoint: Path | None, console: Console) -> None:
    progress = TrainingProgress(RunLog(folder), console, title="SFT", metric="loss", facts=sft_facts)
    stopper = StopOnInterrupt(console)
    for callback in (progress, stopper):
        trainer.add_callback(callback)
    try:
        with stopper.listening():
            train_on(trainer, checkpoint, needs_less="lower sft.max_tokens")
    finally:
        progress.close()
    if left_out := len(trainer.train_dataset.left_out):
        console.print(f"left out {many(left_out, 'question')} longer than the model's context")
    if ranks.any_rank(stopper.is_stopping):
        raise KeyboardInterrupt


def save_and_merge(trainer: Trainer, policy: LoadedPolicy, config: Config, console: Console) -> Path:
    """Save the trained `adapter` or `model` into the run folder, and merge it; returns `merged`."""
    folder = config.run.output_dir
    trained, merged = _save(trainer, policy, config, folder), folder / "merged"
    unset_hf_deepspeed_config()  # ZeRO-3 must not shard the models that are read from now on
    if ranks.is_main():
        base = None if config.model.lora is None else policy.folder
        console.print(f"Merging {trained} ...", soft_wrap=True)
        console.print(str(merge_adapter(trained, merged, base=base)), soft_wrap=True)
    ranks.barrier()
    return merged


def _save(trainer: Trainer, policy: LoadedPolicy, config: Config, folder: Path) -> Path:
    trained = folder / ("model" if config.model.lora is None else "adapter")
    trainer.save_model(str(trained))
    if ranks.is_main():
        policy.tokenizer.save_pretrained(trained)
    ranks.barrier()
    return trained
