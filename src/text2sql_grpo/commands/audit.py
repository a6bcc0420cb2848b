"""Find faults of questions or of a reward."""

import json as json_text
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

from text2sql_grpo.commands.options import Count, NotNegative, Seconds, writing_to
from text2sql_grpo.config import load_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting.counting import counting
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.personal import PERSONAL

GOLD_TIMEOUT_S = 30.0  # a slow gold is reported as slow, not as broken


def data(
    file: Path,
    *,
    db: str,
    against: list[Path] | None = None,
    config: Path | None = None,
    test_databases: NotNegative = 4,
    slow_s: Seconds = 1.0,
    max_prompt_tokens: Count = 8192,
    quarantine: Path | None = None,
    keep: list[str] | None = None,
    answers: Path | None = None,
    suspects: Path = Path("suspects.jsonl"),
    json: bool = False,
) -> int:
    """Run the gold queries of a file; find copies, leaks, long prompts, queries that answers contradict.

    Exits with 1 if a gold fails or reads what is hidden, and --quarantine does not leave its question out.
    Example: `text2sql-grpo audit data questions.jsonl --db shop.sqlite`

    Args:
        file: Questions: JSONL, CSV, or the JSON of Spider or BIRD.
        db: Their databases: a folder, a file or a URL, as data.databases.
        against: Question files of other splits, to find leaks; FILE among them is passed over.
        config: YAML whose environment writes the prompts; default: the defaults.
        test_databases: Test databases to make for each gold query, half a second the first time; 0 for none.
        slow_s: Seconds a gold may take.
        max_prompt_tokens: Tokens a prompt may have.
        quarantine: File to write ids and reasons to, for data.quarantine.
        keep: Reasons that do not quarantine; default: tie_dependent, gap, suspect.
        answers: JSONL of rollouts, collected episodes or predictions (id, sql), at least 4 of a question.
        suspects: File to write the suspects to, with a page to read next to it (.md).
        json: Print JSON instead of a report.
    """
    from text2sql_grpo.audit.questions import KEPT, REASONS, audit_questions, counts, write_quarantine
    from text2sql_grpo.audit.suspects import find_suspects, read_samples, write_suspects
    from text2sql_grpo.data.question_files import only_name, read_questions
    from text2sql_grpo.reporting.audit_tables import question_table, show_findings
    from text2sql_grpo.reporting.terminal import TextConsole
    from text2sql_grpo.rewards import open_grader

    run = load_config(config) if config else None
    settings = run.environment if run else EnvironmentSettings()
    kept = KEPT if keep is None else keep
    for reason in kept:
        if reason not in REASONS:
            raise ConfigError(f"--keep must be of {', '.join(REASONS)}, got {reason!r}")
    others = [path for path in against or () if path.resolve() != file.resolve()]
    started, databases = time.monotonic(), Databases(db)
    with writing_to(quarantine or Path()), SQLExecutor(Limits(timeout_s=GOLD_TIMEOUT_S)) as executor:
        database, found = only_name(databases), []
        questions = read_questions(file, database=database)
        url = run.grading.server_url if run else None
        grader = open_grader(executor, test_databases=test_databases, server_url=url)
        hidden = run.data.hide if run else (PERSONAL,)
        sessions = SQLEnvironment(databases, executor, settings, hide=hidden)
        if answers is not None:
            known = [q.example for q in questions if q.example.database in databases.names()]
            found = find_suspects(known, read_samples(answers), sessions, grader)
            write_suspects(suspects, found)
        with counting("Golds", sum(1 + len(q.example.other_golds) for q in questions)) as on_gold:
            audit = audit_questions(
                questions,
                sessions,
                others={str(path): read_questions(path, database=database) for path in others},
                suite=grader.suite,
                suspects=found,
                slow_s=slow_s,
                max_prompt_tokens=max_prompt_tokens,
                on_gold=on_gold,
            )
        rows = audit.quarantine(kept)
        failed = audit.ids_by_reason["error"] | audit.ids_by_reason["hidden"]
        if quarantine is not None:
            write_quarantine(quarantine, rows)
            failed -= {row["id"] for row in rows}
    seconds = round(time.monotonic() - started, 1)
    if json:
        record = {
            "file": str(file),
            "questions": audit.questions,
            "counts": counts(audit),
            "quarantined": len(rows),
            "seconds": seconds,
            "findings": [asdict(finding) for finding in audit.findings],
        }
        print(json_text.dumps(record))
        return 1 if failed else 0
    console = TextConsole()
    console.print(question_table(audit, kept))
    show_findings(audit, console)
    console.print(f"{many(audit.questions, 'question')}, {len(rows)} for quarantine, {seconds:.0f} s")
    if answers is not None:
        console.print(f"suspects: {suspects}, to read: {suspects.with_suffix('.md')}", soft_wrap=True)
    if quarantine is not None:
        console.print(f"quarantine: {quarantine}  (data.quarantine of a config)", soft_wrap=True)
    if failed:
        text = f"golds that fail (error, hidden): {many(len(failed), 'question')}"
        remedy = "--quarantine FILE leaves them out"
        console.print(f"{text}; {remedy}", style="red", soft_wrap=True)
    return 1 if failed else 0


