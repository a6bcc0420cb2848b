"""Judged rollouts of a generation batch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from text2sql_grpo.environment.episode import Rollout

Scores = dict[str, float] | None


@dataclass(frozen=True)
class Scored:
    """Judged rollouts; one entry of each list per rollout.

    Attributes:
        scores: Score of each named reward; None for a rollout that must not be trained on.
        rewards: Weighted sums of the scores.
        metrics: Figures that are averaged over the batch and logged.
        records: Lines for the log of episodes, without the step.
        families: Families of the questions; None where there are no families.
        turn_rewards: Additional rewards of the sampled turns, of the first ones if fewer; None for none.
        verdicts: Strict verdicts, None for a rollout that must not be trained on; None where there are none.
    """

    rollouts: Sequence[Rollout]
    scores: Sequence[Scores]
    rewards: Sequence[float | None]
    metrics: Sequence[dict[str, float]]
    records: Sequence[dict[str, Any]] | None = None
    turn_rewards: Sequence[Sequence[float]] | None = None
    families: Sequence[str] | None = None
    verdicts: Sequence[bool | None] | None = None

    def with_rows(self, rows: Mapping[int, int], other: "Scored") -> "Scored":
        """Replace rows by those of other rollouts; `rows` maps the index here to the index there."""

        def mixed(own: Any, others: Any) -> Any:
            return own and [others[rows[i]] if i in rows else value for i, value in enumerate(own)]

        return Scored(**{f.name: mixed(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class Played:
    """A generation batch that was played.

    Attributes:
        scored: Its rollouts on this rank.
        prompts: Prompt index of each of them.
        drawn: Prompt index of each group of all ranks; None without a selection.
        records: Lines for the log, those of replaced groups included.
        metrics: Metrics of the selection.
        seconds: Time of each stage if it was played beside updates; else empty.
    """

    scored: Scored
    prompts: list[int]
    drawn: list[int] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, of numbers, texts, lists and dicts alone: what an update reads."""
        names = [f.name for f in fields(Rollout)]
        rollouts = [Rollout(**{name: getattr(one, name) for name in names}) for one in self.scored.rollouts]
        return asdict(replace(self, scored=replace(self.scored, rollouts=rollouts, records=None)))

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Played":
        """Restore `state`."""
        scored = dict(state["scored"])
        scored["rollouts"] = [Rollout(**row) for row in scored["rollouts"]]
        return cls(**{**state, "scored": Scored(**scored)})
