"""Trackers: W&B, Trackio and TensorBoard for metrics, Weave for episodes.

Training metrics are logged by transformers' callbacks, all others here, under the same names everywhere:
`NAME` of `metrics.jsonl` is `train/NAME`, one of a held-out set is `eval/SET/NAME`.
"""

import json
import logging
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from text2sql_grpo.errors import ConfigError, install_command
from text2sql_grpo.files import write_text
from text2sql_grpo.run_folder import PAGE, ROLLOUTS, answers_file, log_lines, read_episodes, with_step

TRACKERS = ("wandb", "trackio", "tensorboard", "weave")
PROJECT = "text2sql-grpo"
ROWS_OF_EACH = 8  # episodes of a step, or answers of a set, in the tables of trackers
_EPISODE_COLUMNS = ("step", "example", "database", "question", "gold_sql", "final_sql", "reason", "reward")
_ANSWER_COLUMNS = ("set", "example", "database", "question", "gold_sql", "final_sql", "reason", "strict")
_EVALUATED = {"wandb", "trackio", "tensorboard"}  # trackers of transformers that receive evaluations
logger = logging.getLogger(__name__)


def trackers(report_to: Any) -> list[str]:
    """Names of the trackers in `grpo.report_to`.

    If it is not set: W&B where its package is installed or a key is set, else none.

    Raises:
        ConfigError: It is no name and no list of names, or one of them is unknown.

    >>> trackers(None), trackers("none"), trackers(["tensorboard", "weave"])
    (['wandb'], [], ['tensorboard', 'weave'])
    """
    if report_to is None:
        return ["wandb"] if find_spec("wandb") or os.environ.get("WANDB_API_KEY") else []
    names = [report_to] if isinstance(report_to, str) else report_to
    known = {*TRACKERS, *INTEGRATION_TO_CALLBACK, "none"}
    if not isinstance(names, list) or any(name not in known for name in names):
        raise ConfigError(
            f"grpo.report_to must be a list of {', '.join(TRACKERS)}, or none, got {report_to!r}"
        )
    return [name for name in names if name != "none"]


def check_installed(names: Sequence[str]) -> None:
    """Check that each tracker's package is installed.

    Raises:
        ConfigError: A package is missing; the text names the installation command.
    """
    missing = [name for name in names if name in TRACKERS and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"grpo.report_to names {' and '.join(missing)}, which is not installed here: "
            f"{install_command(*missing)} (or set grpo.report_to: none)"
        )
    for name in names:
        if name not in TRACKERS:
            try:
                INTEGRATION_TO_CALLBACK[name]()
            except (RuntimeError, ImportError) as error:
                raise ConfigError(f"grpo.report_to names {name}, which cannot be used: {error}") from error