def reward(
    *, config: Path, golds: Count = 40, seed: int = 0, json: bool = False, settings: Sequence[str] = ()
) -> int:
    """Find wrong answers that a config's reward pays.

    Example: `text2sql-grpo audit reward --config my.yaml`

    Args:
        config: YAML of the run.
        golds: Number of gold queries of data.train.
        seed: Random seed.
        json: Print JSON instead of a report.
    """
    from text2sql_grpo.audit.rewards import RewardAudit
    from text2sql_grpo.data.question_files import only_name, read_questions
    from text2sql_grpo.data.shards import shard_files
    from text2sql_grpo.evaluation.bench import quarantined
    from text2sql_grpo.reporting.audit_tables import rates, reward_table, show_misjudged
    from text2sql_grpo.reporting.terminal import TextConsole
    from text2sql_grpo.rewards import RewardMix, open_grader

    run, started = load_config(config, settings), time.monotonic()
    databases, rewards = Databases(run.data.databases), RewardMix(run.rewards)
    left_out = quarantined(run)
    database = only_name(databases)
    questions = [q for path in shard_files(run.data.train) for q in read_questions(path, database=database)]
    examples = [question.example for question in questions if question.example.id not in left_out]
    examples = Random(seed).sample(examples, min(golds, len(examples)))
    with SQLExecutor(run.environment.limits) as executor, counting("Golds", len(examples)) as on_gold:
        grader = open_grader(executor, **vars(run.grading))
        audit = RewardAudit(rewards, grader, executor)
        answers = audit.probes()
        answers += audit.mutations(examples, databases, seed=seed, on_gold=on_gold)
    found = rates(answers)
    seconds = round(time.monotonic() - started, 1)
    if json:
        record = {
            "rewards": run.rewards,
            "warning": rewards.warning,
            "golds": len(examples),
            "golds_left_out": audit.left_out,
            "rates": {name: rate.record() for name, rate in found.items()},
            "misjudged": [asdict(answer) for answer in answers if answer.is_misjudged],
            "seconds": seconds,
        }
        print(json_text.dumps(record))
        return 0
    console = TextConsole()
    console.print(reward_table(found))
    if rewards.warning:
        console.print(rewards.warning, soft_wrap=True)
    show_misjudged(answers, console)
    remark = f" ({audit.left_out} left out)" if audit.left_out else ""
    counted = f"{many(len(answers), 'answer')}, {many(len(examples), 'gold')}"
    console.print(f"{counted} of {run.data.train}{remark}, {seconds:.0f} s")
    return 0
