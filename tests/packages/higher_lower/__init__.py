"""A verifiers package of its own: guess a number in three turns, told whether it is higher or lower."""

# mypy: disallow-untyped-decorators=False

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HigherLowerEnv", "HigherLowerTaskset"]


class Config(vf.TasksetConfig):
    numbers: int = 6


class Data(vf.TaskData):
    number: int
    numbers: int


class HigherLowerTask(vf.Task[Data]):
    @property
    def key(self) -> str:
        return f"number-{self.data.number}"

    @vf.reward
    async def close(self, trace: vf.Trace) -> float:
        """How near the last guess came, 1 for the number itself."""
        return self.nearness(guess(trace.last_reply))

    @vf.reward(weight=0.2)
    async def begins(self, trace: vf.Trace) -> float:
        """Whether the last turn begins with a number."""
        return float(trace.last_reply[:1].isdecimal())

    @vf.metric
    async def found(self, trace: vf.Trace) -> float:
        return float(guess(trace.last_reply) == self.data.number)

    def nearness(self, number: int | None) -> float:
        return 0.0 if number is None else 1 - abs(number - self.data.number) / self.data.numbers


class HigherLowerTaskset(vf.Taskset[HigherLowerTask, Config]):
    def load(self) -> Iterator[HigherLowerTask]:
        for number in range(self.config.numbers):
            data = Data(
                prompt="guess",
                number=number,
                numbers=self.config.numbers,
            )
            yield HigherLowerTask(data, self.config.task)


class EnvConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class HigherLowerEnv(vf.SingleAgentEnv, vf.Env[EnvConfig]):
    async def run(self, task: HigherLowerTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as game:
            said = await game.turn()
            while not said.terminated and guess(said.last_reply) != task.data.number:
                number = guess(said.last_reply)
                hint = "?" if number is None else "higher" if number < task.data.number else "lower"
                said = await game.turn(hint)


def guess(text: str) -> int | None:
    """The number that a turn says; None if it says anything else."""
    return int(text) if text.strip().isdecimal() else None
