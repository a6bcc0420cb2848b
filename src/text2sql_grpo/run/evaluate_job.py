"""Evaluation of a finished model on held-out questions: answers, accuracies, files."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import Any

import sqlparse
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text
from sqlparse.exceptions import SQLParseError
from transformers import set_seed

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.evaluation.answers import write_answers
from text2sql_grpo.evaluation.bench import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.evaluation.endpoint import Endpoint, served_episodes
from text2sql_grpo.evaluation.statistics import Accuracy, remarks
from text2sql_grpo.evaluation.summary import answer_questions, r_ves, summary
from text2sql_grpo.files import write_json
from text2sql_grpo.models.cpu import inference_autocast
from text2sql_grpo.models.loaded_policy import LoadedPolicy, load_policy
from text2sql_grpo.reporting.progress import progress_bar
from text2sql_grpo.rewards import Answer, Judge
from text2sql_grpo.sft.demonstrations import action_text

_SHOWN = ObservationLimits(max_rows=8, max_cell_chars=40, max_chars=800)


def evaluate(
    model_path: str | Path | Endpoint,
    config: Config,
    *,
    out: Path | None = None,
    console: Console | None = None,
    num_samples: int | None = None,
    sets: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate a model in the environment of a config. Options: see `commands.evaluate`.

    Args:
        model_path: A model folder or Hub id, or an endpoint.
        config: Config of data, environment and `evaluation.batch_size`.
        out: File of the record, `.json`; whole answers go beside it, as `.jsonl`. None writes neither.
        console: Console of answers and accuracies; None for standard output.
        num_samples: Number of questions of each set, evenly spaced, each shown; None for all, not shown.

    Returns:
        `sets`: counts, accuracies and intervals by the name of the set; and the options.

    Raises:
        RunError: Anything wrong with model, config or data, or `out` cannot be written.
    """
    console = console or Console()
    bench = open_workbench(config)
    chosen = {
        name: evenly_spaced(examples, num_samples) for name, examples in held_out_sets(bench, sets).items()
    }
    if out is not None:
        check_place(out)
    with closing(bench.environment):
        if isinstance(model_path, Endpoint):
            model = model_path.model
            answers = _answer_served(model_path, bench, chosen, console, temperature=temperature, seed=seed)
        else:
            model = str(model_path)
            answers = answer_all(
                load_policy(model), bench, chosen, console, temperature=temperature, seed=seed
            )
    if num_samples is not None:
        for name, answered in answers.items():
            for answer in answered:
                show(answer, name, console)
    scores = {name: summary(answered) for name, answered in answers.items()}
    if "ves" in (metrics or ()):
        _add_r_ves(scores, answers, bench, console)
    record = {
        "sets": scores,
        "model": model,
        "temperature": temperature,
        "seed": seed,
        "num_samples": num_samples,
    }
    if out is not None:
        write_json(out, record)
        write_answers(out.with_suffix(".jsonl"), answers)
    console.print(accuracy_table(scores, metrics or ()))
    if out is not None:
        console.print(f"evaluation: {out}", soft_wrap=True)
        console.print(f"every answer: {out.with_suffix('.jsonl')}", soft_wrap=True)
    return record


def _add_r_ves(
    scores: Mapping[str, Any], answers: Mapping[str, Sequence[Answer]], bench: Workbench, console: Console
) -> None:
    """Time the answers of each set, after all were written: nothing else runs meanwhile."""
    with progress_bar(console) as bar:
        task = bar.add_task("Timing", total=sum(map(len, answers.values())))
        for name, answered in answers.items():
            limits = bench.executor.limits
            scores[name]["r_ves"] = r_ves(
                answered, bench.databases, limits, on_answer=lambda: bar.advance(task)
            )


def accuracy_table(sets: Mapping[str, Any], metrics: Sequence[str] = ()) -> Table:
    """Table of accuracy with 95% intervals, and R-VES if measured, by set, family and difficulty.

    Args:
        sets: `sets` of `evaluation.json`.
        metrics: `strict`, `official`; both if neither is named.
    """
    shown = [name for name in ("strict", "official") if name in metrics] or ["strict", "official"]
    has_ves = any("r_ves" in scores for scores in sets.values())
    title = " and ".join(shown).capitalize()
    table = empty_accuracy_table(title, [*shown, "R-VES"] if has_ves else shown, sets)
    for name, scores in sets.items():
        ves = [f"{scores['r_ves']:.1f}"] if has_ves else []
        table.add_row(Text(name, style="bold"), *_cells(scores["overall"], shown), *ves)
        for group in ("by_family", "by_difficulty"):
            for part, both in scores[group].items():
                table.add_row(Text(f"  {group.removeprefix('by_')} {part}"), *_cells(both, shown))
        table.add_section()
    return table


