"""The package away from its checkout: a wheel, an empty folder, the commands of the README."""

import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.scripted_policy import SHOP
from tests.tiny_run import write_config
from tests.unit.test_architecture import OPTIONAL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A virtual environment that holds a new wheel.

    Its dependencies are those of this environment, by a path file: installing them again takes minutes. Path
    files beside them are not read, so that this environment's own, editable install stays out of sight.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *options, str(repo_root)], check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 20e6
    venv.create(folder / "venv", symlinks=True)
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(wheel)], check=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


def test_what_made_the_data_is_not_in_the_wheel(installed: Path) -> None:
    (bundled,) = installed.glob("lib/python*/site-packages/text2sql_grpo/bundled")
    assert not [*bundled.rglob("*.py")]
    assert {path.name for path in (bundled / "data").iterdir()} == {
        *("databases", "questions", "start", "own_templates.yaml", "templates.yaml", "vocabulary.yaml")
    }


class Shell:
    """The command of a virtual environment in a folder, with or without the optional packages."""

    def __init__(self, installed: Path, folder: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        self._command = str(installed / "bin" / "text2sql-grpo")
        self._bare = folder / "bare"
        self._bare.mkdir()
        hidden = f"import sys\nsys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))\n"
        (self._bare / "sitecustomize.py").write_text(hidden)

    def run(self, *words: str, stdin: str = "", is_bare: bool = False, code: int = 0) -> str:
        """What a command prints to standard output, or to standard error if it must fail."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PYTHONPATH": str(self._bare)} if is_bare else {}
        done = subprocess.run(
            [self._command, *words],
            cwd=self.folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture
def shell(installed: Path, tmp_path: Path) -> Shell:
    return Shell(installed, tmp_path)


def test_commands_work_in_an_empty_folder(shell: Shell, tmp_path: Path) -> None:
    config = ["--config", str(write_config(tmp_path))]
    assert "This can run." in shell.run("doctor", *config, "--no-dry-run", is_bare=True)
    printed = shell.run("train", *config, "--grpo.report_to", "null", is_bare=True)
    assert printed.count("pip install 'text2sql-grpo[plots]'") == 1
    assert not (tmp_path / "run" / "learning_curve.png").exists()
    shell.run("evaluate", "--model_path", str(tmp_path / "run" / "merged"), is_bare=True)

    (shell.folder / "mine.yaml").write_text(shell.run("config"))
    shell.run("data", "overlap")
    shell.run("data", "make", "--out", "questions")
    shell.run("data", "overlap", "--questions", "questions")

    database = str(tmp_path / "shop.sqlite")
    sqlite3.connect(database).executescript(SHOP)
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}) + "\n"
    assert "serverInfo" in shell.run("mcp", "--db", database, stdin=request)
    refusal = shell.run("mcp", "--db", database, is_bare=True, code=1)
    assert refusal.endswith("pip install 'text2sql-grpo[mcp]'\n")


def test_the_quickstart_works_in_an_empty_folder(shell: Shell, installed: Path) -> None:
    assert "This can run." in shell.run("doctor", "--no-dry-run")
    small = "--grpo.max_steps 1 --grpo.per_device_train_batch_size 8 --grpo.gradient_accumulation_steps 1"
    small += (
        " --start.look_share null --start.questions 1 --evaluation.schedule_samples 2 --data.test_samples 1"
    )
    small += " --rewards.length_cost 0.1"  # so that the one group of the step has a gradient
    shell.run("train", *small.split())
    (shell.folder / "mine.yaml").write_text(shell.run("config", "--example", "quickstart"))
    assert "This can run." in shell.run("doctor", "--no-dry-run", "--config", "mine.yaml")
    shell.run("merge", "--adapter", "data/start")
    assert (shell.folder / "data" / "merged" / "model.safetensors").is_file()
    shell.run("evaluate", "--model_path", "runs/quickstart/merged", "--num_samples", "1")
    question = "How many flights are there?"
    (database,) = installed.glob("lib/python*/site-packages/text2sql_grpo/bundled/data/databases/airline.sql")
    asked = ["ask", question, "--model", "runs/quickstart/merged", "--db", str(database), "--json"]
    assert question in shell.run(*asked)
