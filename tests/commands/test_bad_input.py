"""What a person sees when something is wrong: one message, no traceback, and nothing lost."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.file_limits import file_size_limit
from tests.processes import ended, fork, has_ended, needs_fork, printed
from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from text2sql_grpo.commands import main
from text2sql_grpo.config import check_grpo_keys
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run.archive import claimed
from text2sql_grpo.training.arguments import SQLGRPOConfig

pytestmark = pytest.mark.usefixtures("own_cache", "without_pictures")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path)


@pytest.fixture
def unlearned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards_with_spread: None) -> Path:
    """A config without SFT, whose steps have a gradient all the same."""
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, sft=None)


def refused(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> str:
    """The one message of a training run that is refused."""
    capsys.readouterr()
    assert main(["train", "--config", str(config), *options]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--grpo.learning_rte", "1"], ["grpo.learning_rte", "did you mean learning_rate?"]),
        (["--run.sed", "1"], ["run.sed", "did you mean seed?", "tiny.yaml"]),
        (["--run.seed", "x"], ["run.seed", "'x'", "tiny.yaml"]),
        (["--run.seed", "-5"], ["run.seed", ">= 0", "-5"]),
        (["--run.output_dir", "--sft", "null"], ["must be --section.key VALUE", "'--run.output_dir'"]),
        (["--grpo.max_steps", "x"], ["grpo: max_steps", "integer", "'x'"]),
        (["--grpo.per_device_train_batch_size", "6"], ["grpo: ", "divisible by num_generations (4)"]),
        (
            ["--grpo.per_device_train_batch_size", "32"],
            ["one batch needs at least 8 questions", "got 4 (data.train)"],
        ),
        (["--data.train", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--sft.questions", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--sft.chats", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--data.databases", "none"], ["no databases: no such file or folder", "none"]),
        (["--resume", "auto"], ["no checkpoint to resume from in ", "run"]),
        (["--resume", "databases"], ["--resume names no checkpoint", "databases"]),
        (["--model.tiny.vocab_size", "10"], ["model.tiny was removed", "sft"]),
        (["--rewards.format", "3.0"], ["right answer", "tiny.yaml"]),
    ],
)
def test_wrong_settings_and_missing_files(
    config: Path, options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, config, *options)
    for part in parts:
        assert part in message
    assert "\n" not in message.rstrip()


def test_a_folder_that_another_run_is_writing_to(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(Path("run")):
        assert "another run is writing to this run folder" in refused(capsys, config)
        assert "another run" in refused(capsys, config, "--sft", "null")
    assert [*Path("run").iterdir()] == []


def test_bad_input_is_refused_before_torch_is_imported(config: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("question;sql\nHow many?;\n")
    (tmp_path / "gone.jsonl").write_text('{"question": "?", "sql": "SELECT 1", "database": "shoop"}\n')
    (tmp_path / "runs").mkdir()
    base = ["--config", str(config)]
    closed, model = "postgresql://reader@127.0.0.1:1/shop", str(config.parent / "model")
    commands = {
        "bad.csv:2": ["train", *base, "--data.train", "bad.csv"],
        "bad.csv:2, by evaluate": ["evaluate", "--model_path", model, *base, "--data.test.a", "bad.csv"],
        "'shoop'": ["train", *base, "--data.test.a", "gone.jsonl"],
        "runs/none": ["train", *base, "--model.path", "runs/none"],
        "nobody/absent": ["train", *base, "--model.path", "nobody/absent"],
        "nobody/absent, by evaluate": ["evaluate", "--model_path", "nobody/absent", *base],
        "nobody/absent, by sft": ["sft", *base, "--model.path", "nobody/absent"],
        "did you mean learning_rate?": ["train", *base, "--grpo.learning_rte", "1"],
        "did you mean max_steps?": ["evaluate", "--model_path", model, *base, "--grpo.max_stpes", "1"],
        "127.0.0.1:1/shop": ["train", *base, "--data.databases", closed],
    }
    program = f"""
import sys
from text2sql_grpo.commands import main
for argv in {[*commands.values()]!r}:
    assert main(argv) == 1, argv
