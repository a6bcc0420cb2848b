"""Tools of a taskset, called in this process instead of through servers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.state import state_cls  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.environment.protocols import MalformedTurn, before_call, parse_native, tool_schema
from text2sql_grpo.errors import ConfigError


@dataclass
class Toolbox:
    """Tools of a rollout.

    Attributes:
        schemas: JSON schemas for chat templates, with the names of verifiers' chat loop.
    """

    schemas: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[str, tuple[MCPServer[Any], str]] = field(default_factory=dict)

    async def add(self, toolset: vf.Toolset) -> None:
        """Add the tools of a toolset.

        Raises:
            ConfigError: It runs elsewhere, has a State of its own, or a name that is taken.
        """
        kind = type(toolset).__name__
        if toolset.config.url is not None:
            raise ConfigError(f"a toolset must run in this process, got a url ({kind})")
        if state_cls(type(toolset)) is not vf.State:
            raise ConfigError(f"cannot train with a toolset that has a State of its own: {kind}")
        server: MCPServer[Any] = MCPServer(toolset.server_name or kind)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            if name in self._places:
                raise ConfigError(f"tools must have different names, got two of {name} ({kind})")
            self._places[name] = (server, tool.name)
            self.schemas.append(tool_schema(name, tool.description, tool.input_schema))

    async def answer(self, text: str, number: int) -> tuple[vf.AssistantMessage, vf.ToolMessage | None]:
        """Convert a turn, by its number, to a message, and run its tool call; None without a call.

        A malformed call, and an exception of a tool, is answered by an error.
        """
        content = before_call(text)
        if not self.schemas or content is None:
            return vf.AssistantMessage(content=text), None
        call_id = f"call_{number}"
        try:
            parsed = parse_native(text, self.schemas)
        except MalformedTurn as malformed:
            error = vf.ToolMessage(tool_call_id=call_id, content=f"Error: {malformed}")
            return vf.AssistantMessage(content=text), error
        call = vf.ToolCall(id=call_id, name=parsed.name, arguments=json.dumps(parsed.arguments))
        result = await self._call(parsed.name, parsed.arguments)
        said = vf.AssistantMessage(content=content, tool_calls=[call])
        return said, vf.ToolMessage(tool_call_id=call_id, name=parsed.name, content=result)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        server, own_name = self._places[name]
        try:
            result: Any = await server.call_tool(own_name, arguments)
        except ToolError as error:
            return f"Error: {error}"
        return "\n".join(block.text for block in result.content if block.type == "text")


async def open_toolbox(toolsets: Sequence[vf.Toolset], task: vf.Task) -> Toolbox:
    """Open the tools of a rollout: the shared ones, already set up, and the task's.

    Raises:
        ConfigError: See `Toolbox.add`.
    """
    toolbox = Toolbox()
    for toolset in toolsets:
        await toolbox.add(toolset)
    for toolset in type(task).toolsets(task.config):
        await toolset.setup()
        await toolset.setup_task(task.data)
        await toolbox.add(toolset)
    return toolbox
