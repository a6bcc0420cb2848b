"""`text2sql-grpo <verb>`: reads options, calls one function, turns errors into messages.

Everything heavy is imported inside the verbs, so that `--help` answers at once and `.env` is read
before any library looks at its variables.
"""

import argparse
import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from dotenv import load_dotenv

from text2sql_grpo.errors import ConfigError, ModelError, RunError

INTERRUPTED = 130
_SETTING = "--section.key"
_TOKEN_VARIABLE = "TEXT2SQL_GRPO_MCP_TOKEN"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one verb: 0, 1 after an error told in a message, 130 after Ctrl-C.

    Args:
        argv: Without the program's name; None takes the command line.
    """
    options = _read(argv)
    load_dotenv(Path(".env"))
    if os.environ.get("HF_KEY") and not os.environ.get("HF_TOKEN"):
        os.environ["HF_TOKEN"] = os.environ["HF_KEY"]
    logging.basicConfig(format="%(message)s", handlers=[_MessageHandler()])
    logging.getLogger("text2sql_grpo").setLevel(logging.INFO)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_full_disk(error):
            raise
        # A failed write names no file; then it is the place where the verb writes.
        where = getattr(error, "filename", None) or options.writes_to
        print(f"error: expected space to write, got a full disk (at {where})", file=sys.stderr)
        return 1


def _is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for want of space: a full disk, a quota, or a limit on file sizes.

    torch and safetensors write in C++ and Rust: their errors say so in their text alone.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    texts = (*map(os.strerror, numbers), "unexpected pos")
    return any(text in str(error) for text in texts)


def _quiet_libraries() -> None:
    """Deprecations inside libraries, missing kernels and the bars of single files tell a person nothing."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("bitsandbytes", "transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    wants_downloads_shown = not are_progress_bars_disabled()
    disable_progress_bar()  # would hide the bars of downloads too
    if wants_downloads_shown:
        enable_progress_bars()


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train`."""
    parser.add_argument("--config", type=Path, default=Path("config/quickstart.yaml"), help="YAML of the run")
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="go on from a checkpoint; auto: the newest of the run"
    )
    _take_settings(parser)


def run_train(options: argparse.Namespace) -> int:
    """Warm start or load, evaluate, GRPO, evaluate, merge."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config, options.settings)
    options.writes_to = config.run.output_dir

    _quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.train import train

    return train(config, resume=options.resume, console=Console())


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evaluate`."""
    parser.add_argument("--model_path", required=True, help="model folder, such as RUN/merged, or Hub id")
    parser.add_argument("--num_samples", type=_count, metavar="N", help="N of each held-out set, shown whole")
    parser.add_argument("--config", type=Path, help="default: config.yaml in the folder around the model")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="held-out sets; default: all of the config")
    parser.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default: 0")
    parser.add_argument("--out", type=Path, help="default: evaluation-MODEL.json in the folder around it")
    _take_settings(parser)


def run_evaluate(options: argparse.Namespace) -> int:
    """Answers held-out questions and reports accuracy."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config or _config_around(options.model_path), options.settings)
    model = Path(options.model_path)
    run = model.resolve().parent if model.is_dir() else Path()
    out = options.writes_to = options.out or run / f"evaluation-{model.resolve().name}.json"

    _quiet_libraries()
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
    parser.add_argument("--num_samples", type=_count, metavar="N", help="N of each held-out set")
    parser.add_argument("--config", type=Path, help="default: config.yaml around TRAINED or BASE")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="held-out sets; default: all")
    parser.add_argument("--out", type=Path, help="default: comparison.json in the folder around TRAINED")
    _take_settings(parser)


def run_compare(options: argparse.Namespace) -> int:
    """Compares two models on the same questions."""
    trained = Path(options.trained)
    folder = (
        trained if (trained / "config.yaml").is_file() else trained.parent if trained.exists() else Path()
    )
    options.out = options.writes_to = options.out or folder / "comparison.json"

    _quiet_libraries()
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
    parser.add_argument("--model", metavar="NAME", help="of the model at --base_url")
    parser.add_argument("--config", type=Path, help="default: config.yaml in the folder around --model_path")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of episodes; goes on if it is there")
    parser.add_argument("--questions", type=Path, help="default: data.train of the config")
    parser.add_argument("--num_questions", type=_count, metavar="N", help="the first N; default: all")
    parser.add_argument(
        "--samples", type=_count, default=4, metavar="N", help="of each question (default: 4)"
    )
    parser.add_argument("--temperature", type=_temperature, default=1.0, help="0 is greedy; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default: 0")
    parser.add_argument(
        "--keep",
        nargs="+",
        default=[],
        choices=["correct", "best_of_n", "shortest_correct"],
        help="write the chats worth learning from beside --out, as NAME.FILTER.jsonl",
    )
    parser.add_argument(
        "--parallel", type=_count, default=8, metavar="N", help="episodes at --base_url at once"
    )
    parser.add_argument("--retries", type=_count, default=5, metavar="N", help="of one request; default: 5")
    parser.add_argument("--timeout_s", type=_positive, default=600.0, help="of one request; default: 600")
    parser.add_argument(
        "--key_variable", default="OPENAI_API_KEY", metavar="NAME", help="environment variable of its key"
    )
    _take_settings(parser)


