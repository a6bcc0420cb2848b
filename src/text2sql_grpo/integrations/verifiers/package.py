"""A taskset and its environment, opened for the rollout engine."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from verifiers.v1.configs.agent import agent_config_fields  # type: ignore[import-untyped, import-not-found, unused-ignore]
from verifiers.v1.session import hook_boundary  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.errors import ConfigError

_CHAT_HARNESS = "bash"  # verifiers' default; without its shell it is the plain chat loop


@dataclass(frozen=True)
class Package:
    """Tasks and their environment.

    Attributes:
        environment: The package's `Env` with its control flow; None for verifiers' default: one run of the
            agent on the task.
        agent_name: Name of its only agent.
        agent: Config of that agent, with its limits.
    """

    taskset: vf.Taskset
    tasks: list[vf.Task]
    environment: vf.Env | None
    agent_name: str
    agent: vf.AgentConfig

    @property
    def id(self) -> str:
        """Id of the installed package; empty for another taskset."""
        return str(self.taskset.config.id)


def open_package(
    taskset: vf.Taskset | str, config: Mapping[str, Any] | None = None, *, num_tasks: int | None = None
) -> Package:
    """Load the tasks and check that the rollout engine can play and score them.

    Args:
        taskset: An object, or the id of an installed package.
        config: Config of the taskset, with an id; see the package's documentation.
        num_tasks: Only the first n; None for all.

    Raises:
        ConfigError: There is no such package, its config is wrong, or it needs an unsupported feature: a
            container, a runtime to score in, a harness of its own, several agents.
    """
    if isinstance(taskset, str):
        taskset = _load(taskset, config or {})
    elif config:
        raise ConfigError("a config needs the id of a taskset, it was given with a taskset object")
    if not taskset.bounded and num_tasks is None:
        raise ConfigError(f"an infinite taskset needs num_tasks ({_name(taskset)})")
    tasks = list(taskset if num_tasks is None else taskset.take(num_tasks))
    if not tasks:
        raise ConfigError(f"the taskset has no tasks ({_name(taskset)})")
    _check_task(tasks[0])
    return _with_environment(taskset, tasks)


def _load(taskset_id: str, config: Mapping[str, Any]) -> vf.Taskset:
    try:
        read = vf.taskset_config_type(taskset_id).model_validate({**config, "id": taskset_id})
        return vf.load_taskset(read)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot load the verifiers taskset with its config: {error}") from error


def _with_environment(taskset: vf.Taskset, tasks: list[vf.Task]) -> Package:
    package = taskset.config.id
    if vf.default_harness_id(package) != _CHAT_HARNESS:
        raise ConfigError(
            f"cannot train on a taskset with a harness of its own ({package}), only on chats and Envs;"
            " SQLGRPOTrainer trains on this package's environment"
        )
    environment_class = vf.environment_class(package)
    if environment_class is vf.SingleAgentEnv:
        return Package(taskset, tasks, None, "agent", vf.AgentConfig())
    environment = environment_class(vf.env_config_type(package)(taskset=taskset.config))
    agents = agent_config_fields(environment.config)
    if len(agents) != 1:
        raise ConfigError(
            f"an environment must have one agent, got {', '.join(agents) or 'none'} ({package})"
        )
    ((name, agent),) = agents.items()
    return Package(taskset, tasks, environment, name, agent)


def _check_task(task: vf.Task) -> None:
    name = type(task).__name__
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise ConfigError(f"cannot train on tasks that need a container: {name}")
    for hook in [*task.hooks("reward"), *task.hooks("metric")]:
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"cannot score without a runtime: {name}.{hook.__name__} needs one,"
                " and would be left out of every score"
            )
    if any(hasattr(getattr(type(task), attribute, None), "intercept") for attribute in dir(type(task))):
        raise ConfigError(f"cannot train on tasks with @intercept: {name}")
    for hook in task.hooks("stop"):
        if hook_boundary(hook, allow_trace=True) is not vf.Trace:
            raise ConfigError(f"@stop must take a Trace: {name}.{hook.__name__} does not")


def _name(taskset: vf.Taskset) -> str:
    return taskset.config.id or type(taskset).__name__
