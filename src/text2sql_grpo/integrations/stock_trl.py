"""Dataset, tools and rewards for TRL's unmodified `GRPOTrainer`.

Limits compared with this package's trainer: a turn without a readable call ends the episode, nothing stops
after a submission, and tools run one after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import SQLEnvironment, SQLSession
from text2sql_grpo.environment.tool_calls import call_text
from text2sql_grpo.errors import ConfigError, RunError, check_type
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.rewards import Answer, Judge, reward_mix

_OVER = "Error: the conversation is over, nothing more is run"


@dataclass(frozen=True)
class StockTRL:
    """Keyword arguments of TRL's trainer: `GRPOTrainer(model, args=args, **vars(spec))`.

    Attributes:
        train_dataset: A row per question: its prompt, and its index in the list of examples.
        environment_factory: Makes a `SQLTools`, one per episode; its reward is the whole reward.
        reward_funcs: One function that logs each named score and adds nothing.
    """

    train_dataset: Dataset
    environment_factory: Callable[[], "SQLTools"]
    reward_funcs: list[Callable[..., list[float | None]]]


def stock_trl(questions: Any, environment: Environment, rewards: Any = None) -> StockTRL:
    """Arguments for TRL's `GRPOTrainer` to train on these questions.

    Set `max_tool_calling_iterations` of `GRPOConfig` to the environment's `max_turns`: the session
    answers no more calls than that.

    Args:
        questions: See `Environment.examples`.
        environment: Makes and judges their sessions; its protocol must be `native`.
        rewards: See `reward_mix`; `length_cost` needs tokens, which TRL does not provide.

    Raises:
        ConfigError: Another protocol, other tools (of an MCP server), or `length_cost`.
    """
    check_type("environment", environment, Environment)
    sessions, mix = environment.sessions, reward_mix(rewards)
    if sessions.settings.protocol != "native":
        raise ConfigError(f"environment.protocol must be native, got {sessions.settings.protocol}")
    if sessions.tools != TOOLS:
        names = ", ".join(tool["function"]["name"] for tool in sessions.tools)
        raise ConfigError(f"the tools must be run_sql and submit_sql, got {names}")
    if "length_cost" in mix.weights:
        raise ConfigError("the reward length_cost needs token counts, which TRL does not provide: remove it")
    examples = environment.examples(questions)
    rows = [{"prompt": sessions.session(example).start(), "example": i} for i, example in enumerate(examples)]
    return StockTRL(
        train_dataset=Dataset.from_list(rows),
        environment_factory=partial(SQLTools, examples, sessions, environment.judge(mix)),
        reward_funcs=[log_scores],
    )


class SQLTools:
    """One episode for TRL's trainer: each public method but `reset` and `get_reward` is a tool."""

    def __init__(self, examples: Sequence[Example], environment: SQLEnvironment, judge: Judge) -> None:
        self._examples = examples
        self._environment = environment
        self._judge = judge
        self._session: SQLSession | None = None
        self._failure: Exception | None = None
        self._answer: Answer | None = None

    def reset(self, example: int, **row: Any) -> None:
        """Start an episode on this row of the dataset."""
        self._session = self._environment.session(self._examples[example])
        self._session.start()
        self._failure = self._answer = None

    def run_sql(self, sql: str) -> str:
        """Run one read-only SQL query on the database and see its rows or its error.

        Args:
            sql: The query to run.
        """
        return self._step("run_sql", sql)

    def submit_sql(self, sql: str) -> str:
        """Submit the final SQL query that answers the question. This ends the conversation.

        Args:
            sql: The final query.
        """
        return self._step("submit_sql", sql)

    def get_reward(self) -> float | None:
        """Weighted sum of the episode's scores; None for one that must not be trained on.

        Raises:
            RunError: Internal error of a tool during the episode.
        """
        return self._judged().reward

    def _step(self, name: str, sql: str) -> str:
        session = self._started()
        if session.episode.stop_reason is not None:
            return _OVER
        try:
            reply = session.step(call_text(name, {"sql": sql}))
        except Exception as failure:  # TRL would show it to the model and train on
            self._failure = failure
            raise
        if reply is not None:
            return reply["content"]
        return "Submitted" if session.episode.stop_reason == "submitted" else _OVER

    def _judged(self) -> Answer:
        episode = self._started().episode
        if self._failure is not None:
            raise RunError(f"internal error in a SQL tool (question {episode.example.id})") from self._failure
        if self._answer is None:
            database = self._environment.databases.address(episode.example.database)
            self._answer = self._judge.judge(episode, database)
        return self._answer

    def _started(self) -> SQLSession:
        if self._session is None:
            raise RunError("no episode: call reset first")
        return self._session


def log_scores(
    environments: Sequence[SQLTools], log_metric: Callable[[str, float], None], **_: Any
) -> list[float | None]:
    """TRL reward function that logs the mean of each named score and adds nothing to the reward.

    Returns:
        0.0 per episode, or None if it must not be trained on.

    Raises:
        RunError: Internal error of a tool during an episode.
    """
    scores = [environment._judged().scores for environment in environments]
    known = [score for score in scores if score is not None]
    for name in known[0] if known else ():
        log_metric(f"score/{name}", sum(score[name] for score in known) / len(known))
    return [None if score is None else 0.0 for score in scores]
