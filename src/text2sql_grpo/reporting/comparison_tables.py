"""Sides, questions and report of a comparison of two models."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.evaluation.answers import Judged, read_answers
from text2sql_grpo.evaluation.bench import Workbench, evenly_spaced
from text2sql_grpo.evaluation.comparison import Comparison, Paired
from text2sql_grpo.evaluation.statistics import Interval
from text2sql_grpo.run.evaluate_job import held_out_sets
from text2sql_grpo.run_folder import CONFIG, answers_file

_CHANGES_SHOWN = 20


def saved_answers(name: str, sets: Sequence[str] | None) -> list[Judged] | None:
    """Read the answers in a file or run folder; None for a model.

    Raises:
        RunError: The file or a set is missing or wrong.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file() and (path / CONFIG).is_file():
        path = answers_file(path)
        if not path.is_file():
            raise DataError(
                f"the run folder has no evaluation.jsonl ({name}): name its merged model or answers"
            )
    if path.suffix not in (".json", ".jsonl"):
        return None
    answers = read_answers(path.with_suffix(".jsonl"))
    known = {one.set for one in answers}
    for wanted in sets or ():
        if wanted not in known:
            raise ConfigError(f"--sets must be of {', '.join(sorted(known))}, got {wanted!r} (in {path})")
    return [one for one in answers if sets is None or one.set in sets]


def shared_questions(
    bench: Workbench, sets: Sequence[str] | None, count: int | None, *known: Sequence[Judged]
) -> set[tuple[str, str]]:
    """Set and id of the questions to answer: those with saved answers, if there are any."""
    keys = [
        (name, example.id) for name, examples in held_out_sets(bench, sets).items() for example in examples
    ]
    for answers in known:
        answered = {one.key for one in answers}
        keys = [key for key in keys if key in answered]
    if not keys:
        raise DataError("the saved answers and the config's data.test have no set and id in common")
    return spread(keys, count)


def spread(keys: Sequence[tuple[str, str]], count: int | None) -> set[tuple[str, str]]:
    """`count` questions of each set, evenly spaced."""
    names = dict.fromkeys(name for name, _ in keys)
    return {key for name in names for key in evenly_spaced([key for key in keys if key[0] == name], count)}


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, some changed answers and the verdict."""
    left_out = comparison.only_base + comparison.only_trained
    if left_out:
        console.print(f"{left_out} questions were left out: only one model answered them.")
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
        console.print(Text("\n".join(lines)), soft_wrap=True)
    if len(changed) > _CHANGES_SHOWN:
        console.print(f"... and {len(changed) - _CHANGES_SHOWN} more in the file")
    console.print()
    console.print(Text(comparison.verdict()), style="bold", soft_wrap=True)


def comparison_table(comparison: Comparison) -> Table:
    """Table of strict accuracy by set and kind, with a row by question below each set of several databases.

    Fits 80 columns if names of sets have at most 14 letters.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, title="Strict accuracy in %, 95% intervals by database")
    table.add_column("", min_width=14, overflow="fold")
    for column in ("n", "base", "trained", "difference", "changed", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, paired in _rows(comparison):
        base, trained = paired.base, paired.trained
        table.add_row(
            title,
            str(paired.total),
            _share(base.accuracy, base.interval),
            _share(trained.accuracy, trained.interval),
            f"{paired.difference * 100:+.0f} {_range(paired.interval)}",
            f"+{paired.gained} -{paired.lost}",
            _odds(paired.p_value),
        )
        if title.style and len(paired.by_database) > 1:
            table.add_row(
                Text("  by question"),
                "",
                _share(None, base.naive_interval),
                _share(None, trained.naive_interval),
                _range(paired.naive_interval),
                "",
                _odds(paired.naive_p_value),
                style="dim",
            )
    return table


def _share(accuracy: float | None, interval: Interval) -> str:
    low, high = interval
    bounds = f"({low * 100:.0f}-{high * 100:.0f})"
    return bounds if accuracy is None else f"{accuracy * 100:.0f} {bounds}"


def _range(interval: Interval) -> str:
    low, high = interval
    return f"({low * 100:+.0f} to {high * 100:+.0f})"


def _odds(p: float) -> str:
    return "<.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def _rows(comparison: Comparison) -> Iterator[tuple[Text, Paired]]:
    sets = comparison.sets()
    if len(sets) > 1:
        yield Text("all sets", style="bold"), comparison.paired()
    for name in sets:
        yield Text(name, style="bold"), comparison.paired(set=name)
        yield Text("  official"), comparison.paired("official", set=name)
        for kind in ("family", "difficulty"):
            for value in comparison.values(name, kind):
                yield Text(f"  {value}"), comparison.paired("strict", set=name, **{kind: value})


def _one_line(sql: str | None) -> str:
    return "none submitted" if sql is None else " ".join(sql.split())
