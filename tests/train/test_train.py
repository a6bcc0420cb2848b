"""The main job through the real command line, on a database, questions and a policy of its own."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import trl
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rounding import assert_same
from tests.tiny_model import exact_logits_of, logits_of, write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.environment.episode import CUT
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.rewards import RewardMix

RUN_FILES = {
    *("config.yaml", "metrics.jsonl", "rollouts.jsonl", "evaluation.json", "learning_curve.png"),
    *("report.html", "report.json"),
    *("evaluation-before.jsonl", "evaluation.jsonl", "checkpoint-2", "model", "merged", "sft", "tensorboard"),
    *("suspects.jsonl", "suspects.md"),
}
TENSORBOARD = ["--grpo.report_to", "[tensorboard]"]


@pytest.fixture(autouse=True)
def _no_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Path:
    return write_config(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    """The folder of a finished run of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(config.parent)
        assert main(["train", "--config", str(config), *TENSORBOARD]) == 0
    return config.parent / "run"


def test_a_run_stopped_while_its_model_loads_speaks_of_no_sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("text2sql_grpo.run.pipeline.started_policy", interrupt)
    (tmp_path / "own").mkdir()
    assert main(["train", "--config", str(write_config(tmp_path / "own", sft=None))]) == 130
    assert "Stopped. Run the same command again.\n" in capsys.readouterr().out


def test_the_run_folder_is_complete(run: Path, config: Path) -> None:
    assert {path.name for path in run.iterdir()} == RUN_FILES
    assert load_config(run / "config.yaml") == load_config(config, TENSORBOARD)
    assert [row["step"] for row in json_lines(run / "metrics.jsonl")] == [1, 2]
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "strict" in (run / "merged" / "README.md").read_text(encoding="utf-8")
    (warning,) = json.loads((run / "report.json").read_text("utf-8"))["warnings"]
    assert "4 of 4 of data.test.test_values" in warning


