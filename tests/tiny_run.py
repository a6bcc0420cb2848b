"""A whole run in seconds: one small database, four questions, a policy of 30,000 weights."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.scripted_policy import SHOP

_LOOK = "SELECT code FROM branch"
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": f"look-{said}",
        "database": "shop",
        "question": f"Staff of the {said} branch?",
        "gold_sql": f"SELECT staff FROM branch WHERE code = '{code}'",
        "look_sql": _LOOK,
        "guess_sql": f"SELECT staff FROM branch WHERE code = '{said}'",
        "family": "lookup",
    }
    for said, code in (("Lisbon", "LIS-02"), ("Porto", "OPO-01"))
] + [
    {"id": "count", "database": "shop", "question": "Branches?", "gold_sql": "SELECT COUNT(*) FROM branch"},
    {"id": "cities", "database": "shop", "question": "All cities?", "gold_sql": "SELECT city FROM branch"},
]


def write_questions(path: Path, rows: list[dict[str, Any]] = QUESTIONS) -> Path:
    """A question file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_config(folder: Path, **sections: Any) -> Path:
    """Databases, questions and `tiny.yaml` in a folder; its run folder is `run` beside them.

    Args:
        sections: Replace whole sections of the config.
    """
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sql").write_text(SHOP, encoding="utf-8")
    questions = str(write_questions(folder / "questions.jsonl"))
    config = {
        "run": {"output_dir": str(folder / "run")},
        "model": {
            "dtype": "float32",
            "tiny": {
                "vocab_size": 330,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "intermediate_size": 64,
                "max_positions": 512,
            },
        },
        "data": {
            "databases": str(folder / "databases"),
            "demonstrations": questions,
            "train": questions,
            "test": {"test_values": questions},
        },
        "environment": {
            "schema_text": "compact",
            "instructions": False,
            "max_turns": 2,
            "max_turn_tokens": 24,
            "max_episode_tokens": 120,
        },
        "rewards": {"execution": 1.0, "executes": 0.1, "format": 0.1},
        "warm_start": {
            "steps": 60,
            "practice_steps": 40,
            "renamed_copies": 0,
            "rows_per_step": 1,
            "demonstrations_per_row": 4,
            "learning_rate": 0.01,
        },
        "grpo": {
            "max_steps": 2,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "learning_rate": 0.001,
            "report_to": "none",
        },
    } | sections
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def json_lines(path: Path) -> list[Any]:
    """What the lines of a JSONL file hold."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
