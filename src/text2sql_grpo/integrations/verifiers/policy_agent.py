"""The training policy as a verifiers `Agent`, and the tools of its task.

`PolicyAgent` has the methods of verifiers' `Agent` that an `Env` calls. Its loop is verifiers' chat loop: it
answers calls until a turn has none, and checks limits and `@stop` before each turn. Tools are called in this
process instead of through servers.
"""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.session import RolloutLimits, RolloutSession
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke

from text2sql_grpo.environment.protocols import MalformedTurn, before_call, parse_native, tool_schema
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.integrations.verifiers.traces import OUT_OF_TOKENS


@dataclass(frozen=True)
class Turn:
    """One sampled turn.

    Attributes:
        before: Token ids since the last turn: the prompt, or the bridge with a reply.
        sampled: Sampled token ids.
        log_probs: Log-probabilities of these; empty if the engine has none.
        is_cut: True if it ran out of tokens.
    """

    text: str
    before: list[int]
    sampled: list[int]
    log_probs: list[float]
    is_cut: bool = False


Sample = Callable[[list[vf.Message]], Awaitable[Turn | None]]


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


@dataclass
class PolicyAgent:
    """Agent for one rollout.

    Attributes:
        sample: Returns the policy's turn after new messages; None if it is out of tokens.
        toolsets: Toolsets shared by all tasks, set up.
        trace: Trace of its run; None before it.
        trainable: Flag that an `Env` may set.
    """

    config: vf.AgentConfig
    sample: Sample
    toolsets: Sequence[vf.Toolset]
    trace: vf.Trace | None = None
    trainable: bool = True

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        """Roll out a task from its prompt to the first turn without a tool call."""
        if task.data.prompt is None:
            raise RunError(f"the task has no prompt, and the environment sent no message ({task.data.name})")
        run = await self._open(task, **options)
        await run.step()
        run.trace.stop("agent_completed")  # unless a limit stopped it before
        return await run.close()

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **options: Any) -> AsyncIterator[vf.Interaction]:
        """Rollout in which the caller is the user, turn by turn."""
        interaction = vf.Interaction(await self._open(task, **options))
        yield interaction
        await interaction.close()

    async def _open(self, task: vf.Task, **options: Any) -> "PolicyRun":
        if self.trace is not None:
            raise RunError("the environment started a second rollout: an episode may have only one")
        given = [name for name, value in options.items() if name != "on_trace" and value is not None]
        if given:
            raise RunError(f"an agent takes only a task, it was given {', '.join(given)} too")
        self.trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=self.config),
        )
        if options.get("on_trace") is not None:
            options["on_trace"](self.trace)
        await invoke(task.setup, {"trace": self.trace, "runtime": None})
        run = PolicyRun(self, task, self.trace, await open_toolbox(self.toolsets, task))
        self.trace.timing.agent.start = time.time()
        return run


class PolicyRun:
    """Running rollout, with the parts of verifiers' `Rollout` that its `Interaction` needs."""

    def __init__(self, agent: PolicyAgent, task: vf.Task, trace: vf.Trace, tools: Toolbox) -> None:
        self.trace, self.closed = trace, False
        self._task, self._sample, self._tools = task, agent.sample, tools
        names = {limit.name for limit in fields(RolloutLimits)}
        limits = RolloutLimits(**agent.config.model_dump(include=names))
        self._session = RolloutSession(None, trace, trace_stops=task.hooks("stop"), limits=limits)

    @property
    def ok(self) -> bool:
        """False once something stopped the rollout."""
        return self.trace.stop_condition is None

    async def step(self, messages: Sequence[vf.Message] | None = None, *, on_input: object = None) -> None:
        """Sample turns until one has no tool call, or a limit is reached, which is set in the trace."""
        pending = [*([] if self.trace.nodes else _opening(self._task.data)), *(messages or ())]
        while self.ok and await self._session.refused() is None:
            turn = await self._sample(pending)
            if turn is None:
                self.trace.stop(OUT_OF_TOKENS)
                return
            said, answer = await self._tools.answer(turn.text, self.trace.num_turns)
            self._commit(pending, said, turn)
            if answer is None or turn.is_cut:
                return
            pending = [answer]

    async def close(self) -> vf.Trace:
        """Score the rollout, once, and return its trace."""
        if self.closed:
            return self.trace
        self.closed = True
        self.trace.timing.agent.end = time.time()
        await invoke(self._task.finalize, {"trace": self.trace, "runtime": None})
        await self._task.score(self.trace)
        self.trace.is_completed = self.trace.ok = True
        return self.trace

    def _commit(self, pending: list[vf.Message], said: vf.AssistantMessage, turn: Turn) -> None:
        """Add pending messages and the turn to the trace; the prompt's tokens go to its last message."""
        trace = self.trace
        for message in pending:
            parent = len(trace.nodes) - 1 if trace.nodes else None
            trace.nodes.append(vf.MessageNode(parent=parent, message=message))
        trace.nodes[-1].token_ids, trace.nodes[-1].mask = turn.before, [False] * len(turn.before)
        context = sum(len(node.token_ids) for node in trace.nodes)
        trace.nodes.append(
            vf.MessageNode(
                parent=len(trace.nodes) - 1,
                message=said,
                sampled=True,
                token_ids=turn.sampled,
                mask=[True] * len(turn.sampled),
                logprobs=turn.log_probs,
            )
        )
        finish = "length" if turn.is_cut else "tool_calls" if said.tool_calls else "stop"
        usage = vf.Usage(prompt_tokens=context, completion_tokens=len(turn.sampled))
        trace.calls.append(
            vf.ModelCall(
                node=len(trace.nodes) - 1, model=trace.agent.config.model, finish_reason=finish, usage=usage
            )
        )


def _opening(data: vf.TaskData) -> list[vf.Message]:
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    if isinstance(data.prompt, str):
        return [*system, vf.UserMessage(content=data.prompt)]
    return [*system, *(data.prompt or [])]
