from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count, Temperature
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation import Board, Perturbation
from text2sql_grpo.files import sha256, write_json
from text2sql_grpo.run_folder import CONFIG, config_around, find_config

# Fields that change answers or verdicts; of a section without names all.
_DECISIVE = {"data": ("databases", "test", "quarantine"), "environment": (), "grading": ()}


def evaluate(
    *,
    model_path: str | None = None,
    base_url: str | None = None,
    model: str | None = None,
    num_samples: Count | None = None,
    samples: Count | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    metrics: list[Literal["strict", "official", "ves"]] | None = None,
    temperature: Temperature | None = None,
    seed: int | None = None,
    perturb: list[Perturbation] | None = None,
    export: Board | None = None,
    out: Path | None = None,
    show: bool = False,
    parallel: Count = 8,
    key_variable: str = "OPENAI_API_KEY",
    settings: Sequence[str] = (),
) -> int:
    """Answer held-out questions with a model, as its run did unless options differ.

    Example: `text2sql-grpo evaluate --model_path runs/my/merged --num_samples 5`

    Args:
        model_path: Model folder, such as RUN/merged, an adapter or a checkpoint of a run, or Hub id.
        base_url: OpenAI-compatible endpoint; needs --model and --config.
        model: Name of the model at --base_url.
        num_samples: N questions of each held-out set, evenly spaced, with a line for each; default:
            data.test_samples, without lines.
        samples: Answers to sample of each question, next to the greedy one; default: evaluation.samples.
        config: Default: config.yaml in the folder around the model.
        sets: Held-out sets; default: all of the config.
        metrics: Columns of the table; default: the accuracies strict and official. ves adds BIRD's R-VES:
            the time of right answers against that of the gold, run in turn 100 times each, one query at a
            time. It is a timing, and so noisy: compare runs on one idle machine.
        temperature: 0 is greedy; default: evaluation.temperature. With --samples that of the sampled
            answers; default: evaluation.samples_temperature.
        seed: Random seed of sampling; default: run.seed.
        perturb: Ask each question in these other forms too, and print what that costs: the schema in another
            order, shorter names of columns, tables of another database added, a typo, another sentence, or no
            schema at all.
        export: Write the predictions for a benchmark's own evaluator too, a file for each held-out set.
        out: Default: evaluation-MODEL.json in the run or the folder around the model; for --base_url here.
        show: Print each answer whole, with its turns; they are in the page and in the .jsonl anyway.
        parallel: Concurrent episodes at --base_url.
        key_variable: Environment variable of the endpoint's key.
    """
    options.check_served(base_url, model, config)
    options.check_one_of(model_path=model_path, base_url=base_url)
    options.check_models(model_path)
    run = options.config_with_files(config or config_around(str(model_path)), settings, model=model_path)
    recorded = find_config(str(model_path))  # before options and settings
    run.data.held_out(sets)
    path = Path(model_path or str(model))
    is_run = model_path is not None and (path / CONFIG).is_file()
    folder = path if is_run else path.resolve().parent if model_path and path.is_dir() else Path()
    out = out or folder / f"evaluation-{path.resolve().name}.json"
    count, wanted = num_samples or run.data.test_samples, run.evaluation
    samples = wanted.samples if samples is None else samples
    if export is not None and count is not None:
        raise ConfigError(
            "--export needs whole sets: leave out --num_samples and set data.test_samples to null"
        )
    if samples == 1:
        raise ConfigError("--samples must be at least 2: one answer holds no vote")
    if temperature is not None and samples:
        wanted = replace(wanted, samples_temperature=temperature)
    elif temperature is not None:
        wanted = replace(wanted, temperature=temperature)
    seed = run.run.seed if seed is None else seed
    sampling: dict[str, Any] = {"temperature": wanted.temperature, "seed": seed}
    with options.writing_to(out):
        options.check_place(out)
        lines = out.with_suffix(".jsonl")
        if lines.exists() and not out.exists():
            raise ConfigError(f"--out would overwrite {lines}, which no evaluation wrote: name another file")
        console = options.quiet_console()
        from text2sql_grpo.evaluation.answers import write_answers
        from text2sql_grpo.evaluation.bench import Bench, evenly_spaced, opened_model
        from text2sql_grpo.evaluation.endpoint import Endpoint
        from text2sql_grpo.evaluation.leaderboards import export as exported
        from text2sql_grpo.evaluation.perturbations import check_perturbations
        from text2sql_grpo.evaluation.summary import scored_sets
        from text2sql_grpo.reporting import accuracy_tables as tables
        from text2sql_grpo.reporting.progress import answer_with_bar
        from text2sql_grpo.reporting.report_page import evaluation_report, write_page
        from text2sql_grpo.reporting.shown import show_answer, show_line

        source = model_path or Endpoint(str(base_url), str(model), key_variable, parallel)
        with Bench.open(run) as bench:
            chosen = {name: evenly_spaced(named, count) for name, named in bench.held_out(sets).items()}
            check_perturbations(perturb or (), bench, chosen)
            for line in _unlike_the_run(run, recorded, bench.test, chosen, sampling):
                console.print(line, soft_wrap=True)
            asked = opened_model(source)
            answers = answer_with_bar(bench, chosen, asked, console, **sampling)
            sampled = {}
            if samples:
                warm = sampling | {"temperature": wanted.samples_temperature, "samples": samples}
                sampled = answer_with_bar(bench, chosen, asked, console, title="Samples", **warm)
            scores = scored_sets(bench.environment, answers, sampled, samples)
            if "ves" in (metrics or ()):
                _add_r_ves(scores, answers, bench, console)
            accepted = bench.environment.grader.accepted
            record = {"sets": scores, "model": model_path or model, **sampling, "num_samples": count}
            # Tells versions of a benchmark apart.
            files = {name: Path(str(run.data.test[name])) for name in chosen}
            record["questions_sha256"] = {
                name: sha256(file) for name, file in files.items() if file.is_file()
            }
            record["environment"] = asdict(run.environment)
            record["accepted_by_gap"] = dict(accepted.most_common())
            write_json(out, record)
            write_answers(lines, answers)
            if sampled:
                write_answers(lines.with_name(f"{out.stem}-samples.jsonl"), sampled)
            forms = _perturbed(perturb or (), bench, chosen, answers, asked, console, out, **sampling)
        if forms:
            record["perturbed"] = {kind: form.record() | {"left_out": n} for kind, (form, n) in forms.items()}
        write_json(out, record)
        for name, answered in answers.items():
            for answer in answered:
                if show:
                    show_answer(answer, name, console)
                elif num_samples is not None:
                    show_line(answer, console)
        console.print(tables.accuracy_table(scores, metrics or ()))
        if sampled:
            console.print(tables.samples_table({"": scores}))
        if forms:
            console.print(tables.perturbation_table(forms))
        for line in chain(tables.reason_lines(scores), tables.gap_lines(accepted)):
            console.print(line, soft_wrap=True)
        console.print(f"evaluation: {out}", soft_wrap=True)
        page = write_page(out.with_suffix(".html"), evaluation_report(out, bench.environment.databases))
        console.print(f"every answer: {page} and {lines.name}", soft_wrap=True)
        if export is not None:
            for name, answered in answers.items():
                place = out.with_name(f"{out.stem}-{name.replace('/', '-')}")
                written = exported(export, answered, place)
                console.print(f"for {export}: {written}", soft_wrap=True)
    return 0


