"""Report of a finished run: record, learning curve, model card, table and times."""

import shlex
from pathlib import Path
from typing import Any

from rich.text import Text

from text2sql_grpo.audit.suspects import find_suspects, read_samples, write_suspects
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError, DataError, needs_extra
from text2sql_grpo.evaluation.answers import read_answers
from text2sql_grpo.evaluation.comparison import Comparison, compare
from text2sql_grpo.files import write_json
from text2sql_grpo.models.hardware import hardware
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.phrases import many
from text2sql_grpo.publishing.model_card import write_model_card
from text2sql_grpo.reporting.accuracy_tables import accuracy_table, gap_lines, samples_table
from text2sql_grpo.reporting.comparison_tables import comparison_table
from text2sql_grpo.reporting.report_page import write_report
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run_folder import EVALUATION, ROLLOUTS, SUSPECTS, answers_file

SUSPECTS_BUDGET_S = 60.0


def report(
    run: Run, policy: LoadedPolicy, merged: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Write and print the report of a run."""
    record = {**before, "sets": after, "model": str(merged), "temperature": run.config.evaluation.temperature}
    record |= {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "started_from": policy.folder}
    grader = run.bench.environment.grader
    record["accepted_by_gap"] = dict(grader.accepted.most_common())
    record["changed_golds"] = sorted(f"{gold} ({place})" for place, gold in grader.changed_golds)
    comparison = _change(run) if "before" in before else None
    if comparison is not None:
        record["change"] = {key: value for key, value in comparison.record().items() if key != "changed"}
        record["change"]["verdict"] += f" All of this is of one seed, {run.config.run.seed}."
    record["hardware"], record["warnings"] = hardware(), list(run.warnings)
    write_json(run.folder / EVALUATION, record)
    n_suspects = _write_suspects(run)
    picture, page = _picture(run), write_report(run.folder)
    write_model_card(run.folder, merged)
    if comparison is None:
        run.console.print(accuracy_table(after))
    else:
        run.console.print(comparison_table(comparison, sides=("before", "after"), by_kind=False))
        run.console.print(Text(record["change"]["verdict"]), soft_wrap=True)
    stages_scored = {"before": before.get("before", {}).get("sets", {}), "after": after}
    if run.config.evaluation.samples:
        run.console.print(samples_table(stages_scored))
    for line in gap_lines(grader.accepted):
        run.console.print(line, markup=False, soft_wrap=True)
    if changed := record["changed_golds"]:
        run.console.print(
            f"Golds that no longer hold, as their database changed during the run: {len(changed)}, "
            "see changed_golds in evaluation.json"
        )
    if n_suspects:
        listed = (run.folder / SUSPECTS).with_suffix(".md")
        run.console.print(f"Golds that most answers contradict: {n_suspects}, see {listed}", soft_wrap=True)
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.seconds.items())
    executor = run.bench.environment.executor
    share = executor.seconds_in_sql / max(sum(run.seconds.values()), 0.1)
    run.console.print(
        f"Time: {stages}; in SQL {executor.seconds_in_sql:.1f} s ({share:.1%} of it) for "
        f"{many(executor.queries, 'query')}, {executor.cache_hits} of them from the cache",
        soft_wrap=True,
    )
    for what, path in (
        ("merged model", merged),
        *([("learning curve", picture)] if picture else []),
        ("evaluation", run.folder / EVALUATION),
        ("report", page),
    ):
        run.console.print(f"  {what:15} {path}", soft_wrap=True)
    command = f"text2sql-grpo evaluate --model_path {shlex.quote(str(merged))} --num_samples 5"
    run.console.print(f"Look at its answers: {command}", soft_wrap=True)
    answers = read_answers(answers_file(run.folder)) if run.bench.test else []
    if answers:
        # A right look-up, if there is one: its answer shows the exploratory query.
        best = max(answers, key=lambda answer: (answer.strict, answer.family == "lookup"))
        asked = ["text2sql-grpo", "ask", best.question, "--model", str(merged), "--db"]
        asked.append(str(run.bench.environment.databases.source(best.database)))
        run.console.print(f"Ask it a question: {shlex.join(asked)}", soft_wrap=True, markup=False)


def _picture(run: Run) -> Path | None:
    """Draw the learning curve; without matplotlib print how to install it, and return None."""
    try:
        with needs_extra("plots", "learning_curve.png"):
            from text2sql_grpo.reporting.learning_curve import plot_learning_curve
    except ConfigError as missing:
        run.console.print(f"No picture: {missing}", soft_wrap=True, markup=False)
        return None
    return plot_learning_curve(run.folder)


def _write_suspects(run: Run) -> int:
    """Write the golds that most episodes of the run contradict; returns their number."""
    environment, episodes = run.bench.environment, run.folder / ROLLOUTS
    samples = read_samples(episodes) if episodes.is_file() else {}
    examples = [
        Example(id, first["database"], first["question"], first["gold_sql"])
        for id, (first, *_) in samples.items()
    ]
    found = find_suspects(
        examples, samples, environment.sessions, environment.grader, budget_s=SUSPECTS_BUDGET_S
    )
    write_suspects(run.folder / SUSPECTS, found)
    return len(found)


def _change(run: Run) -> Comparison | None:
    """Compare the answers before and after GRPO; None, with a warning, if files of answers were changed."""
    try:
        return compare(*(read_answers(answers_file(run.folder, when)) for when in ("before", "after")))
    except DataError as error:
        run.warn(str(error))
        return None
