"""Progress bar of training, and the lines of `metrics.jsonl`."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import TrainerCallback, TrainerState, TrainingArguments

from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.reliability.checkpoints import SCHEDULED_METRIC
from text2sql_grpo.reporting.counting import LINE_EVERY_S, counting, progress_bar
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import METRICS, RunLog, read_metrics

if TYPE_CHECKING:
    from text2sql_grpo.evaluation.bench import Model

_ROLLOUT_SHARE = 0.4  # of a step's time, about
_LEAST_DONE = 0.3  # steps before the time left is estimated: the first episodes of a run end late


def answer_with_bar(
    bench: Bench,
    sets: Mapping[str, Sequence[Example]],
    model: "Model",
    console: Console,
    *,
    title: str = "Evaluation",
    samples: int = 1,
    **options: Any,
) -> dict[str, list[Answer]]:
    """Answer the questions of several sets behind a progress bar; see `Bench.answer`.

    They are answered together: a set alone would end with few rows of a batch.
    """
    examples = [example for named in sets.values() for example in named]
    with counting(title, samples * len(examples), console) as on_answer:
        found = bench.answer(examples, model, samples=samples, on_answer=lambda *_: on_answer(), **options)
    answers = iter(found)
    return {name: list(islice(answers, samples * len(named))) for name, named in sets.items()}


def _grpo_facts(logs: dict[str, Any]) -> str:
    figures = f"reward {_number(logs.get('reward'))}  right {_number(logs.get('accuracy/strict'))}"
    return f"{figures}  looks {_looks_text(logs)}"


def sft_facts(logs: dict[str, Any]) -> str:
    """Loss, learning rate and tokens of one logged step."""
    return f"loss {logs['loss']:.3f}  lr {logs['learning_rate']:.1e}  {logs['tokens'] / 1e3:.0f}k tokens"


class TrainingProgress(TrainerCallback):
    """Callback that writes `metrics.jsonl` and shows some of it with the time left.

    Args:
        title: Title of the stage.
        metric: Metric that every step has; other lines are not shown.
        facts: Function from a line of metrics to the text behind the bar.
    """

    def __init__(
        self,
        run_log: RunLog,
        console: Console,
        *,
        title: str = "GRPO",
        metric: str = "reward",
        facts: Callable[[dict[str, Any]], str] = _grpo_facts,
    ) -> None:
        self._run_log = run_log
        self._console = console
        self._title, self._metric, self._facts_of = title, metric, facts
        self._bar = progress_bar(console, "facts")
        self._started = self._last_line = time.monotonic()
        self._state: TrainerState | None = None  # while training
        self._elapsed_before_s = 0.0
        self._steps_before = 0
        self._facts = ""
        self._micro_batches = 0

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Start the bar of a terminal; other outputs get a line now and then instead."""
        rows = [row for row in read_metrics(self._run_log.folder) if row["step"] <= state.global_step]
        self._elapsed_before_s = rows[-1]["elapsed_s"] if rows else 0.0  # of a resumed run
        self._started = time.monotonic()
        self._steps_before = state.global_step
        if not state.is_world_process_zero:
            return
        self._state = state
        if self._console.is_terminal:
            self._task = self._bar.add_task(
                self._title, total=state.max_steps, completed=state.global_step, facts=""
            )
            self._bar.start()

    def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """Count the micro-batches of the step from 0."""
        self._micro_batches = 0

    def show_episodes(self, done: int, total: int) -> None:
        """Show the number of finished episodes of the step."""
        self._show(_ROLLOUT_SHARE * done / total, f"episodes {done}/{total}")

    def on_substep_end(self, args: TrainingArguments, state: Any, *_: Any, **kwargs: Any) -> None:
        """Show the number of finished micro-batches of the step."""
        self._micro_batches += 1
        total = args.gradient_accumulation_steps
        share = _ROLLOUT_SHARE + (1 - _ROLLOUT_SHARE) * self._micro_batches / total
        self._show(share, f"micro-batches {self._micro_batches}/{total}")

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write one line of `metrics.jsonl`, and update the facts behind the bar."""
        is_evaluation = SCHEDULED_METRIC in (logs or {})
        if not state.is_world_process_zero or not logs or not (self._metric in logs or is_evaluation):
            return
        elapsed_s = round(self._elapsed_before_s + time.monotonic() - self._started, 3)
        self._run_log.write(METRICS, [{"step": state.global_step, "elapsed_s": elapsed_s, **logs}])
        if is_evaluation:
            return
        self._facts = self._facts_of(logs)
        is_end = state.global_step in (self._steps_before + 1, state.max_steps)
        self._show(0.0, "", is_due=is_end)

    def _show(self, step_share: float, note: str, *, is_due: bool = False) -> None:
        """Move the bar; without a terminal, print a line if it is due, or if the last one is old.

        Args:
            step_share: Finished share of the current step, by time.
            note: Text behind the figures of the last step.
        """
        state, now = self._state, time.monotonic()
        if state is None:
            return
        facts = "  ".join(part for part in (self._facts, note) if part)
        done = state.global_step + step_share - self._steps_before
        if self._bar.live.is_started:
            completed = self._steps_before + done if done > _LEAST_DONE else None  # the bar waits, too
            self._bar.update(self._task, completed=completed, facts=facts)
        elif is_due or now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            line = f"{self._title} {state.global_step}/{state.max_steps}  {facts}"
            if done > _LEAST_DONE:
                left = (now - self._started) / done * (state.max_steps - self._steps_before - done)
                line += f"  {duration(left)} left"
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar.live.is_started:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(42.3), duration(400), duration(7_900)
    ('42 s', '7 min', '2 h 12 min')
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _number(value: Any) -> str:
    is_known = isinstance(value, int | float) and math.isfinite(value)  # NaN: every episode was masked
    return f"{value:z.2f}" if is_known else "-"


def _looks_text(metrics: Mapping[str, Any]) -> str:
    """Tool calls per episode; of look-ups and of all others where a step has both."""
    shares = {
        name.split("/")[1]: value
        for name, value in metrics.items()
        if name.startswith("family/") and name.endswith("/share") and value
    }
    rest = sum(share for family, share in shares.items() if family != "lookup")
    if "lookup" not in shares or not rest:
        return _number(metrics.get("episode/looks"))
    looks = {family: metrics[f"family/{family}/looks"] for family in shares}
    others = sum(shares[family] * looks[family] for family in shares if family != "lookup") / rest
    return f"{_number(looks['lookup'])} look-ups, {_number(others)} others"
