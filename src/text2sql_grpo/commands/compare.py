from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.files import read_jsonl, write_json
from text2sql_grpo.run_folder import CONFIG, answer_record, config_around

if TYPE_CHECKING:
    from text2sql_grpo.evaluation.answers import Judged
    from text2sql_grpo.evaluation.bench import Bench


def compare(
    base: str,
    trained: str,
    more: list[str] | None = None,
    *,
    num_samples: Count | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Compare two models on the same questions, or several runs of training that differ in their seed.

    Models answer greedily; saved answers are used instead where given, new ones are written next to --out.
    Example: `text2sql-grpo compare runs/my/evaluation-before.jsonl runs/my`

    Args:
        base: Model folder, adapter, checkpoint or Hub id; or answers: .jsonl, an evaluation's .json, or a
            run folder.
        trained: The same of the other model.
        more: Further runs; then all must be folders of finished runs.
        num_samples: N of each held-out set.
        config: Default: config.yaml around the trained model or the base.
        sets: Held-out sets; default: all.
        out: Default: comparison.json in the folder around the last one.
    """
    if more:
        if num_samples or config or sets or settings:
            raise ConfigError("only --out has an effect on several runs: their records are compared whole")
        return compare_runs([Path(name) for name in (base, trained, *more)], out)
    options.check_models(*(name for name in (base, trained) if not Path(name).is_dir()))  # may hold answers
    path = Path(trained)
    folder = path if (path / CONFIG).is_file() else path.parent if path.exists() else Path()
    out = out or folder / "comparison.json"
    with options.writing_to(out):
        options.check_place(out)
        console = options.quiet_console()
        from text2sql_grpo.evaluation.answers import answers_of_sets, judged, saved_answers, write_answers
        from text2sql_grpo.evaluation.bench import Bench, opened_model
        from text2sql_grpo.evaluation.comparison import compare as compared
        from text2sql_grpo.models.sources import readable_folder
        from text2sql_grpo.reporting.comparison_tables import show_comparison
        from text2sql_grpo.reporting.progress import answer_with_bar
        from text2sql_grpo.reporting.report_page import comparison_report, write_page

        given = {"base": base, "trained": trained}
        files = {role: saved for role, name in given.items() if (saved := saved_answers(name))}
        known = {role: answers_of_sets(path, sets) for role, path in files.items()}
        if len(known) == 2 and (config is not None or settings):
            option = "--config" if config is not None else settings[0]
            raise ConfigError(f"{option} has no effect: both sides are saved answers")
        if len(known) < 2:
            run = options.config_with_files(config or config_around(trained, base), settings)
            run.data.held_out(sets)
            for role in given.keys() - known.keys():
                readable_folder(given[role])  # both, before one of them answers for hours
            with Bench.open(run) as bench:
                chosen = _shared_questions(bench, sets, num_samples, *known.values())
                examples = {
                    name: [example for example in named if (name, example.id) in chosen]
                    for name, named in bench.held_out(sets).items()
                }
                for role, name in given.items():
                    if role in known:
                        known[role] = [one for one in known[role] if one.key in chosen]
                        continue
                    title = f"Evaluation of {role}"
                    answers = answer_with_bar(bench, examples, opened_model(name), console, title=title)
                    files[role] = out.with_name(f"{out.stem}-{role}.jsonl")
                    write_answers(files[role], answers)
                    known[role] = judged(answers)
        comparison = compared(known["base"], known["trained"])
        comparison = comparison.only(_spread([one.key for one, _ in comparison.pairs], num_samples))
        record = {"base": base, "trained": trained, "num_samples": num_samples, **comparison.record()}
        write_json(out, record)
        keys = {one.key for one, _ in comparison.pairs}
        lines = [read_jsonl(files[role], "answers", convert=answer_record) for role in given]
        rows = [[row for row in side if (row["set"], row["example"]) in keys] for side in lines]
        page = write_page(out.with_suffix(".html"), comparison_report(out.stem, record, *rows))
        show_comparison(comparison, console)
        console.print(f"comparison: {out}, with every answer: {page}", soft_wrap=True)
    return 0


def compare_runs(folders: Sequence[Path], out: Path | None = None) -> int:
    """Print and write how far several runs agree."""
    from text2sql_grpo.evaluation.several_runs import read_runs
    from text2sql_grpo.reporting.comparison_tables import runs_table
    from text2sql_grpo.reporting.report_page import run_report, write_page

    out = out or folders[-1].parent / "comparison.json"
    with options.writing_to(out):
        options.check_place(out)
        several = read_runs(folders)
        write_json(out, several.record())
        console = options.quiet_console()
        console.print(runs_table(several))
        console.print(several.verdict(), soft_wrap=True)
        page = write_page(out.with_suffix(".html"), *map(run_report, folders))
        console.print(f"comparison: {out}, with every answer: {page}", soft_wrap=True)
    return 0


def _shared_questions(
    bench: "Bench", sets: Sequence[str] | None, count: int | None, *known: Sequence["Judged"]
) -> set[tuple[str, str]]:
    """Set and id of the questions to answer: those with saved answers, if there are any."""
    keys = [(name, example.id) for name, examples in bench.held_out(sets).items() for example in examples]
    for answers in known:
        answered = {one.key for one in answers}
        keys = [key for key in keys if key in answered]
    if not keys:
        raise DataError("the saved answers and the config's data.test have no set and id in common")
    return _spread(keys, count)


def _spread(keys: Sequence[tuple[str, str]], count: int | None) -> set[tuple[str, str]]:
    """`count` questions of each set, evenly spaced."""
    from text2sql_grpo.evaluation.bench import evenly_spaced

    names = dict.fromkeys(name for name, _ in keys)
    return {key for name in names for key in evenly_spaced([key for key in keys if key[0] == name], count)}
