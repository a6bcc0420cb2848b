"""The training policy as a verifiers `Agent`.

`PolicyAgent` has the methods of verifiers' `Agent` that an `Env` calls. Its loop is verifiers' chat loop: it
answers calls until a turn has none, and checks limits and `@stop` before each turn.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from pydantic import TypeAdapter
from verifiers.v1.state import state_cls  # type: ignore[import-untyped, import-not-found, unused-ignore]
from verifiers.v1.utils.decorators import invoke  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.verifiers.toolbox import Toolbox
from text2sql_grpo.integrations.verifiers.traces import OUT_OF_TOKENS

_MESSAGES = TypeAdapter(vf.Messages)
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")


@dataclass(frozen=True)
class Turn:
    """One sampled turn.

    Attributes:
        before: Token ids since the last turn: the prompt, or the bridge with a reply.
        sampled: Sampled token ids.
        log_probs: Log-probabilities of these; empty if the engine has none.
        context: Number of tokens before the turn, `before` included.
        is_cut: True if it ran out of tokens.
    """

    text: str
    before: list[int]
    sampled: list[int]
    log_probs: list[float]
    context: int
    is_cut: bool = False


Sample = Callable[[list[vf.Message]], Awaitable[Turn | None]]


@dataclass
class PolicyAgent:
    """Agent for one rollout.

    Attributes:
        sample: Returns the policy's turn after new messages; None if it is out of tokens.
        tools: Opens the tools of a task.
        trace: Trace of its run; None before it.
        trainable: Flag that an `Env` may set.
    """

    config: vf.AgentConfig
    sample: Sample
    tools: Callable[[vf.Task], Awaitable[Toolbox]]
    trace: vf.Trace | None = None
    trainable: bool = True

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        """Roll out a task from its prompt to the first turn without a tool call."""
        if task.data.prompt is None:
            raise RunError(f"the task has no prompt, and the environment sent no message ({task.data.name})")
        async with self.interaction(task, **options) as interaction:
            await interaction.segment([])
            if interaction.trace.stop_condition is None:
                interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **options: Any) -> AsyncIterator["PolicyInteraction"]:
        """Rollout in which the caller is the user, turn by turn."""
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
        interaction = PolicyInteraction(self, self.trace, task, await self.tools(task))
        self.trace.timing.agent.start = time.time()
        yield interaction
        self.trace.timing.agent.end = time.time()
        if self.trace.stop_condition is None:
            self.trace.stop("user_closed")
        await invoke(task.finalize, {"trace": self.trace, "runtime": None})
        await task.score(self.trace)
        self.trace.is_completed = self.trace.ok = True


@dataclass
class PolicyInteraction:
    """Running rollout; `turn` has the contract of verifiers' `Interaction.turn`."""

    _agent: PolicyAgent
    trace: vf.Trace
    _task: vf.Task
    _tools: Toolbox
    _is_over: bool = field(default=False, init=False)

    async def turn(self, message: str | list[Any] | None = None) -> vf.Segment:
        """Turns of the policy in reply to a user message; a task's prompt needs a first, bare `turn()`."""
        has_prompt = not self.trace.nodes and self._task.data.prompt is not None
        if self._is_over:
            raise RuntimeError("the interaction is over (the run ended): read interaction.trace")
        if (message is None) != has_prompt:
            needed = "without a message, for the task's prompt" if has_prompt else "with a user message"
            raise ValueError(f"call turn() {needed}, got {message!r}")
        given = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        first, turns = len(self.trace.nodes), self.trace.num_turns
        await self.segment(_MESSAGES.validate_python(given))
        if self.trace.num_turns == turns:
            self._is_over = True
            return vf.Segment(messages=[], terminated=True)
        nodes = self.trace.nodes[first:]
        while not nodes[0].sampled:
            del nodes[0]
        return vf.Segment(messages=[node.message for node in nodes])

    async def segment(self, messages: list[vf.Message]) -> None:
        """Sample turns until one has no tool call, or a limit is reached, which is set in the trace."""
        pending = messages if self.trace.nodes else [*_opening(self._task.data), *messages]
        while not await self._is_stopped():
            turn = await self._agent.sample(pending)
            if turn is None:
                self.trace.stop(OUT_OF_TOKENS)
                return
            said, answer = await self._tools.answer(turn.text, self.trace.num_turns)
            self._commit(pending, said, turn)
            if answer is None or turn.is_cut:
                return
            pending = [answer]

    async def _is_stopped(self) -> bool:
        for name in _LIMITS:
            most = getattr(self._agent.config, name)
            if most is not None and getattr(self.trace, name.replace("max", "num")) >= most:
                self.trace.stop(name)
        if self.trace.stop_condition is not None:
            return True
        for stop in self._task.hooks("stop"):
            answer = invoke(stop, {vf.Trace: self.trace})
            if await answer if hasattr(answer, "__await__") else answer:
                self.trace.stop(stop.__name__)
                return True
        return False

    def _commit(self, pending: list[vf.Message], said: vf.AssistantMessage, turn: Turn) -> None:
        """Add pending messages and the turn to the trace; the prompt's tokens go to its last message."""
        trace = self.trace
        for message in pending:
            parent = len(trace.nodes) - 1 if trace.nodes else None
            trace.nodes.append(vf.MessageNode(parent=parent, message=message))
        trace.nodes[-1].token_ids, trace.nodes[-1].mask = turn.before, [False] * len(turn.before)
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
        usage = vf.Usage(prompt_tokens=turn.context, completion_tokens=len(turn.sampled))
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
