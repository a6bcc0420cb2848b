"""Reports of the audits before a run: of a file of questions, and of a config's reward."""

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from text2sql_grpo.audit.questions import REASONS, QuestionAudit
from text2sql_grpo.audit.rewards import Answer, Rate, misjudged
from text2sql_grpo.reporting.accuracy_tables import figures_table

EXAMPLES_SHOWN = 3
_ORIGINS = {
    "wrong probes accepted": ("probe", False),
    "right probes refused": ("probe", True),
    "mutants accepted": ("mutant", False),
    "hard-coded answers accepted": ("hard-coded", False),
    "right rewrites refused": ("rewrite", True),
}


def question_table(audit: QuestionAudit, keep: Collection[str]) -> Table:
    """Table of the questions with each fault, and of the faults that quarantine."""
    table = figures_table("Faults of questions", ["reason", "meaning"], ["questions", "quarantine"])
    for reason, about in REASONS.items():
        count = len(audit.ids_by_reason[reason])
        table.add_row(reason, about, str(count), "no" if reason in keep else "yes")
    return table


def show_findings(audit: QuestionAudit, console: Console) -> None:
    """Print some questions with each fault."""
    for reason in REASONS:
        found = [finding for finding in audit.findings if finding.reason == reason]
        for finding in found[:EXAMPLES_SHOWN]:
            console.print(f"{reason}: {finding.id} (at {finding.place}): {finding.detail}", soft_wrap=True)


def rates(answers: Sequence[Answer]) -> dict[str, Rate]:
    """Rates of accepted wrong answers and refused right answers, by their origin."""
    return {
        title: misjudged([answer for answer in answers if (answer.kind, answer.is_right) == origin])
        for title, origin in _ORIGINS.items()
    }


def reward_table(rates: dict[str, Rate]) -> Table:
    """Table of wrong verdicts, of this reward and of the official one."""
    table = figures_table("Wrong verdicts", [""], ["answers", "this reward", "official EX"])
    for name, rate in rates.items():
        total = max(rate.answers, 1)
        cells = (f"{count} ({count / total:.1%})" for count in (rate.reward, rate.official))
        table.add_row(name, str(rate.answers), *cells)
    return table


def show_misjudged(answers: Sequence[Answer], console: Console) -> None:
    """Print some answers that the reward misjudges."""
    for is_right, what in ((False, "paid though wrong"), (True, "refused though right")):
        found = [answer for answer in answers if answer.is_misjudged and answer.is_right == is_right]
        for answer in found[:EXAMPLES_SHOWN]:
            share = "-" if answer.share is None else f"{answer.share:.0%}"
            lines = (
                f"{what} ({answer.kind}: {answer.name}, {share} of the gold's reward; {answer.database})",
                f"  gold    {' '.join(answer.gold_sql.split())}",
                f"  answer  {' '.join(answer.sql.split())}",
            )
            console.print("\n".join(lines), soft_wrap=True)
