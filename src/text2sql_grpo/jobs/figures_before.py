"""Figures of the policy before GRPO, kept in the cache for the next run that begins with the same policy."""

import dataclasses
import shutil
from pathlib import Path

from text2sql_grpo.data.databases import cache_folder
from text2sql_grpo.data.shards import shard_files
from text2sql_grpo.files import draft, fingerprint
from text2sql_grpo.jobs.setup import Run
from text2sql_grpo.jobs.sft import stage_folder
from text2sql_grpo.reliability import ranks
from text2sql_grpo.run_folder import EVALUATION, START, answers_file
from text2sql_grpo.training.arguments import SQLGRPOConfig

_ABOUT_GRPO = {"run", "grpo", "selection", "alerts"}  # sections that the figures do not depend on


def figures_folder(run: Run, arguments: SQLGRPOConfig) -> Path | None:
    """Folder in the cache by a hash of the SFT stage, the settings, the questions and this package's code.

    None without SFT: the model's files are then not hashed.
    """
    config = run.config
    if config.sft is None:
        return None
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in _ABOUT_GRPO}
    what = [stage_folder(run.bench, arguments).name, settings, config.run.seed, arguments.temperature]
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    files = [*code, *shard_files(config.data.train), *config.data.test.values()]
    return cache_folder("before") / fingerprint(what, files)


def recall_figures(run: Run, folder: Path | None) -> bool:
    """Copy the figures of an earlier run into the run folder; returns whether there were any."""
    is_there = folder is not None and ranks.is_main() and folder.is_dir()
    if is_there:
        assert folder is not None
        shutil.copytree(folder, run.folder, dirs_exist_ok=True)
        run.console.print(f"Figures before GRPO, of an earlier run: {folder}", soft_wrap=True)
    return ranks.any_rank(is_there)


def keep_figures(run: Run, folder: Path | None) -> None:
    """Copy the figures of this run into the cache, unless its start was trained further."""
    if folder is None or not ranks.is_main() or (run.folder / "sft" / "round-1").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with draft(folder) as scratch:
        scratch.mkdir()
        for file in (run.folder / START, run.folder / EVALUATION, answers_file(run.folder, "before")):
            if file.exists():
                shutil.copy(file, scratch)
