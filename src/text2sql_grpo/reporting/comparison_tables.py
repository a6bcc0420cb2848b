"""Table and changed answers of a comparison of two models."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from text2sql_grpo.evaluation.comparison import Comparison, Paired
from text2sql_grpo.evaluation.regrading import Replayed
from text2sql_grpo.evaluation.several_runs import SeveralRuns
from text2sql_grpo.evaluation.statistics import Accuracy, Interval, interval_unit, percents
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting.accuracy_tables import LEAST_QUESTIONS, figures_table

_CHANGES_SHOWN = 20


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, some changed answers and the verdict."""
    left_out = comparison.only_base + comparison.only_trained
    if left_out:
        console.print(f"left out {many(left_out, 'question')} that only one model answered")
    console.print(comparison_table(comparison))
    changed = comparison.changed()
    for base, trained in changed[:_CHANGES_SHOWN]:
        change, style = ("GAINED", "bold green") if trained.strict else ("LOST", "bold red")
        place = f"{base.set}: {base.example} (database {base.database})"
        console.print(Rule(Text.assemble((change, style), f"  {place}"), align="left"))
        lines = (
            f"question  {base.question}",
            f"gold      {_one_line(base.gold_sql)}",
            f"base      {_one_line(base.final_sql)}  ({base.reason})",
            f"trained   {_one_line(trained.final_sql)}  ({trained.reason})",
        )
        console.print("\n".join(lines), soft_wrap=True)
    if len(changed) > _CHANGES_SHOWN:
        console.print(f"... and {len(changed) - _CHANGES_SHOWN} more in the file")
    console.print()
    console.print(comparison.verdict(), style="bold", soft_wrap=True)


def comparison_table(
    comparison: Comparison, *, sides: tuple[str, str] = ("base", "trained"), by_kind: bool = True
) -> Table:
    """Table of strict accuracy by set, with a row by question below each set of several databases.

    Fits 80 columns if names of sets have at most 14 letters.

    Args:
        sides: Titles of the columns of the two models.
        by_kind: Also rows by family and difficulty, and of the official accuracy.
    """
    rows = list(_rows(comparison, by_kind=by_kind))
    unit = interval_unit(len(paired.by_database) for _, paired in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=f"Strict accuracy in %, 95% intervals {unit}")
    table.add_column("", min_width=14, overflow="fold")
    for column in ("n", *sides, "difference", "changed", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, paired in rows:
        base, trained = paired.base, paired.trained
        table.add_row(
            title,
            str(paired.total),
            *(f"{100 * one.accuracy:.0f} ({percents(one.interval)})" for one in (base, trained)),
            f"{paired.difference * 100:+.0f} {_range(paired.interval)}",
            f"+{paired.gained} -{paired.lost}",
            _odds(paired.p_value),
        )
        if title.style and len(paired.by_database) > 1:
            table.add_row(
                Text("  by question"),
                "",
                f"({percents(base.naive_interval)})",
                f"({percents(trained.naive_interval)})",
                _range(paired.naive_interval),
                "",
                _odds(paired.naive_p_value),
                style="dim",
            )
    return table


def show_replay(replayed: Sequence[Replayed], console: Console, *, shown: int) -> None:
    """Print what another judgement changes, and the first answers whose verdict it changes."""
    became_right = [one for one in replayed if one.is_changed and one.answer.verdict.strict]
    became_wrong = [one for one in replayed if one.is_changed and not one.answer.verdict.strict]
    for one in [*became_right, *became_wrong][:shown]:
        record, verdict = one.record, one.answer.verdict
        word, style = ("NOW RIGHT", "bold green") if verdict.strict else ("NOW WRONG", "bold red")
        place = f"  {record['example']} (database {record['database']})"
        console.print(Rule(Text.assemble((word, style), place), align="left"))
        lines = [f"question  {record['question']}", f"answer    {_one_line(record['final_sql'])}"]
        golds = list(
            dict.fromkeys(_one_line(sql) for sql in (record["gold_sql"], one.answer.example.gold_sql))
        )
        lines += [f"gold      {' -> '.join(golds)}", f"reason    {record['reason']} -> {verdict.reason}"]
        console.print("\n".join(lines), soft_wrap=True)
    counts = f"{len(became_right)} become right, {len(became_wrong)} become wrong"
    console.print(f"{many(len(replayed), 'answer')}: {counts}")
    before = Accuracy.of((one.record["database"], one.record["strict"]) for one in replayed)
    after = Accuracy.of((one.record["database"], one.answer.verdict.strict) for one in replayed)
    console.print(f"right: {before} as recorded, {after} now", soft_wrap=True)
    paid = _mean_reward(one.record.get("reward") for one in replayed)
    paid_now = _mean_reward(one.answer.reward for one in replayed)
    console.print(f"mean reward: {paid} as recorded, {paid_now} now")


def _mean_reward(rewards: Iterable[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f"{fmean(known):z.3f}" if known else "none"


def runs_table(several: SeveralRuns) -> Table:
    """Table of several runs: accuracy before and after, mean and range, and the change of each."""
    table = figures_table(
        f"Strict accuracy in %, {len(several.folders)} runs",
        [Column("held-out set", no_wrap=True)],
        ["n", "before", "after", "change", "of each run"],
    )
    for name, total in several.totals.items():
        before, after, changes = several.shares(name)
        table.add_row(
            Text(name),
            str(total),
            _spread(before),
            _spread(after),
            f"{100 * fmean(changes):+.1f}",
            " ".join(f"{100 * change:+.1f}" for change in changes),
        )
    return table


def _spread(shares: Sequence[float]) -> str:
    """Mean and range in percent; the mean alone if all are equal."""
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{100 * fmean(shares):.1f}" + (f" ({low:.0f}-{high:.0f})" if high > low else "")


def _range(interval: Interval) -> str:
    low, high = interval
    return f"({low * 100:+.0f} to {high * 100:+.0f})"


def _odds(p: float | None) -> str:
    if p is None:
        return "-"
    return "<.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def _rows(comparison: Comparison, *, by_kind: bool) -> Iterator[tuple[Text, Paired]]:
    sets = comparison.sets()
    if len(sets) > 1:
        yield Text("all sets", style="bold"), comparison.paired()
    for name in sets:
        yield Text(name, style="bold"), comparison.paired(set=name)
        if not by_kind:
            continue
        yield Text("  official"), comparison.paired("official", set=name)
        for kind in ("family", "difficulty"):
            for value in comparison.values(name, kind):
                paired = comparison.paired("strict", set=name, **{kind: value})
                if paired.total >= LEAST_QUESTIONS:
                    yield Text(f"  {value}"), paired


def _one_line(sql: str | None) -> str:
    return "none submitted" if sql is None else " ".join(sql.split())