@dataclass
class Tracking:
    """Open trackers of one run.

    Attributes:
        callbacks: Callbacks for the trainer, called after the callbacks of `report_to`.
    """

    names: Sequence[str]
    arguments: TrainingArguments
    callbacks: list[TrainerCallback] = field(default_factory=list)

    def log_outcome(self, folder: Path, merged: Path, questions: Sequence[Path], step: int) -> None:
        """Send a finished run: some episodes of each step and the held-out answers as tables, and files.

        W&B gets the page, the question files and a reference to the merged model as artifacts.
        """
        if not PartialState().is_main_process:
            return
        tables = {
            "episodes": _sampled(read_episodes(folder), _EPISODE_COLUMNS),
            "held_out": _sampled(log_lines(answers_file(folder), "answers"), _ANSWER_COLUMNS),
        }
        tables = {name: table for name, table in tables.items() if table["data"]}
        if "wandb" in self.names:
            import wandb

            known = {name: wandb.Table(**table) for name, table in tables.items()}
            wandb.log({**known, "train/global_step": step})
            name = re.sub(r"[^A-Za-z0-9._-]", "-", str(self.arguments.run_name))[:100]  # W&B refuses others
            for kind, paths in {"report": [folder / PAGE], "questions": questions}.items():
                artifact = wandb.Artifact(f"{name}-{kind}", type=kind)
                names = Counter(path.name for path in paths)
                for i, path in enumerate(paths):
                    own = path.name if names[path.name] == 1 else f"{i}-{path.name}"
                    artifact.add_file(str(path), name=own)
                wandb.log_artifact(artifact)
            artifact = wandb.Artifact(f"{name}-model", type="model")
            artifact.add_reference(merged.resolve().as_uri(), checksum=False)
            wandb.log_artifact(artifact)
        if "tensorboard" in self.names:
            with _tensorboard() as writer:
                for name, table in tables.items():
                    writer.add_text(name, _markdown(**table), step)
        if "trackio" in self.names:
            import trackio

            name = self.arguments.run_name
            trackio.init(self.arguments.project, name=name, resume="allow", embed=False)
            for kind, table in tables.items():
                trackio.log({kind: trackio.Table(**table)}, step=step)
            trackio.finish()

    def log_evaluation(self, sets: Mapping[str, Any], step: int) -> None:
        """Log accuracy and looks of held-out sets, by transformers' own callbacks."""
        figures: dict[str, float] = {}  # `eval_NAME`, which transformers makes `eval/NAME`
        for name, scores in sets.items():
            for grading, record in scores["overall"].items():
                figures[f"eval_{name}/accuracy/{grading}"] = record["accuracy"]
            figures[f"eval_{name}/episode/looks"] = scores["looks_per_question"]
        if not figures or not PartialState().is_main_process:
            return
        state = TrainerState(global_step=step)
        for name in _EVALUATED.intersection(self.names):
            callback = INTEGRATION_TO_CALLBACK[name]()
            callback.on_log(self.arguments, state, TrainerControl(), logs=figures)
        if "trackio" in self.names:
            import trackio

            trackio.finish()  # the callback opened its run once more


def _tensorboard() -> Any:
    """Writer of the run, closed at the end of its block."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"])


def _sampled(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[Any]]:
    """`columns` and `data` of the first records of each value of the first column."""
    seen = Counter[Any]()
    rows = []
    for record in records:
        row = [record[name] for name in columns]
        seen[row[0]] += 1
        if seen[row[0]] <= ROWS_OF_EACH:
            rows.append(row)
    return {"columns": list(columns), "data": rows}


def _markdown(columns: Sequence[str], data: Sequence[Sequence[Any]]) -> str:
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in data]
    table = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


class ConfigLog(TrainerCallback):
    """Callback that sends the config of a run to the trackers that transformers' callbacks opened."""

    def __init__(self, names: Sequence[str], config: Mapping[str, Any]) -> None:
        self._names, self._config = names, dict(config)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Add the config; transformers' own callbacks ran before."""
        if not state.is_world_process_zero:
            return
        for name in {"wandb", "trackio"}.intersection(self._names):
            import_module(name).config.update({"config": self._config}, allow_val_change=True)
        if "tensorboard" in self._names:
            with _tensorboard() as writer:
                writer.add_text("config", f"```\n{json.dumps(self._config, indent=1)}\n```")


