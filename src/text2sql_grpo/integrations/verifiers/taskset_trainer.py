"""`VerifiersGRPOTrainer`: this package's trainer on any verifiers taskset."""

import asyncio
import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from anyio.from_thread import BlockingPortal, start_blocking_portal
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.errors import RunError, check_type
from text2sql_grpo.integrations.verifiers.loaded_taskset import LoadedTaskset, load_taskset
from text2sql_grpo.integrations.verifiers.policy_agent import open_toolbox
from text2sql_grpo.integrations.verifiers.task_session import TaskSession
from text2sql_grpo.run_folder import TRACES, RunLog
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.parts import Judged, Play, Row
from text2sql_grpo.training.play import Rollouts
from text2sql_grpo.training.record import Episodes
from text2sql_grpo.training.trainer import RolloutGRPOTrainer

logger = logging.getLogger(__name__)


class TaskPlay(Play):
    """Rollouts of the tasks of a taskset: its code prompts, replies, stops and scores.

    Args:
        taskset: The tasks, and how they run.
        portal: Event loop of a thread of its own, for the taskset's coroutines.
        run_log: Log of traces, in the output folder.
        leaves_out_truncated: Leave truncated rollouts out of the loss and of the baselines.
    """

    def __init__(
        self,
        taskset: LoadedTaskset,
        portal: BlockingPortal,
        run_log: RunLog,
        *,
        model: str,
        leaves_out_truncated: bool,
    ) -> None:
        self._taskset, self._model = taskset, model
        self._loop = portal.call(asyncio.get_running_loop)
        self._run_log, self._leaves_out_truncated = run_log, leaves_out_truncated
        self._toolsets, tools = portal.call(self._open_tools)
        self.tools = tools or None

    async def _open_tools(self) -> tuple[list[vf.Toolset], list[dict[str, Any]]]:
        taskset = self._taskset.taskset
        toolsets = type(taskset).toolsets(taskset.config)
        for toolset in toolsets:
            await toolset.setup()
        return toolsets, (await open_toolbox(toolsets, self._taskset.tasks[0])).schemas

    def play(self, questions: Sequence[int], rollouts: Rollouts) -> list[Row]:
        sessions = [
            TaskSession(
                self._taskset,
                self._taskset.tasks[number],
                rollouts.chat,
                self._loop,
                toolsets=self._toolsets,
                model=self._model,
            )
            for number in questions
        ]
        rollouts.run(sessions)
        traces = [session.finish() for session in sessions]
        _check_some_ok(traces)
        run = vf.TrainRunInfo(id=self._run_log.folder.name, work=vf.TrainWorkInfo(step=rollouts.step))
        rows = []
        for number, session, trace, metrics in zip(
            questions, sessions, traces, _metrics(traces), strict=True
        ):
            episode = session.episode
            is_left_out = not trace.ok or (self._leaves_out_truncated and episode.is_masked)
            judged = Judged(
                question=number,
                scores=None if is_left_out else {"reward": trace.reward},
                reward=None if is_left_out else trace.reward,
                stop_reason=str(episode.stop_reason),
                metrics=metrics,
            )
            rows.append(Row(episode, judged, self._taskset.episode(trace, run=run).to_record()))
        return rows


