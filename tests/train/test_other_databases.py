"""The main job on DuckDB, files of rows and PostgreSQL: the same questions, the same answers."""

import json
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import psycopg
import pytest

from tests.postgres_server import PostgresServer, running_postgres
from tests.scripted_policy import SHOP
from tests.tiers import but_first_thorough
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql
from text2sql_grpo.sql.schema import read_schema
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

pytestmark = pytest.mark.usefixtures("without_pictures")
PASSWORD = "of a reader"
BRANCHES = "code,city,staff\nLIS-02,Lisbon,7\nOPO-01,Porto,4\nFAO-09,,4\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_config(folder)
    return folder / "model"


@pytest.fixture
def shop_on_postgres(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
    with psycopg.connect(postgres_server.admin_url("shop"), autocommit=True) as admin:
        admin.execute(SHOP)
        admin.execute(restricted_role_sql("shop_reader", PASSWORD, "shop"))
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    yield postgres_server.url("shop_reader", "", "shop").replace(":@", "@")
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("DROP DATABASE shop WITH (FORCE)")
        admin.execute("DROP ROLE shop_reader")


def databases_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> Any:
    """What `data.databases` says of the shop, kept by this engine."""
    if kind == "duckdb":
        with duckdb.connect(str(folder / "shop.duckdb")) as connection:
            connection.execute(SHOP)
        return str(folder / "shop.duckdb")
    if kind == "rows":
        (folder / "shop").mkdir()
        (folder / "shop" / "branch.csv").write_text(BRANCHES)
        return {"shop": str(folder / "shop")}
    return request.getfixturevalue("shop_on_postgres")


@pytest.mark.parametrize(
    ("kind", "is_started"),
    [
        ("duckdb", True),
        pytest.param("rows", False, marks=pytest.mark.thorough),
        pytest.param("postgresql", False, marks=pytest.mark.thorough),
    ],
)
def test_the_main_job_runs(
    kind: str,
    is_started: bool,
    tmp_path: Path,
    model: Path,
    started_model: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    databases = databases_of(kind, tmp_path, request)
    questions = str(tmp_path / "questions.jsonl")
    data = {"databases": databases, "train": questions, "test": {"test_values": questions}}
    config = write_config(
        tmp_path,
        model={"path": started_model if is_started else str(model), "dtype": "float32"},
        data=data,
        sft={"max_steps": 2, "batch_size": 4, "learning_rate": 1e-4},
        grading={"test_databases": 2 if kind == "duckdb" else 0},
        rewards={"execution": 1.0},
    )
    assert main(["train", "--config", str(config), "--grpo.max_steps", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert ("nothing was learned" in printed.out) == (not is_started)  # without a start, no answer is right
    asked = json_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(asked) == 16 and {row["database"] for row in asked} == {"shop"}
    before = json_lines(tmp_path / "run" / "evaluation-before.jsonl")
    assert len(before) == 4
    assert any(row["strict"] for row in before) == is_started
    for file in (tmp_path / "run").glob("*.*"):
        assert PASSWORD.encode() not in file.read_bytes(), file

    if kind != "duckdb":
        assert main(["audit", "reward", "--config", str(config), "--golds", "2", "--json"]) == 0
        audit = json.loads(capsys.readouterr().out)
        assert audit["golds_left_out"] == 0 and audit["rates"]["mutants accepted"]["answers"] > 0
    if kind == "postgresql":
        assert main(["audit", "data", questions, "--db", databases, "--test_databases", "0"]) == 0
        assert main(["doctor", "--config", str(config)]) == 0
        assert "does not exist" not in capsys.readouterr().out  # its look runs on this engine
        monkeypatch.setattr("text2sql_grpo.grading.postgres_server.server_binaries", lambda: None)
        assert main(["doctor", "--config", str(config), "--grading.test_databases", "2"]) == 1
        capsys.readouterr()
        assert main(["train", "--config", str(config), "--grading.test_databases", "2"]) == 1
        error = capsys.readouterr().err
        assert "no test databases of 'shop' can be made: PostgreSQL's initdb is not" in error
        assert "grading.server_url" in error and "grading.test_databases: 0" in error


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("duckdb", r"a DuckDB \d+\.\d+\S* database"), ("postgresql", r"a PostgreSQL \d+\S* database")],
)
def test_prompts_name_the_engine_and_its_version(
    kind: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    databases = Databases(databases_of(kind, tmp_path, request))
    example = Example(id="1", database="shop", question="Branches?", gold_sql="SELECT 1")
    with SQLExecutor(workers=1) as executor:
        environment = SQLEnvironment(databases, executor, EnvironmentSettings())
        assert re.search(engine, environment.session(example).start()[0]["content"])


@pytest.mark.parametrize("kind", but_first_thorough(["sqlite", "duckdb", "postgresql"]))
def test_golds_that_no_longer_hold_are_counted(
    kind: str,
    tmp_path: Path,
    model: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hire, step = "UPDATE branch SET staff = 8 WHERE code = 'LIS-02'", SQLGRPOTrainer.training_step
    if kind == "sqlite":
        databases: Any = str(tmp_path / "shop.sqlite")
        with closing(sqlite3.connect(databases)) as connection:
            connection.executescript(SHOP)
    else:
        databases = databases_of(kind, tmp_path, request)

    def change_database(trainer: SQLGRPOTrainer, *args: Any, **options: Any) -> Any:
        if trainer.state.global_step == 1 and kind == "sqlite":
            with closing(sqlite3.connect(databases)) as connection, connection:
                connection.execute(hire)
        elif trainer.state.global_step == 1 and kind == "duckdb":
            other = shutil.copy(databases, tmp_path / "other.duckdb")
            with duckdb.connect(str(other)) as connection:
                connection.execute(hire)
            os.replace(other, databases)
        elif trainer.state.global_step == 1:
            server = request.getfixturevalue("postgres_server")
            with psycopg.connect(server.admin_url("shop"), autocommit=True) as admin:
                admin.execute(hire)
        return step(trainer, *args, **options)

    monkeypatch.setattr(SQLGRPOTrainer, "training_step", change_database)
    config = write_config(
        tmp_path,
        model={"path": str(model), "dtype": "float32"},
        data={"databases": {"shop": databases}, "train": str(tmp_path / "questions.jsonl")},
        sft={"max_steps": 2, "batch_size": 4},
        grading={"test_databases": 0},
        rewards={"execution": 1.0},
    )
    assert main(["train", "--config", str(config), "--evaluation.before_training", "false"]) == 0
    rows = [row for row in json_lines(tmp_path / "run" / "metrics.jsonl") if "grading/changed_golds" in row]
    assert [row["grading/changed_golds"] for row in rows] == [0, 1]
    assert "Golds that no longer hold, as their database changed during the run: 1" in capsys.readouterr().out
    (changed,) = json.loads((tmp_path / "run" / "evaluation.json").read_text())["changed_golds"]
    assert changed.startswith("SELECT staff FROM branch WHERE code = 'LIS-02' (")


def test_a_password_in_a_url_is_refused_and_not_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model={"path": str(model)})
    url = f"postgresql://reader:{quote(PASSWORD)}@127.0.0.1:1/shop"
    assert main(["train", "--config", str(config), "--data.databases", url]) == 1
    error = capsys.readouterr().err
    assert "may hold no password" in error and "PGPASSWORD" in error
    assert PASSWORD not in error and quote(PASSWORD) not in error
    assert os.environ.get("PGPASSWORD") is None


@pytest.mark.thorough
def test_a_server_that_restarts_is_waited_for_and_a_lost_one_leaves_a_checkpoint(
    tmp_path: Path, started_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setattr("text2sql_grpo.sql.executor.SERVER_WAIT_S", 3.0)
    step = SQLGRPOTrainer.training_step
    with running_postgres() as server:
        with psycopg.connect(server.admin_url(), autocommit=True) as admin:
            admin.execute(SHOP)
            admin.execute(restricted_role_sql("shop_reader", PASSWORD, "postgres"))

        def shut_down_at_steps(trainer: SQLGRPOTrainer, *args: Any, **options: Any) -> Any:
            if trainer.state.global_step == 1:
                server.stop()
                threading.Timer(1.0, server.start).start()
            if trainer.state.global_step == 2:
                server.stop()
            return step(trainer, *args, **options)

        monkeypatch.setattr(SQLGRPOTrainer, "training_step", shut_down_at_steps)
        questions = str(tmp_path / "questions.jsonl")
        url = server.url("shop_reader", "").replace(":@", "@")
        config = write_config(
            tmp_path,
            model={"path": started_model, "dtype": "float32"},
            data={"databases": {"shop": url}, "train": questions},
            sft=None,
            grading={"test_databases": 0},
            rewards={"execution": 1.0},
        )
        assert main(["train", "--config", str(config), "--grpo.max_steps", "4"]) == 1
        server.start()
    error = capsys.readouterr().err
    assert "PostgreSQL failed" in error and "checkpoint-2 holds the steps before" in error
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert len(json_lines(tmp_path / "run" / "rollouts.jsonl")) == 32


def test_what_a_server_refuses_is_said_without_the_password(
    shop_on_postgres: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(postgres_server.admin_url("shop"), autocommit=True) as admin:
        admin.execute("REVOKE SELECT ON branch FROM shop_reader")
    with pytest.raises(DataError, match=r"no table or view that this role may read .*role --print"):
        read_schema(shop_on_postgres)
    with SQLExecutor(workers=1) as executor:
        assert executor.execute(shop_on_postgres, "SELECT * FROM branch").status == "denied"
        executor.close()
        monkeypatch.setenv("PGPASSWORD", "another " + PASSWORD)
        with pytest.raises(DataError, match=r"authentication failed.*set PGPASSWORD") as caught:
            executor.execute(shop_on_postgres, "SELECT 1")
    assert PASSWORD not in str(caught.value)
