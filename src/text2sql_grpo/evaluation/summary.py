"""Accuracies and counts of the answers to held-out questions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.evaluation.published import PublishedVerdicts, bird_r_ves, measure_ves_reward
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.rewards import FLAGS, Answer
from text2sql_grpo.sql import Limits, SQLExecutor


def r_ves(
    answers: Sequence[Answer],
    databases: Databases,
    limits: Limits,
    *,
    on_answer: Callable[[], None] = lambda: None,
) -> float:
    """BIRD's R-VES, in [0, 111.8]: each right answer timed against its gold, see `measure_ves_reward`.

    Args:
        limits: Bounds of each of the 100 runs of a query.
    """
    rewards = []
    with SQLExecutor(limits, workers=1, cache_entries=0) as executor:
        for answer in answers:
            sql, reward = answer.episode.final_sql, 0.0
            if sql is not None and answer.verdict.official:
                database = databases.address(answer.example.database)
                reward = measure_ves_reward(executor, database, answer.example.gold_sql, sql)
            rewards.append(reward)
            on_answer()
    return round(bird_r_ves(rewards), 2)


def accuracy(answers: Sequence[Answer]) -> Accuracy:
    """Accuracy by the strict verdict."""
    return Accuracy.of((answer.example.database, answer.verdict.strict) for answer in answers)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Fields of a set in `evaluation.json`: counts, accuracies and 95% intervals, strict and official."""
    return {
        "overall": _both(answers),
        "published": _published(answers),
        "flags": {flag: sum(flag in answer.flags for answer in answers) for flag in FLAGS},
        "by_need": _grouped(answers, lambda a: "look-up" if a.example.family == "lookup" else "others"),
        "by_family": _grouped(answers, lambda answer: answer.example.family),
        "by_difficulty": _grouped(answers, lambda answer: answer.example.difficulty),
        "looks_per_question": round(sum(a.episode.looks for a in answers) / max(1, len(answers)), 4),
        "reasons": _counted(answer.verdict.reason for answer in answers),
        "stop_reasons": _counted(str(answer.episode.stop_reason) for answer in answers),
    }


def _both(answers: Sequence[Answer]) -> dict[str, Any]:
    official = Accuracy.of((answer.example.database, answer.verdict.official) for answer in answers)
    return {"strict": accuracy(answers).record(), "official": official.record()}


def _published(answers: Sequence[Answer]) -> dict[str, float]:
    """Means of the published metrics, in [0, 1]."""
    names = [field.name for field in fields(PublishedVerdicts)]
    count = max(1, len(answers))
    return {
        name: round(sum(answer.published.get(name, 0.0) for answer in answers) / count, 4) for name in names
    }


def _grouped(answers: Sequence[Answer], key: Callable[[Answer], str]) -> dict[str, Any]:
    groups = defaultdict(list)
    for answer in answers:
        groups[key(answer)].append(answer)
    return {name: _both(groups[name]) for name in sorted(groups)}


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
