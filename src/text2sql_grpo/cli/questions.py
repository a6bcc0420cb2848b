"""Verbs about questions and rewards."""

import argparse
from pathlib import Path

from text2sql_grpo.cli.options import (
    Verbs,
    add_verb,
    count,
    positive,
    take_settings,
)


def add_verbs(verbs: Verbs) -> None:
    """Adds them, with their options."""
    data = verbs.add_parser("data", help="make questions, compare question files", allow_abbrev=False)
    add_data_arguments(data)
    audit = verbs.add_parser(
        "audit", help="find what is wrong with questions or a reward", allow_abbrev=False
    )
    add_audit_arguments(audit)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The two verbs of `data`, each with its options."""
    verbs = parser.add_subparsers(required=True, metavar="verb")
    make = add_verb(verbs, "make", "make questions with checked golds from databases", run_data_make)
    make.add_argument("--databases", type=Path, default=Path("data/databases"), help="folder of databases")
    make.add_argument("--out", type=Path, default=Path("data/questions"), help="folder to write")
    make.add_argument("--seed", type=int, default=0, help="another seed draws other questions")
    compare = add_verb(verbs, "overlap", "what each file shares with the training files", run_data_overlap)
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
    data = add_verb(
        verbs, "data", "run every gold of a file; find copies, leaks, long prompts", run_audit_data
    )
    data.add_argument("file", type=Path, help="questions: JSONL, CSV, or the JSON of Spider or BIRD")
    data.add_argument("--db", type=Path, required=True, help="folder of their databases")
    data.add_argument(
        "--against", type=Path, nargs="+", default=[], metavar="FILE", help="questions of other splits"
    )
    data.add_argument("--config", type=Path, help="its environment writes the prompts; default: the defaults")
    data.add_argument("--slow_s", type=positive, default=1.0, help="seconds a gold may take (default: 1)")
    data.add_argument(
        "--max_prompt_tokens", type=count, default=8192, metavar="N", help="tokens a prompt may have"
    )
    data.add_argument(
        "--quarantine", type=Path, metavar="OUT", help="write ids and reasons, for data.quarantine"
    )
    data.add_argument(
        "--keep", nargs="+", metavar="REASON", help="no ground for quarantine (default: tie_dependent)"
    )
    data.add_argument("--json", action="store_true", help="print JSON instead of a report")
    reward = add_verb(verbs, "reward", "wrong answers that a config's reward pays", run_audit_reward)
    reward.add_argument("--config", type=Path, required=True, help="YAML of the run")
    reward.add_argument("--golds", type=count, default=40, metavar="N", help="of data.train (default: 40)")
    reward.add_argument("--seed", type=int, default=0, help="another seed takes others")
    reward.add_argument("--json", action="store_true", help="print JSON instead of a report")
    take_settings(reward)


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
