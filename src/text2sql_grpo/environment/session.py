"""`SQLSession`: the only place that decides what the model may see and do."""

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Self

from text2sql_grpo.checked import Positive, checked
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode, Message
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.prompts import not_a_query_text, system_text, turns_left_text, user_text
from text2sql_grpo.environment.protocols import (
    TOOLS,
    MalformedTurn,
    ParsedAction,
    Protocol,
    may_be_query,
    parse_action,
    unmarked_query,
)
from text2sql_grpo.environment.tools import ExecutorBackend, ToolBackend
from text2sql_grpo.errors import check_type
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.personal import PERSONAL
from text2sql_grpo.sql.schema import Schema
from text2sql_grpo.sql.schema_choice import TableChoice, table_choice
from text2sql_grpo.sql.schema_text import SchemaText, estimated_tokens, schema_text

if TYPE_CHECKING:
    from text2sql_grpo.sql.hidden import Hidden

MAX_HIDDEN_SHOWN = 20  # names, in the log
_logger = logging.getLogger(__name__)


@checked
class EnvironmentSettings:
    """Prompt, turns and limits of an episode.

    Attributes:
        protocol: `tags` for any model, `native` for the tool calls of the model's chat template.
        schema_text: `ddl` (CREATE TABLE text) or `compact` (one line per table), which never show a stored
            value, so that exploratory queries are needed; `m_schema` or `commented_ddl`, which show comments
            and examples.
        max_schema_tokens: Maximum tokens of the schema text, by the model's tokenizer (for an endpoint, a
            quarter of the characters). If the columns of all tables do not fit, those of the tables that
            share words with the question are shown. The last line then names other tables and the query that
            lists their columns (docs/databases.md). None for no limit.
        instructions: Explain the task and the protocol in a system message.
        max_turns: Assistant turns per episode; 1 leaves no exploratory query before the answer.
        max_turn_tokens: Maximum tokens of one assistant turn. A turn that is cut there counts if it holds a
            whole action; else it ends the episode.
        max_episode_tokens: Maximum tokens of the whole episode after the prompt, observations included.
        observation: Caps on the shown part of a result.
        limits: Caps on each execution of the model's SQL.
    """

    protocol: Protocol = "tags"
    schema_text: SchemaText = "ddl"
    max_schema_tokens: Positive | None = None
    instructions: bool = True
    max_turns: Positive = 5
    max_turn_tokens: Positive = 512
    max_episode_tokens: Positive = 2_048
    observation: ObservationLimits = field(default_factory=ObservationLimits)
    limits: Limits = field(default_factory=Limits)


