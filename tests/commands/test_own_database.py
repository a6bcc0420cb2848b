"""The commands of docs/own_database.md, in order, with a small random model in place of SmolLM2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import write_adapter, write_model
from tests.tiny_run import json_lines

pytestmark = pytest.mark.slow


def test_commands_of_the_tutorial_run(tmp_path: Path, repo_root: Path) -> None:
    page = (repo_root / "docs" / "own_database.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    texts = ["<sql>", "</sql>", "<answer>", "</answer>", page]
    write_model(tmp_path / "model", max_positions=4096, texts=texts, vocab_size=700)
    write_adapter(tmp_path / "data" / "start", tmp_path / "model")
    (tmp_path / "examples").symlink_to(repo_root / "examples")
    shop = tmp_path / "shop"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(block: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-e", "-c", block]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    for block in blocks[:-1]:
        done = run(block)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    asked = run(blocks[-1])  # a random model may submit nothing, and the command then exits with 1
    assert "answer" in asked.stdout or "no final SQL" in asked.stdout, asked.stderr
    assert (shop / "run" / "merged" / "model.safetensors").is_file()
    assert len(json_lines(shop / "run" / "rollouts.jsonl")) == 6 * 64
    assert len(json_lines(shop / "start.jsonl")) == len(json_lines(shop / "after.jsonl")) == 130