print(sorted({{"torch", "transformers", "trl", "peft"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr
    messages = done.stderr.splitlines()
    assert len(messages) == len(commands)
    for wanted, message in zip(commands, messages, strict=True):
        assert message.startswith("error: ") and wanted.partition(", by ")[0] in message


def test_the_keys_of_grpo_are_those_of_its_class() -> None:
    names = {field.name for field in dataclasses.fields(SQLGRPOConfig)}
    check_grpo_keys(names)
    for name in names:
        with pytest.raises(ConfigError, match="unknown key grpo"):
            check_grpo_keys([f"{name}z"])


def test_a_key_that_stands_twice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text("utf-8") + "grpo: {max_steps: 1}\n", "utf-8")
    assert "'grpo' stands twice" in refused(capsys, config)


def test_both_models_are_found_before_one_answers(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path / "model"), "run/adapter", "--config", str(config)]) == 1
    assert "run/adapter" in capsys.readouterr().err
    assert not list(tmp_path.glob("*-base.jsonl"))


def test_a_run_without_a_model(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "run" / "checkpoint-1")
    assert main(["evaluate", "--model_path", "run", "--config", str(config)]) == 1
    assert "name one of run/checkpoint-1" in capsys.readouterr().err


def test_missing_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(capsys, config.with_name("nowhere.yaml"))


def test_a_wrong_question_is_named_with_its_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**QUESTIONS[3], "gold_sql": "SELECT pay FROM branch"}
    write_questions(config.with_name("questions.jsonl"), [*QUESTIONS[:3], wrong])
    message = refused(capsys, config)
    assert "no such column: pay" in message and "questions.jsonl:4" in message


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\7" * 4000, b""])
def test_corrupt_database(config: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "databases" / "shop.sqlite").write_bytes(content)
    message = refused(capsys, config)
    assert "shop" in message or "look-Lisbon" in message


def test_broken_sql_text(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "databases" / "shop.sql").write_text("CREATE TABEL branch (code TEXT)")
    message = refused(capsys, config)
    assert "shop.sql" in message
    assert "syntax error" in message


def with_model(config: Path, path: Path | str, **model: Any) -> Path:
    """The same config with this model, not fine-tuned."""
    sections = yaml.safe_load(config.read_text()) | {"model": {"path": str(path), **model}}
    del sections["sft"]
    changed = config.with_name("model.yaml")
    changed.write_text(yaml.safe_dump(sections))
    return changed


def test_a_model_that_is_not_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config.parent / "run"
    run.mkdir()
    (run / "config.yaml").write_text("an earlier run's")
    for place in ("nobody/no-model", "databases", "questions.jsonl"):
        message = refused(capsys, with_model(config, place))
        assert place in message
    assert (run / "config.yaml").read_text() == "an earlier run's"


