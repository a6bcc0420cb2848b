"""How the model writes its actions: plain tags, or tool calls as its own template writes them.

One assistant turn holds exactly one action. What cannot be read is answered by an error turn, so
the texts of the errors here are prompt text: they tell the model what to write instead.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

Protocol = Literal["tags", "native"]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"sql": {"type": "string", "description": argument}},
                "required": ["sql"],
            },
        },
    }
    for name, description, argument in (
        (
            "run_sql",
            "Run one read-only SQL query on the database and see its rows or its error.",
            "The query to run.",
        ),
        (
            "submit_sql",
            "Submit the final SQL query that answers the question. This ends the conversation.",
            "The final query.",
        ),
    )
]


class MalformedTurn(Exception):
    """The turn holds no readable action; the text tells the model what was expected."""


@dataclass(frozen=True)
class ParsedAction:
    """What one turn asks for."""

    kind: Literal["run_sql", "submit_sql"]
    sql: str


_TAG = re.compile(r"<(sql|answer)>(.*?)</\1>", re.DOTALL)
_TAGS_EXPECTED = "expected one <sql>query</sql> to run or one <answer>query</answer> to submit"


def _after_thinking(text: str) -> str:
    """What the turn says once the thinking is over; some templates open `<think>` in the prompt."""
    spoken = text.rpartition("</think>")[2]
    if "<think>" in spoken:
        raise MalformedTurn("expected an action after </think>, got thinking that never ends")
    return spoken


def parse_tags(text: str) -> ParsedAction:
    """The single action of a turn in the tags protocol.

    Raises:
        MalformedTurn: No action, several actions, or an empty one.

    >>> parse_tags("<think>look first</think><sql>SELECT 1</sql>")
    ParsedAction(kind='run_sql', sql='SELECT 1')
    """
    spoken = _after_thinking(text)
    found = _TAG.findall(spoken)
    if len(found) != 1:
        raise MalformedTurn(f"{_TAGS_EXPECTED}, got {len(found) or 'none'}")
    tag, sql = found[0]
    if not sql.strip():
        raise MalformedTurn(f"{_TAGS_EXPECTED}, got an empty <{tag}>")
    return ParsedAction("run_sql" if tag == "sql" else "submit_sql", sql.strip())


_CALL_START = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")
_CALL_EXPECTED = 'expected one tool call {"name": "run_sql" or "submit_sql", "arguments": {"sql": "query"}}'


def parse_native(text: str) -> ParsedAction:
    """The single tool call of a turn, in the JSON forms that chat templates use.

    Read: `<tool_call>{..}</tool_call>` (Qwen, Hermes), `[TOOL_CALLS][{..}]` (Mistral), a bare
    `{"name": .., "parameters": ..}` (Llama 3).

    Raises:
        MalformedTurn: No call, several calls, unknown tool or wrong arguments.

    >>> parse_native('<tool_call>{"name": "run_sql", "arguments": {"sql": "SELECT 1"}}</tool_call>')
    ParsedAction(kind='run_sql', sql='SELECT 1')
    """
    spoken = _after_thinking(text)
    starts = [match.end() for match in _CALL_START.finditer(spoken)]
    if len(starts) > 1:
        raise MalformedTurn(f"{_CALL_EXPECTED}, got {len(starts)} calls")
    body = spoken[starts[0] :] if starts else spoken
    opening = re.search(r"[\[{]", body)
    if opening is None:
        raise MalformedTurn(f"{_CALL_EXPECTED}, got none")
    try:
        call, _ = json.JSONDecoder(strict=False).raw_decode(body, opening.start())
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise MalformedTurn(f"{_CALL_EXPECTED}, got JSON that cannot be read: {error}") from error
    if isinstance(call, list):
        if len(call) != 1:
            raise MalformedTurn(f"{_CALL_EXPECTED}, got {len(call)} calls")
        call = call[0]
    if not isinstance(call, dict):
        raise MalformedTurn(f"{_CALL_EXPECTED}, got {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if name not in ("run_sql", "submit_sql"):
        raise MalformedTurn(f"{_CALL_EXPECTED}, got the tool {repr(name)[:200]}")
    sql = arguments.get("sql") if isinstance(arguments, dict) else None
    if not isinstance(sql, str) or not sql.strip():
        raise MalformedTurn(f"{_CALL_EXPECTED}, got the arguments {json.dumps(arguments)[:200]}")
    return ParsedAction(name, sql.strip())


def parse_action(text: str, protocol: Protocol) -> ParsedAction:
    """`parse_tags` or `parse_native`."""
    return parse_tags(text) if protocol == "tags" else parse_native(text)
