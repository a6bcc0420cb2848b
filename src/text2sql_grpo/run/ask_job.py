"""Answer of a model to one question over one database, in the environment of its training."""

import json
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from text2sql_grpo.config import Config, EnvironmentConfig, RolloutConfig, load_config
from text2sql_grpo.data.databases import Databases, open_address
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.observation import cell_text
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import chat_format
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Policy, SlotPolicy, run
from text2sql_grpo.rollout.policy import context_length, model_policy
from text2sql_grpo.run.evaluate_job import formatted
from text2sql_grpo.run_folder import find_config
from text2sql_grpo.sql import ExecutionOutcome, SQLExecutor

_MAX_ROWS, _MAX_CELL_CHARS = 20, 60


@dataclass(frozen=True)
class Asked:
    """Episode of a question, with the result of its final query.

    Attributes:
        episode: The exploratory queries and the final one.
        result: Outcome of the final query; None if none was submitted.
    """

    episode: Episode
    result: ExecutionOutcome | None

    @property
    def failure(self) -> str:
        """Reason why there is no result; empty if there is one."""
        if self.result is None:
            return f"no final SQL: the episode stopped with {self.episode.stop_reason}"
        return "" if self.result.is_ok else f"the final SQL failed: {self.result.error}"

    def record(self) -> dict[str, Any]:
        """Fields of `--json`."""
        episode = self.episode
        return {
            "question": episode.example.question,
            "turns": [
                {"kind": one.kind, "sql": one.sql, "error": one.error, "result": _outcome_record(one.outcome)}
                for one in episode.actions
            ],
            "final_sql": episode.final_sql,
            "result": _outcome_record(self.result),
            "stop_reason": episode.stop_reason,
            "failure": self.failure,
        }


def ask(
    question: str,
    model: str,
    database: str,
    *,
    console: Console,
    config: Config | None = None,
    as_json: bool = False,
) -> int:
    """Print each exploratory query with its rows, the final SQL and its result; exit code 1 without one.

    Environment and engine are those of `config`, or of the model's run, or the defaults.

    Raises:
        RunError: The question is empty, or the model, the database or the config cannot be read.
    """
    if not question.strip():
        raise DataError("the question is empty: put it in quotes after `ask`")
    name, address = open_address(database)
    found = find_config(model)
    config = config or (load_config(found) if found else None)
    settings = (config.environment if config else EnvironmentConfig()).settings()
    engine = (config.rollout if config else RolloutConfig()).engine
    options = config.grpo.get("chat_template_kwargs") if config else None
    with SQLExecutor(settings.limits) as executor:
        environment = SQLEnvironment(Databases({name: address}), executor, settings)
        environment.schema_text(name)  # may fail, before the model is loaded, which takes longer
        policy = load_policy(model)
        chat = chat_format(policy.tokenizer, policy.ready(), settings, template_options=options)
        environment.count_tokens_by(chat.count_tokens)
        sampler = model_policy(policy.model, chat, engine=engine)
        limit = context_length(policy.model)
        asked = answer_question(question, environment, sampler, chat, context_tokens=limit)
    if as_json:
        print(json.dumps({"model": model, "database": str(address), **asked.record()}))
    else:
        show(asked, console)
    return int(bool(asked.failure))


def answer_question(
    question: str,
    environment: SQLEnvironment,
    policy: Policy | SlotPolicy,
    chat: ChatFormat,
    *,
    context_tokens: int,
) -> Asked:
    """Play one session on an environment's only database as in training, and execute its final query."""
    (name,), settings = environment.databases.names(), environment.settings
    session = environment.session(Example(id="question", database=name, question=question, gold_sql=""))
    budgets = Budgets(settings.max_turn_tokens, settings.max_episode_tokens, context_tokens)
    (episode,) = run([session], policy, chat, budgets)
    if episode.final_sql is None:
        return Asked(episode, None)
    result = environment.executor.execute(environment.databases.address(name), episode.final_sql)
    return Asked(episode, result)


def show(asked: Asked, console: Console) -> None:
    """Print an answer; texts of a model or a database without markup and control characters."""
    episode = asked.episode
    for turn, action in enumerate(episode.actions, 1):
        if action.kind == "submit_sql":
            continue
        console.print(Text(f"turn {turn} of {episode.max_turns}: {action.kind}", style="cyan"))
        if action.kind == "malformed":
            console.print(Padding(_plain(action.error), (0, 2)))
        else:
            _show_query(action.sql, action.outcome, console)
    if episode.final_sql is not None:
        console.print(Text("answer", style="bold green" if not asked.failure else "bold red"))
        _show_query(episode.final_sql, asked.result, console)
    if asked.failure:
        console.print(_plain(asked.failure), style="bold red", soft_wrap=True)


def _show_query(sql: str, outcome: ExecutionOutcome | None, console: Console) -> None:
    console.print(Padding(_plain(formatted(sql)), (0, 2)))
    if outcome is None:
        return
    if not outcome.is_ok:
        console.print(Padding(_plain(f"Error: {outcome.error}"), (0, 2)), style="red")
        return
    table = Table(*[Column(_plain(_shown(name))) for name in outcome.columns], box=box.SIMPLE_HEAD)
    for row in outcome.rows[:_MAX_ROWS]:
        table.add_row(*[_plain(_shown(cell)) for cell in row])
    console.print(table if outcome.rows else Padding("no rows", (0, 2)))
    if len(outcome.rows) > _MAX_ROWS or outcome.is_truncated:
        more = "more than " if outcome.is_truncated else ""
        shown = min(_MAX_ROWS, len(outcome.rows))
        console.print(Padding(f"{shown} of {more}{len(outcome.rows)} rows", (0, 2)))


def _shown(cell: Any) -> str:
    return cell_text(cell, _MAX_CELL_CHARS)


def _plain(text: str) -> Text:
    return Text("".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text))


def _outcome_record(outcome: ExecutionOutcome | None) -> dict[str, Any] | None:
    """Record for JSON, with bytes and infinity as text."""
    if outcome is None:
        return None
    rows = [[_json_cell(cell) for cell in row] for row in outcome.rows]
    return {
        "status": outcome.status,
        "columns": list(outcome.columns),
        "rows": rows,
        "is_truncated": outcome.is_truncated,
        "error": outcome.error,
    }


def _json_cell(cell: Any) -> Any:
    is_infinite = isinstance(cell, float) and abs(cell) == float("inf")
    return cell_text(cell, _MAX_CELL_CHARS) if is_infinite or isinstance(cell, bytes) else cell
