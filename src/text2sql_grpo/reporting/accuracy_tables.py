"""Tables of accuracy with intervals, on a terminal of 80 columns."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from text2sql_grpo.evaluation.comparison import Paired
from text2sql_grpo.evaluation.statistics import Accuracy, database_counts, interval_unit, percents, remarks
from text2sql_grpo.evaluation.summary import TABLES

LEAST_QUESTIONS = 10
"""Questions of a family or difficulty that has a row."""


def figures_table(
    title: str, words: Sequence[str | Column], figures: Sequence[str], *, caption: Text | str | None = None
) -> Table:
    """Table without rows: columns of words, then columns of figures, which are aligned at the right."""
    return Table(
        *words,
        *(Column(name, justify="right") for name in figures),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        caption=caption,
        caption_justify="left",
    )


def accuracy_table(sets: Mapping[str, Any], metrics: Sequence[str] = ()) -> Table:
    """Table of accuracy with 95% intervals, and R-VES if measured, by set; below it by kind of question.

    Args:
        sets: `sets` of `evaluation.json`.
        metrics: `strict`, `official`; both if neither is named.
    """
    shown = [name for name in ("strict", "official") if name in metrics] or ["strict", "official"]
    has_ves = any("r_ves" in scores for scores in sets.values())
    lines = [f"{name}: {text}" for name, text in remarks(sets).items()]
    unit = interval_unit(database_counts(sets).values())
    table = figures_table(
        f"{' and '.join(shown).capitalize()} accuracy (95% interval in % {unit})",
        [Column("held-out set", no_wrap=True)],
        [*shown, "R-VES"] if has_ves else shown,
        caption=Text("\n".join(lines)) if lines else None,
    )
    for name, scores in sets.items():
        ves = [f"{scores['r_ves']:.1f}"] if has_ves else []
        shares = [_share(Accuracy.read(scores["overall"][grading])) for grading in shown]
        table.add_row(Text(name, style="bold"), *shares, *ves)
    table.add_section()
    for kind in ("difficulty", "skill", "tables"):
        for part, both in _of_all_sets(sets, f"by_{kind}").items():
            if both["strict"].total >= LEAST_QUESTIONS:
                title = Text(part if kind == "tables" else f"{kind}: {part}")
                table.add_row(title, *(_share(both[grading]) for grading in shown))
    return table


def _of_all_sets(sets: Mapping[str, Any], field: str) -> dict[str, dict[str, Accuracy]]:
    """Accuracies by kind of question, of the questions of all sets together, in order."""
    sizes = [*TABLES.values()]
    found: dict[str, dict[str, list[Accuracy]]] = defaultdict(lambda: defaultdict(list))
    for scores in sets.values():
        for part, both in scores.get(field, {}).items():
            for grading, record in both.items():
                found[part][grading].append(Accuracy.read(record))
    return {
        part: {grading: Accuracy.joined(parts) for grading, parts in both.items()}
        for part, both in sorted(
            found.items(), key=lambda one: (sizes.index(one[0]) if one[0] in sizes else 0, one[0])
        )
    }


def sample_shares(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracies of the greedy answer and of k sampled ones by name, from a set of `evaluation.json`."""
    own = scores["samples"]
    return {
        "greedy": scores["overall"]["strict"],
        f"mean@{own['samples']}": own["mean"],
        f"vote@{own['samples']}": own["vote"],
        "soft vote": own["soft_vote"],
        f"pass@{own['samples']}": own["oracle"],
    }


