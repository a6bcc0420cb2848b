"""A folder to train on a database of one's own: words, questions and a config fit for this machine."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from text2sql_grpo.bundled import ROOT
from text2sql_grpo.files import parse_yaml, write_text
from text2sql_grpo.sql.schema_text import compact_text, estimated_tokens
from text2sql_grpo.synthesis.generator import QuestionSet
from text2sql_grpo.synthesis.profile import SAMPLE_ROWS, TIMEOUT_S, Profile, TableProfile

_GIB = 1 << 30

SETS = (
    QuestionSet("test_values", "train", 200, 0, "held_out"),
    QuestionSet("test_templates", "train", 200, 0, "seen", is_held_out_templates=True),
    QuestionSet("dev", "train", 120, 0, "seen", gold_thirds=(2,)),
    QuestionSet("train", "train", 2000, 0, "seen", gold_thirds=(0,)),
    QuestionSet("demonstrations", "train", 3000, 0, "seen", gold_thirds=(1,)),
)
"""Questions of one database: by shape and by value held out, to choose a step on, and to learn from."""

SFT_STEPS, GRPO_STEPS = 40, 6
"""Steps on demonstrations and of GRPO: twenty minutes each on two cores."""
_CODER, _CODER_GIB = "qwen2.5_coder_0.5b_cpu", 15.0
_CODER_MINUTES = 20  # the slower of two runs (EXPERIMENTS.md)
_CODER_SFT_STEPS, _CODER_GRPO_STEPS = 16, 8
_SFT_STEP_S, _GRPO_STEP_S, _CORES = 31, 190, 2  # of config/quickstart.yaml on two busy cores with AVX2 alone
_PROMPT_TOKENS = 600


@dataclass(frozen=True)
class Size:
    """A shipped config, and what it needs.

    Attributes:
        example: Its name in `config/`.
        gpu_gib: Memory of the GPU that it needs; 0 for none.
        need: Memory for people.
    """

    example: str
    gpu_gib: float
    need: str


_SIZES = (
    Size("qwen2.5_coder_7b_qlora", 22.0, "15.6 GiB of the GPU, estimated"),
    Size("qwen2.5_coder_1.5b_qlora", 14.0, "10.7 GiB of the GPU, estimated"),
    Size("qwen2.5_coder_0.5b_lora", 7.0, "5.8 GiB of the GPU, estimated"),
    Size(_CODER, 0.0, "7.5 GiB, measured"),
    Size("quickstart", 0.0, "5.5 GB, measured"),
)


def can_train_coder(hardware: Mapping[str, Any]) -> bool:
    """True for a machine without a GPU whose memory suffices for the coder of half a billion weights."""
    return hardware["type"] == "cpu" and bool(hardware["memory_bytes"] >= _CODER_GIB * _GIB)


def size_for(hardware: Mapping[str, Any], *, has_coder: bool = False) -> Size:
    """Largest shipped config that a machine can train.

    Args:
        has_coder: Without a GPU, take the config of an instruct model instead of the quickstart's.

    >>> size_for({"type": "cuda", "memory_bytes": 24 * _GIB}).example, size_for({"type": "cpu"}).example
    ('qwen2.5_coder_7b_qlora', 'quickstart')
    """
    memory = hardware["memory_bytes"] / _GIB if hardware["type"] == "cuda" else 0.0
    return next(size for size in _SIZES if memory >= size.gpu_gib and (has_coder or size.example != _CODER))


def minutes_for(size: Size, cores: int) -> float | None:
    """Estimate of a run's minutes, from those of the quickstart on two cores; None for a GPU."""
    if size.gpu_gib:
        return None
    minutes = (SFT_STEPS * _SFT_STEP_S + GRPO_STEPS * _GRPO_STEP_S) / 60
    return (_CODER_MINUTES if size.example == _CODER else minutes) * _CORES / max(1, min(cores, 8))


