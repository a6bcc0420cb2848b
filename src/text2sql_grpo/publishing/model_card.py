"""The model card of a run, written from its run folder alone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from text2sql_grpo.errors import DataError

_MARK = "<!-- Written by text2sql-grpo. Remove this line to keep your own edits. -->"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GRADINGS = ("strict", "official")

_CARD = """\
---
{front_matter}
---
{mark}

# {name}

A language model that answers questions over a SQL database. It was trained by reinforcement learning
(GRPO, on TRL) in an environment where it may run read-only queries, see their results, and then submit
its final SQL.

## Evaluation

{evaluation}

## How it was trained

{training}

## How to use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
model = AutoModelForCausalLM.from_pretrained("{repo_id}", dtype="auto")
question = "CREATE TABLE city (name TEXT, people INT);\\nHow many cities are there?"
messages = [{{"role": "user", "content": question}}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**prompt, max_new_tokens=64)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))
```

This is one bare turn. The figures above were measured in the environment it was trained in, with the
system prompt, protocol and turns of the config above; elsewhere expect less.

## Limits

- The SQL can be wrong though it runs. Check an answer before you rely on it.
- Run its queries with read-only rights and with limits on time and rows: it writes SQL, nothing guards it.
- It knows the dialect and the kind of schema it was trained on; others were measured only where listed above.
"""


def write_model_card(
    run: Path, merged: Path, *, repo_id: str | None = None, license_id: str | None = None
) -> Path:
    """Path of the `README.md` written into `merged`.

    Reads `config.yaml`, `metrics.jsonl` and `evaluation.json` of `run`; a missing one is said to be missing.

    Args:
        run: The run folder.
        merged: The merged model folder.
        repo_id: Name on the Hub for the example; None uses the folder's path.
        license_id: Hub license id; None leaves the field out where a base from the Hub has its own
            license, and is `apache-2.0` for a policy trained from nothing.

    Raises:
        DataError: One of the three files is not what it should be.
    """
    config = _read_config(run / "config.yaml")
    base = _hub_base(run, config)
    is_from_nothing = bool((config.get("model") or {}).get("tiny"))
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["text-to-sql", "grpo", "trl"],
        base_model=base,
        license=license_id or ("apache-2.0" if is_from_nothing else None),
    )
    text = _CARD.format(
        front_matter=data.to_yaml(),
        mark=_MARK,
        name=repo_id.split("/")[-1] if repo_id else run.resolve().name,
        repo_id=repo_id or merged.as_posix(),
        evaluation=_evaluation(run / "evaluation.json"),
        training=_training(run, config, base),
    )
    path = merged / "README.md"
    ModelCard(text).save(path)
    return path


def is_written_by_hand(readme: Path) -> bool:
    """True for a README.md that this module did not write, or that was taken over from it."""
    return readme.is_file() and _MARK not in readme.read_text(encoding="utf-8")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DataError(f"expected YAML: {error} ({path})") from error
    if not isinstance(config, dict):
        raise DataError(f"expected a YAML mapping, got {type(config).__name__} ({path})")
    return config


def _hub_base(run: Path, config: dict[str, Any]) -> str | None:
    """Hub id of the model the run started from; None for a folder or a policy made on the spot."""
    base = (config.get("model") or {}).get("path")
    adapter_config = run / "adapter" / "adapter_config.json"
    if base is None and adapter_config.is_file():
        base = _read_json(adapter_config).get("base_model_name_or_path")
    is_hub_id = isinstance(base, str) and _HUB_ID.fullmatch(base) and not Path(base).exists()
    return base if is_hub_id else None


def _training(run: Path, config: dict[str, Any], base: str | None) -> str:
    started_from = f"[{base}](https://huggingface.co/{base})" if base else "the model of the config below"
    parts = [f"Started from {started_from}."]
    steps = [line for line in _read_lines(run / "metrics.jsonl") if "step" in line]
    if steps:
        parts[0] += f" Trained for {max(line['step'] for line in steps)} steps."
        rewards = [line["reward"] for line in steps if isinstance(line.get("reward"), int | float)]
        if rewards:
            parts[0] += f" Mean reward: {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last."
    else:
        parts[0] += " The run kept no record of its steps."
    data = config.get("data") or {}
    if data:
        parts.append("Data:\n\n" + "\n".join(f"- {key}: `{json.dumps(data[key])}`" for key in data))
    if config:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip()
        parts.append(f"<details><summary>The whole config</summary>\n\n```yaml\n{text}\n```\n\n</details>")
    return "\n\n".join(parts)


def _evaluation(path: Path) -> str:
    if not path.is_file():
        return "Not evaluated."
    evaluation = _read_json(path)
    try:
        rows = [row for name, scores in evaluation["sets"].items() for row in _rows(name, scores)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"expected scored sets, came upon {error!r} ({path})") from error
    temperature = evaluation.get("temperature")
    how = {None: "", 0: " Greedy."}.get(temperature, f" Sampled at temperature {temperature}.")
    intro = (
        "Share of held-out questions whose submitted SQL returns the right result, with its 95% interval."
        " Strict: same rows as often, order where the question asks for it, same columns."
        f" Official: the benchmark's own comparison of sets.{how}"
    )
    return "\n".join([intro, "", "| set | part | strict | official |", "| --- | --- | --- | --- |", *rows])


def _rows(name: str, scores: dict[str, Any]) -> Iterator[str]:
    parts = {"all": scores["overall"]}
    for group in ("by_family", "by_difficulty"):
        parts |= {f"{group.removeprefix('by_')}: {key}": part for key, part in scores.get(group, {}).items()}
    for part, gradings in parts.items():
        cells = " | ".join(_cell(gradings[grading]) for grading in _GRADINGS)
        yield f"| {name} | {part} | {cells} |"


def _cell(score: dict[str, Any]) -> str:
    low, high = score["interval"]
    return f"{score['accuracy']:.1%} ({score['correct']}/{score['total']}; {low:.1%} to {high:.1%})"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"expected JSON: {error} ({path})") from error
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object, got {type(content).__name__} ({path})")
    return content


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise DataError(f"expected one JSON object a line: {error} ({path})") from error
