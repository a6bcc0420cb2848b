"""Record of one whole interaction, without scores."""

from dataclasses import dataclass, field
from typing import Literal

from text2sql_grpo.data.example import Example
from text2sql_grpo.sql.outcome import ExecutionOutcome

Message = dict[str, str]
StopReason = Literal["submitted", "max_turns", "turn_length", "budget", "context", "error"]
CUT: tuple[StopReason, ...] = ("turn_length", "budget", "context")  # by a limit of tokens
CURES = {
    "context": "prompt and episode exceed the model's context: set or lower environment.max_schema_tokens, "
    "so that only tables for the question are shown, or lower environment.max_episode_tokens",
    "budget": "raise environment.max_episode_tokens",
    "turn_length": "raise environment.max_turn_tokens",
    "max_turns": "raise environment.max_turns",
    "gold_failed": "fix the gold queries that failed (text2sql-grpo audit data names them), or raise "
    "environment.limits.timeout_s",
}
ActionKind = Literal["run_sql", "submit_sql", "call_tool", "malformed"]


@dataclass(frozen=True)
class Action:
    """Action of the model in one turn.

    Attributes:
        kind: `call_tool` for another tool of an MCP server, `malformed` if the protocol could not read the
            turn; then `sql` is empty.
        sql: The query as the model wrote it.
        outcome: Outcome of `run_sql`; None for other kinds, and if an MCP server ran it.
        error: Error text shown to the model for `malformed`.
    """

    kind: ActionKind
    sql: str = ""
    outcome: ExecutionOutcome | None = None
    error: str = ""


@dataclass(kw_only=True)
class Rollout:
    """One whole interaction of any kind: messages, tokens, and why it stopped.

    Token lists cover the completion: all tokens after the prompt, environment tokens included.

    Attributes:
        messages: The whole chat, prompt first.
        stop_reason: None while it runs.
        prompt_ids: Token ids of the prompt.
        completion_ids: T token ids, sampled and environment tokens in order.
        completion_mask: T flags: 1 sampled by the policy, 0 written by the environment.
        log_probs: T log-probabilities of sampling, 0 for tokens that were not sampled, NaN if unknown;
            empty if the engine has none.
        is_masked: True if it must not be trained on (truncated, or an internal failure).
    """

    messages: list[Message] = field(default_factory=list)
    stop_reason: StopReason | None = None
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    completion_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_masked: bool = False


@dataclass
class Episode(Rollout):
    """Rollout on one question, with its actions.

    Attributes:
        example: The question.
        actions: One per assistant turn, K in all.
        max_turns: Its turn limit, >= 1; `len(actions)` never exceeds it.
        max_tokens: Its token limit after the prompt; None for none.
        final_sql: The submitted query; None if nothing was submitted.
    """

    example: Example
    actions: list[Action] = field(default_factory=list)
    max_turns: int = 1
    max_tokens: int | None = None
    final_sql: str | None = None

    @property
    def looks(self) -> int:
        """Number of exploratory tool calls."""
        return sum(action.kind in ("run_sql", "call_tool") for action in self.actions)
