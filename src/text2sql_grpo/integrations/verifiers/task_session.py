"""Session of a verifiers task: its code runs on an event loop, and the rollout engine samples its turns."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import verifiers.v1 as vf

from text2sql_grpo.environment.episode import Message, Rollout
from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.verifiers.loaded_taskset import LoadedTaskset
from text2sql_grpo.integrations.verifiers.policy_agent import PolicyAgent, Turn
from text2sql_grpo.integrations.verifiers.traces import plain
from text2sql_grpo.rollout.chat_format import ChatFormat


class TaskSession:
    """Session of one task: `start` and `step` for the engine, `finish` returns the trace.

    Args:
        loop: Running event loop of another thread, for the taskset's code.
        toolsets: Toolsets shared by all tasks, set up.
        model: Name of the policy, for the trace.
    """

    def __init__(
        self,
        taskset: LoadedTaskset,
        task: vf.Task,
        chat: ChatFormat,
        loop: asyncio.AbstractEventLoop,
        *,
        toolsets: Sequence[vf.Toolset],
        model: str,
    ) -> None:
        self.episode = Rollout()
        self._taskset, self._task, self._chat, self._loop = taskset, task, chat, loop
        config = taskset.agent.model_copy(update={"model": model, "runtime": vf.SubprocessConfig()})
        self._agent = PolicyAgent(config, self._sample, toolsets)
        # Messages that a turn must follow, and the turns; None ends the rollout, from either side.
        self._requests: SimpleQueue[list[vf.Message] | None] = SimpleQueue()
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue()
        self._rollout: Future[None]
        self._num_passed = 0  # tokens of the completion that the taskset's code has seen

    def start(self) -> list[Message]:
        """Start the rollout and return its prompt."""
        self._rollout = asyncio.run_coroutine_threadsafe(self._roll_out(), self._loop)
        messages = self._next_request()
        if messages is None:
            return [{"role": "user", "content": ""}]  # for the engine; the episode is over
        self.episode.messages = [plain(message) for message in messages]
        return list(self.episode.messages)

    def step(self, assistant_text: str) -> Message | None:
        """Reply of the taskset's code to a turn; None if the rollout is over.

        Raises:
            RunError: The reply has several messages, or is a user's although there are tools.
        """
        self._pass_on(self._turn(assistant_text))
        messages = self._next_request()
        if messages is None:
            return None
        if len(messages) != 1:
            raise RunError(f"only one message may follow a turn, got {len(messages)} ({self._name})")
        if self._chat.tools and messages[0].role != "tool":
            raise RunError(f"with tools, only a tool may reply to a turn, got a user ({self._name})")
        self.episode.messages.append(plain(messages[0]))
        return self.episode.messages[-1]

    def holds_action(self, cut_text: str) -> bool:
        """False: what a cut turn is to the taskset's code is verifiers' decision."""
        return False

    def finish(self) -> vf.Trace:
        """Return the scored trace of a rollout that the engine has ended.

        Raises:
            RunError: It has several branches, or none: its tokens are not those of the engine.
        """
        if not self._rollout.done():
            if 1 in self.episode.completion_mask[self._num_passed :]:
                self._pass_on(self._turn(self._chat.text(self._unseen()[1]), is_cut=True))
            self._pass_on(None)
        self._rollout.result()
        trace = self._agent.trace
        if trace is None:
            raise RunError(f"the environment ended without a run of its agent ({self._name})")
        if trace.ok and self.episode.completion_ids:
            _check_branch(trace, self.episode)
        return trace

    @property
    def _name(self) -> str:
        return f"task {self._task.data.name or self._task.data.idx} of {self._taskset.id or 'a taskset'}"

    async def _roll_out(self) -> None:
        """Run the environment's control flow; its exceptions are recorded, like in verifiers."""
        taskset, agent, task = self._taskset, self._agent, self._task
        try:
            if taskset.environment is None:
                await agent.run(task)
                return
            agents = vf.Agents(taskset.environment.config, lambda name, config: agent)
            await taskset.environment.setup(agents)
            await taskset.environment.run(task, agents)
            if agent.trace is not None:
                agent.trace.agent.name = taskset.agent_name
                await taskset.environment.finalize(task, taskset.episode(agent.trace))
        except Exception as error:
            if agent.trace is None or isinstance(error, RunError):
                raise
            agent.trace.record_error(error)
        finally:
            self._requests.put(None)

    async def _sample(self, messages: list[vf.Message]) -> Turn | None:
        self._requests.put(messages)
        return await self._turns.get()

    def _pass_on(self, turn: Turn | None) -> None:
        self._loop.call_soon_threadsafe(self._turns.put_nowait, turn)

    def _next_request(self) -> list[vf.Message] | None:
        """Wait for the messages that the next turn must follow; None if the rollout is over."""
        messages = self._requests.get()
        if messages is None:
            self._rollout.result()
            has_failed = self._agent.trace is None or not self._agent.trace.ok
            self.episode.stop_reason = "error" if has_failed else "submitted"
            self.episode.is_masked = has_failed
        return messages

    def _unseen(self) -> tuple[list[int], list[int]]:
        """Tokens since the last turn: the environment's, the prompt included, and the sampled ones."""
        episode, first = self.episode, self._num_passed
        start = episode.completion_mask.index(1, first)
        before = episode.completion_ids[first:start]
        return (before if first else episode.prompt_ids + before), episode.completion_ids[start:]

    def _turn(self, text: str, *, is_cut: bool = False) -> Turn:
        episode = self.episode
        before, sampled = self._unseen()
        log_probs = episode.log_probs[-len(sampled) :]
        if any(value != value for value in log_probs):  # NaN: not known
            log_probs = []
        episode.messages.append({"role": "assistant", "content": text})
        self._num_passed = len(episode.completion_ids)
        return Turn(text, before, sampled, log_probs, is_cut)


def _check_branch(trace: vf.Trace, episode: Rollout) -> None:
    branches = trace.branches
    if len(branches) != 1:
        raise RunError(f"a rollout must have one branch, got {len(branches)} (trace {trace.id})")
    (branch,) = branches
    tokens, mask = episode.prompt_ids + episode.completion_ids, episode.completion_mask
    if branch.token_ids != tokens or branch.sampled_mask[-len(mask) :] != mask:
        raise RunError(f"the tokens of trace {trace.id} are not the tokens of the engine")
