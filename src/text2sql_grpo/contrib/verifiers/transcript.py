"""From the messages of a trace to the episode that they tell of."""

from typing import TYPE_CHECKING

from text2sql_grpo.contrib import tool_calls
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.environment.protocols import MalformedTurn, parse_action
from text2sql_grpo.environment.session import SQLEnvironment

if TYPE_CHECKING:
    import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]

OUT_OF_TOKENS = "max_total_tokens"  # a stop condition of verifiers' own


def turn_text(message: "vf.AssistantMessage") -> str:
    """An assistant message as the protocols read it."""
    calls = [(call.name, call.arguments) for call in message.tool_calls or []]
    return tool_calls.turn_text(message.reasoning_content, message.content, calls)


def is_cut(trace: "vf.Trace") -> bool:
    """True if the last turn ran out of tokens, so that it is no action."""
    answered = [call for call in trace.calls if call.error is None]
    return trace.stop_condition == OUT_OF_TOKENS or bool(answered and answered[-1].finish_reason == "length")


def played_episode(trace: "vf.Trace", example: Example, environment: SQLEnvironment) -> Episode:
    """The episode with its actions (without outcomes) and its final SQL, as the session saw them.

    Turns after the submission or the turn limit do not count. An episode that ran out of tokens is one
    that submitted nothing: that it was cut, `trace.is_truncated` says.
    """
    settings = environment.settings
    turns = [turn_text(message) for message in trace.assistant_messages]
    episode = Episode(example, max_turns=settings.max_turns)
    episode.completion_mask = [1] * trace.num_output_tokens
    for text in (turns[:-1] if is_cut(trace) else turns)[: settings.max_turns]:
        episode.messages.append({"role": "assistant", "content": text})
        try:
            parsed = parse_action(text, settings.protocol, environment.tools)
        except MalformedTurn as malformed:
            episode.actions.append(Action("malformed", error=str(malformed)))
            continue
        episode.actions.append(Action(parsed.kind, parsed.sql))
        if parsed.kind == "submit_sql":
            episode.final_sql = parsed.sql
            episode.stop_reason = "submitted"
            break
    return episode
