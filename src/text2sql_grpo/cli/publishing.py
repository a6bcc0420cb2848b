"""Verbs that merge a model and send it away."""

import argparse
from pathlib import Path

from text2sql_grpo.cli.options import (
    Verbs,
    add_verb,
    config_around,
    count,
    quiet_libraries,
    take_settings,
)
from text2sql_grpo.errors import ConfigError


def add_verbs(verbs: Verbs) -> None:
    """Adds them, with their options."""
    add_merge_arguments(add_verb(verbs, "merge", "merge a LoRA adapter into its base, checked", run_merge))
    add_push_arguments(add_verb(verbs, "push", "push a model or a run to the Hugging Face Hub", run_push))


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
        "--num_samples", type=count, metavar="N", help="held-out questions to answer before and after"
    )
    parser.add_argument(
        "--config", type=Path, help="of these questions; default: config.yaml beside the adapter"
    )
    take_settings(parser)


def run_merge(options: argparse.Namespace) -> int:
    """Merges an adapter into its base, checks it, and prints by how much the answers moved."""
    config = None
    if options.num_samples is not None:
        from text2sql_grpo.config import load_config

        config = load_config(options.config or config_around(str(options.adapter)), options.settings)
    elif options.config or options.settings:
        raise ConfigError("expected --num_samples with --config, for whose questions it is, got none")

    quiet_libraries()
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
