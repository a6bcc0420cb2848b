"""The rules that keep the package readable: rooms import one way, and the upper ones stay light."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import text2sql_grpo
from docs.rooms import (
    CONTRIB,
    LIGHT_ROOMS,
    PACKAGE,
    ROOMS,
    imported_modules,
    modules,
    nodes_run_at_import,
    parsed,
    picture,
    room_of,
)

# Imports of contrib in the core: inside a function, where a config or an option asks for that very program.
OPENS_CONTRIB = {
    PACKAGE: {"verifiers"},  # which looks up its tasksets there
    f"{PACKAGE}.commands.collect": {"verifiers"},
    f"{PACKAGE}.commands.mcp": {"mcp"},
    f"{PACKAGE}.jobs.served": {"chat_endpoint"},
    f"{PACKAGE}.jobs.doctor_checks": {"mcp", "trackers"},
    f"{PACKAGE}.jobs.setup": {"mcp"},
    f"{PACKAGE}.jobs.train": {"trackers"},
}

NOT_IN_LIGHT_ROOMS = {"torch", "trl", "transformers", "verifiers", "peft"}
NOT_LOADED_BY_LIGHT_ROOMS = NOT_IN_LIGHT_ROOMS | {"pandas", "matplotlib", "datasets", "wandb"}
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers"}


def broken_rules(package_folder: Path) -> list[str]:
    """What each import does wrong, one line each."""
    broken = []
    for module, path in modules(package_folder).items():
        room = room_of(module)
        if room is None:
            continue
        if room not in ROOMS:
            broken.append(f"{module}: {room} has no place in ROOMS")
            continue
        for imported in imported_modules(path, module):
            target = room_of(imported)
            if target is not None and (target not in ROOMS or ROOMS.index(target) > ROOMS.index(room)):
                broken.append(f"{module} imports {imported}, a room below it")
            if room in LIGHT_ROOMS and imported.split(".")[0] in NOT_IN_LIGHT_ROOMS:
                broken.append(f"{module} imports {imported}, too heavy for {room}")
    return broken


def test_rooms_import_one_way_and_upper_rooms_stay_light(repo_root: Path) -> None:
    assert broken_rules(repo_root / "src" / PACKAGE) == []


def test_the_picture_of_the_rooms_is_current(repo_root: Path) -> None:
    drawn = (repo_root / "docs" / "rooms.svg").read_text(encoding="utf-8")
    assert drawn == picture(repo_root / "src" / PACKAGE), "run python docs/rooms.py"


def contrib_opened(package_folder: Path) -> tuple[list[str], dict[str, set[str]]]:
    """Imports of contrib by the core: lines about those at import time, and programs by opening module."""
    loaded, opened = [], {}
    for module, path in modules(package_folder).items():
        if room_of(module) == "contrib":
            continue
        at_import = set(imported_modules(path, module, nodes_of=nodes_run_at_import))
        names = {name for name in imported_modules(path, module) if room_of(name) == "contrib"}
        loaded += [f"{module} imports {name} when it is imported" for name in sorted(names & at_import)]
        if names:
            opened[module] = {name.removeprefix(f"{CONTRIB}.").split(".")[0] for name in names}
    return loaded, opened


def test_the_core_imports_nothing_of_contrib(repo_root: Path) -> None:
    assert contrib_opened(repo_root / "src" / PACKAGE) == ([], OPENS_CONTRIB)


def test_an_import_of_contrib_is_seen(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    (package / "jobs").mkdir(parents=True)
    (package / "jobs" / "early.py").write_text(f"try:\n    import {CONTRIB}.mcp.pool\nexcept OSError: ...\n")
    (package / "jobs" / "late.py").write_text(f"def f():\n    from {CONTRIB} import trackers\n")
    for_types = f"if TYPE_CHECKING:\n    from {CONTRIB}.trackers import Tracking\n"
    (package / "jobs" / "types.py").write_text(for_types)
    assert contrib_opened(package) == (
        [f"{PACKAGE}.jobs.early imports {CONTRIB}.mcp.pool when it is imported"],
        {
            f"{PACKAGE}.jobs.{name}": {opened}
            for name, opened in (("early", "mcp"), ("late", "trackers"), ("types", "trackers"))
        },
    )


# Only what these packages are for imports them at import time; it is itself imported when it is needed.
OPTIONAL = {"duckdb", "psycopg", "bitsandbytes", "vllm", "deepspeed", "verifiers", "mcp", "openai"}
OPTIONAL |= {"wandb", "tensorboard", "trackio", "weave", "gguf", "matplotlib"}
ENGINES = {f"{PACKAGE}.sql.{name}" for name in ("duckdb_database", "postgres_database", "postgres_role")}
ENGINES |= {f"{PACKAGE}.grading.{name}" for name in ("duckdb_copies", "postgres_copies", "postgres_server")}
# Like engines, what these two read or draw is asked for by a config, or can be left out.
ENGINES |= {f"{PACKAGE}.models.gguf", f"{PACKAGE}.reporting.learning_curve"}


def test_the_core_imports_no_optional_package(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"\W", line)[0] for line in project["dependencies"]}
    assert not OPTIONAL & needed
    for module, path in modules(repo_root / "src" / PACKAGE).items():
        if room_of(module) != "contrib" and module not in ENGINES:
            at_import = set(imported_modules(path, module, nodes_of=nodes_run_at_import))
            found = {name for name in at_import if name.split(".")[0] in OPTIONAL} | at_import & ENGINES
            assert not found, module


def test_verifiers_which_opens_every_public_name_loads_no_torch() -> None:
    rooms = {text2sql_grpo._MODULES[name].split(".")[0] for name in text2sql_grpo.__all__}
    assert rooms <= {*LIGHT_ROOMS, "contrib"}
    assert {"train", "SQLGRPOTrainer", *text2sql_grpo.__all__} <= {*dir(text2sql_grpo)}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = text2sql_grpo.trian


def test_the_check_sees_each_kind_of_wrong_import(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    (package / "sql").mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\n")  # held by the test of loaded modules instead
    (package / "attic.py").write_text("")
    (package / "sql" / "__init__.py").write_text("from ..grading import strict\n")
    (package / "sql" / "late.py").write_text("def f():\n    from torch.nn import Linear\n")
    (package / "sql" / "whole.py").write_text(f"from {PACKAGE} import training, errors\n")
    (package / "sql" / "fine.py").write_text(f"import {PACKAGE}.errors\nfrom . import late\nimport json\n")
    assert broken_rules(package) == [
        f"{PACKAGE}.attic: attic has no place in ROOMS",
        f"{PACKAGE}.sql imports {PACKAGE}.grading, a room below it",
        f"{PACKAGE}.sql.late imports torch.nn, too heavy for sql",
        f"{PACKAGE}.sql.whole imports {PACKAGE}.training, a room below it",
    ]


def test_light_rooms_load_nothing_heavy(repo_root: Path) -> None:
    light = [PACKAGE] + [
        module for module in modules(repo_root / "src" / PACKAGE) if room_of(module) in LIGHT_ROOMS
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {NOT_LOADED_BY_LIGHT_ROOMS!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


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
    sources = {
        module: path.read_text(encoding="utf-8")
        for module, path in modules(repo_root / "src" / PACKAGE).items()
        if room_of(module) not in LIGHT_ROOMS
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