class SQLSession:
    """Session on one question. Drive it with `start`, then `step` until it returns None.

    Args:
        backend: Runs every call but the submission.
    """

    def __init__(
        self,
        example: Example,
        *,
        schema_text: str,
        backend: ToolBackend,
        settings: EnvironmentSettings,
        engine: str = "SQLite",
    ) -> None:
        self._engine = engine
        self.episode = Episode(example, max_turns=settings.max_turns, max_tokens=settings.max_episode_tokens)
        self._schema_text = schema_text
        self._backend = backend
        self._settings = settings

    def start(self) -> list[Message]:
        """Build the prompt: instructions if set, then schema text and question."""
        settings = self._settings
        messages: list[Message] = []
        if settings.instructions:
            system = system_text(
                settings.protocol, settings.max_turns, tools=self._backend.tools, engine=self._engine
            )
            messages.append({"role": "system", "content": system})
        question = user_text(self.episode.example.question, self._schema_text)
        messages.append({"role": "user", "content": question})
        self.episode.messages = list(messages)
        return messages

    def step(self, assistant_text: str) -> Message | None:
        """Execute one assistant turn and return the reply; None when the episode is over.

        Raises:
            RunError: An internal failure (a database that vanished), never the model's.
        """
        episode = self.episode
        episode.messages.append({"role": "assistant", "content": assistant_text})
        try:
            parsed = parse_action(assistant_text, self._settings.protocol, self._backend.tools)
            if parsed.kind == "submit_sql" and not may_be_query(parsed.sql):
                raise MalformedTurn(not_a_query_text(self._settings.protocol))
        except MalformedTurn as malformed:
            query = self._query_of(assistant_text, malformed)
            if query is None:
                episode.actions.append(Action("malformed", error=str(malformed)))
                return self._reply(f"Error: {malformed}")
            is_last = len(episode.actions) + 1 >= self._settings.max_turns
            parsed = ParsedAction("submit_sql" if is_last else "run_sql", query)
        if parsed.kind == "submit_sql":
            episode.actions.append(Action("submit_sql", parsed.sql))
            episode.final_sql = parsed.sql
            episode.stop_reason = "submitted"
            return None
        result = self._backend.call(parsed.name, parsed.arguments)
        episode.actions.append(Action(parsed.kind, parsed.sql, result.outcome))
        if result.text is None:  # the backend died: not the model's failure
            episode.stop_reason, episode.is_masked = "error", True
            return None
        return self._reply(result.text, result.advice)

    def holds_action(self, cut_text: str) -> bool:
        """True if a turn that was cut by its limit of tokens holds a whole action before the cut."""
        try:
            parse_action(cut_text, self._settings.protocol, self._backend.tools)
        except MalformedTurn as malformed:
            return self._query_of(cut_text, malformed, is_cut=True) is not None
        return True

    def _query_of(self, text: str, malformed: MalformedTurn, *, is_cut: bool = False) -> str | None:
        """Query of a malformed turn, to be run all the same; None if there is none."""
        names = {tool["function"]["name"] for tool in self._backend.tools}
        if not names >= {"run_sql", "submit_sql"}:
            return None
        return malformed.query or unmarked_query(text, is_cut=is_cut)

    def _reply(self, text: str, advice: str = "") -> Message | None:
        settings, actions = self._settings, self.episode.actions
        turns_left = settings.max_turns - len(actions)
        if turns_left <= 0:
            self.episode.stop_reason = "max_turns"
            return None
        if settings.instructions:
            outcome = actions[-1].outcome
            is_error = text.startswith("Error") if outcome is None else not outcome.is_ok
            hint = turns_left_text(settings.protocol, turns_left, actions, is_error=is_error)
            if advice:
                hint = f"To fix the query, {advice}.\n{hint}"
        else:
            hint = "(1 turn left: submit your answer)" if turns_left == 1 else ""
        text = f"{text}\n{hint}" if hint else text
        role = "tool" if self._settings.protocol == "native" else "user"
        message = {"role": role, "content": text}
        self.episode.messages.append(message)
        return message


def log_hidden(hidden: "Hidden") -> None:
    """Log what is hidden in a database."""
    if names := hidden.names():
        shown = listed(names, MAX_HIDDEN_SHOWN)
        name = hidden.schema.name
        _logger.warning("hidden from the model in %s: %s (data.hide; [] hides nothing)", name, shown)


def log_unmatched(databases: Collection["Hidden"]) -> None:
    """Log the patterns that hide nothing in all databases that there are."""
    unmatched = [hidden.unmatched for hidden in databases]
    for pattern in unmatched[0]:
        if all(pattern in others for others in unmatched):
            _logger.warning("data.hide: no table or column is named %s", pattern)


