"""Files that come with the package: configs, and the data of the quickstart."""

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
# A wheel holds `config/` and `data/` inside the package; in a checkout they stand beside `src/`.
ROOT = _PACKAGE / "bundled" if (_PACKAGE / "bundled").is_dir() else _PACKAGE.parents[1]


def is_bundled(path: Path) -> bool:
    """True for a relative path that names a file of the package, and none of the working folder."""
    return not path.is_absolute() and not path.exists() and (ROOT / path).exists()


def located(path: Path) -> Path:
    """`path`, or the package's file or folder of this name where the working folder has none."""
    return ROOT / path if is_bundled(path) else path


def with_bundled_paths(tree: Any) -> Any:
    """A tree of plain values in which each name of a bundled file or folder is its absolute path."""
    if isinstance(tree, dict):
        return {key: with_bundled_paths(value) for key, value in tree.items()}
    return str(located(Path(tree))) if isinstance(tree, str) and tree.startswith("data/") else tree
