"""Protocols of the model's actions: plain tags, or tool calls in its chat template's form.

One assistant turn holds exactly one action. A malformed turn is answered by an error turn, so the texts of
the errors here are prompt text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Protocol = Literal["tags", "native"]


def tool_schema(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a tool for chat templates and endpoints."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _sql_tool(name: str, description: str, argument: str) -> dict[str, Any]:
    sql = {"type": "string", "description": argument}
    return tool_schema(name, description, {"type": "object", "properties": {"sql": sql}, "required": ["sql"]})


TOOLS = [
    _sql_tool(
        "run_sql",
        "Run one read-only SQL query on the database and see its rows or its error.",
        "The query to run.",
    ),
    _sql_tool(
        "submit_sql",
        "Submit the final SQL query that answers the question. This ends the conversation.",
        "The final query.",
    ),
]


class MalformedTurn(Exception):
    """The turn holds no readable action; the text is shown to the model.

    Attributes:
        query: Query of a call of a tool that does not exist; None if there is none.
    """

    def __init__(self, text: str, query: str | None = None) -> None:
        super().__init__(text)
        self.query = query


@dataclass(frozen=True)
class ParsedAction:
    """Action of one turn."""

    kind: Literal["run_sql", "submit_sql"]
    sql: str

    @property
    def name(self) -> str:
        return self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        return {"sql": self.sql}


_OPENING_TAG = re.compile("<(sql|answer)>")
_TAGS_EXPECTED = "expected one <sql>query</sql> to run or one <answer>query</answer> to submit"


def _after_thinking(text: str) -> str:
    """Text behind the thinking; some templates open `<think>` in the prompt."""
    rest = text.rpartition("</think>")[2]
    if "<think>" in rest:
        raise MalformedTurn("expected an action after </think>, got thinking that never ends")
    return rest


def parse_tags(text: str) -> ParsedAction:
    """Parse the single action of a turn in the tags protocol.

    Raises:
        MalformedTurn: No action, several actions, or an empty one.

    >>> parse_tags("<think>look first</think><sql>SELECT 1</sql>")
    ParsedAction(kind='run_sql', sql='SELECT 1')
    """
    found = _tagged(_after_thinking(text))
    if len(found) != 1:
        raise MalformedTurn(f"{_TAGS_EXPECTED}, got {len(found) or 'none'}")
    tag, sql = found[0]
    if not sql.strip():
        raise MalformedTurn(f"{_TAGS_EXPECTED}, got an empty <{tag}>")
    return ParsedAction("run_sql" if tag == "sql" else "submit_sql", sql.strip())


def _tagged(text: str) -> list[tuple[str, str]]:
    """Tag and content of each closed pair of tags, one after the other, in linear time."""
    found: list[tuple[str, str]] = []
    unclosed: set[str] = set()
    position = 0
    for opening in _OPENING_TAG.finditer(text):
        tag = opening[1]
        if opening.start() < position or tag in unclosed:
            continue
        end = text.find(f"</{tag}>", opening.end())
        if end < 0:
            unclosed.add(tag)
        else:
            found.append((tag, text[opening.end() : end]))
            position = end + len(f"</{tag}>")
    return found


_CALL_START = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")
_MAX_NAMES_CHARS = 200
MAX_JSON_DEPTH = 100  # what is nested deeper might be read, and not be written again


def before_call(text: str) -> str | None:
    """Text of a turn before its first tool call; None if it calls no tool.

    >>> before_call('I look.<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    'I look.'
    """
    start = _CALL_START.search(text)
    if start is None:
        return "" if text.lstrip().startswith('{"name"') else None
    return text[: start.start()]


@dataclass(frozen=True)
class ParsedCall:
    """Call of a tool other than `run_sql` or `submit_sql` with a query alone."""

    name: str
    arguments: dict[str, Any]
    kind: ClassVar[Literal["call_tool"]] = "call_tool"
    sql: ClassVar[str] = ""


def parse_native(text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> ParsedAction | ParsedCall:
    """Parse the single tool call of a turn, in the JSON forms of chat templates.

    Forms: `<tool_call>{..}</tool_call>` (Qwen, Hermes), closed and with nothing else inside;
    `[TOOL_CALLS][{..}]` (Mistral), a bare `{"name": .., "parameters": ..}` (Llama 3). Arguments may stand
    next to the name.

    Raises:
        MalformedTurn: No call, several calls, an unknown tool, or not the arguments that the tool requires.

    >>> parse_native('<tool_call>{"name": "run_sql", "arguments": {"sql": "SELECT 1"}}</tool_call>')
    ParsedAction(kind='run_sql', sql='SELECT 1')
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    expected = _call_expected(schemas)
    call = _read_call(_after_thinking(text), expected)
    beside = {key: value for key, value in call.items() if key != "name"} or None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", beside))
    if not isinstance(name, str) or name not in schemas:
        sql = arguments.get("sql") if isinstance(arguments, dict) and len(arguments) == 1 else None
        query = sql.strip() if isinstance(sql, str) and _BARE_QUERY.match(sql) else None
        raise MalformedTurn(f"{expected}, got the tool {repr(name)[:200]}", query)
    if not isinstance(arguments, dict) or not _has_right_names(arguments, schemas[name]):
        if not _takes_sql(schemas[name]):
            known = ", ".join(schemas[name].get("properties", {}))[:_MAX_NAMES_CHARS] or "none"
            expected = f"expected {name} with its arguments ({known})"
        raise MalformedTurn(f"{expected}, got the arguments {json.dumps(arguments)[:200]}")
    if name not in ("run_sql", "submit_sql") or not _takes_sql(schemas[name]):
        return ParsedCall(name, arguments)
    sql = arguments.get("sql")
    if not isinstance(sql, str) or not sql.strip():
        raise MalformedTurn(f"{expected}, got the arguments {json.dumps(arguments)[:200]}")
    return ParsedAction("run_sql" if name == "run_sql" else "submit_sql", sql.strip())


def _takes_sql(schema: dict[str, Any]) -> bool:
    """True if a query is the only argument of a tool."""
    return list(schema.get("properties", {})) == ["sql"]


def _has_right_names(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """True if all required arguments are there, and no unknown ones; the tool checks their values."""
    is_free = "properties" not in schema or bool(schema.get("additionalProperties"))
    return set(schema.get("required", [])) <= set(arguments) and (
        is_free or set(arguments) <= set(schema["properties"])
    )


def _call_expected(schemas: dict[str, dict[str, Any]]) -> str:
    names = " or ".join(json.dumps(name) for name in schemas)[:_MAX_NAMES_CHARS]
    arguments = '{"sql": "query"}' if all(map(_takes_sql, schemas.values())) else "{..}"
    return f'expected one tool call {{"name": {names}, "arguments": {arguments}}}'


def _read_call(text: str, expected: str) -> dict[str, Any]:
    """Parse the JSON object of the only call."""
    starts = list(_CALL_START.finditer(text))
    if len(starts) > 1:
        raise MalformedTurn(f"{expected}, got {len(starts)} calls")
    body = text[starts[0].end() :] if starts else text
    is_tagged = bool(starts) and starts[0].group() == "<tool_call>"
    if is_tagged:
        body, closing, _ = body.partition("</tool_call>")
        if not closing:
            raise MalformedTurn(f"{expected}, got a <tool_call> without its </tool_call>")
    opening = re.search(r"\S" if is_tagged else r"[\[{]", body)
    if opening is None:
        raise MalformedTurn(f"{expected}, got none")
    n_open = body.count("{") - body.count("}")
    if not is_tagged and n_open in (1, 2):  # a small model forgets the last braces
        body = body.rstrip().removesuffix("```") + n_open * "}"
    try:
        call, end = json.JSONDecoder(strict=False).raw_decode(body, opening.start())
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise MalformedTurn(f"{expected}, got JSON that cannot be read: {error}") from error
    if is_tagged and body[end:].strip():
        raise MalformedTurn(f"{expected}, got more than one JSON object between <tool_call> and </tool_call>")
    if is_deep(call):
        raise MalformedTurn(f"{expected}, got JSON nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(call, list) and not is_tagged:
        if len(call) != 1:
            raise MalformedTurn(f"{expected}, got {len(call)} calls")
        call = call[0]
    if not isinstance(call, dict):
        raise MalformedTurn(f"{expected}, got {type(call).__name__}")
    return call


def is_deep(value: object) -> bool:
    """True if a JSON value is nested deeper than `MAX_JSON_DEPTH` levels.

    >>> is_deep({"a": [1, {"b": 2}]})
    False
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = [part for part in level if isinstance(part, dict | list)]
        level = [child for part in nested for child in (part.values() if isinstance(part, dict) else part)]
    return bool(level)


_QUERY_WORD = re.compile(r"\b(select|with|values|from|table|pragma|explain|show|describe)\b", re.IGNORECASE)


def may_be_query(text: str) -> bool:
    """False for a text without any word that a query begins with: a value, a name, a number.

    >>> [may_be_query(text) for text in ("1900", "Albany", "(SELECT 1)", "FROM t")]
    [False, False, True, True]
    """
    return bool(_QUERY_WORD.search(text))


_CODE_BLOCK = re.compile(r"```(?:sql)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_BARE_QUERY = re.compile(r"\s*(SELECT|WITH)\b", re.IGNORECASE)


def unmarked_query(text: str, *, is_cut: bool = False) -> str | None:
    """Query of a turn without any action: its only code block, or all of it; None if there is none.

    A model that was not trained on the protocol often answers so.

    Args:
        is_cut: The turn was cut, so that only a code block is surely whole.

    >>> unmarked_query("You can run:\\n```sql\\nSELECT 1;\\n```\\nIt counts.")
    'SELECT 1;'
    """
    rest = text.rpartition("</think>")[2]
    if "<think>" in rest or _OPENING_TAG.search(rest) or before_call(rest) is not None:
        return None
    blocks = _CODE_BLOCK.findall(rest)
    if not blocks and not is_cut and _BARE_QUERY.match(rest):
        blocks = [rest]
    queries = [block.strip() for block in blocks if _BARE_QUERY.match(block)]
    return queries[0] if len(queries) == 1 else None


def parse_action(
    text: str, protocol: Protocol, tools: Sequence[dict[str, Any]] = TOOLS
) -> ParsedAction | ParsedCall:
    """`parse_tags` or `parse_native`."""
    return parse_tags(text) if protocol == "tags" else parse_native(text, tools)
