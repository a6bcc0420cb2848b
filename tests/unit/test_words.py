"""Plain words: docstrings start with a noun or an imperative verb, errors with the failure."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "text2sql_grpo"
# Texts that the model sees: an edit is an experiment.
PROMPT_TEXTS = {
    "environment/prompts.py",
    "environment/protocols.py",
    "sql/failure_text.py",
    "sql/postgres_database.py",
}

HEADLESS = re.compile(r"(Of|What|Whether|Else|By|To be)\b")
HEADLESS_FIELD = re.compile(r"^ +\w+: ((?:Of|What|Else|To be)\b.*)", re.M)


def faults(source: str, *, has_prompt_texts: bool = False) -> Iterator[str]:
    """Headless docstrings and fields in them, and texts that start with "expected"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if HEADLESS.match(text):
                yield text.split("\n")[0]
            yield from HEADLESS_FIELD.findall(text)
        elif (
            isinstance(node, ast.Constant)
            and str(node.value).startswith("expected ")
            and not has_prompt_texts
        ):
            yield str(node.value)


def test_docstrings_and_errors_use_plain_words() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        lines = faults(path.read_text(encoding="utf-8"), has_prompt_texts=name in PROMPT_TEXTS)
        found += [f"{name}: {line}" for line in lines]
    assert found == []


def test_faults_are_found() -> None:
    source = '''
def f(x):
    """What f returns.

    Args:
        x: Of f.
    """
    raise ValueError(f"expected x > 0, got {x}")
'''
    assert list(faults(source)) == ["What f returns.", "Of f.", "expected x > 0, got "]
