"""A missing optional package: the message names it, what needs it and the command that installs it."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from text2sql_grpo.errors import ConfigError
from text2sql_grpo.models.sources import model_folder
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.schema import read_schema

OPENED_IN_THIS_PROCESS: dict[str, tuple[str, Callable[[], object]]] = {
    "duckdb": ("duckdb", lambda: read_schema("duckdb:///sales.duckdb")),
    "psycopg": ("postgresql", lambda: read_schema("postgresql://localhost/sales")),
    "mcp": ("mcp", lambda: import_module("text2sql_grpo.integrations.mcp")),
    "verifiers": ("verifiers", lambda: import_module("text2sql_grpo_env")),
}


@pytest.mark.parametrize("package", OPENED_IN_THIS_PROCESS)
def test_what_needs_a_missing_package_prints_how_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, use = OPENED_IN_THIS_PROCESS[package]
    opened = ("text2sql_grpo.integrations.", "text2sql_grpo_env")
    for name in [name for name in sys.modules if name.startswith(opened)]:
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


def test_a_gguf_file_without_its_package_prints_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "text2sql_grpo.models.gguf", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"my\.gguf needs the package gguf .*'text2sql-grpo\[gguf\]'$"):
        model_folder(str(tmp_path / "my.gguf"))
