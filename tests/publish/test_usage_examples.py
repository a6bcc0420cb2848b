"""What a model card shows is run: with a tiny model, and by a client against an endpoint of this machine."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chat_endpoint import Answer, greedy, served
from tests.tiny_model import write_adapter, write_model
from text2sql_grpo.publishing.model_card import usage_examples
from text2sql_grpo.rollout.chat_format import ChatFormat

SETTINGS: dict[str, Any] = {"max_turn_tokens": 6, "max_turns": 3, "schema_text": "compact"}


def blocks(text: str) -> list[str]:
    """The code of a Markdown text."""
    return re.findall(r"```(?:python|bash)\n(.*?)\n```", text, re.DOTALL)


def test_transformers_example_is_run_with_the_prompt_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", max_positions=1024)
    text = usage_examples(SETTINGS, repo_id=str(model), base=None, is_adapter=False)
    variables: dict[str, Any] = {}

    exec(blocks(text)[0], variables)

    assert variables["output"].shape[1] - variables["prompt"]["input_ids"].shape[1] <= 6
    assert capsys.readouterr().out.endswith("\n")
    assert [message["role"] for message in variables["messages"]] == ["system", "user"]
    assert "You have 3 turns." in variables["messages"][0]["content"]
    assert variables["messages"][1]["content"] == "table city.name, city.people\n\nHow many cities are there?"
    assert "one turn of at most 3" in text


def test_adapter_example_is_run(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model", max_positions=1024)
    adapter = write_adapter(tmp_path / "adapter", base)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    text = usage_examples(SETTINGS, repo_id=str(adapter), base=str(base), is_adapter=True)

    exec(blocks(text)[0], variables := {})

    assert variables["output"].shape[0] == 1
    assert any("lora_A" in name for name, _ in variables["model"].named_parameters())


def test_client_example_is_run_against_an_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai", reason="needs openai")
    folder = write_model(tmp_path / "model", max_positions=1024)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return greedy(model, ChatFormat(tokenizer))(request)

    client = blocks(usage_examples(SETTINGS, repo_id="me/sql", base=None, is_adapter=False))[2]
    with served(answer) as url:
        exec(client.replace("http://localhost:8000/v1", url), variables := {})
        variables["client"].close()
    assert "ChatCompletionMessage" in capsys.readouterr().out
    assert (requests[0]["model"], requests[0]["max_tokens"]) == ("me/sql", 6)
    assert requests[0]["messages"] == variables["messages"]


def test_native_protocol_offers_its_tools_everywhere() -> None:
    text = usage_examples({"protocol": "native"}, repo_id="me/sql", base=None, is_adapter=False)
    transformers, server, client, _ = blocks(text)

    for code in (transformers, client):
        compile(code, "example", "exec")
        assert "'name': 'submit_sql'" in code and "tools=tools" in code
    assert server == "vllm serve me/sql --enable-auto-tool-choice --tool-call-parser hermes"
    assert "without other text: run_sql" in transformers


def test_an_adapter_is_served_on_its_base() -> None:
    text = usage_examples({}, repo_id="me/sql", base="Qwen/base", is_adapter=True)
    _, server, client, evaluation = blocks(text)
    assert server == "vllm serve Qwen/base --enable-lora --lora-modules text2sql=me/sql"
    assert 'model="text2sql"' in client
    assert evaluation == "text2sql-grpo evaluate --model_path me/sql --config config.yaml"
