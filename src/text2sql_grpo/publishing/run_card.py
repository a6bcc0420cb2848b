"""Dataset card of a run folder."""

from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from text2sql_grpo.publishing.model_card import MARK

_FILES = {
    "config.yaml": "the settings",
    "evaluation.json": "accuracy on held-out sets, with intervals",
    "comparison.json": "two models on the same questions",
}
_TABLES = {
    "rollouts": "every episode of training, whole: messages, actions, tokens, scores",
    "metrics": "one line a training step",
    "evaluation": "every answer to held-out questions after training",
    "evaluation-before": "the same before training",
}


def write_run_card(run: Path) -> Path:
    """Write the `README.md` of a run folder; returns its path."""
    found = {name: about for name, about in _TABLES.items() if (run / f"{name}.jsonl").is_file()}
    data = DatasetCardData(
        tags=["text-to-sql", "grpo", "rollouts"],
        configs=[{"config_name": name, "data_files": f"{name}.jsonl"} for name in found],
    )
    lines = [f"- `{name}.jsonl`: {about}" for name, about in found.items()]
    lines += [f"- `{name}`: {about}" for name, about in _FILES.items() if (run / name).is_file()]
    curve = "![Learning curve](learning_curve.png)\n\n" if (run / "learning_curve.png").is_file() else ""
    text = (
        f"---\n{data.to_yaml()}\n---\n{MARK}\n\n# {run.resolve().name}\n\n"
        "Config, metrics and episodes of a training run of text2sql-grpo.\n\n"
        f"{curve}{chr(10).join(lines)}\n"
    )
    path = run / "README.md"
    DatasetCard(text).save(path)
    return path
