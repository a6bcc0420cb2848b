"""Set-up that jobs share: databases, questions, environment, grader; and the run of the main job."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from text2sql_grpo.config import Config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples, read_quarantine
from text2sql_grpo.data.shards import load_shards, shard_files
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader
from text2sql_grpo.reliability.alerts import Alerts
from text2sql_grpo.rewards import open_grader
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Policy, SlotPolicy
from text2sql_grpo.rollout.policy import context_length, model_policy
from text2sql_grpo.sql import SQLExecutor

T = TypeVar("T")


@dataclass(frozen=True)
class Workbench:
    """Parts of a run that need no model.

    Attributes:
        test: Held-out questions by the name of their set.
        dev: Held-out questions for evaluations during training; none without a schedule.
    """

    config: Config
    databases: Databases
    executor: SQLExecutor
    environment: SQLEnvironment
    grader: Grader
    test: dict[str, list[Example]]
    dev: Sequence[Example] = ()

    def load(self, path: Path | str, *, limit: int | None = None) -> Sequence[Example]:
        """Load training questions with checked golds, but for those in quarantine or on `dev_databases`.

        Questions of a file are held in memory; those of a folder or a pattern of files stay on disk.

        Raises:
            DataError: A file, question or gold is wrong, or none is left.
        """
        files, left_out = shard_files(path), quarantined(self.config)
        held_out = self.config.data.dev_databases
        if files == [path]:
            examples = load_examples(
                path,
                self.databases,
                self.executor,
                limit=limit,
                leave_out=left_out,
                leaves_out_large=True,
                keep=lambda example: example.database not in held_out,
            )
            if not examples:
                raise DataError(f"every question of {path} is on one of data.dev_databases")
            return examples
        if held_out:
            raise DataError(f"data.dev_databases needs questions in one file, got several: {path}")
        return load_shards(files, self.databases, self.executor, limit=limit, leave_out=left_out)

    def chat(self, tokenizer: Any, model: Any) -> ChatFormat:
        """Make the chat format of a model under this run's protocol; of the tokenizer alone without a model.

        The tokenizer then measures `environment.max_schema_tokens`.
        """
        chat = chat_format(
            tokenizer,
            model,
            self.environment.settings,
            tools=self.environment.tools,
            template_options=self.config.grpo.get("chat_template_kwargs"),
        )
        self.environment.count_tokens_by(chat.count_tokens)
        return chat

    def policy(self, model: Any, chat: ChatFormat, *, temperature: float = 0.0) -> Policy | SlotPolicy:
        """Make a policy for episodes outside of a trainer, with the engine and batch size of the config."""
        return model_policy(
            model,
            chat,
            temperature=temperature,
            batch_size=self.config.evaluation.batch_size,
            engine=self.config.rollout.engine,
        )

    def budgets(self, model: Any) -> Budgets:
        """Token limits of an episode with this model."""
        environment = self.config.environment
        return Budgets(environment.max_turn_tokens, environment.max_episode_tokens, context_length(model))


def chat_format(
    tokenizer: Any,
    model: Any,
    settings: EnvironmentSettings,
    *,
    tools: list[dict[str, Any]] = TOOLS,
    template_options: dict[str, Any] | None = None,
) -> ChatFormat:
    """Make the chat format of a model under the protocol of an environment."""
    eos = None if model is None else model.generation_config.eos_token_id
    return ChatFormat(
        tokenizer,
        tools=tools if settings.protocol == "native" else None,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else eos,
        template_options=template_options,
    )


def open_workbench(config: Config) -> Workbench:
    """Open the databases and read the held-out questions.

    Raises:
        DataError: A folder, file, question or gold query is wrong.
        ConfigError: `environment.mcp` names no usable server.
    """
    databases = Databases(config.data.databases)
    executor = SQLExecutor(config.environment.limits)
    left_out = quarantined(config)

    def held_out(path: Path | str, names: Sequence[str] = ()) -> list[Example]:
        return load_examples(
            path,
            databases,
            executor,
            leave_out=left_out,
            leaves_out_large=True,
            keep=lambda example: not names or example.database in names,
        )

    dev: list[Example] = []
    if config.evaluation.every is not None:
        names = config.data.dev_databases
        dev = held_out(config.data.dev or config.data.train, names)
        if not dev:
            raise DataError(
                f"no question of {config.data.train} is on data.dev_databases ({', '.join(names)})"
            )
    return Workbench(
        config=config,
        databases=databases,
        executor=executor,
        environment=_open_environment(config, databases, executor),
        grader=open_grader(
            executor,
            neighbours=config.grading.neighbours,
            neighbour_url=config.grading.neighbour_url,
        ),
        test={name: held_out(path) for name, path in config.data.test.items()},
        dev=evenly_spaced(dev, config.evaluation.schedule_samples),
    )


def _open_environment(config: Config, databases: Databases, executor: SQLExecutor) -> SQLEnvironment:
    settings = config.environment.settings()
    if config.environment.mcp is None:
        return SQLEnvironment(databases, executor, settings)
    from text2sql_grpo.integrations.mcp.environment import MCPEnvironment

    return MCPEnvironment(databases, executor, settings, server=config.environment.mcp)


@dataclass
class Run:
    """One run of the main job, from an open workbench to a merged model.

    Attributes:
        alerts: The alerts, one or none.
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
        """Time a stage; the run prints the times at its end."""
        started, cpu_started = time.monotonic(), time.process_time()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self.cpu_seconds[name] = round(time.process_time() - cpu_started, 1)


def quarantined(config: Config) -> frozenset[str]:
    """Ids of the questions that a run leaves out."""
    return frozenset() if config.data.quarantine is None else read_quarantine(config.data.quarantine)


def evenly_spaced(examples: Sequence[T], count: int | None) -> list[T]:
    """`count` examples spread over the whole list, in order; all for None or if there are fewer.

    Raises:
        DataError: `count` is below 1.
    """
    if count is not None and count < 1:
        raise DataError(f"the number of questions must be >= 1, got {count}")
    if count is None or count >= len(examples):
        return list(examples)
    return [examples[i * len(examples) // count] for i in range(count)]
