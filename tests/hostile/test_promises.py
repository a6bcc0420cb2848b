"""Each promise of the page on security names tests that exist."""

import ast
import re
from pathlib import Path

from tests.hostile.attacks import load_attacks
from tests.hostile.test_attacks import ENGINES


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of cells below each heading."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0]] = rows[2:]
    return found


def test_each_promise_names_its_tests(repo_root: Path) -> None:
    page = (repo_root / "docs" / "security.md").read_text(encoding="utf-8")
    rows = tables(page)["Promises"] + tables(page)["Bad input"]
    assert len(rows) >= 30

    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
        assert named, f"expected a test behind {row[0]}"
        for file, test in named:
            tree = ast.parse((repo_root / "tests" / file).read_text(encoding="utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert test in names, f"no {test} in tests/{file}"


def test_page_counts_the_attacks(repo_root: Path) -> None:
    page = (repo_root / "docs" / "security.md").read_text(encoding="utf-8")
    counts = [len(load_attacks(engine)) for engine in ENGINES]

    assert "{} on SQLite and {} on DuckDB; {} on PostgreSQL".format(*counts) in page
