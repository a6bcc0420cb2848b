"""Train language models to answer questions over a SQL database, by reinforcement learning on TRL.

    from text2sql_grpo import Databases, Grader, SQLExecutor, evaluate, load_config, load_examples, train

    config = load_config("my.yaml", ["--grpo.max_steps", "1"])
    train(config)  # SFT if configured, evaluation, GRPO, evaluation, merge
    scores = evaluate(config.run.output_dir / "merged", config)["sets"]

    databases = Databases(config.data.databases)
    with SQLExecutor(config.environment.limits) as executor:
        examples = load_examples(config.data.train, databases, executor)
        database = databases.address(examples[0].database)
        print(Grader(executor).grade(database, examples[0].gold_sql, "SELECT 1").reason)

A name is imported when it is first used, so importing the package loads no torch. `docs/api.md` has them all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from text2sql_grpo.config import load_config
    from text2sql_grpo.data.databases import Databases
    from text2sql_grpo.data.loading import load_examples
    from text2sql_grpo.environment.session import SQLEnvironment
    from text2sql_grpo.grading import Grader
    from text2sql_grpo.integrations.verifiers import SQLEnv, SQLHarness, SQLTaskset
    from text2sql_grpo.rewards import RewardMix
    from text2sql_grpo.run.evaluate_job import evaluate as evaluate
    from text2sql_grpo.run.pipeline import train as train
    from text2sql_grpo.sql import SQLExecutor
    from text2sql_grpo.training.arguments import SQLGRPOConfig as SQLGRPOConfig
    from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer as SQLGRPOTrainer

__version__ = "0.2.0"
# verifiers opens each of these names to find the package's taskset, harness and environment, in every process
# of an evaluation. So the names that load torch are not among them.
__all__ = [
    "Databases",
    "Grader",
    "RewardMix",
    "SQLEnv",
    "SQLEnvironment",
    "SQLExecutor",
    "SQLHarness",
    "SQLTaskset",
    "load_config",
    "load_examples",
]
_MODULES = {
    "Databases": "data.databases",
    "Grader": "grading",
    "RewardMix": "rewards",
    "SQLEnv": "integrations.verifiers",
    "SQLEnvironment": "environment.session",
    "SQLExecutor": "sql",
    "SQLGRPOConfig": "training.arguments",
    "SQLGRPOTrainer": "training.sql_trainer",
    "SQLHarness": "integrations.verifiers",
    "SQLTaskset": "integrations.verifiers",
    "evaluate": "run.evaluate_job",
    "load_config": "config",
    "load_examples": "data.loading",
    "train": "run.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
