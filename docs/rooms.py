"""The rooms of the package in order, and a picture of which imports which.

    python docs/rooms.py      # writes docs/rooms.svg

`tests/unit/test_architecture.py` checks the order, and that the picture is the one of today's imports.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "text2sql_grpo"
CONTRIB = f"{PACKAGE}.contrib"

# A room imports only from itself and from rooms before it. A new room needs its place here.
LIGHT_ROOMS = {
    "errors": "failures that stop a run",
    "files": "atomic writes, JSON and JSONL",
    "run_folder": "names of the files that a run leaves",
    "bundled": "configs and data that come with the package",
    "docstrings": "help texts out of docstrings",
    "sql": "one untrusted query to a typed outcome; schemas",
    "grading": "whether a result is right, and why not",
    "data": "questions: loading, checking, generating",
    "environment": "what the model sees, may do and did",
    "rewards": "an episode to verdict, scores, reward, flags",
    "audit": "whether golds and rewards are sound",
    "config": "the fields of a config",
}
HEAVY_ROOMS = {
    "rollout": "many sessions played by one policy",
    "models": "loading, converting and fitting models and devices",
    "reliability": "checkpoints, ranks, signals, alerts",
    "trl_compat": "private names of TRL",
    "token_tree": "an update that forwards each distinct prefix once",
    "training": "a step of GRPO",
    "sft": "supervised fine-tuning before it",
    "evaluation": "held-out accuracy with intervals",
    "publishing": "merge, model card, Hub",
    "reporting": "a run folder to pictures",
    "contrib": "verifiers, MCP, stock TRL, trackers",
    "jobs": "what each command does",
    "commands": "the command line",
}
ROOMS = [*LIGHT_ROOMS, *HEAVY_ROOMS]
parsed = cache(ast.parse)


def modules(package_folder: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(package_folder.rglob("*.py")):
        parts = path.relative_to(package_folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str | None:
    """The room a module of the package belongs to; None for the package itself and other packages."""
    top, _, rest = module.partition(".")
    name = rest.split(".")[0]
    return name if top == PACKAGE and name and not name.startswith("__") else None


def nodes_run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node outside functions and `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield node
            yield from nodes_run_at_import(node)


def imported_modules(path: Path, module: str, *, nodes_of: Any = ast.walk) -> Iterator[str]:
    """Absolute names of the modules that a file imports.

    Args:
        nodes_of: Which nodes of the file count: by default those inside functions too.
    """
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    for node in nodes_of(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from package import room` names the room only among the imported names.
            is_outer = base in (PACKAGE, CONTRIB)
            yield from (f"{base}.{alias.name}" for alias in node.names) if is_outer else (base,)


def room_imports(package_folder: Path, *, nodes_of: Any = ast.walk) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    pairs = {
        (room_of(module), room_of(imported))
        for module, path in modules(package_folder).items()
        for imported in imported_modules(path, module, nodes_of=nodes_of)
    }
    return {(room, other) for room, other in pairs if room and other and room != other}


STEP = 27  # pixels from one room to the next
LEFT, TOP = 16, 40
WIDTH, HEIGHT = 900, TOP + STEP * len(ROOMS) + 44
BLUE, RED, GREY = "#24527a", "#c0392b", "#f4f6f8"


def picture(package_folder: Path) -> str:
    """Return the SVG of the rooms: a staircase of rooms, with a dot for each import of another room."""
    at_import = room_imports(package_folder, nodes_of=nodes_run_at_import)
    right = WIDTH - LEFT
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        "<style>text { font: 13px sans-serif } .name { font-weight: bold }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" class="name">Each room imports only rooms above it</text>',
    ]
    for i, (room, about) in enumerate({**LIGHT_ROOMS, **HEAVY_ROOMS}.items()):
        x, y = LEFT + STEP * i, TOP + STEP * i
        if i % 2:
            shapes.append(f'<rect x="{LEFT}" y="{y}" width="{right - LEFT}" height="{STEP}" fill="{GREY}"/>')
        shapes += [
            f'<rect x="{x + 3}" y="{y + 3}" width="{STEP - 6}" height="{STEP - 6}" rx="3" fill="{BLUE}"/>',
            f'<text x="{x + STEP + 4}" y="{y + 18}"><tspan class="name">{room}</tspan> {about}</text>',
        ]
    for room, other in sorted(room_imports(package_folder)):
        x, y = (start + STEP * (ROOMS.index(one) + 0.5) for start, one in ((LEFT, other), (TOP, room)))
        fill = BLUE if (room, other) in at_import else "white"
        shapes.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{BLUE}" stroke-width="1.5"/>')
    y = TOP + STEP * len(LIGHT_ROOMS)
    caption = f'<text x="{right - 4}" text-anchor="end" fill="{RED}"'
    shapes += [
        f'<path d="M{LEFT} {y}H{right}" stroke="{RED}" stroke-width="2" stroke-dasharray="7 4"/>',
        f'{caption} y="{y - 8}">torch, TRL, transformers, PEFT, verifiers</text>',
        f'{caption} y="{y + 18}">only below this line</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 16}">A dot in the row of a room: it imports the room whose step '
        "stands above the dot. A ring: inside functions only.</text>",
    ]
    return "\n".join([*shapes, "</svg>", ""])


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "rooms.svg").write_text(picture(here.parent / "src" / PACKAGE), encoding="utf-8", newline="\n")
