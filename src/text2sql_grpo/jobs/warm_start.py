"""Supervised training of a model on collected chats, by TRL's SFTTrainer, before reinforcement learning."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from text2sql_grpo.config import Config, dump_config
from text2sql_grpo.environment.episode import Message
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.publishing.merge import merge_adapter
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import context_length
from text2sql_grpo.training.arguments import device_type
from text2sql_grpo.training.policy import LoadedPolicy, load_policy, lora_config, resolved
from text2sql_grpo.training.progress import progress_bar
from text2sql_grpo.training.run_log import RunLog
from text2sql_grpo.training.trajectories import read_episodes, supervised_tokens


@dataclass(frozen=True)
class SupervisedSettings:
    """How it is trained.

    Attributes:
        learning_rate: Peak; None for 1e-5 of all weights, 2e-4 of an adapter.
        batch_size: Chats of one optimiser step.
        micro_batch_size: Chats of one forward pass.
        max_steps: None for whole epochs.
    """

    epochs: float = 2.0
    learning_rate: float | None = None
    batch_size: int = 16
    micro_batch_size: int = 4
    max_steps: int | None = None


def warm_start(
    config: Config, data: Path, out: Path, settings: SupervisedSettings, *, seed: int, console: Console
) -> int:
    """Trains `model.path` of a config on chats, all of it or an adapter as the config says, and merges it.

    Only what the assistant says counts in the loss. Tokens are put together as in a rollout.

    Args:
        data: Chats as `collect` keeps them: JSONL with `messages`, and `tools` for the native protocol.
        out: Folder to write: `model` or `adapter`, `merged`, `metrics.jsonl` and `config.yaml`.

    Returns:
        The exit code 0.

    Raises:
        RunError: Anything wrong with model, config or data.
    """
    if config.model.path is None:
        raise ConfigError("expected model.path, the model to train, got model.tiny")
    if settings.batch_size % settings.micro_batch_size:
        raise ConfigError(
            f"expected a multiple of {settings.micro_batch_size} as batch size, got {settings.batch_size}"
        )
    chats = list(read_episodes(data))
    model_settings = resolved(config.model, device_type())
    policy = load_policy(
        config.model.path,
        dtype=model_settings.dtype,
        quantization=model_settings.quantization,
        attn_implementation=model_settings.attn_implementation,
    )
    dataset = _dataset(chats, policy, config, data, console)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    trainer = SFTTrainer(
        policy.model,
        args=_arguments(settings, out, seed, is_adapter=config.model.lora is not None),
        train_dataset=dataset,
        processing_class=policy.tokenizer,
        peft_config=lora_config(model_settings, policy.model.config),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    with progress_bar(console, "facts") as bar:
        trainer.add_callback(_Progress(bar, RunLog(out)))
        trainer.train()
    trained = out / ("model" if config.model.lora is None else "adapter")
    trainer.save_model(str(trained))
    policy.tokenizer.save_pretrained(trained)
    report = merge_adapter(trained, out / "merged", base=None if config.model.lora is None else policy.folder)
    console.print(str(report), soft_wrap=True)
    command = f"python scripts/evaluate.py --model_path {shlex.quote(str(out / 'merged'))}"
    console.print(f"Its accuracy: {command}", soft_wrap=True)
    return 0


def _dataset(
    chats: list[dict[str, Any]], policy: LoadedPolicy, config: Config, data: Path, console: Console
) -> Dataset:
    usual_tools = TOOLS if config.environment.protocol == "native" else None
    chat = ChatFormat(policy.tokenizer, tools=usual_tools)
    longest = context_length(policy.model)
    rows = []
    for number, record in enumerate(chats, 1):
        tools = record.get("tools", usual_tools)
        if tools != chat.tools:
            chat = ChatFormat(policy.tokenizer, tools=tools)
        try:
            ids, labels = supervised_tokens(_messages(record), chat)
        except DataError as error:
            raise DataError(f"{error} ({data}, line {number})") from error
        if len(ids) <= longest:
            rows.append({"input_ids": ids, "labels": labels})
    if not rows:
        raise DataError(f"expected chats of at most {longest} tokens, got none among {len(chats)} ({data})")
    counted = sum(label != -100 for row in rows for label in row["labels"])
    console.print(f"{len(rows)} chats, {counted} tokens of the assistant", soft_wrap=True)
    if len(rows) < len(chats):
        console.print(f"{len(chats) - len(rows)} are longer than the model's context and left out")
    return Dataset.from_list(rows)


def _messages(record: dict[str, Any]) -> list[Message]:
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise DataError(f"expected messages, got {', '.join(record) or 'nothing'}")
    for message in messages:
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"expected messages of a role and text, got {json.dumps(message)[:200]}")
    return messages


def _arguments(settings: SupervisedSettings, out: Path, seed: int, *, is_adapter: bool) -> SFTConfig:
    device = device_type()
    rate = settings.learning_rate or (2e-4 if is_adapter else 1e-5)
    return SFTConfig(
        output_dir=str(out),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        per_device_train_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.batch_size // settings.micro_batch_size,
        max_length=None,
        gradient_checkpointing=device == "cuda",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class _Progress(TrainerCallback):
    """Moves a bar and writes `metrics.jsonl` anew."""

    def __init__(self, bar: Any, run_log: RunLog) -> None:
        self._bar, self._run_log = bar, run_log
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self._run_log.folder / "metrics.jsonl").unlink(missing_ok=True)
        self._task = self._bar.add_task("Supervised", total=state.max_steps, facts="")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._run_log.write_metrics({"step": state.global_step, **(logs or {})})
        if logs and "loss" in logs:
            self._bar.update(self._task, completed=state.global_step, facts=f"loss {float(logs['loss']):.3f}")
