"""Statements of the docs that code or stored output can check."""

import ast
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.claims import CLAIMS, PAGE, Claim, value
from docs.claims import page as claims_page
from docs.claims import stored as claimed
from docs.pictures import draw, grading
from docs.quickstart_figures import (
    BEGIN,
    END,
    between_markers,
    block,
    figures,
    first_rows,
    lines_after,
    lines_before,
)
from docs.reference import PAGES
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.evaluation.answers import judged, write_answers
from text2sql_grpo.evaluation.comparison import compare
from text2sql_grpo.evaluation.summary import summary
from text2sql_grpo.files import write_json
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import Answer

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


def body_of(source: str, name: str) -> str:
    """Lines of a function or method after its docstring, dedented."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    [function] = [node for node in functions if node.name == name]
    lines = source.splitlines()[function.body[1].lineno - 1 : function.end_lineno]
    return textwrap.dedent("\n".join(lines))


def test_how_it_works_quotes_the_step_as_it_is(repo_root: Path) -> None:
    source = (repo_root / PACKAGE / "training" / "trainer.py").read_text(encoding="utf-8")
    page = (repo_root / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert re.findall(r"```python\n(.*?)\n```", page, re.DOTALL) == [body_of(source, "generation_batch")]


def test_the_selection_of_the_api_page_draws_the_questions_of_one_database(repo_root: Path) -> None:
    page = (repo_root / "docs" / "api.md").read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(Select)" in each]
    names: dict[str, Any] = {}
    exec(block, names)
    examples = [Example(f"q{i}", "ab"[i % 2], f"Question {i}?", "SELECT 1") for i in range(8)]
    select = names["OneDatabase"](examples)
    first = select.draw(4)
    state = select.state_dict()
    after = [select.draw(4) for _ in range(8)]
    assert len(set(first)) == 4
    assert {frozenset(examples[one].database for one in batch) for batch in after} == {
        frozenset("a"),
        frozenset("b"),
    }
    resumed = names["OneDatabase"](examples)
    resumed.load_state_dict(state)
    assert [resumed.draw(4) for _ in range(8)] == after


def stored(repo_root: Path) -> dict[str, Any]:
    """Everything that the docs quote from."""

    def lengths(folder: Path) -> dict[str, int]:
        return {
            path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.jsonl")
        }

    quickstart = json.loads((repo_root / "docs" / "quickstart.json").read_text(encoding="utf-8"))
    others = [kinds["others"] for kinds in quickstart["sets"].values()]
    return json.loads((repo_root / "benchmarks" / "results.json").read_text(encoding="utf-8")) | {
        "others": {when: sum(one[when]["correct"] for one in others) for when in ("before", "after")}
        | {"total": sum(one["after"]["total"] for one in others)},
        "quickstart": quickstart,
        "minutes": sum(quickstart["seconds"].values()) / 60,
        "attacks": lengths(repo_root / "tests" / "hostile"),
        "questions": lengths(repo_root / "data" / "questions"),
        "start": lengths(repo_root / "data" / "start"),
    }


def words(text: str) -> str:
    return " ".join(text.split())


def other_figures(quotes: str, repo_root: Path) -> list[str]:
    """Quotes of `tests/golden/quotes.txt` that their files do not have, filled in."""
    figures, missing = stored(repo_root), []
    for quote in quotes.splitlines():
        if quote.startswith("#"):
            continue
        file, _, sentence = quote.partition(": ")
        page = re.sub(r"^# +", "", (repo_root / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
        if words(sentence.format(**figures)) not in words(page):
            missing.append(f"{file}: {sentence.format(**figures)}")
    return missing


def test_docs_quote_the_stored_figures(repo_root: Path) -> None:
    quotes = (repo_root / "tests" / "golden" / "quotes.txt").read_text(encoding="utf-8")
    assert other_figures(quotes, repo_root) == []


def test_another_figure_is_found(repo_root: Path) -> None:
    quotes = (
        "docs/grading.md: refuses none of {grading[right]:,} right\nREADME.md: of {grading[wrong]} queries"
    )
    assert other_figures(quotes, repo_root) == ["README.md: of 5189 queries"]


def faults(claim: Claim, front_page: str) -> list[str]:
    """What a claim of the front page lacks: its figures, the size of its set, its seeds."""
    figures = claimed()
    wanted = [claim.says.format(**figures), f"{value(claim.size, figures):,}"]
    if claim.seeds is not None:
        seeds = value(claim.seeds, figures)
        wanted.append(claim.named.format(count=len(seeds)))
        if claim.named.startswith("seed "):
            assert claim.named == f"seed {seeds[0]}"
    return [text for text in wanted if words(text) not in words(front_page)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.size)
def test_the_front_page_names_the_set_and_the_seeds_of_its_claims(claim: Claim, repo_root: Path) -> None:
    assert faults(claim, (repo_root / "README.md").read_text(encoding="utf-8").replace("\n> ", " ")) == []


def test_a_claim_of_another_set_or_seed_is_found() -> None:
    spider = next(claim for claim in CLAIMS if claim.size == "spider[questions]")
    said = words(spider.says.format(**claimed()))
    assert faults(spider, said) == []
    assert faults(spider, said.replace("seeds 1", "seeds 2")) == [
        spider.says.format(**claimed()),
        "seeds 1 to 3",
    ]
    assert faults(spider, said.replace("1,026", "1,034")) == [spider.says.format(**claimed()), "1,026"]


def test_the_table_of_claims_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == claims_page(), "run python -m docs.claims"


def test_two_pages_show_the_stored_figures_of_the_quickstart(repo_root: Path) -> None:
    quickstart = stored(repo_root)["quickstart"]
    shown = {"README.md": "\n".join(first_rows(quickstart["seeds"])), "docs/quickstart.md": block(quickstart)}
    for page, expected in shown.items():
        assert between_markers((repo_root / page).read_text(encoding="utf-8")) == expected, page


def test_the_first_table_has_means_and_ranges() -> None:
    runs = [
        {kind: {"right": [before, after], "total": 9} for kind in ("look-up", "unseen", "others")}
        for before, after in ((1, 4), (1, 7))
    ]
    assert first_rows(runs)[2:] == [
        f"| {title} | 9 | 1 | **5.5** (4 to 7) |"
        for title in (
            "need an exploratory query",
            "of these, on databases that are not trained on",
            "do not need one",
        )
    ]


def test_reference_pages_are_those_of_the_code() -> None:
    old = [path.name for path, made in PAGES.items() if path.read_text(encoding="utf-8") != made()]
    assert old == [], "run python docs/reference.py"


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    """Links and pictures of a page that lead to no file, or to no heading of a Markdown file."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        if re.match(r"\w+:", target):
            continue
        is_missing = not found.exists()
        if is_missing or (anchor and anchor not in anchors(found.read_text(encoding="utf-8"))):
            broken.append(f"{path.name}: {target}")
    return broken