def run_collect(options: argparse.Namespace) -> int:
    """Rolls a model out to episodes on disk."""
    from text2sql_grpo.config import load_config

    if (options.base_url is None) != (options.model is None):
        raise ConfigError("expected --base_url and --model together, got one of them")
    if options.model_path is None and options.config is None:
        raise ConfigError("expected --config FILE with --base_url, got none")
    config = load_config(options.config or _config_around(options.model_path), options.settings)
    options.writes_to = options.out

    _quiet_libraries()
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


def add_warm_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `warm-start`."""
    parser.add_argument("--config", type=Path, required=True, help="its section model says what is trained")
    parser.add_argument("--data", type=Path, required=True, help="chats, as collect --keep writes them")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=_positive, default=2.0, help="default: 2")
    parser.add_argument("--max_steps", type=_count, metavar="N", help="optimiser steps instead of epochs")
    parser.add_argument("--learning_rate", type=_positive, help="default: 1e-5, of an adapter 2e-4")
    parser.add_argument(
        "--batch_size", type=_count, default=16, metavar="N", help="chats a step; default: 16"
    )
    parser.add_argument(
        "--micro_batch_size", type=_count, default=4, metavar="N", help="chats a forward pass; default: 4"
    )
    parser.add_argument("--seed", type=int, default=0, help="of their order; default: 0")
    _take_settings(parser)


def run_warm_start(options: argparse.Namespace) -> int:
    """Trains a model on collected chats."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config, options.settings)
    options.writes_to = options.out

    _quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.warm_start import SupervisedSettings, warm_start

    settings = SupervisedSettings(
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        max_steps=options.max_steps,
    )
    return warm_start(
        config, options.data, options.out, settings, seed=options.seed, console=Console(highlight=False)
    )


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `merge`."""
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter or full model")
    parser.add_argument("--out", type=Path, help="folder to write; default: 'merged' beside the adapter")
    parser.add_argument("--base", help="folder or Hub id of the base; default: the one the adapter names")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument(
        "--quantization",
        default="auto",
        choices=["auto", "none", "4bit"],
        help="of the base in training; default: as the config.yaml beside the adapter says",
    )
    parser.add_argument(
        "--num_samples", type=_count, metavar="N", help="held-out questions to answer before and after"
    )
    parser.add_argument(
        "--config", type=Path, help="of these questions; default: config.yaml beside the adapter"
    )
    _take_settings(parser)


def run_merge(options: argparse.Namespace) -> int:
    """Merges an adapter into its base, checks it, and prints by how much the answers moved."""
    config = None
    if options.num_samples is not None:
        from text2sql_grpo.config import load_config

        config = load_config(options.config or _config_around(str(options.adapter)), options.settings)
    elif options.config or options.settings:
        raise ConfigError("expected --num_samples with --config, for whose questions it is, got none")

    _quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.merge import merge

    out = options.writes_to = options.out or options.adapter.parent / "merged"
    merge(
        options.adapter,
        out,
        base=options.base,
        dtype=options.dtype,
        quantization=options.quantization,
        config=config,
        num_samples=options.num_samples,
        console=Console(highlight=False),
    )
    return 0


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `push`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--folder", type=Path, help="merged model or adapter, inside its run folder")
    what.add_argument("--run_folder", type=Path, metavar="RUN", help="run folder, pushed as a dataset")
    parser.add_argument("--repo_id", required=True, help="name/model; without a name: your own account")
    parser.add_argument("--public", action="store_true", help="make it public (default: private)")
    parser.add_argument(
        "--include",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of a run folder: what else to push, such as adapter or 'checkpoint-*'",
    )
    parser.add_argument(
        "--audit",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="of a model's card: what `audit data --json` printed (default: audit*.json of the run)",
    )


def run_push(options: argparse.Namespace) -> int:
    """Pushes a model, an adapter or a run folder with its card and prints the address."""
    if options.folder is None and options.audit:
        raise ConfigError("expected --audit with --folder, for a model's card, got a run folder")
    if options.run_folder is None and options.include:
        raise ConfigError("expected --include with --run_folder, got a model's folder")
    from text2sql_grpo.publishing.hub import push_run_folder, push_to_hub

    options.writes_to = options.folder or options.run_folder
    private = not options.public
    if options.run_folder is not None:
        url = push_run_folder(options.run_folder, options.repo_id, include=options.include, private=private)
    else:
        url = push_to_hub(options.folder, options.repo_id, private=private, audits=options.audit)
    print(url)
    return 0


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The two verbs of `data`, each with its options."""
    verbs = parser.add_subparsers(required=True, metavar="verb")
    make = _add_verb(verbs, "make", "make questions with checked golds from databases", run_data_make)
    make.add_argument("--databases", type=Path, default=Path("data/databases"), help="folder of databases")
    make.add_argument("--out", type=Path, default=Path("data/questions"), help="folder to write")
    make.add_argument("--seed", type=int, default=0, help="another seed draws other questions")
    compare = _add_verb(verbs, "overlap", "what each file shares with the training files", run_data_overlap)
    compare.add_argument(
        "--questions", type=Path, default=Path("data/questions"), help="folder of question files"
    )