def write_config(
    path: Path,
    profile: Profile,
    size: Size,
    minutes: float | None,
    *,
    database: str,
    files: list[str],
    model: str = "",
) -> bool:
    """Write the config of a run on a database; one that is there stays. True if it was written.

    Args:
        path: The file, next to the folder `questions`.
        database: The database as the user named it.
        files: Names of the question files that were made.
        model: The model to train; empty for that of the shipped config.
    """
    if path.exists():
        return False
    folder = path.parent
    tree = parse_yaml((ROOT / "config" / f"{size.example}.yaml").read_text("utf-8"))
    tree["run"]["output_dir"] = str(folder / "run")
    questions = folder / "questions"
    tests = [name for name in ("test_values", "test_templates") if name in files]
    tree["data"] = {
        "databases": database,
        "train": str(questions / "train.jsonl"),
        "test": {name: str(questions / f"{name}.jsonl") for name in tests},
        "test_samples": 60,
    }
    if "dev" in files:
        tree["data"]["dev"] = str(questions / "dev.jsonl")
        tree.setdefault("evaluation", {})["keep"] = "best"  # the start where no step of GRPO is better
    else:
        for name in ("every", "keep"):
            tree.get("evaluation", {}).pop(name, None)
    tree.pop("selection", None)
    tree["model"].pop("frozen_layers", None)  # the model may have fewer
    if estimated_tokens(compact_text(profile.schema)) > _PROMPT_TOKENS and not size.gpu_gib:
        tree["environment"] |= {"max_schema_tokens": _PROMPT_TOKENS, "max_episode_tokens": 1000}
    if any(one.n_rows > SAMPLE_ROWS for one in profile.tables.values()):  # gold queries may take as long
        tree["environment"].setdefault("limits", {})["timeout_s"] = 2 * TIMEOUT_S
    if size.example == _CODER:
        tree["grpo"] |= {"max_steps": _CODER_GRPO_STEPS, "gradient_accumulation_steps": 4, "warmup_steps": 1}
        tree["evaluation"] |= {"every": 4, "schedule_samples": 30} if "dev" in files else {}
    if size.example == "quickstart":
        tree["model"]["path"] = str(folder / "start")
        tree["grpo"]["max_steps"] = GRPO_STEPS
    if model:
        tree["model"]["path"] = model
    if not size.gpu_gib and "demonstrations" in files:
        steps = _CODER_SFT_STEPS if size.example == _CODER else SFT_STEPS
        tree["sft"] = {
            "questions": str(questions / "demonstrations.jsonl"),
            "look_share": 0.35,
            "max_steps": steps,
            "batch_size": 24,
            "group_size": 6,
            "learning_rate": 2e-4,
            "save_steps": 10,
            "evaluate_every": steps // 2,
        }
    time = "measured by `text2sql-grpo doctor`" if minutes is None else f"about {minutes:.0f} minutes"
    header = (
        f"# Made for {database} by `text2sql-grpo init`; edit it as you like, it is never written over.\n"
        f"# Command:   text2sql-grpo train --config {shlex.quote(str(path))}\n"
        f"# Follows:   config/{size.example}.yaml (text2sql-grpo config --example {size.example})\n"
        f"# Memory:    {size.need}\n# Time:      {time}\n"
    )
    write_text(path, header + yaml.safe_dump(tree, allow_unicode=True, sort_keys=False, width=110))
    return True


def next_commands(folder: Path, size: Size, *, database: str, question: str) -> list[str]:
    """The commands behind `init`, in order, quoted for a shell: a name may hold `$(..)`."""
    config = ["--config", str(folder / "config.yaml")]
    start = ["merge", "--adapter", "data/start", "--out", str(folder / "start")]
    model = ["--model", str(folder / "run" / "merged"), "--db", database]
    commands = [
        start if size.example == "quickstart" else ["doctor", *config],
        ["train", *config],
        ["ask", question, *model],
    ]
    return [shlex.join(["text2sql-grpo", *command]) for command in commands]


def described(profile: Profile) -> Iterator[tuple[str, str, str, str]]:
    """Name, number of rows, columns by kind, and keys of each table."""
    for name, one in profile.tables.items():
        kinds = [found.kind or "other" for found in one.columns.values()]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        yield name, str(one.n_rows), counted, ", ".join(_keys(one))


def _keys(one: TableProfile) -> Iterator[str]:
    if one.key:
        yield one.key
    for key in one.table.foreign_keys:
        mined = "" if key in one.declared else " (mined)"
        yield f"{', '.join(key.columns)} -> {key.table}{mined}"
