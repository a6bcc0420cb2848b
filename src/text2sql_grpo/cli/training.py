"""Verbs that make and judge models."""

import argparse
import json
from pathlib import Path

from text2sql_grpo.cli.options import (
    Verbs,
    add_verb,
    config_around,
    count,
    positive,
    quiet_libraries,
    take_settings,
    temperature,
)
from text2sql_grpo.errors import ConfigError


def add_verbs(verbs: Verbs) -> None:
    """Adds them, with their options."""
    add_train_arguments(add_verb(verbs, "train", "train, evaluate and merge a model", run_train))
    add_evaluate_arguments(
        add_verb(verbs, "evaluate", "answer held-out questions with a model", run_evaluate)
    )
    add_compare_arguments(add_verb(verbs, "compare", "compare two models on the same questions", run_compare))
    add_doctor_arguments(add_verb(verbs, "doctor", "say whether a run would work here", run_doctor))
    add_collect_arguments(add_verb(verbs, "collect", "roll out any model to episodes on disk", run_collect))
    add_sft_arguments(add_verb(verbs, "sft", "fine-tune a model on golds or collected chats", run_sft))


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train`."""
    parser.add_argument("--config", type=Path, default=Path("config/quickstart.yaml"), help="YAML of the run")
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="go on from a checkpoint; auto: the newest of the run"
    )
    take_settings(parser)


def run_train(options: argparse.Namespace) -> int:
    """Supervised fine-tuning if the config has it, evaluate, GRPO, evaluate, merge."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config, options.settings)
    options.writes_to = config.run.output_dir

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.train import train

    return train(config, resume=options.resume, console=Console())


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.add_argument("--config", type=Path, default=Path("config/quickstart.yaml"), help="YAML of the run")
    parser.add_argument(
        "--accelerate", type=Path, metavar="FILE", help="accelerate config that will start it"
    )
    parser.add_argument("--no-dry-run", action="store_true", help="do not load the model to play one step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a report")
    take_settings(parser)


def run_doctor(options: argparse.Namespace) -> int:
    """Says whether a run would work here, what it takes, and what to do about it."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config, options.settings)
    options.writes_to = config.run.output_dir

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.doctor import doctor

    return doctor(
        config,
        console=Console(),
        launch=options.accelerate,
        dry_run=not options.no_dry_run,
        as_json=options.json,
    )


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evaluate`."""
    parser.add_argument("--model_path", required=True, help="model folder, such as RUN/merged, or Hub id")
    parser.add_argument("--num_samples", type=count, metavar="N", help="N of each held-out set, shown whole")
    parser.add_argument("--config", type=Path, help="default: config.yaml in the folder around the model")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="held-out sets; default: all of the config")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default: 0")
    parser.add_argument("--out", type=Path, help="default: evaluation-MODEL.json in the folder around it")
    take_settings(parser)


def run_evaluate(options: argparse.Namespace) -> int:
    """Answers held-out questions and reports accuracy."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config or config_around(options.model_path), options.settings)
    model = Path(options.model_path)
    run = model.resolve().parent if model.is_dir() else Path()
    out = options.writes_to = options.out or run / f"evaluation-{model.resolve().name}.json"

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.evaluate import evaluate

    return evaluate(
        options.model_path,
        config,
        num_samples=options.num_samples,
        sets=options.sets,
        temperature=options.temperature,
        seed=options.seed,
        out=out,
        console=Console(),
    )


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `compare`."""
    what = "model folder or Hub id; or answers at hand: their .jsonl, an evaluation's .json, or a run folder"
    parser.add_argument("base", metavar="BASE", help=what)
    parser.add_argument("trained", metavar="TRAINED", help="the same")
    parser.add_argument("--num_samples", type=count, metavar="N", help="N of each held-out set")
    parser.add_argument("--config", type=Path, help="default: config.yaml around TRAINED or BASE")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="held-out sets; default: all")
    parser.add_argument("--out", type=Path, help="default: comparison.json in the folder around TRAINED")
    take_settings(parser)


def run_compare(options: argparse.Namespace) -> int:
    """Compares two models on the same questions."""
    trained = Path(options.trained)
    folder = (
        trained if (trained / "config.yaml").is_file() else trained.parent if trained.exists() else Path()
    )
    options.out = options.writes_to = options.out or folder / "comparison.json"

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.compare import compare_models

    return compare_models(
        options.base,
        options.trained,
        config=options.config,
        settings=options.settings,
        num_samples=options.num_samples,
        sets=options.sets,
        out=options.out,
        console=Console(),
    )


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `collect`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model_path", help="model folder, such as RUN/merged, or Hub id")
    source.add_argument("--base_url", metavar="URL", help="OpenAI-compatible endpoint; needs --model")
    source.add_argument(
        "--traces", type=Path, metavar="DIR", help="play nothing: choose from what vf-eval or a training left"
    )
    parser.add_argument("--model", metavar="NAME", help="of the model at --base_url")
    parser.add_argument("--config", type=Path, help="default: config.yaml in the folder around --model_path")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of episodes; goes on if it is there")
    parser.add_argument("--questions", type=Path, help="default: data.train of the config")
    parser.add_argument("--num_questions", type=count, metavar="N", help="the first N; default: all")
    parser.add_argument("--samples", type=count, default=4, metavar="N", help="of each question (default: 4)")
    parser.add_argument("--temperature", type=temperature, default=1.0, help="0 is greedy; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default: 0")
    parser.add_argument(
        "--keep",
        nargs="+",
        default=[],
        choices=["correct", "best_of_n", "shortest_correct"],
        help="write the chats worth learning from beside --out, as NAME.FILTER.jsonl",
    )
    parser.add_argument(
        "--parallel", type=count, default=8, metavar="N", help="episodes at --base_url at once"
    )
    parser.add_argument("--retries", type=count, default=5, metavar="N", help="of one request; default: 5")
    parser.add_argument("--timeout_s", type=positive, default=600.0, help="of one request; default: 600")
    parser.add_argument(
        "--key_variable", default="OPENAI_API_KEY", metavar="NAME", help="environment variable of its key"
    )
    take_settings(parser)


def run_collect(options: argparse.Namespace) -> int:
    """Rolls a model out to episodes on disk."""
    from text2sql_grpo.config import load_config

    options.writes_to = options.out
    if options.traces is not None:
        from rich.console import Console

        from text2sql_grpo.jobs.collect import collect_traces

        return collect_traces(options.traces, options.out, console=Console(), keep=options.keep)
    if (options.base_url is None) != (options.model is None):
        raise ConfigError("expected --base_url and --model together, got one of them")
    if options.model_path is None and options.config is None:
        raise ConfigError("expected --config FILE with --base_url, got none")
    config = load_config(options.config or config_around(options.model_path), options.settings)

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.collect import Endpoint, collect

    return collect(
        config,
        options.out,
        options.model_path
        or Endpoint(
            options.base_url,
            options.model,
            key_variable=options.key_variable,
            parallel=options.parallel,
            retries=options.retries,
            timeout_s=options.timeout_s,
        ),
        console=Console(),
        questions=options.questions,
        num_questions=options.num_questions,
        samples=options.samples,
        temperature=options.temperature,
        seed=options.seed,
        keep=options.keep,
    )


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sft`."""
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML; its sections model and sft are used"
    )
    parser.add_argument("--questions", type=Path, help="questions whose golds are demonstrated")
    parser.add_argument("--chats", type=Path, help="chats, as collect --keep writes them")
    parser.add_argument("--out", type=Path, help="folder to write; default: the run folder's name with -sft")
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="resume from a checkpoint; auto: the newest of --out"
    )
    take_settings(parser)


def run_sft(options: argparse.Namespace) -> int:
    """Fine-tunes a model on golds or collected chats."""
    from text2sql_grpo.config import load_config

    settings = list(options.settings)
    for name in ("questions", "chats"):
        if getattr(options, name) is not None:
            settings += [f"--sft.{name}", json.dumps(str(getattr(options, name)))]
    config = load_config(options.config, settings)
    folder = config.run.output_dir
    options.writes_to = options.out or folder.with_name(f"{folder.name}-sft")

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.sft import sft
    from text2sql_grpo.jobs.train import run_arguments

    return sft(
        config,
        options.writes_to,
        run_arguments(config),
        console=Console(highlight=False),
        resume=options.resume,
    )