def run_data_make(options: argparse.Namespace) -> int:
    """Writes the question files of a folder of databases."""
    from text2sql_grpo.data.generator import make_questions

    options.writes_to = options.out
    make_questions(options.databases, options.out, seed=options.seed)
    print(f"wrote the questions for {options.databases} to {options.out}")
    return 0


def run_data_overlap(options: argparse.Namespace) -> int:
    """Prints what each question file shares with the files used for training."""
    from text2sql_grpo.data.overlap import format_overlap, overlap

    print(format_overlap(overlap(options.questions)))
    return 0


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """The two verbs of `audit`, each with its options."""
    verbs = parser.add_subparsers(required=True, metavar="verb")
    data = _add_verb(
        verbs, "data", "run every gold of a file; find copies, leaks, long prompts", run_audit_data
    )
    data.add_argument("file", type=Path, help="questions: JSONL, CSV, or the JSON of Spider or BIRD")
    data.add_argument("--db", type=Path, required=True, help="folder of their databases")
    data.add_argument(
        "--against", type=Path, nargs="+", default=[], metavar="FILE", help="questions of other splits"
    )
    data.add_argument("--config", type=Path, help="its environment writes the prompts; default: the defaults")
    data.add_argument("--slow_s", type=_positive, default=1.0, help="seconds a gold may take (default: 1)")
    data.add_argument(
        "--max_prompt_tokens", type=_count, default=8192, metavar="N", help="tokens a prompt may have"
    )
    data.add_argument(
        "--quarantine", type=Path, metavar="OUT", help="write ids and reasons, for data.quarantine"
    )
    data.add_argument(
        "--keep", nargs="+", metavar="REASON", help="no ground for quarantine (default: tie_dependent)"
    )
    data.add_argument("--json", action="store_true", help="print JSON instead of a report")
    reward = _add_verb(verbs, "reward", "wrong answers that a config's reward pays", run_audit_reward)
    reward.add_argument("--config", type=Path, required=True, help="YAML of the run")
    reward.add_argument("--golds", type=_count, default=40, metavar="N", help="of data.train (default: 40)")
    reward.add_argument("--seed", type=int, default=0, help="another seed takes others")
    reward.add_argument("--json", action="store_true", help="print JSON instead of a report")
    _take_settings(reward)


def run_audit_data(options: argparse.Namespace) -> int:
    """Reports what is wrong with a file of questions."""
    from text2sql_grpo.config import load_config
    from text2sql_grpo.jobs.audit import audit_data

    options.writes_to = options.quarantine or Path()
    return audit_data(
        options.file,
        options.db,
        against=options.against,
        environment=load_config(options.config).environment if options.config else None,
        slow_s=options.slow_s,
        max_prompt_tokens=options.max_prompt_tokens,
        quarantine=options.quarantine,
        keep=options.keep,
        as_json=options.json,
    )


def run_audit_reward(options: argparse.Namespace) -> int:
    """Reports which wrong answers a config's reward pays, and which right ones it refuses."""
    from text2sql_grpo.config import load_config
    from text2sql_grpo.jobs.audit import audit_reward

    config = load_config(options.config, options.settings)
    return audit_reward(config, golds=options.golds, seed=options.seed, as_json=options.json)


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.add_argument("--config", type=Path, default=Path("config/quickstart.yaml"), help="YAML of the run")
    parser.add_argument(
        "--accelerate", type=Path, metavar="FILE", help="accelerate config that will start it"
    )
    parser.add_argument("--no-dry-run", action="store_true", help="do not load the model to play one step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a report")
    _take_settings(parser)


