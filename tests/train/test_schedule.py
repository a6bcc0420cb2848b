"""Evaluations every few steps of a real trainer: which steps, what is written, and what it keeps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_policy import ask, shop
from tests.tiny_model import write_model
from text2sql_grpo.data.example import Example
from text2sql_grpo.reliability.checkpoints import SCHEDULED_METRIC, best_checkpoint, saved_checkpoints
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import read_schedule
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.schedule import EvaluationSchedule
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
QUESTIONS = [ask(f"{n}?", GOLD, family="lookup" if n < 2 else "count") for n in range(4)]
# Of the four questions, how many are right at each step; the best is step 2.
RIGHT = {0: 1, 2: 3, 4: 2, 5: 3}


class Trained:
    """Runs of one trainer in one folder; the script answers in place of its policy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.asked: list[int] = []
        self._model = write_model(folder / "model", max_positions=2048)
        budgets = {"max_turn_tokens": 2, "max_episode_tokens": 300}
        self._environment = shop(folder, instructions=False, schema_text="compact", **budgets)

    def run(self, steps: int, resume: Path | None = None) -> SQLGRPOTrainer:
        fields: dict[str, Any] = {"save_steps": 100, "max_steps": steps, "report_to": "none"}
        fields |= {"per_device_train_batch_size": 2, "num_generations": 2}
        trainer = SQLGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(self._model),
            self._environment,
            train_dataset=[ask(f"Lisbon {number}?") for number in range(5)],
            args=training_arguments(
                fields | {"metric_for_best_model": SCHEDULED_METRIC},
                output_dir=str(self.folder),
                disable_tqdm=True,
            ),
            processing_class=AutoTokenizer.from_pretrained(self._model),
        )

        def answer(questions: Sequence[Example], policy: Any) -> list[Answer]:
            step = trainer.state.global_step
            self.asked.append(step)
            return [self._played(question, i < RIGHT[step]) for i, question in enumerate(questions)]

        trainer.add_callback(EvaluationSchedule(trainer, answer, QUESTIONS, every=2))
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer

    def _played(self, question: Example, is_right: bool) -> Answer:
        session = self._environment.sessions.session(question)
        session.start()
        if question.family == "lookup":
            session.step("<sql>SELECT code FROM branch</sql>")
        session.step(f"<answer>{GOLD if is_right else 'SELECT 0'}</answer>")
        database = self._environment.databases.address(question.database)
        return self._environment.judge().judge(session.episode, database)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, SQLGRPOTrainer]:
    run = Trained(tmp_path_factory.mktemp("trained"))
    return run, run.run(5)


def test_steps_are_evaluated_at_the_start_on_time_and_at_the_end(
    trained: tuple[Trained, SQLGRPOTrainer],
) -> None:
    run, _ = trained
    assert run.asked == [0, 2, 4, 5]
    records = read_schedule(run.folder)
    assert [(record["step"], record["accuracy"]["correct"]) for record in records] == list(RIGHT.items())
    first = records[0]
    assert first["look_share"] == 0.5
    assert first["accuracy"]["by_database"] == {"shop": [1, 4]}
    assert {
        name: (part["accuracy"]["correct"], part["look_share"]) for name, part in first["by_family"].items()
    } == {
        "count": (0, 0.0),
        "lookup": (1, 1.0),
    }


def test_the_figures_are_logged_beside_those_of_each_step(trained: tuple[Trained, SQLGRPOTrainer]) -> None:
    _, trainer = trained
    history = trainer.state.log_history
    scheduled = [row for row in history if SCHEDULED_METRIC in row]
    assert [(row["step"], row[SCHEDULED_METRIC]) for row in scheduled] == [
        (0, 0.25),
        (2, 0.75),
        (4, 0.5),
        (5, 0.75),
    ]
    assert scheduled[1]["eval_dev/accuracy/strict/count"] == 0.5
    assert scheduled[1]["eval_dev/look_share/lookup"] == 1.0
    assert [row["step"] for row in history if "reward" in row] == [1, 2, 3, 4, 5]
    assert all("accuracy/strict" in row for row in history if "reward" in row)


def test_the_best_step_has_a_checkpoint_and_is_named_by_the_last(
    trained: tuple[Trained, SQLGRPOTrainer],
) -> None:
    run, _ = trained
    assert [path.name for path in saved_checkpoints(run.folder)] == ["checkpoint-2", "checkpoint-5"]
    assert best_checkpoint(run.folder) == run.folder / "checkpoint-2"  # as good as step 5, and earlier
    manifest = json.loads((run.folder / "checkpoint-5" / "manifest.json").read_text())
    assert manifest["best"] == {"metric": SCHEDULED_METRIC, "value": 0.75, "step": 2}
    assert best_checkpoint(run.folder / "nothing") is None


def test_a_resumed_run_repeats_no_evaluation_and_remembers_the_best(tmp_path: Path) -> None:
    run = Trained(tmp_path)
    run.run(2)
    run.asked.clear()
    run.run(5, resume=run.folder / "checkpoint-2")
    assert run.asked == [4, 5]
    assert [record["step"] for record in read_schedule(run.folder)] == [0, 2, 4, 5]
    assert best_checkpoint(run.folder) == run.folder / "checkpoint-2"
