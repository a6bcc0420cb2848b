"""Accuracies and counts of the answers to held-out questions."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.evaluation.published import PublishedVerdicts, bird_r_ves, measure_ves_reward
from text2sql_grpo.evaluation.report import voted
from text2sql_grpo.evaluation.skills import skills
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.rewards import FLAGS, Answer
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.engines import ENGINES

TABLES = {5: "1 to 5 tables", 15: "6 to 15 tables", 50: "16 to 50 tables", math.inf: "over 50 tables"}


def r_ves(answers: Sequence[Answer], environment: Environment, on_answer: Callable[[], None]) -> float:
    """BIRD's R-VES, in [0, 111.8]: each right answer timed against its gold, see `measure_ves_reward`."""
    rewards = []
    with SQLExecutor(environment.executor.limits, workers=1, cache_entries=0) as executor:
        for answer in answers:
            sql, reward = answer.episode.final_sql, 0.0
            if sql is not None and answer.verdict.official:
                database = environment.databases.address(answer.example.database)
                reward = measure_ves_reward(executor, database, answer.example.gold_sql, sql)
            rewards.append(reward)
            on_answer()
    return round(bird_r_ves(rewards), 2)


def accuracy(answers: Sequence[Answer]) -> Accuracy:
    """Accuracy by the strict verdict."""
    return Accuracy.of((answer.example.database, answer.verdict.strict) for answer in answers)


def scored_sets(
    environment: Environment,
    greedy: Mapping[str, Sequence[Answer]],
    sampled: Mapping[str, Sequence[Answer]],
    samples: int,
) -> dict[str, Any]:
    """`sets` of an `evaluation.json`: `summary` of each set, and `samples`, the `Report` of sampled answers.

    Args:
        greedy: An answer to each question.
        sampled: `samples` answers to each question, those to one question next to each other; empty for none.
    """
    scores = {name: summary(answers, environment.sessions) for name, answers in greedy.items()}
    for name, answers in sampled.items():
        scores[name]["samples"] = voted(answers, samples, environment).record()
    return scores


def summary(answers: Sequence[Answer], sessions: SQLEnvironment | None = None) -> dict[str, Any]:
    """Fields of a set in `evaluation.json`: counts, accuracies and 95% intervals, strict and official.

    Args:
        sessions: Have the schemas of the databases, for accuracies by skill and by number of tables.
    """
    action_kinds = [{action.kind for action in answer.episode.actions} for answer in answers]
    return {
        "overall": _both(answers),
        "published": _published(answers),
        "flags": {flag: sum(flag in answer.flags for answer in answers) for flag in FLAGS},
        "by_need": _grouped(("look-up" if a.example.family == "lookup" else "others", a) for a in answers),
        "by_family": _grouped((answer.example.family, answer) for answer in answers),
        "by_difficulty": _grouped((answer.example.difficulty, answer) for answer in answers),
        **({} if sessions is None else _by_schema(answers, sessions)),
        "looks_per_question": round(_mean(answer.episode.looks for answer in answers), 4),
        "reasons": dict(sorted(Counter(answer.verdict.reason for answer in answers).items())),
        "stop_reasons": dict(sorted(Counter(str(answer.episode.stop_reason) for answer in answers).items())),
        "malformed_share": round(_mean("malformed" in kinds for kinds in action_kinds), 4),
        "tokens_per_answer": round(_mean(sum(answer.episode.completion_mask) for answer in answers), 1),
    }


def _mean(values: Iterable[float]) -> float:
    """Mean; 0 of none."""
    return fmean(known) if (known := list(values)) else 0.0


def _by_schema(answers: Sequence[Answer], sessions: SQLEnvironment) -> dict[str, Any]:
    """Accuracies by the skills of the gold query, each of which a question counts for, and by tables."""
    by_skill, by_tables = list[tuple[str, Answer]](), list[tuple[float, Answer]]()
    for answer in answers:
        schema = sessions.hidden(answer.example.database).schema
        by_skill += [(skill, answer) for skill in skills(answer.example, ENGINES[schema.dialect].dialect)]
        by_tables.append((next(size for size in TABLES if len(schema.tables) <= size), answer))
    sizes = _grouped(by_tables).items()
    return {"by_skill": _grouped(by_skill), "by_tables": {TABLES[size]: both for size, both in sizes}}


def _both(answers: Sequence[Answer]) -> dict[str, Any]:
    official = Accuracy.of((answer.example.database, answer.verdict.official) for answer in answers)
    return {"strict": accuracy(answers).record(), "official": official.record()}


def _published(answers: Sequence[Answer]) -> dict[str, float]:
    names = [field.name for field in fields(PublishedVerdicts)]
    return {name: round(_mean(answer.published.get(name, 0.0) for answer in answers), 4) for name in names}


def _grouped(keyed: Iterable[tuple[Any, Answer]]) -> dict[Any, Any]:
    """Accuracies of the answers with each key, in the order of the keys."""
    groups = defaultdict(list)
    for key, answer in keyed:
        groups[key].append(answer)
    return {key: _both(groups[key]) for key in sorted(groups)}