class VerifiersGRPOTrainer(RolloutGRPOTrainer):
    """Trainer on the tasks of a `vf.Taskset`, with the policy in place of a verifiers agent.

    The taskset's code prompts, replies, stops and scores (`Task.score`); the rollout engine samples turns, so
    tokens are never re-encoded. A trace that is not ok is left out of the loss and of the baselines. Every
    trace is written to `traces.jsonl` of the output folder, which `vf-replay` reads if the taskset is an
    installed plug-in.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments. Truncated rollouts are scored as they are, or left out with
            `mask_truncated_completions`.
        taskset: An object, or the id of an installed plug-in.
        taskset_config: Config of the taskset, with an id.
        num_tasks: Only the first n; None for all.
        max_turn_tokens: Maximum number of sampled tokens in one turn.
        max_episode_tokens: Maximum number of tokens after the prompt, replies included.
        processing_class: Tokenizer; None for that of the model.
        rollout: Engine of the rollouts.

    Raises:
        ConfigError: See `load_taskset`.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: SQLGRPOConfig,
        *,
        taskset: vf.Taskset | str,
        taskset_config: Mapping[str, Any] | None = None,
        num_tasks: int | None = None,
        max_turn_tokens: int = 512,
        max_episode_tokens: int = 2_048,
        processing_class: PreTrainedTokenizerBase | None = None,
        rollout: RolloutConfig | None = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        check_type("model", model, str | PreTrainedModel)
        check_type("args", args, SQLGRPOConfig)
        loaded = load_taskset(taskset, taskset_config, num_tasks=num_tasks)
        thread = ExitStack()
        portal = thread.enter_context(start_blocking_portal(name="verifiers"))
        weakref.finalize(self, thread.close)  # cancels rollouts that still wait for a turn
        self._run_log = RunLog(Path(args.output_dir))
        play = TaskPlay(
            loaded,
            portal,
            self._run_log,
            model=args.run_name or "policy",
            leaves_out_truncated=args.mask_truncated_completions,
        )
        play.max_turn_tokens, play.max_episode_tokens = max_turn_tokens, max_episode_tokens
        super().__init__(
            model,
            args,
            num_questions=len(loaded.tasks),
            play=play,
            record=[Episodes(partial(self._run_log.write, TRACES))],
            rollout=rollout,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
        )
        if self.accelerator.is_main_process:
            _write_config(self._run_log.folder, loaded.taskset)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Train like TRL's trainer; refuses to mix its traces with those of an earlier run."""
        traces = self._run_log.folder / TRACES
        if not resume_from_checkpoint and traces.exists() and traces.stat().st_size:
            raise RunError(
                f"the output folder has earlier traces ({traces}): use another or resume_from_checkpoint"
            )
        return super().train(resume_from_checkpoint, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.accelerator.is_main_process:
            self._run_log.cut_back(self.state.global_step)


def _metrics(traces: Sequence[vf.Trace]) -> list[dict[str, float]]:
    """Metrics of each trace; a score that only some have is averaged over these."""
    rows = [
        {
            "trace/not_ok": float(not trace.ok),
            "trace/turns": float(trace.num_turns),
            "trace/truncated": float(trace.is_truncated),
        }
        for trace in traces
    ]
    named = [_named(trace) if trace.ok else {} for trace in traces]
    for name in sorted(set().union(*named)):
        values = [scores[name] for scores in named if name in scores]
        for row in rows:
            row[name] = sum(values) / len(values)
    return rows


def _named(trace: vf.Trace) -> dict[str, float]:
    rewards = {f"score/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {f"metric/{name}": value for name, value in trace.metrics.items() if value is not None}
    return rewards | metrics


def _check_some_ok(traces: Sequence[vf.Trace]) -> None:
    """Warn of failed traces; raise if all failed, which is a bug of the taskset."""
    failed = [trace for trace in traces if not trace.ok]
    if not failed:
        return
    error = failed[0].last_error
    message = "no error" if error is None else f"{error.type}: {error.message}"
    if len(failed) == len(traces):
        raise RunError(f"all {len(traces)} traces failed; the first: {message}")
    logger.warning(
        "%d of %d traces are not ok and left out; the first: %s", len(failed), len(traces), message
    )


def _write_config(folder: Path, taskset: vf.Taskset) -> None:
    """Write the taskset's config for `vf-replay`."""
    resolved = folder / "configs" / "resolved"
    resolved.mkdir(parents=True, exist_ok=True)
    config = {"taskset": taskset.config.model_dump(mode="json")}
    (resolved / "train.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / TRACES).touch()
