"""The quickstart's databases and questions on DuckDB, PostgreSQL or CSV, with a config to train on them.

    python examples/other_engines.py duckdb runs/duckdb
    python examples/other_engines.py csv runs/csv
    PGPASSWORD=reading python examples/other_engines.py postgresql runs/pg --admin postgresql://postgres@localhost
    text2sql-grpo train --config runs/duckdb/config.yaml --grpo.max_steps 2

Golds are translated from SQLite's dialect by sqlglot; one that fails there, or returns something else, is
left out and counted. For PostgreSQL the admin's role makes a database and a reading role for each name; the
readers' password is $PGPASSWORD, in training too.
"""

import argparse
import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import sqlglot
import yaml

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.grading.strict import compare_strict
from text2sql_grpo.sql import SQLExecutor


def to_duckdb(name: str, script: str, out: Path) -> str:
    """Make a DuckDB file; return its address."""
    import duckdb

    (out / "databases").mkdir(exist_ok=True)
    path = out / "databases" / f"{name}.duckdb"
    path.unlink(missing_ok=True)
    with duckdb.connect(str(path)) as connection:
        connection.execute(script)
    return str(path)


def to_csv(name: str, script: str, out: Path) -> str:
    """Make a folder of CSV files; return it."""
    import csv

    folder = out / "databases" / name
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = connection.execute(f'SELECT * FROM "{table}"')
            with (folder / f"{table}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([[column[0] for column in rows.description], *rows])
    return str(folder)


def to_postgresql(name: str, script: str, admin: str) -> str:
    """Make a database and its reading role; return the role's URL."""
    import psycopg

    from text2sql_grpo.sql.postgres_role import restricted_role_sql

    server, database, role = urlsplit(admin), f"text2sql_{name}", f"text2sql_{name}_reader"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {database}")
        connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(f"CREATE DATABASE {database}")
    with psycopg.connect(server._replace(path=f"/{database}").geturl(), autocommit=True) as connection:
        connection.execute(script)
        connection.execute(restricted_role_sql(role, os.environ["PGPASSWORD"], database))
    return f"postgresql://{role}@{server.netloc.rpartition('@')[2]}/{database}"


def translated(source: Path, target: Path, before: Databases, after: Databases, dialect: str) -> None:
    """Write the questions whose golds return the same on both."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    kept = []
    golds = [(before.address(row["database"]), row["gold_sql"]) for row in rows]
    for row in rows:
        for key in {"gold_sql", "look_sql", "guess_sql"} & set(row):
            row[key] = sqlglot.transpile(row[key], read="sqlite", write=dialect, identify=True)[0]
    asked = [(after.address(row["database"]), row["gold_sql"]) for row in rows]
    with SQLExecutor() as executor:
        pairs = zip(rows, executor.execute_many(golds), executor.execute_many(asked), strict=True)
        for row, expected, found in pairs:
            if found.is_ok and compare_strict(expected, found, ordered=False, ties=lambda: None) == "equal":
                kept.append(json.dumps(row, ensure_ascii=False) + "\n")
    target.write_text("".join(kept), encoding="utf-8")
    print(f"{target}: {len(kept)} of {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=["duckdb", "postgresql", "csv"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--admin", help="URL of PostgreSQL's superuser")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    dialect = "postgres" if options.engine == "postgresql" else "duckdb"
    before, addresses = Databases(Path("data/databases")), {}
    for name in before.names():
        script = Path(f"data/databases/{name}.sql").read_text(encoding="utf-8")
        if options.engine != "csv":
            script = ";\n".join(sqlglot.transpile(script, read="sqlite", write=dialect, identify=True))
            script = re.sub(r"\bREAL\b", "DOUBLE PRECISION", script)  # there REAL has four bytes
        if options.engine == "postgresql":
            addresses[name] = to_postgresql(name, script, options.admin)
        else:
            make = to_duckdb if options.engine == "duckdb" else to_csv
            addresses[name] = make(name, script, options.out)
    files = {}
    for name in ("train", "dev", "test_databases", "demonstrations"):
        source, files[name] = Path(f"data/questions/{name}.jsonl"), str(options.out / f"{name}.jsonl")
        translated(source, Path(files[name]), before, Databases(addresses), dialect)
    config = yaml.safe_load(Path("config/quickstart.yaml").read_text(encoding="utf-8"))
    config["run"]["output_dir"] = str(options.out / "run")
    config["data"] |= {"databases": addresses, "train": files["train"], "dev": files["dev"]}
    config["sft"]["questions"] = files["demonstrations"]
    config["data"]["test"] = {"test_databases": files["test_databases"]}
    (options.out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