class SQLEnvironment:
    """Factory of sessions over a folder of databases; schemas are read once.

    Attributes:
        tools: JSON schemas of the tools, for the native protocol.
        arrange: Function from a schema to the one that the model reads; for experiments.

    Args:
        hide: Patterns of tables and columns that no prompt and no observation shows; see `hidden.hide`.
        count_tokens: Counter of the model's tokenizer, for `max_schema_tokens`; by default a quarter of the
            characters. See `counted_by`.

    Raises:
        ArgumentError: `hide` is not a list of texts.
    """

    def __init__(
        self,
        databases: Databases,
        executor: SQLExecutor,
        settings: EnvironmentSettings,
        *,
        hide: Sequence[str] = (PERSONAL,),
        count_tokens: Callable[[str], int] = estimated_tokens,
    ) -> None:
        check_type("hide", hide, list | tuple)  # a text would be read as a pattern a letter
        for pattern in hide:
            check_type("a pattern of hide", pattern, str)
        self.databases = databases
        self.executor = executor
        self.settings = settings
        self.tools = TOOLS
        self.arrange: Callable[[Schema], Schema] = lambda schema: schema
        self._count_tokens = count_tokens
        self._patterns = hide
        self._hidden: dict[str, Hidden] = {}
        self._schema_texts: dict[str, str] = {}
        self._choices: dict[str, TableChoice | None] = {}
        self._engines: dict[str, str] = {}

    def counted_by(self, count_tokens: Callable[[str], int]) -> Self:
        """View of this environment whose `max_schema_tokens` are those of a model's tokenizer."""
        if self.settings.max_schema_tokens is None or count_tokens == self._count_tokens:
            return self
        view = copy.copy(self)
        view._count_tokens, view._schema_texts, view._choices = count_tokens, {}, {}
        return view

    def hidden(self, database: str) -> "Hidden":
        """Hidden tables and columns of a database, and its schema without them; logged once.

        Raises:
            DataError: The schema, or the list of the database's own functions, cannot be read.
        """
        from text2sql_grpo.sql.hidden import read_hidden  # with sqlglot, which the config need not load

        if database not in self._hidden:
            address = self.databases.address(database)
            found = read_hidden(address, self._patterns, self.executor, name=database)
            log_hidden(found)
            self._hidden[database] = found
            if len(self._hidden) == len(self.databases.names()):
                log_unmatched(self._hidden.values())
        return self._hidden[database]

    def schema_text(self, database: str, question: str = "") -> str:
        """Schema text of a database; of one over `max_schema_tokens`, with the tables for the question."""
        schema, settings = self.arrange(self.hidden(database).schema), self.settings
        kind, max_tokens, count = settings.schema_text, settings.max_schema_tokens, self._count_tokens
        if question and database not in self._choices:
            self._choices[database] = table_choice(schema, kind, max_tokens=max_tokens, count_tokens=count)
        choice = self._choices[database] if question else None
        if choice and (text := choice.text(question)):
            return text
        if database not in self._schema_texts:
            self._schema_texts[database] = schema_text(
                schema, kind, max_tokens=max_tokens, count_tokens=count
            )
        return self._schema_texts[database]

    def session(self, example: Example) -> SQLSession:
        """New session for one question."""
        return SQLSession(
            example,
            schema_text=self.schema_text(example.database, example.question),
            backend=self.backend(example.database),
            settings=self.settings,
            engine=self._engine_of(example.database),
        )

    def _engine_of(self, database: str) -> str:
        """Name of a database's engine, with its version where dialects differ by it."""
        if database not in self._engines:
            address = self.databases.address(database)
            engine = parse_address(address).engine
            query = engine.version_sql
            version = self.executor.execute(address, query).rows if query else ()
            numbers = [str(row[0]).split()[0].lstrip("v") for row in version]
            self._engines[database] = " ".join([engine.title, *numbers])
        return self._engines[database]

    def close(self) -> None:
        """End the tools' servers and check the databases; nothing to do for the executor."""

    def backend(self, database: str) -> ToolBackend:
        """Backend of the sessions on one database: the executor."""
        return self.guarded(database)

    def guarded(self, database: str) -> ExecutorBackend:
        """Executor on one database that reads nothing hidden."""
        path, settings = self.databases.address(database), self.settings
        return ExecutorBackend(
            self.executor, path, settings.limits, settings.observation, self.hidden(database)
        )
