"""The package away from its checkout: a wheel, an empty folder, the commands of the README."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """Folder that holds the package of a new wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *options, str(repo_root)], check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 20e6
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_commands_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "text2sql_grpo", *arguments]
        environment = os.environ | {"PYTHONPATH": str(installed)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "This can run." in run("doctor", "--no-dry-run")
    (tmp_path / "mine.yaml").write_text(run("config"))
    data = installed / "text2sql_grpo" / "bundled" / "data"
    run("data", "overlap")
    run("data", "make", "--out", "questions")
    run("data", "overlap", "--questions", "questions")
    small = "--grpo.max_steps 1 --grpo.per_device_train_batch_size 8 --grpo.gradient_accumulation_steps 1"
    small += (
        " --start.look_share null --start.questions 1 --evaluation.schedule_samples 2 --data.test_samples 1"
    )
    small += " --rewards.length_cost 0.1"  # so that the one group of the step has a gradient
    run("train", *small.split())
    run("evaluate", "--model_path", "runs/quickstart/merged", "--num_samples", "1")
    question = "How many flights are there?"
    database = data / "databases" / "airline.sql"
    asked = ["ask", question, "--model", "runs/quickstart/merged", "--db", str(database), "--json"]
    assert question in run(*asked)
