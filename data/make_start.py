"""Make `data/start`, the supervised start of the quickstart, from the folder of a finished SFT stage.

Run: python data/make_start.py runs/sft    (`make sft` trains the stage and calls this)

The adapter is stored in bfloat16, which halves it; `metrics.jsonl` holds loss and learning rate of each step.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FIGURES = ("step", "loss", "learning_rate", "tokens")
START = Path(__file__).parent / "start"


def make_start(stage: Path, start: Path = START) -> None:
    """Write the adapter, its config and the figures of its training."""
    start.mkdir(parents=True, exist_ok=True)
    weights = load_file(stage / "adapter" / "adapter_model.safetensors")
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        start / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((stage / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    (start / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    with (start / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "loss" in row:  # an optimiser step, not an evaluation
                file.write(json.dumps({name: round(row[name], 9) for name in FIGURES}) + "\n")


if __name__ == "__main__":
    make_start(Path(sys.argv[1]))
