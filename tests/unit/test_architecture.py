"""Rules that keep the package readable, beside the contracts of import-linter in pyproject.toml."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import text2sql_grpo

PACKAGE = "text2sql_grpo"
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers"}
HEAVY = {"torch", "trl", "transformers", "verifiers", "peft", "pandas", "matplotlib", "datasets", "wandb"}


def modules(repo_root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the package by its dotted name."""
    folder = repo_root / "src" / PACKAGE
    for path in sorted(folder.rglob("*.py")):
        yield ".".join(path.relative_to(folder.parent).with_suffix("").parts), path


def lower_layers(repo_root: Path) -> set[str]:
    """Layers that load no framework, by the contract."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [one for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "forbidden"]
    return {name.removeprefix(f"{PACKAGE}.") for name in contract["source_modules"]}


def test_lower_layers_load_nothing_heavy(repo_root: Path) -> None:
    """Nor do the libraries that they import."""
    layers = lower_layers(repo_root)
    light = [
        PACKAGE,
        *(name.removesuffix(".__init__") for name, _ in modules(repo_root) if name.split(".")[1] in layers),
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


OPTIONAL = {"duckdb", "psycopg", "verifiers", "mcp", "openai", "gguf", "matplotlib", "trackio", "weave"}
OPTIONAL |= {"starlette", "uvicorn", "sse_starlette"}
# Imported where a config or an option asks for what they are for.
USES_OPTIONAL = {f"sql.{name}" for name in ("duckdb_database", "postgres_database", "postgres_role")}
USES_OPTIONAL |= {f"grading.{name}" for name in ("duckdb_copies", "postgres_copies", "postgres_server")}
USES_OPTIONAL |= {"models.gguf", "models.gguf_export", "reporting.learning_curve", "reporting.live_view"}
USES_OPTIONAL |= {"serving.openai_server"}


@pytest.mark.thorough
def test_the_package_is_imported_without_optional_packages(repo_root: Path) -> None:
    names = [name.removesuffix(".__init__").removeprefix(f"{PACKAGE}.") for name, _ in modules(repo_root)]
    core = [
        f"{PACKAGE}.{name}"
        for name in names
        if not name.startswith(("integrations.", "__main__")) and name not in {PACKAGE, *USES_OPTIONAL}
    ]
    code = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"for name in {core!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported_and_a_misspelt_one_is_named() -> None:
    for name in dir(text2sql_grpo):
        assert getattr(text2sql_grpo, name) is not None
    with pytest.raises(AttributeError, match="trian"):
        _ = text2sql_grpo.trian


def test_no_basename_stands_twice(repo_root: Path) -> None:
    counts = Counter(path.name for _, path in modules(repo_root) if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_module_names_say_what_is_inside(repo_root: Path) -> None:
    folders = [repo_root / "src", repo_root / "scripts"]
    vague = [
        path.relative_to(repo_root).as_posix()
        for folder in folders
        for path in folder.rglob("*.py")
        if VAGUE_WORDS & set(path.stem.split("_")) or VAGUE_WORDS & set(path.parent.name.split("_"))
    ]
    assert vague == []


COMPAT = f"{PACKAGE}.trl_compat"
# Modules whose objects the package holds; what they define with a leading underscore is theirs alone.
HOSTS = {
    "trl": ("trainer/grpo_trainer.py", "trainer/base_trainer.py", "trainer/utils.py"),
    "transformers": ("trainer.py", "modeling_utils.py", "configuration_utils.py"),
    "accelerate": ("accelerator.py", "state.py"),
    "torch": tuple(f"distributed/fsdp/_fully_shard/{name}.py" for name in ("_fully_shard", "_fsdp_state")),
}
# `rollout` stands before `training`, and transformers has no getter.
ELSEWHERE = {f"{PACKAGE}.rollout.policy": {"_attn_implementation"}}


PRIVATE = r"(?<!\w)(_[A-Za-z]\w*)"


def defined_names(source: str) -> set[str]:
    """Private names that a module defines: functions, constants, and attributes of `self`."""
    return set(
        re.findall(rf"(?:def |self\.|for |^ *){PRIVATE}(?=\(|,.* (?:=|in) |:.* = | = )", source, re.MULTILINE)
    )


def test_private_names_of_trl_and_transformers_live_in_one_module(repo_root: Path) -> None:
    """Each stands in the table at its head, and the table lists no other."""
    hosts: set[str] = set()
    for package, files in HOSTS.items():
        folder = importlib.util.find_spec(package).submodule_search_locations[0]  # type: ignore[union-attr, index]
        for file in files:
            hosts |= defined_names(Path(folder, file).read_text(encoding="utf-8"))
    assert {"_CHUNKED_LOGPROB_CHUNK_SIZE", "_metrics", "_step", "_compute_loss"} <= hosts
    used: dict[str, set[str]] = {}
    overridden: set[str] = set()
    table: set[str] = set()
    for module, path in modules(repo_root):
        if module.split(".")[1] in lower_layers(repo_root):
            continue
        source = path.read_text(encoding="utf-8")
        if module == COMPAT:
            _, head, source = source.split('"""', 2)
            table = set(re.findall(r"`(_\w+)`", head))
        overridden |= hosts & set(re.findall(rf"super\(\)\.{PRIVATE}", source))
        names = re.findall(rf"(?:\.|\bimport |[\"(, ]){PRIVATE}", source)
        used[module] = hosts & set(names) - defined_names(source)
    in_compat = used.pop(COMPAT)
    assert {module: names for module, names in used.items() if names} == ELSEWHERE
    assert table & hosts == in_compat | overridden | ELSEWHERE[f"{PACKAGE}.rollout.policy"]


def test_contributing_lists_the_subpackages_by_their_docstrings(repo_root: Path) -> None:
    package = repo_root / "src" / "text2sql_grpo"
    sources = {path.parent.name: path.read_text("utf-8") for path in package.glob("*/__init__.py")}
    lines = {
        name: (ast.get_docstring(ast.parse(source)) or "").split("\n")[0] for name, source in sources.items()
    }
    page = (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("| subpackage | what it decides |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert dict(re.findall(r"\| `(\w+)` \| (.+) \|", table)) == lines
