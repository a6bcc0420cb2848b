"""Audits before a run: of a file of questions, and of a config's reward."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from text2sql_grpo.audit.questions import (
    KEPT,
    REASONS,
    QuestionAudit,
    audit_questions,
    counts,
    write_quarantine,
)
from text2sql_grpo.audit.rewards import Answer, Rate, RewardAudit, accepted, refused
from text2sql_grpo.config import Config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.loading import read_quarantine
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.data.shards import shard_files
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.rewards import RewardMix, open_grader
from text2sql_grpo.sql import Limits, SQLExecutor

GOLD_LIMITS = Limits(timeout_s=30.0)  # a slow gold is reported as slow, not as broken
EXAMPLES_SHOWN = 3
MASKED = "-"


def audit_data(
    file: Path,
    db: Path,
    *,
    against: Sequence[Path] = (),
    environment: EnvironmentSettings | None = None,
    neighbours: int = 4,
    slow_s: float = 1.0,
    max_prompt_tokens: int = 8_192,
    quarantine: Path | None = None,
    keep: Collection[str] | None = None,
    as_json: bool = False,
) -> int:
    """Audit a file of questions and print the findings; exit code 0. Options: see `commands.audit`.

    Args:
        environment: Settings of the prompts; None for the defaults.

    Raises:
        RunError: A file cannot be read or written, or a reason is unknown.
    """
    keep = KEPT if keep is None else keep
    for reason in keep:
        if reason not in REASONS:
            raise ConfigError(f"--keep must be of {', '.join(REASONS)}, got {reason!r}")
    started = time.monotonic()
    databases = Databases(db)
    questions = read_questions(file)
    others = {str(path): read_questions(path) for path in against}
    with SQLExecutor(GOLD_LIMITS) as executor:
        audit = audit_questions(
            questions,
            databases,
            executor,
            SQLEnvironment(databases, executor, environment or EnvironmentSettings()),
            others=others,
            neighbours=open_grader(executor, neighbours=neighbours).neighbours,
            slow_s=slow_s,
            max_prompt_tokens=max_prompt_tokens,
        )
    rows = audit.quarantine(keep)
    if quarantine is not None:
        write_quarantine(quarantine, rows)
    seconds = round(time.monotonic() - started, 1)
    if as_json:
        record = {
            "file": str(file),
            "questions": audit.questions,
            "counts": counts(audit),
            "quarantined": len(rows),
            "seconds": seconds,
            "findings": [asdict(finding) for finding in audit.findings],
        }
        print(json.dumps(record))
        return 0
    console = Console()
    console.print(_question_table(audit, keep))
    _show_findings(audit, console)
    console.print(f"{audit.questions} questions, {len(rows)} for quarantine, {seconds:.0f} s")
    if quarantine is not None:
        console.print(
            f"quarantine: {quarantine}  (data.quarantine of a config)", soft_wrap=True, markup=False
        )
    return 0


def _question_table(audit: QuestionAudit, keep: Collection[str]) -> Table:
    table = Table(
        "reason",
        "meaning",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="Faults of questions",
    )
    for column in ("questions", "quarantine"):
        table.add_column(column, justify="right")
    for reason, about in REASONS.items():
        count = len(audit.ids_by_reason[reason])
        table.add_row(reason, about, str(count), "no" if reason in keep else "yes")
    return table


def _show_findings(audit: QuestionAudit, console: Console) -> None:
    for reason in REASONS:
        found = [finding for finding in audit.findings if finding.reason == reason]
        for finding in found[:EXAMPLES_SHOWN]:
            console.print(
                Text(f"{reason}: {finding.id} (at {finding.place}): {finding.detail}"), soft_wrap=True
            )


def audit_reward(config: Config, *, golds: int = 40, seed: int = 0, as_json: bool = False) -> int:
    """Audit a config's reward by the probe battery and by mutants of its questions; exit code 0.

    Args:
        golds: Number of questions of `data.train`, drawn by `seed`.

    Raises:
        RunError: Anything wrong with config or data.
    """
    started = time.monotonic()
    databases = Databases(config.data.databases)
    left_out = read_quarantine(config.data.quarantine) if config.data.quarantine else frozenset[str]()
    examples = [
        question.example for file in shard_files(config.data.train) for question in read_questions(file)
    ]
    examples = [example for example in examples if example.id not in left_out]
    examples = Random(seed).sample(examples, min(golds, len(examples)))
    rewards = RewardMix(config.rewards)
    with (
        SQLExecutor(config.environment.limits) as executor,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        audit = RewardAudit(rewards, open_grader(executor, neighbours=config.grading.neighbours), executor)
        answers = audit.probes()
        task = bar.add_task("Golds", total=len(examples))
        answers += audit.mutations(examples, databases, seed=seed, on_gold=lambda: bar.advance(task))
    rates = _rates(answers)
    seconds = round(time.monotonic() - started, 1)
    if as_json:
        record: dict[str, Any] = {
            "rewards": config.rewards,
            "warning": rewards.warning,
            "golds": len(examples),
        }
        record["rates"] = {name: rate.record() for name, rate in rates.items()}
        record["misjudged"] = [asdict(answer) for answer in answers if answer.is_accepted != answer.is_right]
        print(json.dumps(record | {"seconds": seconds}))
        return 0
    console = Console()
    console.print(_reward_table(rates))
    if rewards.warning:
        console.print(Text(rewards.warning), soft_wrap=True)
    _show_misjudged(answers, console)
    console.print(f"{len(answers)} answers, {len(examples)} golds of {config.data.train}, {seconds:.0f} s")
    return 0


def _rates(answers: Sequence[Answer]) -> dict[str, Rate]:
    """Rates of accepted wrong answers and refused right answers, by their origin."""

    def some(kind: str, *, is_right: bool) -> list[Answer]:
        return [answer for answer in answers if answer.kind == kind and answer.is_right == is_right]

    return {
        "wrong probes accepted": accepted(some("probe", is_right=False)),
        "right probes refused": refused(some("probe", is_right=True)),
        "mutants accepted": accepted(some("mutant", is_right=False)),
        "written-down answers accepted": accepted(some("hard-coded", is_right=False)),
        "right rewrites refused": refused(some("rewrite", is_right=True)),
    }


def _reward_table(rates: dict[str, Rate]) -> Table:
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Wrong verdicts")
    for column in ("answers", "this reward", "official EX"):
        table.add_column(column, justify="right")
    for name, rate in rates.items():
        total = max(rate.answers, 1)
        cells = (f"{count} ({count / total:.1%})" for count in (rate.reward, rate.official))
        table.add_row(name, str(rate.answers), *cells)
    return table


def _show_misjudged(answers: Sequence[Answer], console: Console) -> None:
    for is_right, what in ((False, "paid though wrong"), (True, "refused though right")):
        found = [a for a in answers if a.is_right == is_right and a.is_accepted != is_right]
        for answer in found[:EXAMPLES_SHOWN]:
            share = MASKED if answer.share is None else f"{answer.share:.0%}"
            lines = (
                f"{what} ({answer.kind}: {answer.name}, {share} of the gold's reward; {answer.database})",
                f"  gold    {' '.join(answer.gold_sql.split())}",
                f"  answer  {' '.join(answer.sql.split())}",
            )
            console.print(Text("\n".join(lines)), soft_wrap=True)
