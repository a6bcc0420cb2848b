"""What jobs share: databases, questions, environment, grader; and the run of the main job."""

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
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader
from text2sql_grpo.jobs.grader import open_grader
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets
from text2sql_grpo.rollout.policy import context_length
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.alerts import Alerts

T = TypeVar("T")


@dataclass(frozen=True)
class Workbench:
    """The parts of a run that stand before any model is loaded.

    Attributes:
        test: Held-out questions by the name of their set, whole.
    """

    config: Config
    databases: Databases
    executor: SQLExecutor
    environment: SQLEnvironment
    grader: Grader
    test: dict[str, list[Example]]

    def load(self, path: Path, *, limit: int | None = None) -> Sequence[Example]:
        """Questions for training, their golds checked, without those in quarantine.

        Those of a file are held in memory; those of a folder or a pattern of files stay on disk.
        """
        files, left_out = shard_files(path), quarantined(self.config)
        if files == [path]:
            return load_examples(path, self.databases, self.executor, limit=limit, leave_out=left_out)
        return load_shards(files, self.databases, self.executor, limit=limit, leave_out=left_out)

    def chat(self, tokenizer: Any, model: Any) -> ChatFormat:
        """The chat format of a model under this run's protocol."""
        eos = model.generation_config.eos_token_id
        return ChatFormat(
            tokenizer,
            tools=self.environment.tools if self.config.environment.protocol == "native" else None,
            eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else eos,
        )

    def budgets(self, model: Any) -> Budgets:
        """Token limits of an episode with this model."""
        environment = self.config.environment
        return Budgets(environment.max_turn_tokens, environment.max_episode_tokens, context_length(model))


def open_workbench(config: Config) -> Workbench:
    """Opens the databases and reads the held-out questions.

    Raises:
        DataError: A folder, file, question or gold query is wrong.
        ConfigError: `environment.mcp` names no server that can be used.
    """
    databases = Databases(config.data.databases)
    executor = SQLExecutor(config.environment.limits)
    test = {name: load_examples(path, databases, executor) for name, path in config.data.test.items()}
    return Workbench(
        config=config,
        databases=databases,
        executor=executor,
        environment=_open_environment(config, databases, executor),
        grader=open_grader(executor, neighbours=config.grading.neighbours),
        test=test,
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


def quarantined(config: Config) -> frozenset[str]:
    """Ids of the questions that training leaves out."""
    return frozenset() if config.data.quarantine is None else read_quarantine(config.data.quarantine)


def evenly_spaced(examples: Sequence[T], count: int | None) -> list[T]:
    """`count` examples spread over the whole list, in order; all of them for None.

    Raises:
        DataError: Fewer examples than asked for is fine; less than one asked for is not.
    """
    if count is not None and count < 1:
        raise DataError(f"expected at least 1 question, got {count}")
    if count is None or count >= len(examples):
        return list(examples)
    return [examples[i * len(examples) // count] for i in range(count)]
