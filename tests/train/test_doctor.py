"""What `doctor` reports before a run."""

import json
from pathlib import Path

import pytest

from tests.tiny_run import write_config
from text2sql_grpo.commands import main


def databases_finding(config: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Text of the problem that `doctor` finds with the databases."""
    assert main(["doctor", "--config", str(config), "--json", "--no-dry-run", *options]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]["databases"]
    assert found["status"] == "problem"
    return str(found["text"])


def test_databases_that_cannot_be_read_are_shown_with_their_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    text = databases_finding(config, capsys, "--environment.limits.max_sql_bytes", "5")
    assert text.startswith("1 of 1 could not be read: shop: ") and "5" in text.partition("shop: ")[2]

    for name in ("first", "second"):
        (tmp_path / "databases" / f"{name}.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    text = databases_finding(config, capsys)
    assert text.startswith("2 of 3 could not be read: first: ") and "; second: " in text
    assert text.count("not a database") == 2