def test_a_model_without_chat_template(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    message = refused(capsys, with_model(config, model))
    assert "the tokenizer has no chat template" in message
    assert str(model) in message


def test_4_bit_without_bitsandbytes(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    four_bit = with_model(config, write_model(tmp_path / "model"), quantization="4bit", lora={"r": 4})
    monkeypatch.setenv("DISABLE_BITSANDBYTES", "1")
    assert "DISABLE_BITSANDBYTES=1 is set" in refused(capsys, four_bit)
    monkeypatch.delenv("DISABLE_BITSANDBYTES")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "bitsandbytes, which is not installed" in refused(capsys, four_bit)


def test_vllm_without_its_package(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = refused(capsys, config, "--grpo.use_vllm", "true")
    assert "grpo.use_vllm needs the package vllm" in message and "[vllm]'" in message


def test_a_run_folder_that_cannot_be_or_holds_other_things(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config.parent / "file"
    file.write_text("mine")
    for place in ("file", "file/run", "/proc/run"):
        message = refused(capsys, config, "--run.output_dir", place)
        assert "cannot write to the run folder" in message
        assert place in message
    assert file.read_text() == "mine"
    other = config.parent / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("mine")
    message = refused(capsys, config, "--run.output_dir", "thesis")
    assert "other files than those of a run, such as chapter.tex (thesis)" in message
    assert os.listdir(other) == ["chapter.tex"]


@pytest.mark.thorough
def test_a_full_disk_is_one_message_and_earlier_files_stay(
    unlearned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--config", str(unlearned), "--grpo.save_steps", "1", "--grpo.max_steps", "1"]
    assert main([*argv, "--evaluation.before_training", "false"]) == 0
    run = unlearned.parent / "run"
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    logged = (run / "rollouts.jsonl").stat().st_size
    checkpoint = run / "checkpoint-1"
    weights = (checkpoint / "model.safetensors").stat().st_size
    assert logged + 10_000 < weights < (checkpoint / "optimizer.pt").stat().st_size - 20_000
    other = refused(capsys, unlearned, "--resume", "auto", "--model.attn_implementation", "eager")
    assert (
        f"cannot resume {checkpoint} with other settings: model.attn_implementation auto -> eager;" in other
    )
    again = [*argv[:-1], "3", "--resume", str(checkpoint), "--evaluation.before_training", "false"]
    # The log; the weights, written by safetensors; the optimizer, written by torch.
    for size, place in ((logged + 100, "rollouts.jsonl"), (weights - 100, "run"), (weights + 10_000, "run")):
        with file_size_limit(size):
            assert main(again) == 1
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert place in message
        assert "Traceback" not in message
        for path, content in kept.items():
            places = (path, run / "earlier-1" / path.relative_to(run))
            now = [place.read_bytes() for place in places if place.is_file()]
            assert path.name in ("config.yaml", "metrics.jsonl") or any(
                one.startswith(content) for one in now
            )
    for row in json_lines(run / "rollouts.jsonl"):
        assert row["completion_ids"]
    assert main(again) == 0


class InterruptingOutput:
    """Standard output of a run; presses Ctrl-C, once, when a text appears."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_pressed = False

    def write(self, text: str) -> int:
        if self.text in text and not self.is_pressed:
            self.is_pressed = True
            signal.raise_signal(signal.SIGINT)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.thorough
def test_ctrl_c_in_sft_saves_a_checkpoint_and_the_next_run_resumes_it(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rewards_with_spread: None,
) -> None:
    monkeypatch.setattr("text2sql_grpo.reporting.progress.LINE_EVERY_S", 0.0)
    argv = ["train", "--config", str(config), "--sft.max_steps", "12", "--run.seed", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptingOutput("SFT 8/12"))
        assert main(argv) == 130
    (unfinished,) = (Path(os.environ["TEXT2SQL_GRPO_CACHE"]) / "sft").glob("*.unfinished")
    assert main([*argv, "--grpo.max_steps", "1"]) == 0
    assert "Resuming SFT after step 9" in capsys.readouterr().out
    assert not unfinished.exists()
    assert [row["step"] for row in json_lines(Path("run/sft/metrics.jsonl"))] == list(range(1, 13))


def test_the_verb_warm_start_names_sft(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warm-start", "--config", "c.yaml"])
    assert "warm-start was removed: use sft" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@needs_fork
def test_ctrl_c_in_training_saves_a_checkpoint_and_prints_how_to_resume(
    unlearned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", str(unlearned), "--grpo.max_steps", "500", "--evaluation.before_training", "false"]
    importlib.import_module("text2sql_grpo.run.pipeline")  # seconds, which the other process is spared
    output = unlearned.parent / "printed"
    pid = fork(output, lambda: main(["train", *options]))
    metrics = unlearned.parent / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert not has_ended(pid), printed(output)
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert ended([pid]) == [130], printed(output)
    text = printed(output)
    assert "Traceback" not in text
    done = json_lines(metrics)[-1]["step"]
    checkpoint = unlearned.parent / "run" / f"checkpoint-{done}"
    command = f"text2sql-grpo train --config {unlearned.parent / 'run' / 'config.yaml'} --resume auto"
    assert text.endswith(f"Stopped. Saved: {checkpoint}. Resume with:\n  {command}\n")

    argv = command.removeprefix("text2sql-grpo ").split()
    assert main([*argv, "--grpo.max_steps", str(done + 1)]) == 0
    rows = json_lines(metrics)
    assert [row["step"] for row in rows] == list(range(1, done + 2))
    assert [row["elapsed_s"] for row in rows] == sorted(row["elapsed_s"] for row in rows)
    assert capsys.readouterr().err == ""
    assert (unlearned.parent / "run" / "merged" / "model.safetensors").is_file()
