"""A whole run in seconds: one small database, four questions, a random model of 30,000 weights after SFT.

`python -m tests.tiny_run FOLDER` writes its files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.scripted_policy import SHOP
from tests.tiny_model import write_model

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
        sections: Replace whole sections of the config; without `model`, a random one is written.
    """
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sql").write_text(SHOP, encoding="utf-8")
    questions = str(write_questions(folder / "questions.jsonl"))
    config = {
        "run": {"output_dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "databases": str(folder / "databases"),
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
        "sft": {"max_steps": 60, "batch_size": 4, "learning_rate": 0.01, "look_share": 0.5},
        "grpo": {
            "max_steps": 2,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "learning_rate": 0.001,
            "gradient_checkpointing": False,
            "report_to": "none",
        },
    } | sections
    if "model" not in sections:
        texts = [row[name] for row in QUESTIONS for name in ("question", "gold_sql")]
        texts += ["<sql>", "</sql>", "<answer>", "</answer>", "branch(code, city, staff)"] * 4
        write_model(folder / "model", max_positions=512, texts=texts, vocab_size=400)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def json_lines(path: Path) -> list[Any]:
    """What the lines of a JSONL file hold."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write_config(Path(sys.argv[1]))
