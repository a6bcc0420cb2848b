"""Rollouts of verifiers tasks by our engine: what is played, stopped, scored, masked and refused."""

# mypy: disallow-untyped-decorators=False

import asyncio
import inspect
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.number_game import find_packages, game_tokenizer, game_trainer
from tests.tiny_model import write_tokenizer
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, run

vf = pytest.importorskip("verifiers.v1", reason="needs verifiers (pip install text2sql-grpo[verifiers])")
from text2sql_grpo.integrations.verifiers.package import Package, open_package  # noqa: E402
from text2sql_grpo.integrations.verifiers.task_session import TaskSession  # noqa: E402
from text2sql_grpo.integrations.verifiers.taskset_trainer import turn_rewards  # noqa: E402
from text2sql_grpo.integrations.verifiers.toolbox import open_toolbox  # noqa: E402

# All of verifiers that training calls, with the parameters that it hands over.
USED: list[tuple[str, str, Sequence[str]]] = [
    ("verifiers.v1", "Taskset.take", ["num_tasks"]),
    ("verifiers.v1", "Taskset.toolsets", ["config"]),
    ("verifiers.v1", "Task.toolsets", ["config"]),
    ("verifiers.v1", "Task.hooks", ["attr"]),
    ("verifiers.v1", "Task.setup", ["trace", "runtime"]),
    ("verifiers.v1", "Task.finalize", ["trace", "runtime"]),
    ("verifiers.v1", "Task.score", ["trace"]),
    ("verifiers.v1", "Env.setup", ["agents"]),
    ("verifiers.v1", "Env.run", ["task", "agents"]),
    ("verifiers.v1", "Env.finalize", ["task", "episode"]),
    ("verifiers.v1", "Agents.__init__", ["config", "make"]),
    ("verifiers.v1", "Agent.run", ["task", "runtime", "tools", "on_trace"]),
    ("verifiers.v1", "Agent.interaction", ["task", "runtime", "tools", "on_trace"]),
    ("verifiers.v1", "Interaction.turn", ["message"]),
    ("verifiers.v1", "Toolset.register", ["mcp"]),
    ("verifiers.v1", "Toolset.setup_task", ["task"]),
    ("verifiers.v1", "Trace.stop", ["condition"]),
    ("verifiers.v1", "Trace.record_error", ["error"]),
    ("verifiers.v1", "Segment", ["messages", "terminated"]),
    ("verifiers.v1", "load_taskset", ["config"]),
    ("verifiers.v1", "taskset_config_type", ["taskset_id"]),
    ("verifiers.v1", "env_config_type", ["taskset_id"]),
    ("verifiers.v1", "environment_class", ["taskset_id"]),
    ("verifiers.v1", "default_harness_id", ["taskset_id"]),
    ("verifiers.v1.configs.agent", "agent_config_fields", ["config"]),
    ("verifiers.v1.dialects", "parse_message", []),
    ("verifiers.v1.session", "hook_boundary", ["handler", "allow_trace"]),
    ("verifiers.v1.session", "RolloutLimits.reached", ["trace"]),
    ("verifiers.v1.state", "state_cls", ["cls"]),
    ("verifiers.v1.utils.decorators", "invoke", ["fn", "available"]),
]
FIELDS = {
    "Trace": "task agent nodes calls rewards metrics info state is_completed ok stop_condition errors timing",
    "MessageNode": "parent message sampled token_ids mask logprobs",
    "ModelCall": "node model finish_reason usage",
    "Usage": "prompt_tokens completion_tokens",
    "TraceTask": "type data key hash",
    "AgentInfo": "config name",
    "AgentConfig": "model runtime max_turns max_input_tokens max_output_tokens max_total_tokens",
    "Episode": "env task ok traces run",
    "TrainRunInfo": "id work",
    "TrainWorkInfo": "step",
    "TaskData": "idx name prompt system_prompt image",
    "AssistantMessage": "content tool_calls",
    "ToolMessage": "tool_call_id content name",
    "ToolCall": "id name arguments",
}


@pytest.mark.parametrize(("module", "name", "parameters"), USED)
def test_verifiers_still_has_what_training_calls(module: str, name: str, parameters: Sequence[str]) -> None:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert set(parameters) <= set(inspect.signature(found).parameters)


@pytest.mark.parametrize(("name", "fields"), FIELDS.items())
def test_verifiers_still_has_the_fields_of_its_records(name: str, fields: str) -> None:
    assert set(fields.split()) <= set(getattr(vf, name).model_fields)


