"""Train language models to answer questions over a SQL database, by reinforcement learning on TRL.

    import text2sql_grpo as t2s

    with t2s.Environment("shop.sqlite", max_turns=4) as env:
        trainer = t2s.SQLGRPOTrainer("Qwen/Qwen2.5-Coder-0.5B-Instruct", env, train_dataset=rows)
        trainer.train()
        merged = trainer.merge("runs/mine/merged")
        print(t2s.evaluate(merged, env, test, samples=8).pass_at(8))
        print(env.ask("How many orders were cancelled?", merged).result)

A name is imported when it is first used, so importing the package loads no torch. `docs/api.md` has them all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from text2sql_grpo.config import Config as Config
    from text2sql_grpo.config import EnvironmentConfig as EnvironmentConfig
    from text2sql_grpo.config import EvaluationConfig as EvaluationConfig
    from text2sql_grpo.config import LossesConfig as LossesConfig
    from text2sql_grpo.config import MCPConfig as MCPConfig
    from text2sql_grpo.config import RolloutConfig as RolloutConfig
    from text2sql_grpo.config import load_config as load_config
    from text2sql_grpo.data.databases import Databases as Databases
    from text2sql_grpo.data.example import Example as Example
    from text2sql_grpo.data.loading import load_examples as load_examples
    from text2sql_grpo.environment.episode import Action as Action
    from text2sql_grpo.environment.episode import Episode as Episode
    from text2sql_grpo.environment.observation import ObservationLimits as ObservationLimits
    from text2sql_grpo.environment.session import EnvironmentSettings as EnvironmentSettings
    from text2sql_grpo.environment.session import SQLEnvironment as SQLEnvironment
    from text2sql_grpo.errors import ConfigError as ConfigError
    from text2sql_grpo.errors import DataError as DataError
    from text2sql_grpo.errors import HubError as HubError
    from text2sql_grpo.errors import ModelError as ModelError
    from text2sql_grpo.errors import RewardError as RewardError
    from text2sql_grpo.errors import RunError as RunError
    from text2sql_grpo.evaluation.bench import Asked as Asked
    from text2sql_grpo.evaluation.bench import Environment as Environment
    from text2sql_grpo.evaluation.endpoint import Endpoint as Endpoint
    from text2sql_grpo.evaluation.report import Report as Report
    from text2sql_grpo.evaluation.report import evaluate as evaluate
    from text2sql_grpo.evaluation.statistics import Accuracy as Accuracy
    from text2sql_grpo.grading import Grader as Grader
    from text2sql_grpo.grading import Verdict as Verdict
    from text2sql_grpo.rewards import Answer as Answer
    from text2sql_grpo.rewards import Results as Results
    from text2sql_grpo.rewards import RewardFunction as RewardFunction
    from text2sql_grpo.rewards import RewardMix as RewardMix
    from text2sql_grpo.rewards import reward as reward
    from text2sql_grpo.run.pipeline import RunResult as RunResult
    from text2sql_grpo.run.pipeline import train as train
    from text2sql_grpo.sql import ExecutionOutcome as ExecutionOutcome
    from text2sql_grpo.sql import Limits as Limits
    from text2sql_grpo.sql import SQLExecutor as SQLExecutor
    from text2sql_grpo.training.arguments import SQLGRPOConfig as SQLGRPOConfig
    from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer as SQLGRPOTrainer

__version__ = "0.3.0"
_NAMES = {
    "config": "Config EnvironmentConfig EvaluationConfig LossesConfig MCPConfig RolloutConfig load_config",
    "data.databases": "Databases",
    "data.example": "Example",
    "data.loading": "load_examples",
    "environment.episode": "Action Episode",
    "environment.observation": "ObservationLimits",
    "environment.session": "EnvironmentSettings SQLEnvironment",
    "errors": "ConfigError DataError HubError ModelError RewardError RunError",
    "evaluation.bench": "Asked Environment",
    "evaluation.endpoint": "Endpoint",
    "evaluation.report": "Report evaluate",
    "evaluation.statistics": "Accuracy",
    "grading": "Grader Verdict",
    "rewards": "Answer Results RewardFunction RewardMix reward",
    "run.pipeline": "RunResult train",
    "sql": "ExecutionOutcome Limits SQLExecutor",
    "training.arguments": "SQLGRPOConfig",
    "training.sql_trainer": "SQLGRPOTrainer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
