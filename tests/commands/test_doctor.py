"""What `doctor` finds: a run that works, one that would fail, and every config of this repository."""

import json
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate.commands.config.config_args import load_config_from_file
from rich.console import Console
from transformers import AutoTokenizer

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.doctor import checks as doctor_checks
from text2sql_grpo.doctor import diagnosis
from text2sql_grpo.doctor.checks import read_launch
from text2sql_grpo.doctor.diagnosis import doctor
from text2sql_grpo.doctor.memory import MemoryEstimate, Sharding
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.training.arguments import wrong_combinations

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "config").glob("*.yaml"))
FSDP2 = str(ROOT / "config" / "accelerate" / "fsdp2.yaml")
LAUNCHES = sorted((ROOT / "config" / "accelerate").glob("*.yaml"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random Qwen2 with Qwen2.5's own chat template."""
    folder = write_model(tmp_path / "model", architecture="qwen2", max_positions=8_192)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    environment = {"protocol": "native", "schema_text": "compact", "max_turns": 2, "max_turn_tokens": 8}
    policy = {"path": str(model), "lora": {"r": 4}}
    return write_config(tmp_path, model=policy, sft=None, environment=environment)


@pytest.fixture
def unchecked_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each call the query that runs into its time limit."""
    monkeypatch.setattr(doctor_checks, "databases", lambda config: iter(()))


@pytest.fixture
def untraced_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each call the update that is traced for its memory."""
    nothing = MemoryEstimate(**{field.name: 0 for field in fields(MemoryEstimate)})
    monkeypatch.setattr(diagnosis, "memory_of", lambda *_, **__: nothing)


def findings(config: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--config", str(config), "--json", *options])
    record = json.loads(capsys.readouterr().out)
    assert record["would_run"] == (code == 0)
    return code, record["findings"]


@pytest.mark.thorough
def test_a_run_that_works(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(config, capsys)

    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["settings"]["mode"] == "LoRA"
    assert found["data"]["status"] == "note" and "4 of 4 of data.test.test_values" in found["data"]["text"]
    assert found["databases"]["status"] == "ok" and "change of the schema" in found["databases"]["text"]
    assert found["executor"]["endless"] == "timeout"
    template = found["chat template"]
    assert template["is_prefix_stable"] and template["trained_tokens"] > 50
    memory = found["memory"]
    kept = memory["weights"] + memory["optimizer"] + memory["reference"]
    assert memory["peak"] >= kept + memory["gradients"] + memory["update"]
    groups = found["zero-variance groups"]
    assert (groups["groups"], groups["zero_variance"]) == (4, 4)  # it only babbles
    assert "raise environment.max_turn_tokens" in groups["text"] and "SFT" not in groups["text"]
    assert found["time"]["episodes"] == 16 and found["time"]["steps"] == 2
    assert " steps about " in found["time"]["text"] and "0.0 h" not in found["time"]["text"]
    assert found["trackers"]["trackers"] == [] and "mcp" not in found
    assert not list(tmp_path.glob("run/*")), "a dry run left something"


SERVER = f"{sys.executable} {ROOT / 'tests' / 'mcp_server.py'}"


def test_the_mcp_server_is_started_and_its_tools_are_listed(config: Path, tmp_path: Path) -> None:
    command = json.dumps({"command": f"{SERVER} {tmp_path / 'log'}"})

    (found,) = doctor_checks.mcp_server(load_config(config, ["--environment.mcp", command]))

    assert found.status == "ok" and "with run_sql, sleep" in found.text
    tools = found.facts["tools"]
    assert tools[0] == "run_sql" and tools[-1] == "submit_sql" and "pid" in tools


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("nowhere-to-be-found", "nowhere-to-be-found"),
        (f"{sys.executable} -c 'print(5)'", "cannot connect to the MCP server"),
    ],
)
def test_an_mcp_server_that_does_not_serve_is_a_problem(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    reason: str,
) -> None:
    monkeypatch.setattr("text2sql_grpo.integrations.mcp.server_pool.BACK_OFF_S", ())
    option = json.dumps({"command": command})

    code, found = findings(config, capsys, "--no-dry-run", "--environment.mcp", option)

    assert code == 1
    assert found["mcp"]["status"] == "problem" and reason in found["mcp"]["text"]
    assert found["databases"]["status"] == "ok" and "data" not in found


def test_trackers(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed

    def found(names: str) -> tuple[str, str]:
        finding = doctor_checks.trackers(load_config(config, ["--grpo.report_to", names]))
        return finding.status, finding.text

    assert found("[wandb, tensorboard]") == ("ok", "wandb, tensorboard")
    assert found("none") == ("ok", "none")
    status, text = found("[wandb, trackio]")
    assert status == "problem" and "pip install 'text2sql-grpo[trackio]'" in text
    monkeypatch.setattr("text2sql_grpo.reporting.trackers.find_spec", lambda name: True)
    status, text = found("weave")
    assert status == "note" and "no WANDB_API_KEY" in text
    code, record = findings(config, capsys, "--no-dry-run", "--grpo.report_to", "wanbd")
    assert code == 1 and "must be a list of wandb" in record["settings"]["text"]


@pytest.mark.thorough
def test_without_a_dry_run_in_colour(config: Path, model: Path) -> None:
    console = Console(record=True, width=200, force_terminal=True, color_system="standard")

    assert doctor(load_config(config), console=console, dry_run=False) == 0

    text = console.export_text(styles=True)
    assert "skipped" in text and "--no-dry-run was given" in text
    trained = text.split("\x1b[1;32m")[1:]  # bold green: what the policy is trained on
    written = "".join(part.split("\x1b[0m")[0] for part in trained)
    assert '{"name": "submit_sql", "arguments": {"sql":' in written
    assert "tool_response" in text and "tool_response" not in written
    assert AutoTokenizer.from_pretrained(model).eos_token in written


def two_processes(folder: Path) -> str:
    """A config of accelerate that starts two processes."""
    launch = folder / "two.yaml"
    launch.write_text("num_processes: 2\ndistributed_type: MULTI_GPU\n", encoding="utf-8")
    return str(launch)


def test_a_group_that_two_processes_share(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    unchecked_databases: None,
    untraced_update: None,
) -> None:
    options = ("--no-dry-run", "--grpo.per_device_train_batch_size", "2", "--grpo.num_generations", "4")
    code, found = findings(config, capsys, *options)
    assert code == 1 and "divisible by num_generations (4)" in found["settings"]["text"]

    code, found = findings(config, capsys, *options, "--accelerate", two_processes(tmp_path))

    assert code == 0 and found["settings"]["text"].endswith("2 processes")


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        (["--data.databases", "nowhere"], "databases", "no databases: no such file or folder"),
        (
            ["--grpo.per_device_train_batch_size", "64"],
            "data",
            "one batch needs at least 16 questions",
        ),
        (["--grpo.sync_ref_model", "true"], "settings", "sync_ref_model needs beta > 0"),
        (
            ["--accelerate", FSDP2, "--grpo.sync_ref_model", "true", "--grpo.beta", "0.1"],
            "settings",
            "a reference that no checkpoint can hold",
        ),
        (["--accelerate", FSDP2], "settings", "accelerate shards a model only on accelerators"),
        (["--accelerate", "LAUNCH", "--evaluation.blend", "0.5"], "settings", "blend below 1 needs a single"),
        (["--accelerate", "LAUNCH", "--sft.batch_size", "9"], "settings", "multiple of the number of proc"),
        (["--accelerate", "LAUNCH"], "data", "one batch needs at least 8 questions"),
        (["--environment.schema_text", "ddl", "--model.path", "SHORT"], "context", "longest prompt"),
    ],
)
def test_a_run_that_would_fail(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    untraced_update: None,
    options: list[str],
    name: str,
    text: str,
) -> None:
    if "SHORT" in options:
        short = write_model(tmp_path / "short", architecture="qwen2", max_positions=64)
        options = [word.replace("SHORT", str(short)) for word in options]
    options = [word.replace("LAUNCH", two_processes(tmp_path)) for word in options]

    code, found = findings(config, capsys, "--no-dry-run", *options)

    assert code == 1
    assert found[name]["status"] == "problem"
    assert text in found[name]["text"]


def test_a_template_without_tools_refuses_native_calls_though_the_prompt_names_them(
    config: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    unchecked_databases: None,
    untraced_update: None,
) -> None:
    blind = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(blind)

    code, found = findings(config, capsys, "--no-dry-run")

    assert code == 1 and found["chat template"]["status"] == "problem"
    assert "set environment.protocol: tags" in found["chat template"]["text"]
    code, found = findings(config, capsys, "--no-dry-run", *advised(found["chat template"]))
    assert code == 0 and found["chat template"]["status"] == "ok"


def advised(finding: dict[str, Any]) -> tuple[str, str]:
    """The setting that a finding asks for, as an option of the command line."""
    ((name, value),) = re.findall(r"\bset ([a-z_]+\.[a-z_.]+): (\w+)", finding["text"])
    return f"--{name}", value


@pytest.mark.thorough
@pytest.mark.parametrize(("spare", "status", "name"), [(-100, "problem", "schema"), (50, "note", "episode")])
def test_advice_on_the_context_works_when_it_is_followed(
    config: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    unchecked_databases: None,
    untraced_update: None,
    spare: int,
    status: str,
    name: str,
) -> None:
    """Of a schema of a hundred columns, by a tokenizer with a token for each byte."""
    columns = ", ".join(f"column_{number} TEXT" for number in range(100))
    shop = config.parent / "databases" / "shop.sql"
    shop.write_text(f"{shop.read_text('utf-8')}\nCREATE TABLE wide ({columns});", encoding="utf-8")
    options = ("--no-dry-run", "--environment.max_episode_tokens", "100")
    longest = findings(config, capsys, *options)[1]["context"]["longest_prompt"]
    shape = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": longest + spare}
    (model / "config.json").write_text(json.dumps(shape))

    context = findings(config, capsys, *options)[1]["context"]
    assert context["status"] == status and advised(context)[0] == f"--environment.max_{name}_tokens"
    code, found = findings(config, capsys, *options, *advised(context))

    assert (code, found["context"]["status"]) == (0, "ok")


def test_a_model_that_cannot_be_read_is_a_problem_after_one_request_to_the_hub(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(self: object, hub_id: str, **options: object) -> None:
        asked.append(hub_id)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_: pytest.fail("another attempt"))
    code, found = findings(config, capsys, "--model.path", "nobody/absent-model")

    assert code == 1 and asked == ["nobody/absent-model"]
    text = found["model"]["text"]
    assert found["model"]["status"] == "problem" and "nobody/absent-model cannot be read" in text
    assert "no network" in text and "set model.path" in text
    assert "memory" not in found


@pytest.mark.thorough
def test_weights_that_are_missing_are_a_problem(
    config: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    code, found = findings(config, capsys)
    assert code == 1 and found["dry run"]["status"] == "problem"
    assert "the weights cannot be loaded: " in found["dry run"]["text"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_settings_of_every_config_go_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the processes of the command that it opens with."""
    monkeypatch.chdir(ROOT)
    comment = path.read_text("utf-8")
    launch = next((one for one in LAUNCHES if one.name in comment), None)
    sharding = read_launch(launch)

    arguments = run_arguments(load_config(path))

    assert wrong_combinations(arguments, sharding.processes, is_sharded=sharding.stage == 3) == []


def test_every_accelerate_config_is_read_by_accelerate_and_by_us(tmp_path: Path) -> None:
    sharding = {}
    for path in LAUNCHES:
        accelerate = load_config_from_file(str(path))
        sharding[path.stem] = read_launch(path)
        assert accelerate.num_processes == sharding[path.stem].processes
    assert sharding == {
        "single": Sharding(1),
        "ddp": Sharding(8),
        "fsdp2": Sharding(8, 3),
        "deepspeed_zero2": Sharding(8, 2),
        "deepspeed_zero3": Sharding(2, 3, offloads_states=True),
    }
    launch = "num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config: "
    for text in ("a: 1", f"{launch}ds.json", f"{launch}{{zero_stage: auto}}"):
        (tmp_path / "other.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"not a config of accelerate: .*other\.yaml"):
            read_launch(tmp_path / "other.yaml")


@pytest.mark.thorough
def test_databases_that_cannot_be_read_are_shown_with_their_errors(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def problem(*options: str) -> str:
        code, found = findings(config, capsys, "--no-dry-run", *options)
        assert code == 1 and found["databases"]["status"] == "problem"
        return str(found["databases"]["text"])

    text = problem("--environment.limits.max_sql_bytes", "5")
    assert text.startswith("1 of 1 could not be read: shop: ") and "5" in text.partition("shop: ")[2]
    for name in ("first", "second"):
        (tmp_path / "databases" / f"{name}.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    text = problem()
    assert text.startswith("2 of 3 could not be read: first: ") and "; second: " in text
    assert text.count("not a database") == 2
