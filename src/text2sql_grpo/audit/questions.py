"""Audit of a file of questions: golds that fail or have several possible results, copies, leaks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text2sql_grpo.audit.gold_stability import open_results
from text2sql_grpo.data.example import Example, folded
from text2sql_grpo.data.loading import GOLDS_PER_BATCH
from text2sql_grpo.data.question_rows import Question
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import write_jsonl
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.schema_text import estimated_tokens

REASONS = {
    "error": "a gold fails, has too many rows to compare, or has no database",
    "hidden": "the gold reads what data.hide hides from the model",
    "empty": "the gold returns no rows, or only NULLs",
    "slow": "the gold takes longer than allowed",
    "non_deterministic": "the gold's rows depend on chance or on the scan order",
    "time_dependent": "the gold reads the clock",
    "tie_dependent": "a limit cuts through rows that tie",
    "duplicated": "the question was asked before",
    "leaking": "the question or its gold is in another split too",
    "too_long": "the prompt is longer than allowed",
    "gap": "too few test databases tell this gold query from wrong answers",
    "suspect": "most answers agree, and not with the gold",
}
# The grader accepts any choice among rows that tie, and grades a gold query with a gap on its database.
# Most answers of a weak model may be wrong.
KEPT = ("tie_dependent", "gap", "suspect")


@dataclass(frozen=True)
class Finding:
    """One reason against one question.

    Attributes:
        reason: A key of `REASONS`.
        detail: Text for the report.
    """

    id: str
    place: str
    reason: str
    detail: str


@dataclass(frozen=True)
class QuestionAudit:
    """Findings in one file of questions."""

    questions: int
    findings: tuple[Finding, ...]

    @property
    def ids_by_reason(self) -> dict[str, set[str]]:
        """Ids of the questions with each fault."""
        return {reason: {one.id for one in self.findings if one.reason == reason} for reason in REASONS}

    def quarantine(self, keep: Collection[str] = KEPT) -> list[dict[str, object]]:
        """One row per question to leave out for reasons not in `keep`: `id`, `reasons`, `details`."""
        rows: dict[str, dict[str, list[str]]] = {}
        for finding in self.findings:
            if finding.reason not in keep:
                row = rows.setdefault(finding.id, {"reasons": [], "details": []})
                row["reasons"].append(finding.reason)
                row["details"].append(finding.detail)
        return [{"id": id, **row} for id, row in rows.items()]


def audit_questions(
    questions: Sequence[Question],
    environment: SQLEnvironment,
    *,
    others: Mapping[str, Sequence[Question]] | None = None,
    suite: TestSuite | None = None,
    suspects: Iterable[Mapping[str, Any]] = (),
    slow_s: float = 1.0,
    max_prompt_tokens: int = 8_192,
    on_gold: Callable[[], None] = lambda: None,
) -> QuestionAudit:
    """Run every gold and compare every question; a broken question or database never stops the audit.

    Args:
        environment: Has their databases, runs the golds and writes the prompts.
        others: Questions of other splits, by the name of their file, which should share none.
        suite: Makes the test databases of each gold query; None leaves out the reason `gap`.
        slow_s: A gold that takes longer is `slow`.
        max_prompt_tokens: A prompt with more, estimated at four characters each, is `too_long`.
        on_gold: Called after each gold.
    """
    findings: list[Finding] = []
    known: list[Question] = []
    for question in questions:
        try:
            environment.hidden(question.example.database)  # reads its schema
            known.append(question)
        except DataError as error:
            findings.append(_finding(question, "error", str(error)))
    for start in range(0, len(known), GOLDS_PER_BATCH):
        batch = known[start : start + GOLDS_PER_BATCH]
        findings += _gold_findings(batch, environment, suite, slow_s, on_gold)
    findings += _copies(questions)
    findings += _leaks(questions, others or {})
    findings += _long_prompts(known, environment, max_prompt_tokens)
    places = {question.example.id: number for number, question in enumerate(questions)}
    for suspect in suspects:
        detail = f"{suspect['share']:.0%} of {suspect['answers']} answers have another result"
        findings.append(_finding(questions[places[suspect["id"]]], "suspect", detail))
    findings.sort(key=lambda finding: (places[finding.id], list(REASONS).index(finding.reason)))
    return QuestionAudit(len(questions), tuple(findings))


def write_quarantine(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write the rows of `QuestionAudit.quarantine`, for `data.quarantine` of a config.

    Raises:
        RunError: The file or its folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write the quarantine: {error} (at {path})") from error
    write_jsonl(path, rows)


def _finding(question: Question, reason: str, detail: str) -> Finding:
    return Finding(question.example.id, question.place, reason, detail)


def _gold_findings(
    questions: Sequence[Question],
    environment: SQLEnvironment,
    suite: TestSuite | None,
    slow_s: float,
    on_gold: Callable[[], None],
) -> Iterator[Finding]:
    executor = environment.executor
    asked = [
        (question, (environment.databases.address(question.example.database), sql))
        for question in questions
        for sql in (question.example.gold_sql, *question.example.other_golds)
    ]
    golds = [gold for _, gold in asked]
    outcomes = executor.execute_many(golds)
    outcomes = [
        _run_again(gold, outcome, executor) if outcome.elapsed_s > slow_s else outcome
        for gold, outcome in zip(golds, outcomes, strict=True)
    ]
    reasons = open_results(golds, outcomes, executor)
    for (question, gold), outcome, reason in zip(asked, outcomes, reasons, strict=True):
        if outcome.is_truncated and GoldResult.of(executor, *gold).is_usable:
            outcome = outcome._replace(is_truncated=False)  # the database itself compares its rows
        for fault in _faults(question.example, outcome, slow_s):
            yield _finding(question, *fault)
        if outcome.is_ok and (hidden := environment.hidden(question.example.database).refusal(gold[1])):
            yield _finding(question, "hidden", hidden)
        if reason:
            yield _finding(question, *reason)
        is_whole = outcome.is_ok and not outcome.is_truncated
        if suite is not None and is_whole and (gap := suite.databases(*gold).gap):
            yield _finding(question, "gap", gap)
        on_gold()


def _run_again(
    gold: tuple[Database, str], first: ExecutionOutcome, executor: SQLExecutor
) -> ExecutionOutcome:
    """The faster outcome of the first run, next to others, and one alone."""
    with SQLExecutor(executor.limits, workers=1, cache_entries=0) as alone:
        return min(first, alone.execute(*gold), key=lambda outcome: (not outcome.is_ok, outcome.elapsed_s))


def _faults(example: Example, outcome: ExecutionOutcome, slow_s: float) -> Iterator[tuple[str, str]]:
    if outcome.is_ok and outcome.elapsed_s > slow_s:
        yield "slow", f"{outcome.elapsed_s:.1f} s"
    if not outcome.is_ok:
        yield "error", f"{outcome.status}: {outcome.error}"
    elif outcome.is_truncated:
        yield "error", f"cut after {len(outcome.rows)} rows"
    elif all(cell is None for row in outcome.rows for cell in row) and not example.gold_is_empty:
        yield "empty", "only NULLs" if outcome.rows else "no rows"


def _copies(questions: Sequence[Question]) -> Iterator[Finding]:
    firsts: dict[tuple[str, str], Question] = {}
    for question in questions:
        keys = _keys(question.example)
        first = firsts.setdefault(keys["question"], question)
        if first is not question:
            golds = "the same gold" if _keys(first.example)["gold"] == keys["gold"] else "another gold"
            yield _finding(question, "duplicated", f"asked as {first.example.id}, with {golds}")


def _leaks(questions: Sequence[Question], others: Mapping[str, Sequence[Question]]) -> Iterator[Finding]:
    """Questions that are in another split: another file, or another `split` in the same file."""
    splits: defaultdict[tuple[str, tuple[str, str]], set[str]] = defaultdict(set)
    for name, group in [("", questions), *others.items()]:
        for question in group:
            for key in _keys(question.example).items():
                splits[key].add(name or f"split {question.example.split}")
    for question in questions:
        own = f"split {question.example.split}"
        for what, value in _keys(question.example).items():
            if elsewhere := sorted(splits[what, value] - {own}):
                yield _finding(question, "leaking", f"{what} also in {', '.join(elsewhere)}")
                break


def _keys(example: Example) -> dict[str, tuple[str, str]]:
    """Parts that no question of another split may share."""
    parts = {"question": example.question, "gold": example.gold_sql}
    return {what: (example.database, folded(text)) for what, text in parts.items()}


def _long_prompts(
    questions: Sequence[Question], environment: SQLEnvironment, max_prompt_tokens: int
) -> Iterator[Finding]:
    for question in questions:
        messages = environment.session(question.example).start()
        tokens = sum(estimated_tokens(message["content"]) for message in messages)
        if tokens > max_prompt_tokens:
            bound = "environment.max_schema_tokens of --config bounds the schema"
            yield _finding(question, "too_long", f"about {tokens} tokens; {bound}")


def counts(audit: QuestionAudit) -> Counter[str]:
    """Number of questions for each reason found."""
    return Counter({reason: len(ids) for reason, ids in audit.ids_by_reason.items() if ids})