def run_doctor(options: argparse.Namespace) -> int:
    """Says whether a run would work here, what it takes, and what to do about it."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config, options.settings)
    options.writes_to = config.run.output_dir

    _quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.doctor import doctor

    return doctor(
        config,
        console=Console(),
        launch=options.accelerate,
        dry_run=not options.no_dry_run,
        as_json=options.json,
    )


def add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mcp`."""
    parser.add_argument(
        "--db", required=True, metavar="URL", help="a path, duckdb:///FILE or postgresql://.."
    )
    parser.add_argument(
        "--transport",
        choices=["stdio", "http"],
        default="stdio",
        help="http: streamable HTTP (default: stdio)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="of http; any other than this machine needs a token"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="of http; 0 for any free one (default: 8000)"
    )
    parser.add_argument("--token", help=f"that http requests must carry; better in ${_TOKEN_VARIABLE}")
    parser.add_argument(
        "--audit_log", type=Path, help="JSONL of every query; default: mcp/ in the cache folder"
    )
    parser.add_argument("--config", type=Path, help="its environment sets the limits; default: the defaults")
    _take_settings(parser)


def run_mcp(options: argparse.Namespace) -> int:
    """Serves one database until standard input ends, or Ctrl-C."""
    from text2sql_grpo.data.databases import cache_folder
    from text2sql_grpo.environment.session import EnvironmentSettings
    from text2sql_grpo.integrations.mcp.audit_log import AuditLog
    from text2sql_grpo.integrations.mcp.server import http_server, listen, make_server, url_of
    from text2sql_grpo.sql import SQLExecutor

    settings = EnvironmentSettings()
    if options.config or options.settings:
        from text2sql_grpo.config import load_config

        if options.config is None:
            raise ConfigError(f"expected --config FILE with settings such as {options.settings[0]}, got none")
        settings = load_config(options.config, options.settings).environment
    options.writes_to = options.audit_log or cache_folder("mcp") / "audit.jsonl"
    token = os.environ.get(_TOKEN_VARIABLE) if options.token is None else options.token
    if token == "":
        raise ConfigError(f"expected a token that is not empty (--token or ${_TOKEN_VARIABLE})")
    audit_log = AuditLog(options.writes_to)
    with SQLExecutor(settings.limits) as executor:
        server = make_server(options.db, executor, audit_log, observation=settings.observation, token=token)
        if options.transport == "stdio":
            server.run("stdio")
            return 0
        listener = listen(options.host, options.port, token=token)
        print(f"serving {url_of(listener)}\naudit log: {audit_log.path}", file=sys.stderr, flush=True)
        http_server(server, options.host).run(sockets=[listener])
    return 0


def _config_around(model_path: str) -> Path:
    """The config of the run that made a model."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(
            f"expected a model folder such as RUN/merged, got none (at {model_path}); "
            "for a model of the Hub add --config FILE"
        )
    config = folder.resolve().parent / "config.yaml"
    if not config.is_file():
        raise ModelError(f"expected a model folder inside its run folder, got no {config}: add --config FILE")
    return config


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="text2sql-grpo",
        description="Train language models to answer questions over a SQL database.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")
    add_train_arguments(_add_verb(verbs, "train", "train, evaluate and merge a model", run_train))
    add_evaluate_arguments(
        _add_verb(verbs, "evaluate", "answer held-out questions with a model", run_evaluate)
    )
    add_compare_arguments(
        _add_verb(verbs, "compare", "compare two models on the same questions", run_compare)
    )
    add_doctor_arguments(_add_verb(verbs, "doctor", "say whether a run would work here", run_doctor))
    add_collect_arguments(_add_verb(verbs, "collect", "roll out any model to episodes on disk", run_collect))
    add_warm_start_arguments(
        _add_verb(verbs, "warm-start", "train a model on collected chats", run_warm_start)
    )
    add_merge_arguments(_add_verb(verbs, "merge", "merge a LoRA adapter into its base, checked", run_merge))
    add_push_arguments(_add_verb(verbs, "push", "push a model or a run to the Hugging Face Hub", run_push))
    data = verbs.add_parser("data", help="make questions, compare question files", allow_abbrev=False)
    add_data_arguments(data)
    audit = verbs.add_parser(
        "audit", help="find what is wrong with questions or a reward", allow_abbrev=False
    )
    add_audit_arguments(audit)
    add_mcp_arguments(_add_verb(verbs, "mcp", "serve a database to MCP clients, read-only", run_mcp))
    options, rest = parser.parse_known_args(argv)
    options.settings = rest
    unknown = [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]
    if rest and (unknown or not options.takes_settings):
        options.parser.error(f"unknown options: {' '.join(unknown or rest)}")
    return options


def _add_verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser, takes_settings=False, writes_to=Path())
    return parser


def _take_settings(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_settings=True)
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [{_SETTING} VALUE ...]"
    parser.epilog = f"{_SETTING} VALUE sets any field of the config, such as --run.seed 1."


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an int >= 1, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"expected an int from 0 to 65535, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value


class _MessageHandler(logging.Handler):
    """Prints to whatever stderr is at the moment: a progress bar on the terminal stands in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
