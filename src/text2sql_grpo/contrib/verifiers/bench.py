"""Environment and judge of tasks, opened once per process for each config."""

import json
from dataclasses import dataclass
from functools import lru_cache

from text2sql_grpo.config import Config, parse_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.rewards import Judge, RewardMix, open_grader
from text2sql_grpo.sql import SQLExecutor


@dataclass(frozen=True)
class Bench:
    """Environment and judge of one config."""

    environment: SQLEnvironment
    judge: Judge


def read_settings(settings: str) -> Config:
    """Parse settings into a whole config, with all its checks; model and questions are placeholders.

    Args:
        settings: JSON: the folder `databases`, and the sections `environment`, `rewards` and `grading`.

    Raises:
        ConfigError: A key or value is wrong, or a wrong answer could out-score a right one.
    """
    sections = json.loads(settings)
    data = {"databases": sections.pop("databases"), "train": "-"}
    return parse_config({"model": {"path": "-"}, "data": data} | sections, source="taskset.task")


@lru_cache(maxsize=8)
def open_bench(settings: str) -> Bench:
    """Open the bench of these settings; see `read_settings`."""
    config = read_settings(settings)
    databases, executor = Databases(config.data.databases), SQLExecutor(config.environment.limits)
    environment = SQLEnvironment(databases, executor, config.environment.settings())
    if config.environment.mcp is not None:
        from text2sql_grpo.contrib.mcp.environment import MCPEnvironment

        server = config.environment.mcp
        environment = MCPEnvironment(databases, executor, environment.settings, server=server)
    grader = open_grader(
        executor,
        neighbours=config.grading.neighbours,
        neighbour_url=config.grading.neighbour_url,
    )
    return Bench(environment, Judge(grader, executor, RewardMix(config.rewards)))
