"""Time left and figures while training runs."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from text2sql_grpo.reporting import counting, progress
from text2sql_grpo.reporting.progress import TrainingProgress
from text2sql_grpo.run_folder import METRICS, RunLog, read_metrics

LOGS = {
    "reward": 0.5,
    "accuracy/strict": 0.25,
    "episode/looks": 0.4,
    "family/lookup/share": 0.5,
    "family/lookup/looks": 0.75,
    "family/count/share": 0.25,
    "family/count/looks": 0.1,
    "family/join/share": 0.25,
    "family/join/looks": 0.0,
}


def test_time_left_is_shown_within_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 40 s of rollouts and four micro-batches of 15 s, ten of them."""
    clock, printed = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = TrainingProgress(RunLog(tmp_path), Console(file=printed, width=200))
    arguments = TrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=4, use_cpu=True)
    state, control = TrainerState(max_steps=10), TrainerControl()
    shown.on_train_begin(arguments, state, control)
    shown.on_step_begin(arguments, state, control)
    for done in range(1, 9):
        clock[0] += 5
        shown.show_episodes(done, 8)
    for micro_batch in range(4):
        clock[0] += 15
        if micro_batch < 3:
            shown.on_substep_end(arguments, state, control)
    state.global_step = 1
    shown.on_log(arguments, state, control, logs=LOGS)
    assert printed.getvalue().splitlines() == [
        "GRPO 0/10  episodes 4/8",  # too early to tell
        "GRPO 0/10  episodes 8/8  16 min left",
        "GRPO 0/10  micro-batches 2/4  16 min left",
        "GRPO 1/10  reward 0.50  right 0.25  looks 0.75 look-ups, 0.05 others  15 min left",
    ]
    shown.on_step_begin(arguments, state, control)
    clock[0] += 20
    shown.show_episodes(4, 8)
    assert printed.getvalue().splitlines()[-1].endswith("0.05 others  episodes 4/8  15 min left")


def test_a_resumed_run_counts_the_time_left_from_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, printed, log = [0.0], io.StringIO(), RunLog(tmp_path)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    log.write(METRICS, [{"step": 5, "elapsed_s": 500.0}])
    shown = TrainingProgress(log, Console(file=printed, width=200))
    arguments, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerControl()
    state = TrainerState(max_steps=10, global_step=5)
    shown.on_train_begin(arguments, state, control)
    clock[0], state.global_step = 10.0, 6
    shown.on_log(arguments, state, control, logs={"reward": -0.001})
    assert printed.getvalue() == "GRPO 6/10  reward 0.00  right -  looks -  40 s left\n"
    assert read_metrics(log.folder)[-1]["elapsed_s"] == 510.0


def test_counting_prints_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LINE_EVERY_S", 0.0)
    printed = io.StringIO()
    with counting.counting("Evaluation", 5, Console(file=printed, width=60), done=2) as count:
        count()
        count()
    *lines, bar = printed.getvalue().splitlines()
    assert lines == ["Evaluation 3/5", "Evaluation 4/5"]
    assert bar.startswith("Evaluation ") and "4/5" in bar
