"""When the result of SFT is taken from the cache: never for other contents of a database."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import psycopg
import pytest
from rich.console import Console

from tests.postgres_server import PostgresServer
from tests.processes import ended, fork, needs_fork, printed
from tests.scripted_policy import SHOP
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.sft_stage import stage_folder, started_policy
from text2sql_grpo.sql.postgres_role import restricted_role_sql

UPDATE = "UPDATE branch SET staff = staff + 1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))


def stage_of(config: Path) -> Path:
    opened = load_config(config)
    with Bench.open(opened) as bench:
        return stage_folder(bench, run_arguments(opened))


def write_sqlite(path: Path, mode: str) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA journal_mode = {mode}; {SHOP}")
    writer = sqlite3.connect(path)  # stays open, so that it merges no log into the file

    def update() -> None:
        with writer:
            writer.execute(UPDATE)

    update()
    return update


def write_duckdb(path: Path) -> Callable[[], None]:
    def run(script: str) -> None:
        with duckdb.connect(str(path)) as connection:
            connection.execute(script)

    run(SHOP)
    return lambda: run(UPDATE)


@pytest.mark.parametrize(
    "kind", ["sqlite", "sqlite with a write-ahead log", pytest.param("duckdb", marks=pytest.mark.thorough)]
)
def test_a_changed_row_makes_another_stage(tmp_path: Path, kind: str) -> None:
    config = write_config(tmp_path)
    (tmp_path / "databases" / "shop.sql").unlink()
    path = tmp_path / "databases" / f"shop.{kind.partition(' ')[0]}"
    update = (
        write_duckdb(path) if kind == "duckdb" else write_sqlite(path, "WAL" if "log" in kind else "DELETE")
    )
    first, size = stage_of(config), path.stat().st_size
    os.utime(path)
    assert stage_of(config) == first
    update()
    assert path.stat().st_size == size or kind == "duckdb"
    assert stage_of(config) != first


@pytest.fixture
def on_a_server(tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Path]:
    """Config of a run on a PostgreSQL database."""
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE cached")
    with psycopg.connect(postgres_server.admin_url("cached"), autocommit=True) as admin:
        admin.execute(SHOP)
        admin.execute(restricted_role_sql("cached_reader", "of a reader", "cached"))
    url = postgres_server.url("cached_reader", "", "cached").replace(":@", "@")
    config = write_config(tmp_path)
    text = config.read_text().replace(f"databases: {tmp_path}/databases", f"databases: {{shop: '{url}'}}")
    config.write_text(text.replace("max_steps: 60", "max_steps: 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGPASSWORD", "of a reader")
        yield config
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("DROP DATABASE cached WITH (FORCE)")
        admin.execute("DROP ROLE cached_reader")


def trained_at(folder: Path) -> int:
    """Time at which the stage's log was written, in nanoseconds."""
    return (folder / "metrics.jsonl").stat().st_mtime_ns


@pytest.mark.thorough
@needs_fork
def test_two_runs_at_once_train_a_stage_once(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["--sft.max_steps", "8", "--sft.save_steps", "1"])

    def start() -> int:
        with Bench.open(config) as bench:
            started_policy(bench, run_arguments(config), Console())
        return 0

    runs = [tmp_path / "one", tmp_path / "other"]
    assert ended([fork(run, start) for run in runs]) == [0, 0], "".join(map(printed, runs))
    assert sum("Waiting for another run" in printed(run) for run in runs) == 1
    (folder,) = Path("cache/sft").iterdir()
    assert [row["step"] for row in json_lines(folder / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.thorough
def test_a_stage_on_a_server_is_taken_by_its_own_run_alone(on_a_server: Path) -> None:
    config = load_config(on_a_server)
    arguments = run_arguments(config)
    with Bench.open(config) as bench:
        folder = stage_folder(bench, arguments)
        assert stage_folder(bench, arguments, Path("another_run")) != folder

        def start(*, is_resumed: bool) -> int:
            started_policy(bench, arguments, Console(quiet=True), is_resumed=is_resumed)
            return trained_at(folder)

        first = start(is_resumed=False)
        assert start(is_resumed=True) == first
        again = start(is_resumed=False)
        assert again > first
    assert len(json_lines(folder / "metrics.jsonl")) == 1
    assert not list(folder.parent.glob("*.unfinished"))


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures", "rewards_with_spread")
def test_a_resumed_run_on_a_server_continues_on_its_own_stage(on_a_server: Path) -> None:
    argv = ["train", "--config", str(on_a_server), "--data.test", "{}", "--grading.test_databases", "0"]
    argv += ["--grpo.save_steps", "1", "--rewards", "{execution: 1.0}"]
    assert main([*argv, "--grpo.max_steps", "1"]) == 0
    (folder,) = Path("cache/sft").iterdir()
    first = trained_at(folder)
    assert main([*argv, "--grpo.max_steps", "2", "--resume", "auto"]) == 0
    assert trained_at(folder) == first
    assert main([*argv, "--grpo.max_steps", "1"]) == 0
    assert trained_at(folder) > first
