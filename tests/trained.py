"""Fail unless a run's two stages learned: `python -m tests.trained RUN BASE`."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def check(run: Path, base: Path) -> None:
    """Losses are not 0, SFT's falls, and each stage moved the weights.

    Raises:
        SystemExit: One of these does not hold.
    """
    (start,) = (Path(os.environ["TEXT2SQL_GRPO_CACHE"]) / "sft").glob("*/model")
    weights = [load_file(folder / "model.safetensors") for folder in (base, start, run / "model")]
    moved = [any(not one[name].equal(other[name]) for name in one) for one, other in pairwise(weights)]
    sft, grpo = (_rows(folder / "metrics.jsonl") for folder in (run / "sft", run))
    facts = {
        "SFT moved the weights": moved[0],
        "GRPO moved the weights": moved[1],
        "the loss of SFT fell": sft[-1]["loss"] < sft[0]["loss"],
        "the loss of GRPO is not 0": any(row["loss"] and row["grad_norm"] for row in grpo),
    }
    wrong = [name for name, holds in facts.items() if not holds]
    if wrong:
        raise SystemExit(f"does not hold in {run}: {', '.join(wrong)}")
    print(", ".join(facts))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    check(Path(sys.argv[1]), Path(sys.argv[2]))
