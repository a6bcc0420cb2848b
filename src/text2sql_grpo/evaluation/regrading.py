"""Recorded episodes, judged once more: by other gold queries, test databases or rewards, without a model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.rewards import Answer, RewardMix
from text2sql_grpo.sql import ExecutionOutcome

_AT_ONCE = 64
_FIELDS = (
    "messages",
    "stop_reason",
    "is_masked",
    "final_sql",
    "prompt_ids",
    "completion_ids",
    "completion_mask",
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Replayed:
    """One recorded episode, as `Answer.record` wrote it, and its new judgement."""

    record: Record
    answer: Answer

    @property
    def is_changed(self) -> bool:
        """True if the strict verdict is another one."""
        return self.answer.verdict.strict is not self.record["strict"]


def replay(
    records: Iterable[Record],
    environment: Environment,
    *,
    golds: Mapping[str, Example] | None = None,
    rewards: RewardMix | None = None,
) -> Iterator[Replayed]:
    """Judge recorded episodes once more, in their order.

    Their exploratory queries run again, since records hold the numbers of their rows alone.

    Args:
        records: Lines of `rollouts.jsonl`, or of a file of `evaluate` or `collect`; see `read_record`.
        environment: Its databases and grader judge.
        golds: Questions by id, whose gold queries replace those of the records; see `corrected`.
        rewards: Rewards of the episodes; None for verdicts alone.

    Raises:
        DataError: A record names an unknown database.
        RewardError: A reward function raised.
    """
    judge, source = environment.judge(rewards), iter(records)
    while part := list(islice(source, _AT_ONCE)):
        episodes = [_read_episode(record, environment, golds or {}) for record in part]
        addresses = [environment.databases.address(one.example.database) for one in episodes]
        answers = judge.judge_many(list(zip(episodes, addresses, strict=True)))
        yield from map(Replayed, part, answers)


def corrected(record: Record, golds: Mapping[str, Example]) -> Example | None:
    """Question of `golds` with the id, text and database of a record; None if there is none."""
    example = golds.get(record["example"])
    asked = record["question"], record["database"]
    return example if example and (example.question, example.database) == asked else None


def read_record(record: Record) -> Record:
    """The record of an episode; KeyError or TypeError if a field is missing or wrong."""
    _episode(record, {}, (None for _ in record["actions"]), max_turns=1)
    itemgetter("strict", "reason")(record)
    return record


def _read_episode(record: Record, environment: Environment, golds: Mapping[str, Example]) -> Episode:
    database = environment.databases.address(record["database"])
    runs = [one["sql"] for one in record["actions"] if "outcome" in one]
    outcomes = environment.executor.execute_many([(database, sql) for sql in runs])
    return _episode(record, golds, iter(outcomes), max_turns=environment.settings.max_turns)


def _episode(
    record: Record,
    golds: Mapping[str, Example],
    outcomes: Iterator[ExecutionOutcome | None],
    *,
    max_turns: int,
) -> Episode:
    example = corrected(record, golds) or Example(
        record["example"],
        record["database"],
        record["question"],
        record["gold_sql"],
        difficulty=record["difficulty"],
        family=record["family"],
        other_golds=tuple(record.get("other_golds", ())),
    )
    actions = []
    for one in record["actions"]:
        outcome = next(outcomes) if "outcome" in one else None
        actions.append(Action(one["kind"], one["sql"], outcome, one.get("error", "")))
    known = {name: record[name] for name in _FIELDS}
    return Episode(example, actions=actions, max_turns=max_turns, **known)
