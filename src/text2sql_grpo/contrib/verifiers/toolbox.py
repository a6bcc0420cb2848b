"""Tools of a taskset, called in this process instead of through servers of their own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.state import state_cls  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.contrib.tool_calls import tool_schema
from text2sql_grpo.environment.protocols import MalformedTurn, before_call, parse_native
from text2sql_grpo.errors import ConfigError


@dataclass
class Toolbox:
    """The tools that a rollout may call.

    Attributes:
        schemas: As chat templates show them; named as verifiers' own chat loop names them.
    """

    schemas: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[str, tuple[MCPServer[Any], str]] = field(default_factory=dict)

    async def add(self, toolset: vf.Toolset) -> None:
        """Adds the tools of a toolset.

        Raises:
            ConfigError: It lives elsewhere, keeps state of verifiers', or has a name that is taken.
        """
        kind = type(toolset).__name__
        if toolset.config.url is not None:
            raise ConfigError(f"expected a toolset that runs in this process, got a url ({kind})")
        if state_cls(type(toolset)) is not vf.State:
            raise ConfigError(f"expected a toolset without a State of its own, got {kind}")
        server: MCPServer[Any] = MCPServer(toolset.server_name or kind)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            if name in self._places:
                raise ConfigError(f"expected tools with different names, got two of {name} ({kind})")
            self._places[name] = (server, tool.name)
            self.schemas.append(tool_schema(name, tool.description, tool.input_schema))

    async def answer(self, text: str, number: int) -> tuple[vf.AssistantMessage, vf.ToolMessage | None]:
        """A turn as a message, and the answer to its call; None if it calls nothing.

        What cannot be read, and what a tool raises, is answered by an error.

        Args:
            number: Of the turn; names the call.
        """
        said_before = before_call(text)
        if not self.schemas or said_before is None:
            return vf.AssistantMessage(content=text), None
        call_id = f"call_{number}"
        try:
            parsed = parse_native(text, self.schemas)
        except MalformedTurn as malformed:
            error = vf.ToolMessage(tool_call_id=call_id, content=f"Error: {malformed}")
            return vf.AssistantMessage(content=text), error
        call = vf.ToolCall(id=call_id, name=parsed.name, arguments=json.dumps(parsed.arguments))
        result = await self._call(parsed.name, parsed.arguments)
        said = vf.AssistantMessage(content=said_before, tool_calls=[call])
        return said, vf.ToolMessage(tool_call_id=call_id, name=parsed.name, content=result)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        server, own_name = self._places[name]
        try:
            result: Any = await server.call_tool(own_name, arguments)
        except ToolError as error:
            return f"Error: {error}"
        return "\n".join(block.text for block in result.content if block.type == "text")


async def open_toolbox(toolsets: Sequence[vf.Toolset], task: vf.Task) -> Toolbox:
    """The tools of a rollout: those that all tasks share, which are set up, and the task's own.

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
