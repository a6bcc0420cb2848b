"""`SQLTaskset`: a file of questions over a folder of databases; `SQLTask`: one of them, and its rewards."""

# mypy: disallow-untyped-decorators=False

import asyncio
import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ConfigDict, Field, model_validator

from text2sql_grpo.config import Config, EnvironmentConfig, GradingConfig, parse_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import checked_golds
from text2sql_grpo.data.question_files import only_name, read_questions
from text2sql_grpo.data.question_rows import Question
from text2sql_grpo.environment.session import SQLEnvironment, SQLSession
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.evaluation.published import with_published
from text2sql_grpo.integrations.verifiers.traces import rebuilt_episode
from text2sql_grpo.rewards import Answer, Judge, RewardMix


class SQLTaskConfig(vf.TaskConfig):
    """Databases, and the sections of this package's config for playing and grading.

    Attributes:
        databases: Folder of `.sql` or `.sqlite` files (Spider's and BIRD's layout too).
        hide: Tables and columns that the model never sees; see `DataConfig`.
        environment: Section `environment`; with `mcp`, all tasks share a server.
        reward_mix: Section `rewards`.
        grading: Section `grading`.
    """

    databases: str | Path | dict[str, str] = Path("data/databases")
    hide: list[str] = Field(default_factory=lambda: ["personal"])
    environment: EnvironmentConfig = EnvironmentConfig()
    reward_mix: dict[str, Any] = Field(default_factory=lambda: {"preset": "strict"})
    grading: GradingConfig = GradingConfig()

    @model_validator(mode="after")
    def _checked(self) -> "SQLTaskConfig":
        try:
            self.whole()
        except ConfigError as error:  # verifiers prints a ValueError as one line
            raise ValueError(str(error)) from error
        return self

    def whole(self) -> Config:
        """Whole config of these sections, with all its checks; model and questions are placeholders.

        Raises:
            ConfigError: A key or value is wrong, or a wrong answer could out-score a right one.
        """
        sections = self.model_dump(mode="json", include={"environment", "grading"})
        data = {"databases": self.databases, "hide": self.hide, "train": "-"}
        sections |= {"model": {"path": "-"}, "data": data, "rewards": self.reward_mix}
        return parse_config(sections, source="taskset.task")

    @property
    def opened(self) -> tuple[Environment, Judge]:
        """Environment of its tasks, and the judge of their episodes."""
        return _opened(self.model_dump_json())


@lru_cache(maxsize=8)
def _opened(config: str) -> tuple[Environment, Judge]:
    library = logging.getLogger("verifiers.v1")
    if not library.propagate:  # verifiers' commands log only its records, and may drop all others
        logging.getLogger("text2sql_grpo").parent = library
    whole = SQLTaskConfig.model_validate_json(config).whole()
    environment = Environment.of(whole)
    return environment, environment.judge(RewardMix(whole.rewards))


class SQLTaskData(vf.TaskData):
    """One question with its prompt.

    Attributes:
        example: The question; its gold is in every saved trace.
        gold_may_be_empty: False if its file states that the gold returns rows.
    """

    example: Example
    gold_may_be_empty: bool = True


class SQLState(vf.State):
    """Session of one rollout and its environment; None until the task is set up."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    session: SQLSession | None = None
    environment: SQLEnvironment | None = None


class SQLTask(vf.Task[SQLTaskData, SQLState, SQLTaskConfig]):
    """One question. It is scored from the messages and the question alone, so replays score alike."""

    @property
    def key(self) -> str:
        """Database and id, independent of paths."""
        return f"{self.data.example.database}/{self.data.example.id}"

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Open the session for the harness."""
        environment, _ = self.config.opened
        trace.state.environment = environment.sessions
        trace.state.session = environment.sessions.session(self.data.example)

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Run every accepted gold.

        Raises:
            DataError: One fails, is cut at a limit, or is empty against its file.
        """
        data, (environment, _) = self.data, self.config.opened
        question = Question(data.example, self.key, has_gold_is_empty=not data.gold_may_be_empty)
        golds = checked_golds([question], environment.databases, environment.executor)
        await asyncio.to_thread(list, golds)
        return True

    @vf.reward
    async def mix(self, trace: vf.Trace) -> dict[str, float]:
        """Weighted rewards of `reward_mix` by name; their sum is the reward of training."""
        scores = (await asyncio.to_thread(self._judged, trace)).scores
        assert scores is not None  # neither is the episode masked nor did the gold fail
        _, judge = self.config.opened
        weights = judge.rewards.weights
        return {name: weights[name] * score for name, score in scores.items()}

    @vf.metric
    async def verdicts(self, trace: vf.Trace) -> dict[str, float]:
        """Verdicts of this package's evaluation, each 0 or 1 but `bird_f1`, and the number of tool calls."""
        answer = await asyncio.to_thread(self._judged, trace)
        environment, _ = self.config.opened
        database = environment.databases.address(self.data.example.database)
        answer = await asyncio.to_thread(with_published, answer, environment.executor, database)
        own = {"strict": answer.verdict.strict, "official": answer.verdict.official}
        return own | {"looks": answer.episode.looks} | dict(answer.published)

    def _judged(self, trace: vf.Trace) -> Answer:
        example, (environment, judge) = self.data.example, self.config.opened
        episode = rebuilt_episode(trace, example, environment.sessions)
        database = environment.databases.address(example.database)
        answer: Answer = judge.judge(episode, database)
        # verifiers marks the trace of an error as not ok: neither paid nor punished
        if answer.verdict.reason == "gold_failed":
            raise DataError(f"the gold fails (question {example.id})")
        return answer


class SQLTasksetConfig(vf.TasksetConfig):
    """Questions of the taskset.

    Attributes:
        questions: JSONL or CSV, or the JSON of Spider or BIRD.
        task: Databases, environment, rewards and grading.
    """

    questions: Path = Path("data/questions/dev.jsonl")
    task: SQLTaskConfig = SQLTaskConfig()


class SQLTaskset(vf.Taskset[SQLTask, SQLTasksetConfig]):
    """Questions of a file. Golds are not run here: `vf-validate` runs them."""

    def load(self) -> Iterator[SQLTask]:
        """One task per question, in order.

        Raises:
            DataError: The file, a question or a database is wrong.
        """
        environment, _ = self.config.task.opened
        database = only_name(environment.databases)
        for example, _, has_gold_is_empty in read_questions(self.config.questions, database=database):
            *system, user = environment.sessions.session(example).start()
            yield SQLTask(
                SQLTaskData(
                    id=example.id,
                    name=f"{example.database}/{example.id}",
                    system_prompt=system[0]["content"] if system else None,
                    prompt=user["content"],
                    example=example,
                    gold_may_be_empty=example.gold_is_empty or not has_gold_is_empty,
                ),
                self.config.task,
            )


class SQLEnvConfig(vf.SingleAgentEnvConfig):
    """Config of `SingleAgentEnv` without a sandbox: the model's SQL runs only in the executor's workers."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SQLEnv(vf.SingleAgentEnv, vf.Env[SQLEnvConfig]):
    """`SingleAgentEnv` whose runtime is not a cloud sandbox by default."""
