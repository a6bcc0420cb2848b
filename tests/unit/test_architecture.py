"""Rules that keep the package readable, beside the contracts of import-linter in pyproject.toml."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import text2sql_grpo

PACKAGE = "text2sql_grpo"
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers"}
HEAVY = {"torch", "trl", "transformers", "verifiers", "peft", "pandas", "matplotlib", "datasets", "wandb"}
parsed = cache(ast.parse)


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
# Imported where a config or an option asks for what they are for.
USES_OPTIONAL = {f"sql.{name}" for name in ("duckdb_database", "postgres_database", "postgres_role")}
USES_OPTIONAL |= {f"grading.{name}" for name in ("duckdb_copies", "postgres_copies", "postgres_server")}
USES_OPTIONAL |= {"models.gguf", "reporting.learning_curve"}


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


def defined_private_names(source: str) -> set[str]:
    """Private names that a module defines: functions, constants, and attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if re.match(r"_[A-Za-z]", name)}


def used_private_names(source: str, hosts: set[str]) -> tuple[set[str], set[str]]:
    """Private names of other packages: those that a module uses, and those that it calls by `super()`."""
    used: set[str] = set()
    overridden: set[str] = set()
    own = defined_private_names(source)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in HOSTS:
            used |= {alias.name for alias in node.names if alias.name in hosts}
        elif isinstance(node, ast.Constant) and node.value in hosts:
            used.add(str(node.value))
        elif isinstance(node, ast.keyword) and node.arg in hosts:
            used.add(node.arg)
        elif isinstance(node, ast.Attribute) and node.attr in hosts:
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
                overridden.add(node.attr)
            elif node.attr not in own or not (isinstance(value, ast.Name) and value.id == "self"):
                used.add(node.attr)
    return used, overridden


def host_private_names() -> set[str]:
    found: set[str] = set()
    for package, files in HOSTS.items():
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for file in files:
            found |= defined_private_names((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    return found


def test_private_names_of_trl_and_transformers_live_in_one_module(repo_root: Path) -> None:
    """Each stands in the table at its head, and the table lists no other."""
    hosts = host_private_names()
    light = lower_layers(repo_root)
    sources = {
        module: path.read_text(encoding="utf-8")
        for module, path in modules(repo_root)
        if module.split(".")[1] not in light
    }
    used = {module: used_private_names(source, hosts) for module, source in sources.items()}
    elsewhere = {module: names for module, (names, _) in used.items() if names and module != COMPAT}
    assert elsewhere == ELSEWHERE
    table = set(re.findall(r"`(_\w+)`", ast.get_docstring(ast.parse(sources[COMPAT])) or ""))
    overridden = set[str]().union(*(names for _, names in used.values()))
    assert table & hosts == used[COMPAT][0] | overridden | ELSEWHERE[f"{PACKAGE}.rollout.policy"]


def test_the_check_sees_private_names(repo_root: Path) -> None:
    source = """
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
class Ours(GRPOTrainer):
    def _compute_loss(self):
        self._mine = self._metrics
        return super()._compute_loss()
def f(trainer):
    trainer._step += 1
"""
    used, overridden = used_private_names(source, host_private_names())
    assert used == {"_CHUNKED_LOGPROB_CHUNK_SIZE", "_metrics", "_step"}
    assert overridden == {"_compute_loss"}
