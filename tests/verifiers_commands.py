"""Console scripts of verifiers, run in this process: one of its own would import for seconds."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.number_game import find_packages


def run_command(folder: Path, name: str, *arguments: str) -> None:
    """Run a console script in a folder; signals and logging of this process stay as they are."""
    find_packages()
    (script,) = entry_points(group="console_scripts", name=name)
    main = script.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        for setting in ("install_interrupt", "setup_logging"):
            patch.setitem(main.__globals__, setting, lambda *_, **__: None)
        main(list(arguments))
