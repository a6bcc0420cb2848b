"""Model card of a run, written from its run folder alone."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from text2sql_grpo.audit.questions import REASONS
from text2sql_grpo.environment.prompts import system_text, user_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import Accuracy, remarks
from text2sql_grpo.files import draft, read_json, sha256
from text2sql_grpo.models.sources import KNOWN_GGUF, SMOLLM2, SMOLLM2_HUB_ID
from text2sql_grpo.phrases import many
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.run_folder import (
    COMPARISON,
    CURVE,
    EVALUATION,
    answers_file,
    read_evaluation,
    read_metrics,
    read_settings,
)
from text2sql_grpo.sql.schema import Column, Schema, Table
from text2sql_grpo.sql.schema_text import schema_text

MARK = "<!-- Written by text2sql-grpo. Remove this line to keep your own edits. -->"
_PEFT_MARK = "# Model Card for Model ID"  # PEFT's empty template next to an adapter
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEMPLATES = Environment(
    loader=PackageLoader("text2sql_grpo.publishing", ""),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["many"] = many
_QUESTION = "How many cities are there?"
_COLUMNS = (
    Column("name", "TEXT", is_nullable=True, is_primary_key=False),
    Column("people", "INTEGER", is_nullable=True, is_primary_key=False),
)
_WORLD = Schema((Table("city", _COLUMNS, foreign_keys=(), n_rows=0),), name="world")


def write_model_card(
    run: Path,
    folder: Path,
    *,
    repo_id: str | None = None,
    audits: Sequence[Path] = (),
) -> Path:
    """Write the `README.md` of a model's or adapter's folder, with the learning curve; returns its path.

    Reads `config.yaml`, `metrics.jsonl`, `evaluation.json`, `comparison.json` and `audit*.json` of `run`; the
    card names missing ones. A comparison of a different model is left out.

    Args:
        repo_id: Name on the Hub for the examples; None uses the folder's path.
        audits: More files of `audit data --json`.

    Raises:
        DataError: One of the files has unexpected content.
    """
    config = read_settings(run)
    is_adapter = (folder / "adapter_config.json").is_file()
    base = _hub_base(run, config)
    name = repo_id.split("/")[-1] if repo_id else run.resolve().name
    evaluation = read_evaluation(run)
    scored = _evaluation(run, folder, evaluation)
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
    text = _TEMPLATES.get_template("model_card.md.jinja").render(
        front_matter=data.to_yaml(),
        mark=MARK,
        name=name,
        is_adapter=is_adapter,
        base=base,
        evaluation=scored,
        temperature=evaluation.get("temperature"),
        steps=[{"reward": None, **line} for line in read_metrics(run) if "step" in line],
        hardware=evaluation.get("hardware"),
        times=[f"{stage} {spent:.0f} s" for stage, spent in (evaluation.get("seconds") or {}).items()],
        curve=CURVE if (run / CURVE).is_file() else None,
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip() if config else None,
        data={key: json.dumps(value) for key, value in (config.get("data") or {}).items()},
        audits=[_audit(path) for path in [*sorted(run.glob("audit*.json")), *audits]],
        rewards=_rewards(config),
        usage=usage_examples(
            config.get("environment") or {},
            repo_id=repo_id or folder.as_posix(),
            base=base,
            is_adapter=is_adapter,
        ),
    )
    if (run / CURVE).is_file():
        copy_from_run(run / CURVE, folder)
    path = folder / "README.md"
    ModelCard(text).save(path)
    return path


def usage_examples(settings: Mapping[str, Any], *, repo_id: str, base: str | None, is_adapter: bool) -> str:
    """Section of a model card, in Markdown.

    Args:
        settings: Section `environment` of the run's config; missing fields have their defaults.
        repo_id: Hub id, or a folder.
        base: Hub id or folder of the adapter's base.
    """
    names = {field.name for field in dataclasses.fields(EnvironmentSettings)} - {"observation", "limits"}
    known = EnvironmentSettings(**{name: settings[name] for name in names if name in settings})
    messages = [{"role": "user", "content": user_text(_QUESTION, schema_text(_WORLD, known.schema_text))}]
    if known.instructions:
        system = system_text(known.protocol, known.max_turns)
        messages.insert(0, {"role": "system", "content": system})
    return _TEMPLATES.get_template("usage_examples.md.jinja").render(
        settings=known,
        messages=pformat(messages, width=100, sort_dicts=False),
        tools=pformat(TOOLS, width=100, sort_dicts=False) if known.protocol == "native" else "",
        repo_id=repo_id,
        base=base,
        is_adapter=is_adapter,
    )


def copy_from_run(path: Path, folder: Path) -> None:
    """Copy a file directly in a run folder into a folder of a model, in place of a file or link there.

    Raises:
        DataError: It is a link out of the run folder.
    """
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise DataError(f"links out of the run folder are not followed: copy the file instead ({path})")
    with draft(folder / path.name) as scratch:
        shutil.copyfile(path, scratch)


def is_written_by_hand(readme: Path) -> bool:
    """True for a README.md that neither this module nor PEFT wrote, or whose mark was removed."""
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8")
    return MARK not in text and _PEFT_MARK not in text


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


def _audit(path: Path) -> dict[str, Any]:
    audit = read_json(path)
    try:
        counts = {reason: (count, REASONS[reason]) for reason, count in audit["counts"].items()}
        return {name: audit[name] for name in ("file", "questions", "quarantined")} | {"counts": counts}
    except (KeyError, AttributeError) as error:
        raise DataError(f"cannot read the JSON of `audit data`: {error!r} ({path})") from error


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


def _evaluation(run: Path, folder: Path, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Rows, remarks and changes of a card; empty without an evaluation."""
    if not evaluation:
        return {}
    changes, compared = [], read_json(run / COMPARISON) if (run / COMPARISON).is_file() else None
    try:
        rows = [row for name, scores in evaluation["sets"].items() for row in _rows(name, scores)]
        few = remarks(evaluation["sets"])
        if change := evaluation.get("change"):
            changes.append(f"Against the start of training: {change['verdict']}")
        own = {path.resolve() for path in (folder, run, run / EVALUATION, answers_file(run))}
        if compared is not None and Path(compared["trained"]).resolve() in own:
            changes.append(f"Against `{compared['base']}` on the same questions: {compared['verdict']}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        places = f"{run / EVALUATION}, {COMPARISON}"
        raise DataError(f"cannot read the scored sets or their comparison: {error!r} ({places})") from error
    return {"rows": rows, "remarks": few, "changes": changes}


def _rows(name: str, scores: dict[str, Any]) -> Iterator[list[str]]:
    parts = {"all": scores["overall"]}
    for group in ("family", "difficulty"):
        parts |= {f"{group}: {key}": part for key, part in scores.get(f"by_{group}", {}).items()}
    for part, gradings in parts.items():
        yield [name, part, *(str(Accuracy.read(gradings[grading])) for grading in ("strict", "official"))]
