"""Statements of the docs that code or stored output can check."""

import ast
import re
from pathlib import Path

PACKAGE = "src/text2sql_grpo"
STOP = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def has_definition(tree: ast.AST, name: str) -> bool:
    """Whether a module defines this function, class or `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return has_definition(node, rest) if rest else True
    return False


def missing_stops(page: str, package: Path) -> list[str]:
    """Functions that a page names in the form `file.py: function` and that do not exist."""
    return [
        f"{file}: {name}"
        for file, name in STOP.findall(page)
        if not (path := package / file).is_file()
        or not has_definition(ast.parse(path.read_text(encoding="utf-8")), name)
    ]


def test_every_stop_of_how_it_works_exists(repo_root: Path) -> None:
    page = (repo_root / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    stops = re.findall(r"^\d+\. .*", page, re.MULTILINE)
    assert stops
    assert [stop for stop in stops if not STOP.match(stop.partition(" ")[2])] == []
    assert missing_stops(page, repo_root / PACKAGE) == []


def test_a_stop_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def b(self): ...\n")
    page = "`a.py: A` `a.py: A.b` `a.py: b` `a.py: A.c` `b.py: A`"
    assert missing_stops(page, tmp_path) == ["a.py: b", "a.py: A.c", "b.py: A"]
