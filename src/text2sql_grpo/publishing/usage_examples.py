"""Usage examples for a model card: the prompt of its run, in transformers, vLLM and clients."""

import dataclasses
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from text2sql_grpo.environment.prompts import system_text, user_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.sql.schema import Column, Schema, Table
from text2sql_grpo.sql.schema_text import schema_text

_QUESTION = "How many cities are there?"
_COLUMNS = (
    Column("name", "TEXT", is_nullable=True, is_primary_key=False),
    Column("people", "INTEGER", is_nullable=True, is_primary_key=False),
)
_WORLD = Schema((Table("city", _COLUMNS, foreign_keys=(), n_rows=0),), name="world")

_TRANSFORMERS = """\
```python
{imports}

tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
model = {model_class}.from_pretrained("{repo_id}", dtype="auto")
{messages}
prompt = tokenizer.apply_chat_template(
    messages, {tools}add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**prompt, max_new_tokens={max_tokens})
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```"""

_VLLM = """\
```bash
{command}
```"""

_CLIENT = """\
```python
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
{messages}
answer = client.chat.completions.create(
    model="{served}", messages=messages, {tools}max_tokens={max_tokens}, temperature=0
)
print(answer.choices[0].message)
```"""


def usage_examples(settings: Mapping[str, Any], *, repo_id: str, base: str | None, is_adapter: bool) -> str:
    """Section of a model card, in Markdown.

    Args:
        settings: Section `environment` of the run's config; missing fields have their defaults.
        repo_id: Hub id, or a folder.
        base: Hub id or folder of the adapter's base.
    """
    names = {field.name for field in dataclasses.fields(EnvironmentSettings)} - {"observation", "limits"}
    known = EnvironmentSettings(**{name: settings[name] for name in names if name in settings})
    is_native = known.protocol == "native"
    messages = f"messages = {pformat(_messages(known), width=100, sort_dicts=False)}"
    if is_native:
        messages += f"\ntools = {pformat(TOOLS, width=100, sort_dicts=False)}"
    parts = {
        "repo_id": repo_id,
        "served": "text2sql" if is_adapter else repo_id,
        "messages": messages,
        "tools": "tools=tools, " if is_native else "",
        "max_tokens": known.max_turn_tokens,
    }
    model_class = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if is_adapter:
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    command = f"vllm serve {repo_id}"
    if is_adapter:
        command = f"vllm serve {base or 'BASE'} --enable-lora --lora-modules text2sql={repo_id}"
    if is_native:
        command += " --enable-auto-tool-choice --tool-call-parser hermes"
    lines = [
        "With transformers, one turn:",
        _TRANSFORMERS.format(**parts, model_class=model_class, imports=imports),
        "With vLLM, as a server"
        + (" (the parser of Qwen2.5; other families have others):" if is_native else ":"),
        _VLLM.format(command=command),
        "and any client of OpenAI's API:",
        _CLIENT.format(**parts),
        "This is one turn of at most "
        f"{known.max_turns}: run the query that it asks for, add the rows as a message, and ask again until "
        "it submits one. The figures above were measured in this environment, by",
        _VLLM.format(command=f"text2sql-grpo evaluate --model_path {repo_id} --config config.yaml"),
    ]
    return "\n\n".join(lines)


def _messages(settings: EnvironmentSettings) -> list[dict[str, str]]:
    """Prompt of a small question in the run's format."""
    prompt = user_text(_QUESTION, schema_text(_WORLD, settings.schema_text))
    messages = [{"role": "user", "content": prompt}]
    if settings.instructions:
        system = system_text(settings.protocol, settings.max_turns)
        messages.insert(0, {"role": "system", "content": system})
    return messages
