"""Bridge between a package's event loop, which requests turns, and the engine, which samples them."""

import asyncio
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.environment.episode import Message, Rollout
from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.verifiers.package import Package
from text2sql_grpo.integrations.verifiers.seat import Seat, Turn
from text2sql_grpo.integrations.verifiers.toolbox import open_toolbox
from text2sql_grpo.rollout.chat_format import ChatFormat


class TaskSession:
    """Session of one task: `start` and `step` for the engine, `finish` returns the trace.

    The package's code runs on an event loop in another thread, and blocks on each turn.

    Args:
        toolsets: Toolsets shared by all tasks, set up.
        model: Name of the policy, for the trace.
    """

    def __init__(
        self,
        package: Package,
        task: vf.Task,
        chat: ChatFormat,
        loop: asyncio.AbstractEventLoop,
        *,
        toolsets: Sequence[vf.Toolset] = (),
        model: str = "policy",
    ) -> None:
        self.episode = Rollout()
        self._package, self._task, self._chat, self._loop = package, task, chat, loop
        config = package.agent.model_copy(update={"model": model, "runtime": vf.SubprocessConfig()})
        self._seat = Seat(config, self._ask, lambda played: open_toolbox(toolsets, played))
        self._asked: queue.SimpleQueue[list[vf.Message] | None] = queue.SimpleQueue()
        self._answer: asyncio.Future[Turn | None] | None = None
        self._played: Future[None] | None = None
        self._num_passed = 0  # tokens of the completion
        self._is_cut = False

    def start(self) -> list[Message]:
        """Start the rollout and return its prompt."""
        self._played = asyncio.run_coroutine_threadsafe(self._play(), self._loop)
        messages = self._next()
        if messages is None:
            return [{"role": "user", "content": ""}]  # for the engine; the episode is over
        self.episode.messages = [plain(message) for message in messages]
        return list(self.episode.messages)

    def step(self, assistant_text: str) -> Message | None:
        """Reply of the package to a turn; None if the rollout is over.

        Raises:
            RunError: The reply has several messages, or is a user's although there are tools.
        """
        self._pass_turn(assistant_text)
        messages = self._next()
        if messages is None:
            return None
        if len(messages) != 1:
            raise RunError(f"only one message may follow a turn, got {len(messages)} ({self._name})")
        if self._chat.tools and messages[0].role != "tool":
            raise RunError(f"with tools, only a tool may reply to a turn, got a user ({self._name})")
        self.episode.messages.append(plain(messages[0]))
        return self.episode.messages[-1]

    def finish(self) -> vf.Trace:
        """Return the scored trace of a rollout that the engine has ended.

        Raises:
            RunError: It has several branches, or none: its tokens are not those of the engine.
        """
        assert self._played is not None
        self._is_cut = True
        if not self._played.done():
            unread = self.episode.completion_mask[self._num_passed :]
            if 1 in unread:
                self._pass_turn(self._chat.text(self._sampled()), is_cut=True)
            else:
                self._set_answer(None)
        self._played.result()
        trace = self._seat.trace
        if trace is None:
            raise RunError(f"the environment ended without playing its agent ({self._name})")
        if trace.ok and self.episode.completion_ids:
            _check_branch(trace, self.episode)
        return trace

    @property
    def _name(self) -> str:
        return f"task {self._task.data.name or self._task.data.idx} of {self._package.id or 'a taskset'}"

    async def _play(self) -> None:
        """Run the package's control flow; its exceptions are recorded, like in verifiers."""
        package, seat, task = self._package, self._seat, self._task
        try:
            if package.environment is None:
                await seat.run(task)
                return
            agents = vf.Agents(package.environment.config, lambda name, config: seat)
            await package.environment.setup(agents)
            await package.environment.run(task, agents)
            if seat.trace is not None:
                await package.environment.finalize(task, _episode(package, seat.trace))
        except Exception as error:
            if seat.trace is None or isinstance(error, RunError):
                raise
            seat.trace.record_error(error)
        finally:
            self._asked.put(None)

    async def _ask(self, messages: list[vf.Message]) -> Turn | None:
        if self._is_cut:
            return None
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put(messages)
        return await self._answer

    def _next(self) -> list[vf.Message] | None:
        messages = self._asked.get()
        if messages is None:
            assert self._played is not None
            self._played.result()
            has_failed = self._seat.trace is None or not self._seat.trace.ok
            self.episode.stop_reason = "error" if has_failed else "submitted"
            self.episode.is_masked = has_failed
        return messages

    def _sampled(self) -> list[int]:
        ids, mask = self.episode.completion_ids, self.episode.completion_mask
        start = mask.index(1, self._num_passed)
        return ids[start:]

    def _pass_turn(self, text: str, *, is_cut: bool = False) -> None:
        episode, sampled = self.episode, self._sampled()
        end = len(episode.completion_ids)
        before = episode.completion_ids[self._num_passed : end - len(sampled)]
        if not self._num_passed:
            before = episode.prompt_ids + before
        log_probs = episode.log_probs[end - len(sampled) :]
        if any(value != value for value in log_probs):  # NaN: not known
            log_probs = []
        episode.messages.append({"role": "assistant", "content": text})
        self._num_passed = end
        context = len(episode.prompt_ids) + end - len(sampled)
        self._set_answer(Turn(text, before, sampled, log_probs, context, is_cut))

    def _set_answer(self, turn: Turn | None) -> None:
        assert self._answer is not None
        self._loop.call_soon_threadsafe(self._answer.set_result, turn)


def _episode(package: Package, trace: vf.Trace) -> vf.Episode:
    trace.agent.name = package.agent_name
    return vf.Episode(env=vf.EnvInfo(id=package.id), task=trace.task, traces=[trace], ok=trace.ok)


def plain(message: Any) -> Message:
    """Message for chat templates.

    Raises:
        RunError: It holds more than text.
    """
    content = message.content or ""
    if not isinstance(content, str):
        if any(part.type != "text" for part in content):
            raise RunError(f"messages must be text only, got {content[0].type} ({message.role})")
        content = "\n".join(part.text for part in content)
    return {"role": message.role, "content": content}


def _check_branch(trace: vf.Trace, episode: Rollout) -> None:
    branches = trace.branches
    if len(branches) != 1:
        raise RunError(f"a rollout must have one branch, got {len(branches)} (trace {trace.id})")
    (branch,) = branches
    played = episode.prompt_ids + episode.completion_ids
    if branch.token_ids != played or branch.sampled_mask[-len(episode.completion_mask) :] != [
        bool(flag) for flag in episode.completion_mask
    ]:
        raise RunError(f"the tokens of trace {trace.id} are not the tokens that were played")