def _perturbed(
    kinds: Sequence[Perturbation],
    bench: Any,
    chosen: dict[str, Any],
    answers: dict[str, Any],
    asked: Any,
    console: Any,
    out: Path,
    **sampling: Any,
) -> dict[str, Any]:
    """Answers to the questions in other forms, each with the answer to the plain one."""
    from text2sql_grpo.evaluation.answers import judged, write_answers
    from text2sql_grpo.evaluation.comparison import paired
    from text2sql_grpo.evaluation.perturbations import perturbed
    from text2sql_grpo.reporting.progress import answer_with_bar

    forms: dict[str, Any] = {}
    plain = {one.key: one for one in judged(answers)}
    for kind in kinds:
        with TemporaryDirectory(prefix="text2sql-grpo-") as folder:
            form = perturbed(kind, bench, chosen, folder=Path(folder), seed=sampling["seed"])
            with form.environment as environment:
                other = replace(bench, environment=environment)
                found = answer_with_bar(
                    other, form.sets, asked, console, title=f"Questions: {kind}", **sampling
                )
        write_answers(out.with_name(f"{out.stem}-{kind}.jsonl"), found)
        rights = ((one.database, plain[one.key].strict, one.strict) for one in judged(found))
        forms[kind] = paired(rights), form.left_out
    return forms


def _unlike_the_run(
    here: Config,
    recorded: Path | None,
    test: dict[str, Any],
    chosen: dict[str, Any],
    sampling: dict[str, Any],
) -> list[str]:
    """A line that names what differs from the evaluation of the run; none if nothing does."""
    run = here
    with suppress(ConfigError):  # a config.yaml that is not this package's
        run = here if recorded is None else load_config(recorded)
    facts = {
        "sets": (", ".join(chosen), ", ".join(test)),
        "questions": (
            sum(map(len, chosen.values())),
            sum(min(run.data.test_samples or len(test[name]), len(test[name])) for name in chosen),
        ),
        "temperature": (sampling["temperature"], run.evaluation.temperature),
        "seed": (sampling["seed"], run.run.seed),
    }
    for section, names in _DECISIVE.items():
        ours, its = vars(getattr(here, section)), vars(getattr(run, section))
        facts |= {f"{section}.{name}": (ours[name], its[name]) for name in names or ours}
    unlike = [f"{name} {value} instead of {its}" for name, (value, its) in facts.items() if value != its]
    return [f"Not to be compared with the figures of the run: {'; '.join(unlike)}"] if unlike else []


def _add_r_ves(scores: dict[str, Any], answers: Any, bench: Any, console: Any) -> None:
    """Time the answers of each set, after all were judged: nothing else runs meanwhile."""
    from text2sql_grpo.evaluation.summary import r_ves
    from text2sql_grpo.reporting.counting import counting

    with counting("Timing", sum(map(len, answers.values())), console) as on_answer:
        for name, answered in answers.items():
            scores[name]["r_ves"] = r_ves(answered, bench.environment, on_answer)
