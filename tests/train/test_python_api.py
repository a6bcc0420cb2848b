"""The program of docs/api.md, the notebook, and mistakes of a caller in Python."""

import inspect
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import numpy
import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import text2sql_grpo as t2s
from tests.scripted_policy import SHOP
from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, write_config
from text2sql_grpo.errors import RewardError
from text2sql_grpo.training.parts import Select

ROWS = [{"question": row["question"], "query": row["gold_sql"]} for row in QUESTIONS]


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A random model beside `shop.sqlite` and `my.yaml`, in the working folder."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.sqlite")) as connection:
        connection.executescript(SHOP)
    return str(write_model(tmp_path / "small", max_positions=2048))


def run_blocks(blocks: list[str], model: str) -> dict[str, Any]:
    """The names after the blocks of a page have run, with the small model in place of the page's."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(re.sub(r'(?m)^MODEL = ".*?"', f"MODEL = {model!r}", block), names)
    return names


def arguments(**fields: Any) -> t2s.SQLGRPOConfig:
    batch = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1}
    return t2s.SQLGRPOConfig(**{"output_dir": "run", **batch, "bf16": False, "report_to": "none"} | fields)


@pytest.mark.thorough
def test_arguments_show_no_warning_of_a_name_that_trl_uses() -> None:
    program = "import text2sql_grpo as t2s; t2s.SQLGRPOConfig('run', use_cpu=True)"
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", program], check=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures")
def test_the_program_of_the_docs_runs(model: str, repo_root: Path, own_cache: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(write_config(tmp_path).read_text(encoding="utf-8"))
    Path("my.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    page = (repo_root / "docs" / "api.md").read_text(encoding="utf-8")
    names = run_blocks(re.findall(r"```python\n(.*?)```", page, re.DOTALL), model)
    assert names["result"].global_step == 2
    assert len(names["report"].answers) == 8 and names["report"].samples == 4
    assert names["run"].merged.is_dir() and names["run"].after["test_values"].total == 4
    assert names["trainer"].state.global_step == 1
    assert {"adapter", "merged", "rollouts.jsonl"} <= {path.name for path in Path("runs/mine").iterdir()}


@pytest.mark.thorough
def test_the_program_of_the_readme_runs(model: str, repo_root: Path, own_cache: Path) -> None:
    page = (repo_root / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = block.replace("Qwen/Qwen2.5-Coder-0.5B-Instruct", model).replace("max_steps=100", "max_steps=1")
    assert run_blocks([block], model)["trainer"].state.global_step == 1


def test_the_page_lists_every_public_name_with_its_parameters(repo_root: Path) -> None:
    page = (repo_root / "docs" / "api.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", page, re.MULTILINE))
    values = re.findall(r"`(\w+)`", page.partition("take and return:")[2].partition("\n\n")[0])
    assert {*documented, *values} == {*t2s.__all__}
    for name, text in documented.items():
        given = [word.partition("=")[0].strip("*") for word in text.split(", ") if word not in ("*", "..")]
        found = list(inspect.signature(getattr(t2s, name)).parameters)
        assert given == (found[: len(given)] if ".." in text else found), name


@pytest.mark.thorough
def test_the_notebook_runs(model: str, repo_root: Path) -> None:
    book = json.loads((repo_root / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    Path("data").symlink_to(repo_root / "data")
    names = run_blocks([cell for cell in cells if "subprocess.run" not in cell], model)
    assert names["trainer"].state.global_step > 0
    assert names["merged"].is_dir()


def test_the_same_questions_as_rows_a_dataset_a_file_and_examples(model: str) -> None:
    from datasets import Dataset

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path("rows.jsonl").write_text(lines, encoding="utf-8")
    with t2s.Environment("shop.sqlite", test_databases=0) as env:
        expected = env.examples(ROWS)
        for source in (Dataset.from_list(ROWS), "rows.jsonl", Path("rows.jsonl"), expected):
            found = env.examples(source)
            assert [(one.question, one.gold_sql) for one in found] == [
                (one.question, one.gold_sql) for one in expected
            ]


def test_examples_made_by_hand_are_checked_like_rows() -> None:
    with small(hide=["branch.staff"]) as env:
        known = env.examples(ROWS[2:])
        assert env.examples(known) == known
        for wrong, reason in (
            ([*known, replace(known[0], gold_sql=None)], "gold_sql"),  # type: ignore[arg-type]
            ([replace(known[0], database="nowhere")], "nowhere"),
            ([replace(known[0], gold_sql="SELECT staff FROM branch")], "refused"),
            ([known[0], replace(known[0], question="Again?")], "used twice"),
        ):
            with pytest.raises(t2s.RunError, match=reason):
                env.examples(wrong)
        with pytest.raises(t2s.RunError, match="limit must be an int >= 1 or None, got '2'"):
            env.examples(ROWS[2:], limit="2")


def test_evaluations_render_the_chat_template_as_training_does(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[t2s.Answer] = []

    def answer(*args: Any, **options: Any) -> list[t2s.Answer]:
        answers.extend(found := t2s.Environment.answer(env, *args, **options))
        return found

    with small() as env:
        monkeypatch.setattr(env, "answer", answer)
        args = arguments(chat_template_kwargs={"mark": True})
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, eval_dataset=ROWS[:1], args=args)
        trainer.processing_class.chat_template += "{{ 'MARK' if mark }}"
        trainer.train()
        t2s.evaluate(trainer, env, ROWS[:1])
    texts = [trainer.processing_class.decode(one.episode.prompt_ids) for one in answers]
    assert len(texts) == 3 and all(text.endswith("MARK") for text in texts)


def test_each_model_counts_the_schemas_tokens_itself(model: str) -> None:
    with closing(sqlite3.connect("shop.sqlite")) as connection:
        connection.execute(
            f"CREATE TABLE wide ({', '.join(f'column_{number} TEXT' for number in range(40))})"
        )
    with small(max_schema_tokens=300) as env:  # a token is a byte of this model, or an estimate of 4
        whole = env.sessions.schema_text("shop")
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=arguments())
        t2s.evaluate(trainer, env, ROWS[:1])
        assert env.sessions.schema_text("shop") == whole
        trainer.train()
    rows = map(json.loads, Path("run/rollouts.jsonl").read_text().splitlines())
    assert not any(whole in row["messages"][1]["content"] for row in rows)


def test_dora_is_trained_in_bf16_with_checkpointed_layers(model: str) -> None:
    args = arguments(bf16=True, gradient_checkpointing=True)
    adapter = LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    with small() as env:
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=args, peft_config=adapter)
        trainer.train()
    assert trainer.ways["updates"] == "token trees"


def test_evaluation_on_a_schedule_is_written_and_logged(model: str) -> None:
    with t2s.Environment("shop.sqlite", test_databases=0, max_turn_tokens=4, max_episode_tokens=60) as env:
        trainer = t2s.SQLGRPOTrainer(
            model, env, train_dataset=ROWS, eval_dataset=ROWS[:2], args=arguments(max_steps=2, eval_steps=1)
        )
        trainer.train()
    lines = Path("run/evaluation_schedule.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_an_optimizer_and_a_callback_of_the_caller_are_used(model: str) -> None:
    steps: list[int] = []

    class Seen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            steps.append(state.global_step)

    policy = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with t2s.Environment("shop.sqlite", test_databases=0, max_turn_tokens=4, max_episode_tokens=60) as env:
        trainer = t2s.SQLGRPOTrainer(
            policy,
            env,
            train_dataset=ROWS,
            args=arguments(),
            callbacks=[Seen()],
            optimizers=(optimizer, None),
        )
        trainer.train()
    assert steps == [1] and trainer.optimizer.optimizer is optimizer


def test_a_reward_that_fails_in_training_leaves_the_steps_before_it(started_model: str) -> None:
    scored: list[str] = []

    def fails_at_last(episode: t2s.Episode) -> float:
        scored.append(episode.example.id)
        if trainer.state.global_step == 1:
            raise ZeroDivisionError("no tokens")
        return len(scored) % 4 / 4

    budgets = {"max_turns": 2, "max_turn_tokens": 24, "max_episode_tokens": 120}
    with t2s.Environment(
        "shop.sqlite", test_databases=0, schema_text="compact", instructions=False, **budgets
    ) as env:
        trainer = t2s.SQLGRPOTrainer(
            started_model,
            env,
            train_dataset=ROWS,
            reward_funcs=[(fails_at_last, 0.1)],
            args=arguments(max_steps=3, save_steps=100, per_device_train_batch_size=16),
        )
        with pytest.raises(t2s.RunError, match="fails_at_last raised ZeroDivisionError") as caught:
            trainer.train()
    assert scored[-1] in str(caught.value) and "checkpoint-1" in caught.value.__notes__[0]
    assert Path("run/checkpoint-1/trainer_state.json").is_file()


def small(**fields: Any) -> t2s.Environment:
    return t2s.Environment(
        "shop.sqlite", test_databases=0, max_turn_tokens=4, max_episode_tokens=60, **fields
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


def test_a_used_folder_is_refused_and_a_resumed_one_repeats_no_line(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with small() as env:

        def trainer(rows: list[dict[str, str]] = ROWS) -> t2s.SQLGRPOTrainer:
            args = arguments(max_steps=2, save_steps=1)
            return t2s.SQLGRPOTrainer(model, env, train_dataset=rows, eval_dataset=ROWS[:1], args=args)

        with pytest.raises(t2s.ConfigError, match="undamaged checkpoint"):
            trainer().train(resume_from_checkpoint=True)
        trainer().train()
        with pytest.raises(t2s.ConfigError, match="another training"):
            trainer().train()
        shutil.rmtree("run/checkpoint-2")
        trainer().train(resume_from_checkpoint=True)
        assert "questions have changed" not in caplog.text
        shutil.rmtree("run/checkpoint-2")
        trainer(ROWS[::-1]).train(resume_from_checkpoint=True)
        assert "the training questions have changed since the checkpoint" in caplog.text
        assert trainer().train(resume_from_checkpoint=True).global_step == 2  # no step was left
        with pytest.raises(t2s.ConfigError, match="no checkpoint"):
            trainer().train(resume_from_checkpoint=model)
    lines = [json.loads(line) for line in Path("run/rollouts.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in lines) == {0: 4, 1: 4}
    lines = Path("run/evaluation_schedule.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2]


@pytest.mark.parametrize(
    "where",
    [
        "reward",
        "on_step_end",
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in ("part", "server", "on_step_begin", "on_log")
        ),
    ],
)
def test_a_run_that_failed_resumes_with_the_questions_of_the_failed_step(where: str, model: str) -> None:
    errors = {
        "reward": RewardError("a reward failed"),
        "server": t2s.RunError("a server is gone"),
        "part": ZeroDivisionError(),
    }

    class Fails(TrainerCallback):
        pass

    def fails_at_last(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError("of the caller")

    setattr(Fails, where, fails_at_last)

    def trainer(*callbacks: TrainerCallback) -> t2s.SQLGRPOTrainer:
        args = arguments(max_steps=4, save_steps=100)
        return t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=args, callbacks=[*callbacks])

    def asked() -> list[str]:
        return [json.loads(line)["example"] for line in Path("run/rollouts.jsonl").read_text().splitlines()]

    with small() as env:
        trainer().train()
        expected = asked()
        shutil.rmtree("run")
        failing = trainer(Fails())
        play = failing.play.play

        def fail_in_play(*args: Any) -> Any:
            if failing.state.global_step == 2 and where in errors:
                raise errors[where]
            return play(*args)

        failing.play.play = fail_in_play  # type: ignore[method-assign]
        with pytest.raises(type(errors.get(where, errors["part"]))) as caught:
            failing.train()
        assert "checkpoint-2 holds the steps before" in "".join(format_exception(caught.value))
        trainer().train(resume_from_checkpoint=True)
    assert asked() == expected


@pytest.mark.parametrize("other", [None, 4])
def test_a_checkpoint_of_another_model_or_adapter_is_named(other: int | None, model: str) -> None:
    with small() as env:
        for rank, resume in ((2, None), (other, True)):
            trainer = t2s.SQLGRPOTrainer(
                model,
                env,
                train_dataset=ROWS,
                args=arguments(max_steps=2 if resume else 1),
                peft_config=LoraConfig(r=rank) if rank else None,
            )
            if not resume:
                trainer.train()
        with pytest.raises(t2s.ConfigError, match="cannot resume from run/checkpoint-1"):
            trainer.train(resume_from_checkpoint=True)


def test_memory_that_runs_out_as_a_checkpoint_loads_is_said_as_such(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with small() as env:
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=arguments(max_steps=1))
        trainer.train()
        monkeypatch.setattr(GRPOTrainer, "_load_optimizer_and_scheduler", full)
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=arguments(max_steps=2))
        with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("drawn", [[0], [0, 0, 0], [0, 99], ["train-0", "train-1"], [], None])
def test_a_selection_that_draws_something_else_is_named(drawn: list[Any], model: str) -> None:
    class Odd(Select):
        def draw(self, count: int) -> list[int]:
            return drawn

    args = arguments(per_device_train_batch_size=8)
    with small() as env:
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=args, select=Odd())
        with pytest.raises(t2s.RunError, match=r"Odd\.draw must return 2 numbers"):
            trainer.train()


def test_the_trainer_neither_evaluates_by_itself_nor_sends_its_rows_to_the_hub(model: str) -> None:
    with small() as env:
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, args=arguments())
        for evaluate in (trainer.evaluate, lambda: trainer.predict(trainer.train_dataset)):
            with pytest.raises(t2s.RunError, match="eval_dataset"):
                evaluate()
        with pytest.raises(t2s.RunError, match="text2sql-grpo push"):
            trainer.push_to_hub()


@pytest.mark.parametrize("samples", [1, 2])
def test_an_evaluation_in_a_callback_changes_nothing_in_training(samples: int, model: str) -> None:
    class Evaluates(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.model.train()
            t2s.evaluate(trainer, env, ROWS[:1], samples=samples)
            assert trainer.model.training

    sampled = []
    with small() as env:
        for callbacks in ([], [Evaluates()]):
            trainer = t2s.SQLGRPOTrainer(
                model, env, train_dataset=ROWS, args=arguments(max_steps=3), callbacks=callbacks
            )
            trainer.train()
            lines = Path("run/rollouts.jsonl").read_text().splitlines()
            sampled.append([json.loads(line)["completion_ids"] for line in lines])
            shutil.rmtree("run")
    assert sampled[0] == sampled[1]


def test_training_by_epochs_is_evaluated_at_its_ends(model: str) -> None:
    with small() as env:
        args = arguments(max_steps=-1, num_train_epochs=1)
        trainer = t2s.SQLGRPOTrainer(model, env, train_dataset=ROWS, eval_dataset=ROWS[:1], args=args)
        last = trainer.train().global_step
    lines = Path("run/evaluation_schedule.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, last] and last > 1


def test_ctrl_c_saves_a_checkpoint(model: str) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    with small() as env:
        trainer = t2s.SQLGRPOTrainer(
            model, env, train_dataset=ROWS, args=arguments(max_steps=9), callbacks=[Interrupt()]
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert list(Path("run").glob("checkpoint-*"))


def test_a_base_in_memory_is_merged_as_it_is(model: str) -> None:
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        changed.lm_head.weight.mul_(2.0)
    with small() as env:
        trainer = t2s.SQLGRPOTrainer(
            changed, env, train_dataset=ROWS, args=arguments(), peft_config=LoraConfig(r=2)
        )
        trainer.train()
        merged = trainer.merge("run/merged")
        assert len(t2s.evaluate(trainer.model, env, ROWS).answers) == len(ROWS)
        shutil.copytree(model, "other")
        with pytest.raises(t2s.ModelError, match="overwrite"):
            trainer.merge("other")
    written = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert torch.allclose(logits(trainer.model), logits(written), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": "two"}, "samples"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"rewards": ["exection"]}, "execution"),
        ({"evaluation": {"batch_size": 1}}, "evaluation must be of type"),
        ({"rollout": "slots"}, "rollout must be of type"),
        ({"template_options": ["x"]}, "template_options must be of type"),
        ({"samples": 1.5}, "samples"),
    ],
)
def test_wrong_numbers_of_an_evaluation(options: dict[str, Any], name: str, model: str) -> None:
    with small() as env, pytest.raises(t2s.RunError, match=name):
        t2s.evaluate(model, env, ROWS, **options)


def test_an_endpoint_without_http_is_named_with_the_reason() -> None:
    served = t2s.Endpoint("127.0.0.1:1/v1", "m", retries=0)
    with small() as env, pytest.raises(t2s.RunError, match=r"127\.0\.0\.1:1/v1.*http://"):
        t2s.evaluate(served, env, ROWS[:1])


def test_an_error_of_a_callback_ends_an_evaluation_at_once(model: str) -> None:
    called = []

    def fails(place: int, answer: t2s.Answer) -> None:
        called.append(place)
        raise ZeroDivisionError

    with small() as env, pytest.raises(ZeroDivisionError):
        t2s.evaluate(model, env, ROWS, samples=64, on_answer=fails)
    assert len(called) < 4 * 64


def test_a_report_is_one_line_in_a_notebook(model: str) -> None:
    with small() as env:
        assert repr(t2s.evaluate(model, env, ROWS)).count("\n") == 0


def test_a_closed_environment_answers_nothing(model: str) -> None:
    with small() as env:
        pass
    for use in (lambda: env.ask("Branches?", model), lambda: t2s.evaluate(model, env, ROWS)):
        with pytest.raises(t2s.ConfigError, match="closed"):
            use()


def test_another_working_folder_leaves_the_database(model: str, tmp_path: Path) -> None:
    with small() as env:
        (tmp_path / "other").mkdir()
        os.chdir(tmp_path / "other")
        outcome = env.executor.execute(env.databases.address("shop"), "SELECT COUNT(*) FROM branch")
    assert outcome.is_ok


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"beta": -1.0}, "beta"),
        ({"max_steps": 0}, "max_steps"),
        ({"eval_steps": 0.5}, "eval_steps"),
        ({"loss_type": "x"}, "loss_type"),
        ({"learning_rate": "1e-5"}, "learning_rate must be a valid number, got '1e-5'"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"temperature": None}, "temperature must be a valid number"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"min_p": 2.0}, "min_p must be <= 1"),
        ({"num_iterations": 0}, "num_iterations must be >= 1, got 0"),
        ({"num_train_epochs": 0, "max_steps": -1}, "num_train_epochs must be > 0"),
        ({"num_train_epochs": -1}, "num_train_epochs"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"steps_per_generation": 0}, "steps_per_generation"),
        ({"max_steps": 2.5}, "max_steps must be a valid integer, got 2.5"),
        ({"top_entropy_quantile": 2.0}, "top_entropy_quantile"),
        ({"delta": -1.0}, "delta"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"gradient_accumulation_steps": "2"}, "gradient_accumulation_steps"),
    ],
)
def test_wrong_training_arguments(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(t2s.ConfigError, match=name):
        arguments(**fields)


def test_a_number_of_numpy_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(arguments(learning_rate=numpy.float32(1e-5)).learning_rate) is float
    monkeypatch.setattr("text2sql_grpo.training.arguments.is_liger_kernel_available", lambda: False)
    with pytest.raises(t2s.ConfigError, match="pip install liger-kernel"):
        arguments(use_liger_kernel=True)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no database": ({"databases": "nowhere.sqlite"}, "nowhere.sqlite"),
    "a field that is unknown": ({"max_turn": 3}, "max_turns"),
    "a field out of range": ({"max_turns": 0}, "max_turns must be >= 1, got 0"),
    "columns that are unknown": ({"train_dataset": [{"frage": "?", "sql": "SELECT 1"}]}, "frage"),
    "a gold that fails": (
        {"train_dataset": [{"question": "?", "sql": "SELECT x FROM branch"}]},
        "no such column",
    ),
    "no questions": ({"train_dataset": []}, "question"),
    "no model": ({"model": "nowhere/at/all"}, "nowhere/at/all"),
    "an unknown reward": ({"reward_funcs": ["exection"]}, "did you mean execution"),
    "a reward that pays wrong answers more": ({"reward_funcs": [(len, 2.0)]}, "rewards"),
    "steps of evaluation without questions": ({"args": {"eval_steps": 1}}, "eval_dataset"),
    "rows of no kind": ({"train_dataset": 5}, "got int"),
    "two gold queries": ({"train_dataset": [ROWS[0] | {"sql": "SELECT 99"}]}, "contradict"),
    "half a surrogate pair": ({"train_dataset": [ROWS[0] | {"question": "\ud800"}]}, "surrogate"),
    "no environment": ({"environment": "shop.sqlite"}, "environment must be"),
    "arguments of TRL": (
        {"training_arguments": GRPOConfig("run", report_to="none", bf16=False, use_cpu=True)},
        "SQLGRPOConfig",
    ),
    "an adapter of no layer": ({"peft_config": LoraConfig(target_modules=["nope"])}, "nope"),
    "an optimizer of other weights": (
        {"optimizers": (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), None)},
        "optimizers",
    ),
    "an optimizer by its class": (
        {"optimizers": (torch.optim.SGD, {"lr": 0.1})},
        "optimizers[0] must be of type Optimizer, got type",
    ),
    "losses as a dict": ({"losses": {"gold": 0.1}}, "losses must be of type"),
    "a selection by name": ({"select": "strata"}, "select must be of type"),
    "a tokenizer by name": ({"processing_class": "small"}, "processing_class must be of type"),
    "a callback alone": ({"callbacks": TrainerCallback()}, "callbacks must be of type list"),
    "a layer as model": ({"model": torch.nn.Linear(2, 2)}, "model must be of type"),
    "an output folder that is a file": (
        {"args": {"output_dir": "shop.sqlite"}},
        "cannot make the run folder",
    ),
    "a field that the model lacks": ({"args": {"model_init_kwargs": {"foo": 1}}}, "argument 'foo'"),
    "vLLM without its package": ({"args": {"use_vllm": True}}, "vLLM is not available"),
    "too few questions": ({"train_dataset": ROWS[:1], "args": {"num_generations": 2}}, "questions"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_the_caller_is_one_clear_error(case: str, model: str) -> None:
    given, reason = MISTAKES[case]
    given = {"databases": "shop.sqlite", "model": model, "train_dataset": ROWS, "args": {}} | given
    fields = {name: value for name, value in given.items() if name in ("max_turn", "max_turns")}
    with (
        pytest.raises(t2s.RunError, match=re.escape(reason)),
        t2s.Environment(given["databases"], test_databases=0, **fields) as env,
    ):
        t2s.SQLGRPOTrainer(
            given["model"],
            given.get("environment", env),
            train_dataset=given["train_dataset"],
            reward_funcs=given.get("reward_funcs"),
            args=given.get("training_arguments") or arguments(**given["args"]),
            peft_config=given.get("peft_config") or LoraConfig(r=2, target_modules="all-linear"),
            optimizers=given.get("optimizers", (None, None)),
            **{
                name: given[name]
                for name in ("losses", "select", "processing_class", "callbacks")
                if name in given
            },
        )


def test_a_wrong_argument_of_a_function_is_named_with_both_types(model: str) -> None:
    path = Path("my.yaml")
    path.write_text("run: {seed: 1}\n", encoding="utf-8")
    executor: Any = None
    calls: dict[str, Any] = {
        "environment must be of type Environment, got str": lambda: t2s.evaluate(model, "shop.sqlite", ROWS),  # type: ignore[arg-type]
        "config must be of type Config, got PosixPath": lambda: t2s.train(path),  # type: ignore[arg-type]
        "path must be of type str | pathlib.Path, got dict": lambda: t2s.load_config({}),  # type: ignore[arg-type]
        "unknown key run.step": lambda: t2s.load_config(path, ["--run.step", 2]),  # type: ignore[list-item]
        "databases must be of type Databases, got str": lambda: t2s.load_examples(ROWS, "a.db", executor),  # type: ignore[arg-type]
        "limits must be of type Limits, got dict": lambda: t2s.SQLExecutor({"timeout_s": 1}),  # type: ignore[arg-type]
        "rewards must be a mapping": lambda: t2s.RewardMix(None),  # type: ignore[arg-type]
        "pairs of a reward and a weight": lambda: t2s.RewardMix({}, [len]),  # type: ignore[list-item]
        "parallel must be >= 1, got 0": lambda: t2s.Endpoint("http://x/v1", "m", parallel=0),
    }
    for reason, call in calls.items():
        with pytest.raises(t2s.ConfigError, match=re.escape(reason)):
            call()
