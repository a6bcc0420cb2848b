"""A taskset and what belongs to it, opened to be played by our rollout engine."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from verifiers.v1.configs.agent import agent_config_fields  # type: ignore[import-untyped, import-not-found, unused-ignore]
from verifiers.v1.session import hook_boundary  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.errors import ConfigError

_CHAT_HARNESS = "bash"  # verifiers' default; with its shell left out it is the plain chat loop


@dataclass(frozen=True)
class Package:
    """Tasks, and the environment that plays them.

    Attributes:
        environment: The package's `Env` with its control flow; None for verifiers' default: one run of the
            agent on the task.
        agent_name: Of the only seat in it.
        agent: The seat's config: its limits count.
    """

    taskset: vf.Taskset
    tasks: list[vf.Task]
    environment: vf.Env | None
    agent_name: str
    agent: vf.AgentConfig

    @property
    def id(self) -> str:
        """Of the installed package; empty for a taskset that is none."""
        return str(self.taskset.config.id)


def open_package(
    taskset: vf.Taskset | str, config: Mapping[str, Any] | None = None, *, num_tasks: int | None = None
) -> Package:
    """Loads the tasks and checks that our engine can play and score them.

    Args:
        taskset: An object, or the id of an installed package.
        config: Of the taskset, with an id; see the package's documentation.
        num_tasks: The first so many; None for all.

    Raises:
        ConfigError: There is no such package, its config is wrong, or it needs what training does not have:
            a container, a runtime to score in, a harness of its own, several agents.
    """
    if isinstance(taskset, str):
        taskset = _load(taskset, config or {})
    elif config:
        raise ConfigError("expected a config with the id of a taskset, got one with a taskset object")
    if not taskset.bounded and num_tasks is None:
        raise ConfigError(f"expected num_tasks for a taskset without end, got none ({_name(taskset)})")
    tasks = list(taskset if num_tasks is None else taskset.take(num_tasks))
    if not tasks:
        raise ConfigError(f"expected a taskset with tasks, got none ({_name(taskset)})")
    _check_task(tasks[0])
    return _with_environment(taskset, tasks)


def _load(taskset_id: str, config: Mapping[str, Any]) -> vf.Taskset:
    try:
        read = vf.taskset_config_type(taskset_id).model_validate({**config, "id": taskset_id})
        return vf.load_taskset(read)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"expected a verifiers taskset and its config, got: {error}") from error


def _with_environment(taskset: vf.Taskset, tasks: list[vf.Task]) -> Package:
    package = taskset.config.id
    if vf.default_harness_id(package) != _CHAT_HARNESS:
        raise ConfigError(
            f"expected a taskset that is played as a chat or by an Env, got one with a harness of its own "
            f"({package}); SQLGRPOTrainer trains on our own environment"
        )
    environment_class = vf.environment_class(package)
    if environment_class is vf.SingleAgentEnv:
        return Package(taskset, tasks, None, "agent", vf.AgentConfig())
    environment = environment_class(vf.env_config_type(package)(taskset=taskset.config))
    seats = agent_config_fields(environment.config)
    if len(seats) != 1:
        raise ConfigError(
            f"expected an environment with one agent, got {', '.join(seats) or 'none'} ({package})"
        )
    ((name, agent),) = seats.items()
    return Package(taskset, tasks, environment, name, agent)


def _check_task(task: vf.Task) -> None:
    name = type(task).__name__
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise ConfigError(f"expected tasks that need no container, got {name}")
    for hook in [*task.hooks("reward"), *task.hooks("metric")]:
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"expected rewards and metrics that need no runtime, got {name}.{hook.__name__}, "
                "which would be left out of every score"
            )
    if any(hasattr(getattr(type(task), attribute, None), "intercept") for attribute in dir(type(task))):
        raise ConfigError(f"expected tasks without @intercept, got {name}")
    for hook in task.hooks("stop"):
        if hook_boundary(hook, allow_trace=True) is not vf.Trace:
            raise ConfigError(f"expected @stop of a Trace, got {name}.{hook.__name__}")


def _name(taskset: vf.Taskset) -> str:
    return taskset.config.id or type(taskset).__name__