class Script:
    """A policy that writes given turns, one after the other; a list of ids is written as it is."""

    def __init__(self, chat: ChatFormat, turns: Sequence[str | list[int]]) -> None:
        self.chat, self.left = chat, list(turns)

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        turns = [self.left.pop(0) for _ in prompts]
        rows = [(self.chat.turn_ids(turn) if isinstance(turn, str) else turn) for turn in turns]
        rows = [row[:max_new_tokens] for row in rows]
        return Continuations(rows, [[-0.5] * len(row) for row in rows])


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def play(
    package: Package,
    turns: Sequence[str | list[int]],
    loop: asyncio.AbstractEventLoop,
    chat: ChatFormat,
    *,
    number: int = 0,
    tokens: int = 400,
) -> tuple[TaskSession, Any]:
    """A session that was played by a script, and its trace."""
    session = TaskSession(package, package.tasks[number], chat, loop)
    policy = Script(chat, turns)
    run([session], policy, chat, Budgets(min(tokens, 200), tokens, 2_000))
    trace = session.finish()
    assert not policy.left
    return session, trace


@pytest.fixture
def game() -> Package:
    find_packages()
    return open_package("higher-lower")


@pytest.fixture
def game_chat() -> ChatFormat:
    return ChatFormat(game_tokenizer())


def said(trace: Any) -> list[tuple[str, str]]:
    return [(node.message.role, node.message.content) for node in trace.nodes]