def test_links_of_the_docs_lead_somewhere(repo_root: Path) -> None:
    pages = [*repo_root.glob("*.md"), *(repo_root / "docs").glob("*.md"), *repo_root.glob("experiments/*.md")]
    pages += [repo_root / "benchmarks" / "RESULTS.md", repo_root / "data" / "README.md"]
    assert [link for page in pages for link in broken_links(page)] == []


def test_sections_of_experiments_are_short(repo_root: Path) -> None:
    """At most 250 words each, tables not counted; longer ones have a page in experiments/."""
    _, *sections = re.split(r"^## ", (repo_root / "EXPERIMENTS.md").read_text(encoding="utf-8"), flags=re.M)
    lengths = {text.split("\n")[0]: len(re.sub(r"^\|.*$", "", text, flags=re.M).split()) for text in sections}
    assert {title: length for title, length in lengths.items() if length > 250} == {}


def test_every_page_is_in_the_index(repo_root: Path) -> None:
    index = (repo_root / "docs" / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (repo_root / "docs").glob("*.md")} - {"README.md"} == {
        target for target in re.findall(r"\]\((\w+\.md)[)#]", index)
    }


def test_every_page_is_in_the_menu_of_the_site(repo_root: Path) -> None:
    menu = yaml.safe_load((repo_root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert {*re.findall(r"\w+\.md", str(menu))} == {path.name for path in (repo_root / "docs").glob("*.md")}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Two words\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#two-words) [y](b.md#three) [z](c.md) [w](https://example.org)")
    assert broken_links(page) == ["a.md: b.md#three", "a.md: c.md"]


def answers(right: str) -> list[Answer]:
    """Answers to six questions on two databases, the first three of them look-ups; `1` for a right one."""
    found = []
    for i, mark in enumerate(right):
        family = "lookup" if i < 3 else "count"
        example = Example(f"q{i}", "ab"[i % 2], f"Question {i}?", "SELECT 1", family=family)
        is_right = mark == "1"
        verdict = Verdict(
            official=is_right, strict=is_right, reason="equal" if is_right else "values", executes=True
        )
        found.append(Answer(Episode(example, stop_reason="submitted", final_sql="SELECT 1"), verdict))
    return found


def test_figures_of_a_run_are_shown_and_stored(tmp_path: Path) -> None:
    before, after = {"test_values": answers("000110")}, {"test_values": answers("110110")}
    for name, asked in (("evaluation-before.jsonl", before), ("evaluation.jsonl", after)):
        write_answers(tmp_path / name, asked)
    record = {
        "before": {"sets": {name: summary(asked) for name, asked in before.items()}},
        "sets": {name: summary(asked) for name, asked in after.items()},
        "change": compare(judged(before), judged(after)).record(),
        "step": 2,
        "seconds": {"SFT": 20.4, "GRPO": 100.0},
    }
    write_json(tmp_path / "evaluation.json", record)

    found = figures(tmp_path)
    shown = block(found)

    parts = found["sets"]["test_values"]
    assert {part: cells["after"]["correct"] for part, cells in parts.items()} == {
        "all": 4,
        "look-up": 2,
        "others": 2,
    }
    assert "Time: SFT 20 s, GRPO 100 s" in shown
    expected = [*lines_before(found), *lines_after(found)]
    assert [line for line in expected if words(line) not in words(shown)] == []
    assert "| `test_values` (6) | 33% " in shown and "| look-up (3) | 0% " in shown
    assert between_markers(f"Text.\n\n{BEGIN}{shown}{END}\n") == shown


def test_pictures_name_the_stored_figures(repo_root: Path, tmp_path: Path) -> None:
    measured = stored(repo_root)["grading"]
    draw(tmp_path / "grading.svg", (6, 1.3), grading, measured)
    label = f"{measured['wrong_accepted']:.2%}"
    for path in (tmp_path / "grading.svg", repo_root / "docs" / "grading.svg"):
        assert label in path.read_text(encoding="utf-8"), path


def test_reviewed_questions_of_the_examples_name_the_database_of_their_folder(repo_root: Path) -> None:
    files = sorted((repo_root / "examples" / "own_database").glob("*/verified.jsonl"))
    lines = [(file.parent.name, line) for file in files for line in file.read_text("utf-8").splitlines()]
    assert len(files) == 4 and all(json.loads(line)["database"] == folder for folder, line in lines)