def test_a_tracker_is_told_every_figure_and_both_evaluations(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    told = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    for row in json_lines(run / "metrics.jsonl"):
        assert told["train/accuracy/strict"][row["step"]] == pytest.approx(row["accuracy/strict"])
        assert told["train/episode/looks"][row["step"]] == pytest.approx(row["episode/looks"])
    record = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    for step, sets in ((0, record["before"]["sets"]), (2, record["sets"])):
        accuracy = sets["test_values"]["overall"]["official"]["accuracy"]
        assert told["eval/test_values/accuracy/official"][step] == pytest.approx(accuracy)


def test_every_episode_is_logged_whole(run: Path) -> None:
    episodes = json_lines(run / "rollouts.jsonl")
    assert [row["step"] for row in episodes] == [0] * 16 + [1] * 16
    for row in episodes:
        assert row["example"] in {question["id"] for question in QUESTIONS}
        assert len(row["completion_ids"]) == len(row["completion_mask"]) > 0
        assert row["prompt_ids"]
        assert row["stop_reason"] in {"submitted", "max_turns", *CUT}
        assert (row["scores"] is None) == row["is_masked"]
        if row["scores"] is not None:
            weights = {"execution": 1.0, "executes": 0.1, "format": 0.1}
            assert row["reward"] == pytest.approx(sum(weights[name] * s for name, s in row["scores"].items()))


def test_metrics_hold_each_reward_by_its_name_and_agree_with_the_episodes(run: Path) -> None:
    episodes = json_lines(run / "rollouts.jsonl")
    for row in json_lines(run / "metrics.jsonl"):
        own = [episode for episode in episodes if episode["step"] == row["step"] - 1]
        assert row["accuracy/strict"] == pytest.approx(sum(e["strict"] for e in own) / 16)
        assert row["episode/masked"] == pytest.approx(sum(e["is_masked"] for e in own) / 16)
        scored = [e for e in own if e["scores"] is not None]
        for name in ("execution", "executes", "format"):
            mean = sum(e["scores"][name] for e in scored) / len(scored) if scored else None
            assert row[f"rewards/{name}/mean"] == (mean if mean is None else pytest.approx(mean))


def test_the_merged_model_is_the_trained_one_and_loads_by_itself(run: Path, own_cache: Path) -> None:
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Branches?"}], tokenize=False)
    assert "Branches?" in text
    (started,) = (own_cache / "sft").iterdir()
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert_same(exact_logits_of(merged), exact_logits_of(trained), layers=trained.config.num_hidden_layers)
    before = AutoModelForCausalLM.from_pretrained(started / "model")
    difference = (exact_logits_of(merged) - exact_logits_of(before)).abs().max()
    assert difference > 1e-5, "GRPO changed nothing"


@pytest.mark.usefixtures("without_pictures")
def test_a_second_run_takes_sft_from_the_cache_and_puts_the_first_aside(
    run: Path, config: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = json.loads((run / "evaluation.json").read_text())
    kept = {path: path.stat().st_mtime_ns for path in (own_cache / "sft").rglob("*")}
    episodes = (run / "rollouts.jsonl").read_bytes()
    (run / "notes.txt").write_text("mine")
    assert main(["train", "--config", str(config), "--grpo.max_steps", "1"]) == 0
    printed = capsys.readouterr()
    assert {path: path.stat().st_mtime_ns for path in (own_cache / "sft").rglob("*")} == kept
    assert len(json_lines(run / "sft" / "metrics.jsonl")) == 60
    assert f"Moved the earlier run of this folder to {run / 'earlier-1'}" in printed.out
    assert {path.name for path in (run / "earlier-1").iterdir()} == RUN_FILES
    assert (run / "earlier-1" / "rollouts.jsonl").read_bytes() == episodes
    assert len(json_lines(run / "metrics.jsonl")) == 1
    assert not (run / "tensorboard").exists()
    assert (run / "notes.txt").read_text() == "mine"
    again = json.loads((run / "evaluation.json").read_text())
    assert again["before"] == figures["before"]
    assert printed.err == ""


@pytest.mark.usefixtures("without_pictures")
def test_a_lora_run_leaves_the_adapter_and_the_same_model_merged(
    config: Path, run: Path, own_cache: Path
) -> None:
    """On the model that full SFT made, whose answers differ in what they earn."""
    base = next((own_cache / "sft").glob("*/model"))
    argv = ["train", "--config", str(config), "--run.output_dir", "lora", "--model.lora", "{r: 4}"]
    argv += ["--model.path", str(base), "--sft.max_steps", "1"]
    assert main([*argv, "--evaluation.before_training", "false", "--grpo.learning_rate", "0.01"]) == 0
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "lora/adapter")
    merged = AutoModelForCausalLM.from_pretrained("lora/merged")
    layers = merged.config.num_hidden_layers
    assert_same(exact_logits_of(merged), exact_logits_of(adapted), layers=layers, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(base)
    difference = (exact_logits_of(merged) - exact_logits_of(before)).abs().max()
    assert difference > 1e-4, "the adapter does nothing"


@pytest.mark.usefixtures("without_pictures")
def test_the_weights_of_the_best_scheduled_step_are_merged(
    config: Path, capsys: pytest.CaptureFixture[str], rewards_with_spread: None
) -> None:
    schedule = ["--data.dev", str(config.parent / "questions.jsonl"), "--evaluation.every", "1"]
    argv = ["train", "--config", str(config), "--run.output_dir", "best", "--grpo.save_steps", "1", *schedule]
    argv += ["--evaluation.before_training", "false", "--evaluation.schedule_samples", "2"]
    # No step gets any of two questions right, so that the first is the best.
    argv += ["--evaluation.keep", "best", "--environment.max_turns", "1", "--sft.max_steps", "1"]
    assert main(argv) == 0
    weights = [
        load_file(f"best/{name}/model.safetensors") for name in ("model", "checkpoint-1", "checkpoint-2")
    ]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert any((weights[0][name] != weights[2][name]).any() for name in weights[0])
    assert json.loads(Path("best/evaluation.json").read_text())["step"] == 1
    schedule = json_lines(Path("best/evaluation_schedule.jsonl"))
    assert [record["accuracy"]["total"] for record in schedule] == [2, 2, 2]
    scores = [f"step {record['step']} {record['accuracy']['accuracy']:.1%}" for record in schedule]
    assert f"Kept the weights of step 1 of 2 (dev: {', '.join(scores)})" in capsys.readouterr().out


def test_a_run_without_a_gradient_warns_with_its_reason_and_merges_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, sft=None, rewards={"execution": 1.0})
    argv = ["train", "--config", str(config), "--data.test", "{}"]
    assert main(argv) == 0
    assert "step 1 has no gradient: all 16 episodes are masked (turn_length " in caplog.text
    assert "step 2 has no gradient" not in caplog.text
    warning = "warning: nothing was learned: no step had a gradient: all 32 episodes are masked (turn_length "
    assert warning in capsys.readouterr().out
    kept = json.loads((tmp_path / "run" / "report.json").read_text("utf-8"))["warnings"]
    assert any(text.startswith("step 1 has no gradient") for text in kept)
    assert any(text.startswith("nothing was learned") for text in kept)
    assert "raise environment.max_turn_tokens" in caplog.text
    assert len(json_lines(tmp_path / "run" / "rollouts.jsonl")) == 32
    assert main([*argv, "--resume", "auto"]) == 0
    assert warning in capsys.readouterr().out, "a resumed run that is finished learned nothing either"
    metrics = tmp_path / "run" / "metrics.jsonl"
    learned = [row | {"grad_norm": row["step"] - 1.0} for row in json_lines(metrics)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in learned), encoding="utf-8")
    assert main([*argv, "--resume", "auto"]) == 0
    assert "warning: 1 of 2 steps had no gradient\n" in capsys.readouterr().out
    folders = (tmp_path / "model", tmp_path / "run" / "merged")
    start, merged = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(weights, merged[name]) for name, weights in start.items())


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_smoke_run_ends_with_a_model_that_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: dict[str, int] | None
) -> None:
    config = write_config(tmp_path, rewards={"execution": 1.0})
    own = ["--grpo.max_steps", "50", "--grpo.num_generations", "16", "--evaluation.every", "1"]
    own += ["--data.dev", str(tmp_path / "questions.jsonl"), "--evaluation.keep", "best"]
    own += ["--selection.strata", "{join: 0.5}", "--model.lora", json.dumps(lora), "--losses.kept", "0.5"]
    text = yaml.safe_load(config.read_text())
    for name, value in zip(own[::2], own[1::2], strict=True):
        section, key = name.removeprefix("--").split(".")
        text.setdefault(section, {})[key] = yaml.safe_load(value)
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(text))

    argv = ["train", "--config", str(tmp_path / "long.yaml"), "--smoke", "--data.test_samples", "1"]
    assert main([*argv, "--run.output_dir", str(tmp_path / "run")]) == 0

    folder = tmp_path / "run-smoke"
    assert len(json_lines(folder / "rollouts.jsonl")) == 8 and len(json_lines(folder / "metrics.jsonl")) == 1
    assert yaml.safe_load((folder / "config.yaml").read_text())["losses"]["kept_questions"] == 8
    assert len(json_lines(folder / "evaluation.jsonl")) == 1, "options of the command line come last"
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    database = str(tmp_path / "databases" / "shop.sql")
    assert main(["ask", "Branches?", "--model", str(folder), "--db", database]) in (0, 1)
    assert "error" not in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures")