def samples_table(when: Mapping[str, Mapping[str, Any]]) -> Table:
    """Table of several answers to each question: their mean, their votes, and the best of them.

    Args:
        when: `sets` of an `evaluation.json` by when it was made, such as `before` and `after` training.
    """
    known = [
        (name, title, scores)
        for title, sets in when.items()
        for name, scores in sets.items()
        if "samples" in scores
    ]
    unit = interval_unit(count for sets in when.values() for count in database_counts(sets).values())
    k = known[0][2]["samples"]["samples"] if known else 0
    names = [*sample_shares(known[0][2])] if known else []
    table = figures_table(
        f"Strict accuracy of {k} sampled answers in % (95% interval {unit})",
        [Column("held-out set", no_wrap=True)],
        [*names, "sure", "tokens"],
        caption="sure: accuracy of the half of the questions whose soft vote is the surest",
    )
    for name, title, scores in sorted(known, key=lambda row: row[0]):
        own, shares = scores["samples"], sample_shares(scores).values()
        cells = [f"{100 * s['accuracy']:.0f}\n({percents(s['interval'])})" for s in shares]
        sure = f"{100 * own['accuracy_at']['50']:.0f}" if own.get("accuracy_at") else "-"
        table.add_row(Text(f"{name}\n  {title}".rstrip()), *cells, sure, f"{own['tokens_per_answer']:.0f}")
    return table


def reason_lines(sets: Mapping[str, Any]) -> Iterator[str]:
    """Kinds of answers to the questions of all sets: verdicts, ends, unreadable turns, looks and tokens.

    Args:
        sets: `sets` of `evaluation.json`.
    """
    asked = sum(scores["overall"]["strict"]["total"] for scores in sets.values())
    if not asked:
        return
    for title, field in (("Verdicts", "reasons"), ("Episodes ended", "stop_reasons")):
        counts = Counter[str]()
        for scores in sets.values():
            counts.update(scores[field])
        named = {"equal": "right"}
        shown = ", ".join(
            f"{count} {named.get(name, name).replace('_', ' ')}" for name, count in counts.most_common()
        )
        yield f"{title}: {shown}"
    means = {
        field: sum(scores[field] * scores["overall"]["strict"]["total"] for scores in sets.values()) / asked
        for field in ("malformed_share", "looks_per_question", "tokens_per_answer")
    }
    yield (
        f"Each answer: {means['tokens_per_answer']:.0f} tokens and {means['looks_per_question']:.2f} "
        f"exploratory queries; {means['malformed_share']:.0%} hold a turn that could not be read"
    )


def perturbation_table(forms: Mapping[str, tuple[Paired, int]]) -> Table:
    """Table of the same questions as they are and in other forms, with the number of those left out."""
    unit = interval_unit(len(both.by_database) for both, _ in forms.values())
    table = figures_table(
        "Strict accuracy in % on questions in another form",
        ["form"],
        ["n", "as asked", "perturbed", f"difference (95% {unit})", "left out"],
    )
    for name, (both, left_out) in forms.items():
        low, high = (100 * bound for bound in both.interval)
        table.add_row(
            name,
            str(both.total),
            f"{100 * both.base.accuracy:.1f}",
            f"{100 * both.trained.accuracy:.1f}",
            f"{100 * both.difference:+.1f} ({low:+.0f} to {high:+.0f})",
            str(left_out),
        )
    return table


def gap_lines(accepted: Mapping[str, int]) -> Iterator[str]:
    """Share of accepted answers that were checked less than configured, and the reasons.

    >>> list(gap_lines({"": 3, "1 test databases instead of 4": 1}))
    ['Accepted answers checked less than configured: 1 of 4 (25%)', '  1: 1 test databases instead of 4']
    """
    total, n_checked = sum(accepted.values()), accepted.get("", 0)
    if total > n_checked:
        share = (total - n_checked) / total
        yield f"Accepted answers checked less than configured: {total - n_checked} of {total} ({share:.0%})"
    for gap, n_answers in sorted(accepted.items(), key=lambda entry: -entry[1]):
        if gap:
            yield f"  {n_answers}: {gap}"


def _share(one: Accuracy) -> str:
    return f"{one.correct}/{one.total} = {one.accuracy:.1%} ({percents(one.interval)})"
