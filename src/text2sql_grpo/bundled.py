"""Files bundled with the package: configs, and the quickstart's data."""

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
# A wheel holds `config/` and `data/` inside the package; in a checkout they stand next to `src/`.
ROOT = _PACKAGE / "bundled" if (_PACKAGE / "bundled").is_dir() else _PACKAGE.parents[1]


def is_bundled(path: Path) -> bool:
    """True for a relative path that names a file of the package, and none of the working folder."""
    return not path.is_absolute() and not path.exists() and (ROOT / path).exists()


def located(path: Path) -> Path:
    """Resolve `path` to the bundled file or folder of this name if the working folder has none."""
    return ROOT / path if is_bundled(path) else path


def with_bundled_paths(tree: Any) -> Any:
    """Copy of a tree of plain values with absolute paths for bundled files and folders."""
    if isinstance(tree, dict):
        return {key: with_bundled_paths(value) for key, value in tree.items()}
    return str(located(Path(tree))) if isinstance(tree, str) and tree.startswith("data/") else tree