def test_a_package_with_an_environment_of_its_own_is_played_by_it(
    game: Package, game_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    session, trace = play(game, ["3", "higher", "4"], loop, game_chat, number=4)
    assert said(trace) == [
        *[("user", "guess"), ("assistant", "3"), ("user", "higher"), ("assistant", "higher")],
        *[("user", "?"), ("assistant", "4")],
    ]
    assert (trace.ok, trace.stop_condition, trace.num_turns) == (True, "user_closed", 3)
    assert trace.reward == pytest.approx(1.2) and trace.metrics == {"found": 1.0}
    (branch,) = trace.branches
    episode = session.episode
    assert branch.token_ids == episode.prompt_ids + episode.completion_ids
    assert branch.sampled_mask == [False] * len(episode.prompt_ids) + [
        bool(f) for f in episode.completion_mask
    ]
    assert branch.logprobs[-2:] == [-0.5, -0.5] and branch.num_output_tokens == 6
    assert (episode.stop_reason, episode.is_masked) == ("submitted", False)
    assert trace.task.key == "number-4"


def test_the_limits_of_the_agent_hold(
    game: Package, game_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    _, trace = play(game, ["0", "1", "2"], loop, game_chat, number=5)
    assert trace.stop_condition == "max_turns" and trace.metrics == {"found": 0.0}
    assert trace.is_truncated and trace.ok


def test_a_turn_out_of_tokens_ends_the_rollout_and_is_scored(
    game: Package, game_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    three = game_chat.turn_ids("3")[:1]
    session, trace = play(game, ["1", three * 9], loop, game_chat, number=4, tokens=8)
    assert said(trace)[-1][1].startswith("3 3") and trace.is_truncated
    assert trace.ok and trace.calls[-1].finish_reason == "length"
    assert trace.rewards["begins"].score == 1.0 and trace.rewards["close"].score == 0.0
    assert session.episode.stop_reason == "budget" and trace.stop_condition == "max_total_tokens"


def test_a_reply_that_leaves_no_room_ends_the_rollout(
    game: Package, game_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    session, trace = play(game, ["3"], loop, game_chat, number=4, tokens=4)
    assert said(trace) == [("user", "guess"), ("assistant", "3")]
    assert trace.stop_condition == "max_total_tokens" and session.episode.stop_reason == "budget"


class LetterTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "letters"

    @vf.tool
    async def after(self, letter: str) -> str:
        """The letter after a letter."""
        if letter == "z":
            raise ValueError("there is none after z")
        return chr(ord(letter) + 1)


class Letters(vf.Task[vf.TaskData]):
    @vf.stop
    def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 3

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no reward")
        trace.info["turn_rewards"] = [0.5] * (1 if trace.last_reply == "few" else trace.num_turns)
        return float(trace.last_reply == "b")


class LetterTaskset(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self) -> Iterator[Letters]:
        data = vf.TaskData(system_prompt="Use tools.", prompt=[vf.UserMessage(content="After a?")])
        yield Letters(data, self.config.task)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [LetterTools(vf.SharedToolsetConfig())]


@pytest.fixture
def letters() -> Package:
    return open_package(LetterTaskset(vf.TasksetConfig()))


@pytest.fixture
def letter_chat(letters: Package, tmp_path: Path) -> ChatFormat:
    toolbox = asyncio.run(open_toolbox(LetterTaskset.toolsets(None), letters.tasks[0]))
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["letters_after"]
    return ChatFormat(write_tokenizer(tmp_path), tools=toolbox.schemas)


def call(letter: str) -> str:
    return f'Look.<tool_call>{{"name": "letters_after", "arguments": {{"letter": "{letter}"}}}}</tool_call>'


def play_letters(letters: Package, chat: ChatFormat, loop: Any, *turns: str) -> Any:
    task = letters.tasks[0]
    session = TaskSession(letters, task, chat, loop, toolsets=LetterTaskset.toolsets(None))
    run([session], Script(chat, turns), chat, Budgets(200, 2_000, 4_000))
    return session.finish()


def test_tools_answer_until_a_turn_calls_none(
    letters: Package, letter_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    trace = play_letters(letters, letter_chat, loop, call("a"), "<tool_call>oops", "b")
    assert trace.stop_condition == "agent_completed" and trace.reward == 1.0
    roles = [node.message.role for node in trace.nodes]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trace.nodes[2].message.content == "Look."
    assert trace.nodes[2].message.tool_calls[0].arguments == '{"letter": "a"}'
    answers = [message.content for message in trace.tool_messages]
    assert answers[0] == "b" and answers[1].startswith("Error: expected one tool call")


def test_tool_errors_are_shown_and_stop_conditions_are_asked_before_a_turn(
    letters: Package, letter_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    trace = play_letters(letters, letter_chat, loop, call("z"), call("a"), call("b"), call("c"))
    assert (
        trace.tool_messages[0].content.startswith("Error: ") and "after z" in trace.tool_messages[0].content
    )
    assert trace.stop_condition == "enough" and trace.num_turns == 4 and trace.ok


def test_a_reward_that_raises_leaves_its_rollout_out(
    letters: Package, letter_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    trace = play_letters(letters, letter_chat, loop, "raise")
    assert not trace.ok and "no reward" in trace.last_error.message and turn_rewards(trace) == [0.0]


def test_rewards_of_turns_are_one_a_turn(
    letters: Package, letter_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    assert turn_rewards(play_letters(letters, letter_chat, loop, call("a"), "b")) == [0.5, 0.5]
    with pytest.raises(RunError, match=r"trace.info.* must have one entry a turn \(2\), got 1"):
        turn_rewards(play_letters(letters, letter_chat, loop, call("a"), "few"))


def scripted(trainer: Any, turns: list[str]) -> dict[str, Any]:
    """One generation batch in which a script plays."""
    chat = trainer.rollouts.chat
    policy = Script(chat, turns)
    trainer.rollouts.policy = lambda model: policy
    trainer.select.draw = lambda count, progress=0.0: [5] * count
    output: dict[str, Any] = trainer.generation_batch()
    assert not policy.left
    return output | {"sampled": (output["tool_mask"] * output["completion_mask"]).bool()}


GROUP = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "engine": "generation",
    "scale_rewards": "none",
}


def test_turns_have_advantages_of_their_own_where_they_earn_something(tmp_path: Path) -> None:
    trainer = game_trainer(tmp_path, taskset_config={"credit_turns": True}, **GROUP)
    output = scripted(trainer, ["5", "?", "0", "5", "?", "5", "5"])
    turns = output["advantages"][output["sampled"]].reshape(-1, 2)
    assert turns[:, 0].tolist() == turns[:, 1].tolist()
    # All rewards are alike, 1.2; the turns earned [0.1], [0, 0, 0.1], [0.1, 0.1] and [0.1].
    assert turns[:, 0].tolist() == pytest.approx([-0.025, -0.025, 0, 0, 0.075, 0, -0.025], abs=1e-6)
    assert output["advantages"][~output["sampled"]].abs().max() == 0


def test_without_rewards_of_turns_advantages_are_those_of_trl(tmp_path: Path) -> None:
    output = scripted(game_trainer(tmp_path, **GROUP), ["5", "5", "0", "0", "0", "0", "0", "0"])
    assert output["advantages"].tolist() == pytest.approx([0.4167, 0.4167, -0.4167, -0.4167], abs=1e-3)


def test_rollouts_out_of_tokens_count_unless_they_are_to_be_left_out(tmp_path: Path) -> None:
    turns = ["5", "5", "3 3", "3 3"]
    counted = scripted(game_trainer(tmp_path, **GROUP), turns)
    assert counted["sampled"].sum(1).tolist() == [2] * 4 and counted["advantages"][2] < -0.1
    left_out = scripted(game_trainer(tmp_path, mask_truncated_completions=True, **GROUP), turns)
    assert left_out["sampled"].sum(1).tolist() == [2, 2, 0, 0]
    assert left_out["advantages"].tolist() == [0.0] * 4


def test_a_trace_with_other_tokens_than_were_played_is_refused(
    game: Package, game_chat: ChatFormat, loop: asyncio.AbstractEventLoop
) -> None:
    session, trace = play(game, ["3", "4"], loop, game_chat, number=4)
    trace.nodes[1].token_ids = [*trace.nodes[1].token_ids, 0]
    with pytest.raises(RunError, match="the tokens that were played"):
        session.finish()
    trace.nodes[2].parent = 0  # as if the second turn had answered another prompt
    with pytest.raises(RunError, match="a rollout must have one branch, got 2"):
        session.finish()


def test_rollouts_that_are_not_ok_are_left_out_and_only_such_end_the_run(tmp_path: Path) -> None:
    trainer = game_trainer(tmp_path, **GROUP)
    task = trainer.play._package.tasks[5]
    score = type(task).score

    async def fails(trace: Any) -> None:
        if trace.num_turns > 1:
            raise ValueError("no judge")
        await score(task, trace)

    task.score = fails
    output = scripted(trainer, ["5", "5", "0", "5", "5"])
    assert output["advantages"].tolist() == [0.0] * 4
    assert output["sampled"].sum(1).tolist() == [2, 2, 0, 2]
    assert trainer._collected["trace/not_ok"] == [0.25]
    with pytest.raises(RunError, match="all 4 traces failed; the first: ValueError: no judge"):
        scripted(trainer, ["0", "0", "0", "0", "5", "5", "5", "5"])


class InAContainer(Letters):
    NEEDS_CONTAINER = True


class WithRuntime(Letters):
    @vf.reward
    async def built(self, runtime: vf.Runtime) -> float:
        return 1.0


class WithIntercept(Letters):
    @vf.intercept
    async def watch(self, request: vf.Request) -> None:
        return None


class WithResponseStop(Letters):
    @vf.stop
    async def late(self, response: vf.Response) -> bool:
        return False


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InAContainer, "cannot train on tasks that need a container: InAContainer"),
        (WithRuntime, "WithRuntime.built needs one, and would be left out"),
        (WithIntercept, "cannot train on tasks with @intercept: WithIntercept"),
        (WithResponseStop, "@stop must take a Trace: WithResponseStop.late does not"),
    ],
)
def test_tasks_that_training_cannot_play_are_refused(kind: Any, message: str) -> None:
    class Refused(LetterTaskset):
        def load(self) -> Iterator[Any]:
            yield kind(vf.TaskData(prompt="?"), self.config.task)

    with pytest.raises(ConfigError, match=message):
        open_package(Refused(vf.TasksetConfig()))


def test_wrong_tasksets_are_refused() -> None:
    class Empty(LetterTaskset):
        def load(self) -> Iterator[Any]:
            yield from ()

    class Endless(LetterTaskset):
        INFINITE = True

    find_packages()
    with pytest.raises(ConfigError, match="the taskset has no tasks"):
        open_package(Empty(vf.TasksetConfig()))
    with pytest.raises(ConfigError, match="an infinite taskset needs num_tasks"):
        open_package(Endless(vf.TasksetConfig()))
    assert len(open_package(Endless(vf.TasksetConfig()), num_tasks=1).tasks) == 1
    with pytest.raises(ConfigError, match="harness of its own"):
        open_package("text2sql-grpo", {"questions": "data/questions/dev.jsonl"}, num_tasks=1)
    with pytest.raises(ConfigError, match="not found"):
        open_package("no-such-package")
    with pytest.raises(ConfigError, match="numbers"):
        open_package("higher-lower", {"numbers": "many"})
    with pytest.raises(ConfigError, match="with a taskset object"):
        open_package(LetterTaskset(vf.TasksetConfig()), {"numbers": 3})
