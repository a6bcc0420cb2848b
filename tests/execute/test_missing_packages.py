"""A missing optional package: the message names it, what needs it and the command that installs it."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import text2sql_grpo
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.schema import read_schema

OPENED_IN_THIS_PROCESS: dict[str, tuple[str, Callable[[], object]]] = {
    "duckdb": ("duckdb", lambda: read_schema("duckdb:///sales.duckdb")),
    "psycopg": ("postgresql", lambda: read_schema("postgresql://localhost/sales")),
    "mcp": ("mcp", lambda: import_module("text2sql_grpo.contrib.mcp")),
    "verifiers": ("verifiers", lambda: text2sql_grpo.SQLTaskset),
}


@pytest.mark.parametrize("package", OPENED_IN_THIS_PROCESS)
def test_what_needs_a_missing_package_prints_how_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, use = OPENED_IN_THIS_PROCESS[package]
    for name in [name for name in sys.modules if name.startswith("text2sql_grpo.contrib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package} .*: pip install '.*\[{extra}\]'$"):
        use()


@pytest.mark.parametrize(("kind", "package"), [("duckdb", "duckdb"), ("postgresql", "psycopg")])
def test_a_sql_worker_without_its_engine_prints_how_to_install_it(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('gone', name='{package}')")
    (tmp_path / "sales.duckdb").touch()
    monkeypatch.syspath_prepend(tmp_path)  # which workers search too
    address = f"duckdb:///{tmp_path}/sales.duckdb" if kind == "duckdb" else "postgresql://localhost/sales"
    with SQLExecutor(workers=1) as executor, pytest.raises(ConfigError) as raised:
        executor.execute(address, "SELECT 1")
    assert f"a {kind} database needs the package {package}" in str(raised.value)
    assert str(raised.value).endswith(f"pip install 'text2sql-grpo[{kind}]'")
