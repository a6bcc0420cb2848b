"""Model card of a run, written from its run folder alone."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from text2sql_grpo.audit.questions import REASONS
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import remarks
from text2sql_grpo.files import parse_yaml, read_json, sha256
from text2sql_grpo.models.sources import KNOWN_GGUF, SMOLLM2, SMOLLM2_HUB_ID
from text2sql_grpo.publishing.usage_examples import usage_examples
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.run_folder import COMPARISON, CONFIG, CURVE, EVALUATION, read_evaluation, read_metrics

MARK = "<!-- Written by text2sql-grpo. Remove this line to keep your own edits. -->"
_PEFT_MARK = "# Model Card for Model ID"  # PEFT's empty template next to an adapter
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GRADINGS = ("strict", "official")

_CARD = """\
---
{front_matter}
---
{mark}

# {name}

{about} It was trained by reinforcement learning (GRPO, on TRL) in an environment where it may run read-only
queries, see their results, and then submit its final SQL.

## Evaluation

{evaluation}

## How it was trained

{training}

## Data

{data}

## Rewards

{rewards}

## How to use it

{usage}

## Limits

- The SQL can be wrong though it runs. Check an answer before you rely on it.
- Run its queries with read-only rights and with limits on time and rows: it writes SQL, nothing guards it.
- It knows the dialect and the kind of schema it was trained on; others were measured only where listed above.
"""
_MODEL = "A language model that answers questions over a SQL database."
_ADAPTER = "A LoRA adapter{of} for answering questions over a SQL database."


def write_model_card(
    run: Path,
    folder: Path,
    *,
    repo_id: str | None = None,
    audits: Sequence[Path] = (),
) -> Path:
    """Write the `README.md` of a model's or adapter's folder, with the learning curve; returns its path.

    Reads `config.yaml`, `metrics.jsonl`, `evaluation.json`, `comparison.json` and `audit*.json` of `run`; the
    card names missing ones.

    Args:
        repo_id: Name on the Hub for the examples; None uses the folder's path.
        audits: More files of `audit data --json`.

    Raises:
        DataError: One of the files has unexpected content.
    """
    config = _read_config(run / CONFIG)
    is_adapter = (folder / "adapter_config.json").is_file()
    base = _hub_base(run, config)
    name = repo_id.split("/")[-1] if repo_id else run.resolve().name
    evaluation = read_evaluation(run)
    evaluation_text = _evaluation(run, evaluation)
    strict = {name: scores["overall"]["strict"] for name, scores in evaluation.get("sets", {}).items()}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=name_of_set,
            dataset_name=name_of_set,
            metric_type="accuracy",
            metric_name="strict execution accuracy",
            metric_value=one["accuracy"],
            metric_args={"correct": one["correct"], "interval_95_by_database": one.get("interval")},
            dataset_args={"questions": one["total"], "databases": len(one.get("by_database", {}))},
        )
        for name_of_set, one in strict.items()
    ]
    data = ModelCardData(
        model_name=name,
        eval_results=results or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["text-to-sql", "grpo", "trl", *(["lora"] if is_adapter else [])],
        base_model=base,
        license="apache-2.0" if base in KNOWN_GGUF.values() else None,  # else the base's own, unknown here
    )
    text = _CARD.format(
        front_matter=data.to_yaml(),
        mark=MARK,
        name=name,
        about=_ADAPTER.format(of=f" of {base}" if base else "") if is_adapter else _MODEL,
        evaluation=evaluation_text,
        training=_training(run, config, base, evaluation),
        data=_data(config, [*sorted(run.glob("audit*.json")), *audits]),
        rewards=_rewards(config),
        usage=usage_examples(
            config.get("environment") or {},
            repo_id=repo_id or folder.as_posix(),
            base=base,
            is_adapter=is_adapter,
        ),
    )
    if (run / CURVE).is_file():
        shutil.copyfile(run / CURVE, folder / CURVE)
    path = folder / "README.md"
    ModelCard(text).save(path)
    return path


def is_written_by_hand(readme: Path) -> bool:
    """True for a README.md that neither this module nor PEFT wrote, or whose mark was removed."""
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8")
    return MARK not in text and _PEFT_MARK not in text


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"cannot parse the YAML: {error} ({path})") from error
    if not isinstance(config, dict):
        raise DataError(f"a config must be a YAML mapping, got {type(config).__name__} ({path})")
    return config


def _hub_base(run: Path, config: dict[str, Any]) -> str | None:
    """Hub id of the model that the run started from; None for a folder or an unknown file."""
    base = (config.get("model") or {}).get("path")
    adapter_config = run / "adapter" / "adapter_config.json"
    if base is None and adapter_config.is_file():
        base = read_json(adapter_config).get("base_model_name_or_path")
    base = SMOLLM2_HUB_ID if base == SMOLLM2 else base
    if isinstance(base, str) and base.endswith(".gguf") and Path(base).is_file():
        return KNOWN_GGUF.get(sha256(Path(base)))
    is_hub_id = isinstance(base, str) and _HUB_ID.fullmatch(base) and not Path(base).exists()
    return base if is_hub_id else None


def _training(run: Path, config: dict[str, Any], base: str | None, evaluation: dict[str, Any]) -> str:
    started_from = f"[{base}](https://huggingface.co/{base})" if base else "the model of the config below"
    parts = [f"Started from {started_from}."]
    steps = [line for line in read_metrics(run) if "step" in line]
    if steps:
        parts[0] += f" Trained for {max(line['step'] for line in steps)} steps."
        rewards = [line["reward"] for line in steps if isinstance(line.get("reward"), int | float)]
        if rewards:
            parts[0] += f" Mean reward: {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last."
    else:
        parts[0] += " The run kept no record of its steps."
    hardware = evaluation.get("hardware")
    if hardware:
        parts.append(_hardware(hardware, evaluation.get("seconds") or {}))
    if (run / CURVE).is_file():
        parts.append(f"![Reward, accuracy and looks by training step]({CURVE})")
    if config:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip()
        parts.append(f"<details><summary>The whole config</summary>\n\n```yaml\n{text}\n```\n\n</details>")
    return "\n\n".join(parts)


def _hardware(hardware: dict[str, Any], seconds: dict[str, float]) -> str:
    memory = (hardware.get("memory_bytes") or 0) / (1 << 30)
    device = f"{hardware.get('devices', 1)} x {hardware['name']}" if "name" in hardware else hardware["type"]
    text = f"Hardware: {device}, {memory:.0f} GiB, {hardware['cpu_cores']} CPU cores."
    if seconds:
        text += " Time: " + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()) + "."
    return text


def _data(config: dict[str, Any], audits: Sequence[Path]) -> str:
    data = config.get("data") or {}
    parts = ["\n".join(f"- {key}: `{json.dumps(data[key])}`" for key in data)] if data else ["Not recorded."]
    if not audits:
        parts.append("No audit of the questions is at hand; the run itself executed every gold query.")
    for path in audits:
        audit = read_json(path)
        try:
            found = audit["counts"]
            rows = [f"| {reason} | {found[reason]} | {REASONS[reason]} |" for reason in found]
            intro = (
                f"Audit of `{audit['file']}`: {audit['questions']} questions, {audit['quarantined']} for "
                "quarantine."
            )
        except (KeyError, TypeError) as error:
            raise DataError(f"cannot read the JSON of `audit data`: {error!r} ({path})") from error
        table = ["", "", "| reason | questions | meaning |", "| --- | --- | --- |", *rows]
        parts.append(intro + ("\n".join(table) if rows else " Nothing was found."))
    return "\n\n".join(parts)


def _rewards(config: dict[str, Any]) -> str:
    if not config.get("rewards"):
        return "Not recorded."
    if any(":" in name for name in config["rewards"]):  # of modules that may not be at hand
        lines = [f"- `{name}`: {setting}" for name, setting in config["rewards"].items()]
        return "\n".join(["Settings of the rewards; the reward is a weighted sum of scores.", "", *lines])
    mix = RewardMix(config["rewards"])
    lines = [f"- `{name}`: {weight:g}" for name, weight in mix.weights.items()]
    preset = f", preset `{mix.preset}`" if mix.preset else ""
    lines = [f"Weights of the named scores{preset}; the reward is their sum.", "", *lines]
    return "\n".join([*lines, "", f"Known weakness: {mix.warning}"] if mix.warning else lines)


def _evaluation(run: Path, evaluation: dict[str, Any]) -> str:
    if not evaluation:
        return "Not evaluated."
    path = run / EVALUATION
    try:
        rows = [row for name, scores in evaluation["sets"].items() for row in _rows(name, scores)]
        few = "\n".join(f"- `{name}`: {text}" for name, text in remarks(evaluation["sets"]).items())
        change = (
            evaluation.get("change") and f"Against the start of training: {evaluation['change']['verdict']}"
        )
        merge = evaluation.get("merge_check")
        merged = merge and (
            f"Merging: of {merge['before']['total']} questions {merge['other_sql']} were answered with"
            f" different SQL after it; {merge['before']['correct']} right before,"
            f" {merge['after']['correct']} after."
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"cannot read the scored sets: {error!r} ({path})") from error
    temperature = evaluation.get("temperature")
    how = {None: "", 0: " Greedy."}.get(temperature, f" Sampled at temperature {temperature}.")
    intro = (
        "Share of held-out questions whose submitted SQL returns the right result, with its 95% interval:"
        " by database, since questions about one database are not independent, and by question."
        " Strict: same rows as often, order where the question asks for it, same columns."
        f" Official: the benchmark's own comparison of sets.{how}"
    )
    table = "\n".join(["| set | part | strict | official |", "| --- | --- | --- | --- |", *rows])
    parts = [intro, table, few, change, merged, _compared(run / COMPARISON)]
    return "\n\n".join(part for part in parts if part)


def _compared(path: Path) -> str | None:
    if not path.is_file():
        return None
    comparison = read_json(path)
    try:
        return f"Against `{comparison['base']}` on the same questions: {comparison['verdict']}"
    except KeyError as error:
        raise DataError(f"cannot read the comparison: {error!r} ({path})") from error


def _rows(name: str, scores: dict[str, Any]) -> Iterator[str]:
    parts = {"all": scores["overall"]}
    for group in ("by_family", "by_difficulty"):
        parts |= {f"{group.removeprefix('by_')}: {key}": part for key, part in scores.get(group, {}).items()}
    for part, gradings in parts.items():
        cells = " | ".join(_cell(gradings[grading]) for grading in _GRADINGS)
        yield f"| {name} | {part} | {cells} |"


def _cell(score: dict[str, Any]) -> str:
    text = f"{score['accuracy']:.1%} ({score['correct']}/{score['total']}; {_bounds(score['interval'])}"
    if len(score.get("by_database", {})) > 1:
        text += f"; by question {_bounds(score['naive_interval'])}"
    return f"{text})"


def _bounds(interval: list[float]) -> str:
    low, high = interval
    return f"{low:.1%} to {high:.1%}"