def empty_accuracy_table(title: str, columns: Sequence[str], sets: Mapping[str, Any]) -> Table:
    """Table without rows, with a remark below about the `sets` of an `evaluation.json` with few databases."""
    lines = [f"{name}: {text}" for name, text in remarks(sets).items()]
    table = Table(
        Column("held-out set", no_wrap=True),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{title} accuracy (95% interval in %: by database, below it by question)",
        caption=Text("\n".join(lines)) if lines else None,
        caption_justify="left",
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cells(both: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    accuracies = [Accuracy.read(both[grading]) for grading in shown]
    return [f"{one.correct}/{one.total} = {one.accuracy:.1%} {stacked_intervals(one)}" for one in accuracies]


def stacked_intervals(accuracy: Accuracy) -> str:
    """Interval by database, and below it the one by question; only one of them for a single database."""
    return "\n".join(f"({bounds})" for bounds in accuracy.intervals.split("; "))


def held_out_sets(bench: Workbench, sets: Sequence[str] | None) -> dict[str, list[Example]]:
    """Held-out sets of these names; all of the config for None.

    Raises:
        ConfigError: A name is unknown, or the config has no set.
    """
    known = ", ".join(bench.test) or "none"
    for name in sets or ():
        if name not in bench.test:
            raise ConfigError(f"--sets must be of data.test ({known}), got {name!r}")
    if not bench.test:
        raise ConfigError("data.test has no held-out sets")
    return {name: examples for name, examples in bench.test.items() if sets is None or name in sets}


def check_place(out: Path) -> None:
    """Fail early if `out` cannot be written; an existing file stays.

    Raises:
        ConfigError: It cannot be written, or does not end in `.json`.
    """
    if out.suffix != ".json":
        raise ConfigError(f"--out must name a .json file, got {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not out.exists()
        out.open("a").close()
        if is_new:
            out.unlink()
    except OSError as error:
        raise ConfigError(f"--out cannot be written: {error} ({out})") from error


def answer_all(
    policy: LoadedPolicy,
    bench: Workbench,
    chosen: Mapping[str, Sequence[Example]],
    console: Console,
    *,
    title: str = "Evaluation",
    temperature: float = 0.0,
    seed: int = 0,
    force_look: bool = False,
) -> dict[str, list[Answer]]:
    """Answer each question of each set with a model on the device of the run.

    Args:
        force_look: Give the first turn of each episode: the exploratory query of a demonstration.
    """
    model = policy.ready()
    chat = bench.chat(policy.tokenizer, model)
    sampler = bench.policy(model, chat, temperature=temperature)
    set_seed(seed)
    examples = [example for named in chosen.values() for example in named]
    looks = [action_text("run_sql", example.look_sql or example.gold_sql, "tags") for example in examples]
    bf16 = bench.config.evaluation.bf16
    with progress_bar(console) as bar, inference_autocast(model, bf16=bf16):
        task = bar.add_task(title, total=len(examples))
        answers = iter(  # all sets at once: a set alone would end with few rows of a batch
            answer_questions(
                examples,
                sampler,
                chat,
                bench.environment,
                bench.grader,
                bench.budgets(model),
                first_turns=looks if force_look else None,
                on_answer=lambda: bar.advance(task),
            )
        )
    return {name: list(islice(answers, len(named))) for name, named in chosen.items()}


def _answer_served(
    endpoint: Endpoint,
    bench: Workbench,
    chosen: Mapping[str, Sequence[Example]],
    console: Console,
    *,
    temperature: float,
    seed: int,
) -> dict[str, list[Answer]]:
    """Answer each question of each set with a served model.

    Raises:
        RunError: Questions were left without an answer.
    """
    max_rows = bench.environment.settings.observation.max_rows
    judge = Judge(bench.grader, bench.executor, max_rows_shown=max_rows)
    todo = [example for named in chosen.values() for example in named]
    answers: dict[int, Answer] = {}
    with progress_bar(console) as bar:
        task = bar.add_task("Evaluation", total=len(todo))

        def on_end(place: int, episode: Episode) -> None:
            database = bench.databases.address(episode.example.database)
            answers[place] = judge.judge(episode, database, runs_published=True)
            bar.advance(task)

        failures = served_episodes(
            todo, bench.environment, endpoint, temperature=temperature, seed=seed, on_end=on_end
        )
    if failures:
        raise RunError(
            f"{len(failures)} of {len(todo)} questions were not answered, the first: {failures[0]} "
            f"({endpoint.base_url}); run the command again when the endpoint answers"
        )
    found = iter([answers[place] for place in range(len(todo))])
    return {name: list(islice(found, len(named))) for name, named in chosen.items()}


def show(answer: Answer, set_name: str, console: Console) -> None:
    """Print one question whole; texts of a model or a database are never read as markup."""
    episode, verdict, example = answer.episode, answer.verdict, answer.example
    console.print(Rule(Text(f"{set_name}: {example.id} (database {example.database})"), align="left"))
    console.print(Text(f"question: {example.question}", style="bold"))
    for number, action in enumerate(episode.actions, 1):
        console.print(Text(f"turn {number} of {episode.max_turns}: {action.kind}", style="cyan"))
        console.print(Text(indent(_turn_text(action), "  ")))
    console.print(Text("final SQL:", style="cyan"))
    console.print(Text(indent(formatted(episode.final_sql) if episode.final_sql else "none submitted", "  ")))
    if not verdict.strict:
        console.print(Text("gold SQL:", style="cyan"))
        console.print(Text(indent(formatted(example.gold_sql), "  ")))
    console.print(
        Text.assemble(
            ("RIGHT" if verdict.strict else "WRONG", "bold green" if verdict.strict else "bold red"),
            f" ({verdict.reason})  strict: {_yes(verdict.strict)}  official: {_yes(verdict.official)}",
            f"  stopped: {episode.stop_reason}\n",
        )
    )


def _turn_text(action: Action) -> str:
    if action.kind == "malformed":
        return f"could not be read: {action.error}"
    observed = f"\n-> {observation_text(action.outcome, _SHOWN)}" if action.outcome else ""
    return formatted(action.sql) + observed.replace("\n", "\n   ").replace("\n   ->", "\n->", 1)


def formatted(sql: str) -> str:
    """Format a query over several lines; unchanged if it nests too deep for sqlparse."""
    try:
        return str(sqlparse.format(sql, reindent=True)).strip()
    except SQLParseError:
        return sql


def _yes(is_right: bool) -> str:
    return "yes" if is_right else "no"
