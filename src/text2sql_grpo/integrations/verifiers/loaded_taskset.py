"""A taskset of verifiers and its environment, loaded for the rollout engine."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import verifiers.v1 as vf

from text2sql_grpo.errors import ConfigError

_CHAT_HARNESS = "bash"  # verifiers' default; without its shell it is the plain chat loop


@dataclass(frozen=True)
class LoadedTaskset:
    """Tasks and their environment.

    Attributes:
        environment: The plug-in's `Env` with its control flow; None for verifiers' default: one run of the
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
        """Id of the plug-in; empty for a taskset that is not of one."""
        return str(self.taskset.config.id)

    def episode(self, trace: vf.Trace, **fields: Any) -> vf.Episode:
        """Verifiers' episode of the only trace of a rollout."""
        return vf.Episode(env=vf.EnvInfo(id=self.id), task=trace.task, traces=[trace], ok=trace.ok, **fields)


def load_taskset(
    taskset: vf.Taskset | str, config: Mapping[str, Any] | None = None, *, num_tasks: int | None = None
) -> LoadedTaskset:
    """Load the tasks and check that the rollout engine can roll them out and score them.

    Args:
        taskset: An object, or the id of an installed plug-in.
        config: Config of the taskset, with an id; see the plug-in's documentation.
        num_tasks: Only the first n; None for all.

    Raises:
        ConfigError: The plug-in is not installed, its config is wrong, or it needs an unsupported feature: a
            container, a runtime to score in, a harness of its own, several agents.
    """
    if isinstance(taskset, str):
        try:
            read = vf.taskset_config_type(taskset).model_validate({**(config or {}), "id": taskset})
            taskset = vf.load_taskset(read)
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"cannot load the verifiers taskset with its config: {error}") from error
    elif config:
        raise ConfigError("a config needs the id of a taskset, it was given with a taskset object")
    name = taskset.config.id or type(taskset).__name__
    if not taskset.bounded and num_tasks is None:
        raise ConfigError(f"an infinite taskset needs num_tasks ({name})")
    tasks = list(taskset if num_tasks is None else taskset.take(num_tasks))
    if not tasks:
        raise ConfigError(f"the taskset has no tasks ({name})")
    _check_task(tasks[0])
    if vf.default_harness_id(taskset.config.id) != _CHAT_HARNESS:
        raise ConfigError(
            f"cannot train on a taskset with a harness of its own ({name}), only on chats and Envs;"
            " SQLGRPOTrainer trains on this package's environment"
        )
    environment_class = vf.environment_class(taskset.config.id)
    if environment_class is vf.SingleAgentEnv:
        return LoadedTaskset(taskset, tasks, None, "agent", vf.AgentConfig())
    environment = environment_class(vf.env_config_type(taskset.config.id)(taskset=taskset.config))
    agents = {name: value for name, value in environment.config if isinstance(value, vf.AgentConfig)}
    if len(agents) != 1:
        raise ConfigError(f"an environment must have one agent, got {', '.join(agents)} ({name})")
    ((agent_name, agent),) = agents.items()
    return LoadedTaskset(taskset, tasks, environment, agent_name, agent)


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
        if not {vf.Request, vf.Response}.isdisjoint(get_type_hints(hook).values()):
            raise ConfigError(f"@stop must take a Trace: {name}.{hook.__name__} does not")
