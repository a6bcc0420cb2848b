"""A real vLLM server on the CPU: the same answers as by the engine `slots`, in tags and by parsed tool calls.

The server has an environment of its own; $TEXT2SQL_VLLM_PYTHON names its interpreter (docs/scale.md).
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.environment.protocols import TOOLS

openai = pytest.importorskip("openai", reason="needs openai (pip install openai)")
pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "DO_NOT_TRACK": "1"}
OPTIONS = (
    "--dtype float32 --max-model-len 2048 --enforce-eager --enable-auto-tool-choice --tool-call-parser hermes"
)


@contextmanager
def vllm(python: str, model: Path, folder: Path) -> Iterator[str]:
    """Base URL of a server of a model, while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *OPTIONS.split()]
    command += ["--chat-template", str(folder / "template.jinja")]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, env=_environment(), stdout=file, stderr=file)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS


def _wait(server: subprocess.Popen[bytes], health: str, log: Path, timeout_s: float = 300) -> None:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        assert server.poll() is None, log.read_text()[-4_000:]
        try:
            urlopen(health, timeout=5).close()
            return
        except (URLError, TimeoutError):
            time.sleep(1)
    pytest.fail(f"no server after {timeout_s} s: {log.read_text()[-4_000:]}")


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_vllm_server_plays_as_the_engine_does(tmp_path: Path, protocol: str) -> None:
    python = os.environ.get("TEXT2SQL_VLLM_PYTHON")
    if python is None:
        pytest.skip("needs $TEXT2SQL_VLLM_PYTHON: the python of an environment with vLLM (docs/scale.md)")
    texts = [row[name] for row in QUESTIONS for name in ("question", "gold_sql")]
    texts += ["<sql>", "</sql>", "<answer>", "</answer>", '{"name": "submit_sql", "arguments": {"sql": "'] * 4
    base = write_model(  # vLLM's attention on CPUs has no heads of fewer than 32
        tmp_path / "model", max_positions=2048, texts=texts, vocab_size=500, hidden_size=64, head_dim=32
    )
    environment = {"protocol": protocol, "schema_text": "compact", "instructions": False}
    config = write_config(
        tmp_path,
        model={"path": str(base), "dtype": "float32"},
        environment=environment | {"max_turns": 2, "max_turn_tokens": 96, "max_episode_tokens": 400},
        sft={"max_steps": 150, "batch_size": 4, "learning_rate": 0.01, "look_share": 0.5},
        grading={"test_databases": 0},
    )
    assert main(["sft", "--config", str(config), "--out", str(tmp_path / "tuned")]) == 0
    merged = tmp_path / "tuned" / "merged"
    evaluate = ["evaluate", "--config", str(config), "--out"]
    assert main([*evaluate, str(tmp_path / "own.json"), "--model_path", str(merged)]) == 0
    with vllm(python, merged, tmp_path) as url:
        served = ["--base_url", url, "--model", "tiny"]
        assert main([*evaluate, str(tmp_path / "served.json"), *served]) == 0
        collect = ["collect", "--config", str(config), "--out", str(tmp_path / "episodes.jsonl")]
        assert main([*collect, *served, "--samples", "2"]) == 0
        episodes = json_lines(tmp_path / "episodes.jsonl")
        if protocol == "native":
            asked = [message for message in episodes[0]["messages"] if message["role"] in ("system", "user")]
            with openai.OpenAI(base_url=url, api_key="none") as client:
                reply = client.chat.completions.create(
                    model="tiny", messages=asked, tools=TOOLS, temperature=0, max_tokens=96
                )
            (call,) = reply.choices[0].message.tool_calls
            assert call.function.name in ("run_sql", "submit_sql"), "the server should parse calls"
    own, answers = (json_lines(tmp_path / f"{name}.jsonl") for name in ("own", "served"))
    assert [row["final_sql"] for row in answers] == [row["final_sql"] for row in own]
    assert sum(row["strict"] for row in answers) >= 2, "the model should have learned its questions"
    assert len(episodes) == 2 * len(QUESTIONS)
    assert "run_sql" in {action["kind"] for row in episodes for action in row["actions"]}
