"""Choice of a server's tools, with the names and arguments that the model sees (`environment.mcp.tools`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcp.types import Tool

from text2sql_grpo.environment.protocols import tool_schema
from text2sql_grpo.errors import ConfigError

# `read_query`, `run_sql: read_query(query)`, `look: describe(table=table_name)`
_ENTRY = re.compile(r"(?:([\w.-]+)\s*:\s*)?([\w./-]+)\s*(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class MappedTool:
    """A server's tool as the model sees it.

    Attributes:
        schema: JSON schema for chat templates.
        server_name: Name on the server.
        arguments: The server's name of each argument that has another name there.
    """

    schema: dict[str, Any]
    server_name: str
    arguments: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def server_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call by the server's names."""
        return {self.arguments.get(name, name): value for name, value in arguments.items()}


def mapped_tools(offered: list[Tool], entries: Sequence[str | dict[str, str]] | None) -> list[MappedTool]:
    """Tools that the model may call: those of `entries`, else those that their server marks as reading only.

    Raises:
        ConfigError: An entry cannot be read or names no tool or argument, or there are no tools.
    """
    by_name = {tool.name: tool for tool in offered}
    known = ", ".join(by_name) or "none"
    if entries is None:
        reading = [tool for tool in offered if tool.annotations and tool.annotations.read_only_hint]
        if not reading:
            raise ConfigError(
                "the MCP server marks no tool as read-only (readOnlyHint): allow tools by name in "
                f"environment.mcp.tools, such as [run_sql: read_query(query)]; it has the tools {known}"
            )
        return [_whole(tool, tool.name) for tool in reading]
    tools = [_mapped(entry, by_name, known) for entry in _texts(entries)]
    names = [tool.name for tool in tools]
    if not tools or len(set(names)) < len(names):
        raise ConfigError(f"environment.mcp.tools must name each tool once, got {', '.join(names) or 'none'}")
    return tools


def _whole(tool: Tool, name: str) -> MappedTool:
    """Tool with all its arguments; `run_sql` with its query alone, as the protocols call it."""
    schema = tool.input_schema
    if name == "run_sql" and takes_a_query(schema):
        schema = schema | {"properties": {"sql": schema["properties"]["sql"]}}
    return MappedTool(tool_schema(name, tool.description, schema), tool.name, {})


def takes_a_query(schema: dict[str, Any]) -> bool:
    """True if a tool with these arguments can be called with a query alone."""
    return "sql" in schema.get("properties", {}) and set(schema.get("required", [])) <= {"sql"}


def _texts(entries: Sequence[str | dict[str, str]]) -> list[str]:
    """Entries as text; YAML reads `run_sql: read_query(query)` as a mapping."""
    texts = []
    for entry in entries:
        texts += [entry] if isinstance(entry, str) else [f"{name}: {tool}" for name, tool in entry.items()]
    return texts


def _mapped(entry: str, by_name: dict[str, Tool], known: str) -> MappedTool:
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        raise ConfigError(
            "environment.mcp.tools must hold entries such as read_query or run_sql: read_query(query), "
            f"got {entry!r}"
        )
    ours, theirs, listed = match[1] or match[2], match[2], match[3]
    tool = by_name.get(theirs)
    if tool is None:
        raise ConfigError(f"environment.mcp.tools: the MCP server has no tool {theirs!r}; its tools: {known}")
    if listed is None:
        return _whole(tool, ours)
    words = [word.strip() for word in listed.split(",") if word.strip()]
    arguments = {}
    for word in words:
        name, equals, server_name = (part.strip() for part in word.partition("="))
        if not equals:
            # The one argument of `run_sql` is the query, whatever the server calls it.
            name, server_name = ("sql" if ours == "run_sql" and len(words) == 1 else word), word
        arguments[name] = server_name
    properties, required = tool.input_schema.get("properties", {}), tool.input_schema.get("required", [])
    unknown = [name for name in arguments.values() if name not in properties]
    missing = [name for name in required if name not in arguments.values()]
    if unknown or missing:
        raise ConfigError(
            f"environment.mcp.tools: {theirs} takes the arguments {', '.join(properties) or 'none'}, "
            f"of which {', '.join(required) or 'none'} must be named, got {entry!r}"
        )
    schema = {
        "type": "object",
        "properties": {name: properties[server_name] for name, server_name in arguments.items()},
        "required": [name for name, server_name in arguments.items() if server_name in required],
    }
    return MappedTool(tool_schema(ours, tool.description, schema), theirs, arguments)