def test_a_resumed_run_may_end_without_a_gradient_if_its_earlier_part_learned(
    tmp_path: Path, rewards_with_spread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, sft=None, rewards={"execution": 1.0})
    argv = ["train", "--config", str(config), "--data.test", "{}"]
    assert main([*argv, "--grpo.max_steps", "1"]) == 0
    monkeypatch.setattr(RewardMix, "score", lambda *_: {"execution": 0.0})
    resume = ["--resume", str(tmp_path / "run" / "checkpoint-1")]
    assert main([*argv, *resume, "--run.output_dir", "other"]) == 0
    assert main([*argv, *resume]) == 0
    assert [row["grad_norm"] > 0 for row in json_lines(tmp_path / "run" / "metrics.jsonl")] == [True, False]


QWEN = "config/qwen2.5_coder_1.5b_lora.yaml"


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A tiny random Qwen2 with Qwen2.5's own chat template, tools included; 4-bit blocks are 64 wide."""
    folder = write_model(
        tmp_path / "qwen", architecture="qwen2", hidden_size=64, max_positions=16_384, dtype=torch.bfloat16
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


CONFIGS = sorted(path.name for path in (Path(__file__).parents[2] / "config").glob("*.yaml"))
OWN = {  # what else differs from the machine that a config is for
    "quickstart.yaml": {"sft.adapter": "null", "model.frozen_layers": "1"},
    "smollm2_spider.yaml": {"data.dev_databases": "[]"},
    "qwen2.5_coder_0.5b_cpu.yaml": {"data.dev_databases": "[]"},
}


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    "name",
    [name if name == Path(QWEN).name else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_every_config_trains_two_steps_of_a_small_stand_in(
    qwen: Path, repo_root: Path, rewards_with_spread: None, name: str
) -> None:
    data = repo_root / "data"
    small = {
        "model.path": str(qwen),
        "run.output_dir": "small",
        "data.databases": str(data / "databases"),
        "data.train": str(data / "questions" / "train.jsonl"),
        "data.train_samples": "40",
        "data.test": f"{{test_values: {data / 'questions' / 'test_values.jsonl'}}}",
        "data.test_samples": "2",
        "data.dev": str(data / "questions" / "dev.jsonl"),
        "evaluation.every": "1",
        "evaluation.schedule_samples": "1",
        "sft.questions": str(data / "questions" / "dev.jsonl"),
        "sft.max_steps": "1",
        "sft.batch_size": "2",
        "environment.max_turns": "2",
        "environment.max_turn_tokens": "12",
        "grpo.max_steps": "2",
        "grpo.per_device_train_batch_size": "2",
        "grpo.num_generations": "2",
        "grpo.gradient_accumulation_steps": "2",
        "grpo.report_to": "none",
        "grpo.use_vllm": "false",
        **OWN.get(name, {}),
    }
    options = [word for key, value in small.items() for word in (f"--{key}", value)]
    assert main(["train", "--config", str(repo_root / "config" / name), *options]) == 0
    steps = [row for row in json_lines(Path("small/metrics.jsonl")) if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    episode = json_lines(Path("small/rollouts.jsonl"))[0]
    prompt = AutoTokenizer.from_pretrained(qwen).decode(episode["prompt_ids"])
    merged = AutoModelForCausalLM.from_pretrained("small/merged")
    assert merged.config.model_type == "qwen2"
    if name == Path(QWEN).name:
        assert '"name": "submit_sql"' in prompt
        assert "CREATE TABLE" in prompt
        assert merged.dtype == torch.bfloat16
        assert AutoTokenizer.from_pretrained("small/merged").chat_template.startswith("{%- if tools %}")


@pytest.mark.thorough
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_a_model_is_trained_in_4_bit_and_merged_into_the_weights_it_was_trained_on(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rewards_with_spread: None
) -> None:
    model = {"path": str(qwen), "quantization": "4bit", "lora": {"r": 4}}
    environment = {"schema_text": "compact", "max_turns": 2, "max_turn_tokens": 8}
    config = write_config(tmp_path, model=model, sft=None, environment=environment)
    assert main(["train", "--config", str(config), "--grpo.max_steps", "2"]) == 0
    assert capsys.readouterr().err == ""
    run = tmp_path / "run"
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    assert getattr(merged.config, "quantization_config", None) is None
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    four_bit = load_policy(str(qwen), dtype="float32", quantization="4bit").model
    trained = logits_of(PeftModel.from_pretrained(four_bit, run / "adapter"))
    plain = logits_of(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32))
    rounding = (logits_of(merged.float()) - trained).abs().max()  # to bfloat16, when it was written
    assert rounding < 0.2 * (plain - trained).abs().max()


# What a person reads, line by line; a bar draws many of the first kind.
SHOWN = re.compile(
    r"(SFT|Evaluation (before|after)|GRPO) [━╸╺ ]+ *\d+/\d+ .*|"
    r"Run folder: .*|SFT: .*|warning: held-out questions are also training questions .*|"
    r"(Merging|merged) .*|into .*|largest change of a logit: .*|"
    r"Strict accuracy .*|n +before +after +difference .*|─+|test_values.*|by question .*|"
    r"(Of \d+ questions|Both are right) .*|(by )?(database|question) alone\.|alone\.|Time: .*|"
    r"(merged model|learning curve|evaluation|report) +\S+|Look at its answers: .*|"
    r"shared_prefix is on: .*|Ask it a question: .*"
)
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_a_terminal(command: list[str], environment: dict[str, str]) -> list[str]:
    """The lines that a program draws on a terminal, each of its redrawn bars too."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as program:
        os.close(theirs)
        drawn = bytearray()
        with contextlib.suppress(OSError):  # Linux ends a terminal with an error
            while part := os.read(ours, 65_536):
                drawn += part
        os.close(ours)
    text = CONTROLS.sub("", drawn.decode())
    assert program.returncode == 0, text
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.thorough
def test_a_terminal_shows_the_run_and_nothing_else_and_wandb_stays_in_its_folder(
    config: Path, tmp_path: Path, repo_root: Path, own_cache: Path
) -> None:
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    del settings["grpo"]["report_to"]
    settings["run"]["output_dir"] = "seen"
    Path("seen.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"PYTHONPATH": str(repo_root / "src"), "TERM": "xterm", "COLUMNS": "100"}
    script = str(repo_root / "scripts" / "train.py")
    lines = in_a_terminal([sys.executable, script, "--config", "seen.yaml"], environment)
    assert [line for line in lines if not SHOWN.fullmatch(line)] == []
    assert any(re.match(r"GRPO ━+ 2/2 .* reward [-\d]", line) for line in lines)
    assert len(list(Path("seen/wandb").glob("offline-run-*/*.wandb"))) == 1
    assert sorted(os.listdir()) == ["seen", "seen.yaml"]