def _wandb_run_id(folder: Path) -> str:
    """Id of the W&B run of a folder, so that a resumed run goes on in it."""
    path = folder / "wandb" / "run_id"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def tracking(
    names: Sequence[str], arguments: TrainingArguments, config: Mapping[str, Any] | None = None
) -> Iterator[Tracking]:
    """Open the trackers of a run in its folder, offline without a key, and close them.

    Args:
        config: Whole config of the run as plain data, which trackers receive; None for none.
        arguments: Training arguments: `output_dir`, `run_name` and `project` are used.

    Raises:
        ConfigError: Weave cannot be reached with the given key.
    """
    folder = Path(str(arguments.output_dir))
    defaults = {
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": arguments.project,
        "WANDB_SILENT": "true",
        "WANDB_MODE": "online" if os.environ.get("WANDB_API_KEY") else "offline",
        "WANDB_DISABLE_WEAVE": "true",  # or it would open Weave a second time
        "WANDB_ERROR_REPORTING": "false",  # it would go to a third party
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
    }
    if "wandb" in names and PartialState().is_main_process:
        defaults |= {"WANDB_RUN_ID": _wandb_run_id(folder), "WANDB_RESUME": "allow"}
    added = {name: value for name, value in defaults.items() if not os.environ.get(name)}
    os.environ.update(added)
    opened = Tracking(names, arguments)
    try:
        if config is not None:
            opened.callbacks.append(ConfigLog(names, config))
        if "weave" in names and PartialState().is_main_process:
            opened.callbacks += _episode_traces(folder / ROLLOUTS, arguments, config or {})
        yield opened
    finally:
        if "wandb" in names:
            import wandb

            if wandb.run is not None:
                wandb.finish(exit_code=int(sys.exc_info()[0] is not None))
            wandb.teardown()  # else the next run of this process would use this run's folder
        if any(isinstance(one, EpisodeTraces) for one in opened.callbacks):
            import weave

            weave.finish()
        for name in added:
            del os.environ[name]


class EpisodeTraces(TrainerCallback):
    """Callback that sends a step's episodes to Weave: a trace per episode, with a call per turn.

    Args:
        client: Client of Weave; it sends in the background and never stops training.
    """

    def __init__(self, client: Any, rollouts: Path, run_name: str) -> None:
        self._client = client
        self._rollouts = rollouts
        self._run_name = run_name
        self._sent_bytes = 0

    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """Skip episodes of an interrupted run, which sent them itself."""
        self._sent_bytes = self._rollouts.stat().st_size if self._rollouts.exists() else 0

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Send the step's episodes."""
        if not state.is_world_process_zero or not self._rollouts.exists():
            return
        with self._rollouts.open("rb") as file:
            file.seek(self._sent_bytes)
            for line in file:
                self._send(with_step(json.loads(line)))
            self._sent_bytes = file.tell()

    def _send(self, episode: Mapping[str, Any]) -> None:
        asked = ("question", "database", "gold_sql", "messages")
        became = ("final_sql", "stop_reason", "strict", "official", "reason", "flags", "scores", "reward")
        call = self._client.create_call(
            "episode",
            {name: episode[name] for name in asked},
            attributes={"run": self._run_name, "step": episode["step"], "example": episode["example"]},
            display_name=episode["example"],
            use_stack=False,
        )
        for action in episode["actions"]:
            turn = self._client.create_call(
                action["kind"], {"sql": action["sql"]}, parent=call, use_stack=False
            )
            self._client.finish_call(turn, output=action.get("outcome") or action.get("error"))
        self._client.finish_call(call, output={name: episode[name] for name in became})


def _episode_traces(
    rollouts: Path, arguments: TrainingArguments, config: Mapping[str, Any]
) -> list[TrainerCallback]:
    """Callback for Weave; none without a key, because Weave has no offline mode."""
    if not os.environ.get("WANDB_API_KEY"):
        logger.warning(f"Weave needs WANDB_API_KEY: no episode is sent to it; all of them are in {rollouts}")
        return []
    import weave
    from gql.transport.exceptions import TransportError
    from weave.trace.weave_init import WeaveWandbAuthenticationException

    unasked = ("print_call_link", "capture_code", "capture_system_info", "implicitly_patch_integrations")
    settings: dict[str, Any] = dict.fromkeys(unasked, False)
    try:
        client = weave.init(os.environ["WANDB_PROJECT"], settings=settings | {"log_level": "WARNING"})
    except (OSError, RuntimeError, ValueError, TransportError, WeaveWandbAuthenticationException) as error:
        raise ConfigError(
            f"cannot send traces to Weave: {error}; take weave out of grpo.report_to to run without"
        ) from error
    call = client.create_call(
        "run", {"config": dict(config)}, display_name=str(arguments.run_name), use_stack=False
    )
    client.finish_call(call)
    return [EpisodeTraces(client, rollouts, str(arguments.run_name))]
