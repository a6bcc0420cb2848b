import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from text2sql_grpo.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GradingConfig,
    MCPConfig,
    ModelConfig,
    RunConfig,
    dump_config,
    load_config,
    parse_config,
)
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.sql import Limits

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "config").glob("*.y*ml"))  # accelerate's own lie in a folder
SMALLEST = "model: {path: some/model}\ndata: {databases: d, train: t.jsonl}\n"


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(text, "utf-8")
    return load_config(path, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, text, *overrides)
    return str(refused.value)


def test_there_are_configs() -> None:
    assert {path.name for path in CONFIGS} >= {
        *("quickstart.yaml", "test.yaml", "qwen2.5_coder_1.5b_lora.yaml"),
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_opens_with_its_command(path: Path) -> None:
    config = load_config(path)

    comment = path.read_text("utf-8").split("\nrun:")[0]
    assert re.search(r"^# Command: ", comment, re.M)
    assert re.search(r"^# Hardware: ", comment, re.M)
    data = config.data
    assert isinstance(data.databases, str)
    paths = [data.databases, data.train, *data.test.values(), config.sft and config.sft.questions]
    files = [Path(path) for path in paths if path]
    bundled = [file for file in files if file.parts[0] != "spider"]  # Spider's files are the user's
    assert [file for file in bundled if not (ROOT / file).exists()] == []
    assert isinstance(config.grpo["learning_rate"], float)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dump_and_load(tmp_path: Path, path: Path) -> None:
    config = load_config(path)

    assert load(tmp_path, dump_config(config)) == config
    assert dump_config(load(tmp_path, dump_config(config))) == dump_config(config)


def test_dump_says_every_field(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump_config(load(tmp_path, SMALLEST)))

    assert tree["environment"]["limits"]["timeout_s"] == 5.0
    assert tree["run"] == {"output_dir": str(Path("runs/run")), "seed": 0}
    assert tree["model"]["lora"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {sed: 1}", "unknown key run.sed: did you mean seed?"),
        ("rewrds: {execution: 1}", "unknown key rewrds: did you mean rewards?"),
        ("run: {zzz: 1}", "unknown key run.zzz: known: output_dir, seed"),
        (
            "environment: {limits: {timeout: 3}}",
            "unknown key environment.limits.timeout: did you mean timeout_s?",
        ),
        ("run: {seed: 2.5}", "run.seed must be a valid integer, got 2.5"),
        ("run: {seed: '3'}", "run.seed must be a valid integer, got '3'"),
        ("run: {seed: true}", "run.seed must be a valid integer, got True"),
        ("run: {seed: }", "run.seed must be a valid integer, got None"),
        ("run: 3", "run must be a mapping, got 3"),
        ("run: {output_dir: 3}", "run.output_dir must be a valid string, got 3"),
        ("evaluation: {temperature: '1'}", "evaluation.temperature must be a valid number, got '1'"),
        (
            "evaluation: {before_training: 'yes'}",
            "evaluation.before_training must be a valid boolean, got 'yes'",
        ),
        ("evaluation: {temperature: .nan}", "evaluation.temperature must be a finite number, got nan"),
        ("evaluation: {temperature: -1}", "evaluation.temperature must be >= 0, got -1"),
        ("evaluation: {batch_size: 0}", "evaluation.batch_size must be >= 1, got 0"),
        ("environment: {protocol: xml}", "environment.protocol must be 'tags' or 'native', got 'xml'"),
        ("environment: {max_turns: 0}", "environment.max_turns must be >= 1, got 0"),
        ("environment: {max_schema_tokens: 0}", "environment.max_schema_tokens must be >= 1, got 0"),
        ("environment: {max_turn_tokens: -1}", "environment.max_turn_tokens must be >= 1, got -1"),
        ("environment: {limits: {timeout_s: 0}}", "environment.limits.timeout_s must be > 0, got 0"),
        ("environment: {limits: {timeout_s: .nan}}", "environment.limits.timeout_s must be a finite number"),
        (
            "environment: {observation: {max_rows: 0}}",
            "environment.observation.max_rows must be >= 1, got 0",
        ),
        ("environment: {mcp: {comand: x}}", "unknown key environment.mcp.comand: did you mean command?"),
        (
            "environment: {mcp: {command: x, url: 'http://y'}}",
            "environment.mcp: set exactly one of command and url, got command=x url=http://y",
        ),
        ("environment: {mcp: {command: x, tools: 3}}", "environment.mcp.tools must be a valid "),
        ("environment: {mcp: {}}", "environment.mcp: set exactly one of command and url"),
        (
            "environment: {mcp: {command: x, timeout_s: 0}}",
            "environment.mcp.timeout_s must be > 0, got 0",
        ),
        (
            "environment: {mcp: {command: x, connections: 0}}",
            "environment.mcp.connections must be >= 1, got 0",
        ),
        (
            "rewards: {execution: high}",
            "the weight of execution must be a finite number, got 'high'",
        ),
        (
            "rewards: {exectuion: 1}",
            "rewards: unknown name 'exectuion': did you mean execution?",
        ),
        (
            "rewards: {execution: 1, format: 1, schema_linking: 2}",
            "rewards: every right answer must earn more than any wrong one, but a wrong one "
            "can earn 3 and a right one as little as ",
        ),
        ("rewards: {execution: 0}", "raise execution above 0"),
        ("rewards: {preset: arktic}", "rewards: preset must be one of strict, skyrl, arctic, "),
        (
            "rewards: {execution: 1, clip: [1, 0]}",
            "clip must be two finite numbers, the lowest first",
        ),
        ("rewards: {execution: 1, on_error: ignore}", "rewards: on_error must be one of mask, penalty"),
        ("grading: {test_databases: -1}", "grading.test_databases must be >= 0, got -1"),
        (
            "rewards: {preset: strict}\ngrading: {test_databases: 0}",
            "rewards.preset strict needs grading.test_databases >= 1, got 0",
        ),
        ("warm_start: {}", "warm_start was removed: use the section sft (docs/sft.md)"),
        ("rollout: {same_draws: true}", "rollout.same_draws was removed: equal draws for equal seeds are"),
        ("rollout: {staleness: 1}", "rollout.staleness was removed: it saved no wall-clock time; docs/scale"),
        ("selection: {by: learnability}", "selection.by was removed: no weight by verdicts gained"),
        ("selection: {resample_flat: 1}", "selection.resample_flat was removed: it gained nothing"),
        ("losses: {observations: 0.1}", "losses.observations was removed: it gained no look-up"),
        ("selection: {max_share: 0.5}", "selection.max_share was removed: it gained nothing"),
        ("selection: {databases_per_batch: 4}", "selection.databases_per_batch was removed: a step took as"),
        ("selection: {quarantine_suspects: 1}", "removed: run text2sql-grpo audit data --answers between"),
        ("selection: {easy_by: difficulty}", "selection.easy_by was removed: no order by difficulty"),
        ("rewards: {execution: 1, turns: {gold_shown: 1}}", "rewards.turns was removed: it gained nothing"),
        ("sft: {stop: {accuracy: 0.6}}", "sft.stop was removed: set sft.max_steps"),
        ("sft: {look_share: 2}", "sft.look_share must be <= 1, got 2"),
        ("sft: {batch_size: 0}", "sft.batch_size must be >= 1, got 0"),
        ("sft: {epochs: 0}", "sft.epochs must be > 0, got 0"),
        ("sft: {question: q}", "unknown key sft.question: did you mean questions?"),
        ("selection: {strata: {lookup: 0}}", "selection.strata.lookup must be > 0, got 0"),
        ("a.b: 3", "unknown key a.b: known: model, data"),
    ],
)
def test_refusals_say_what_was_expected_what_came_and_where(tmp_path: Path, text: str, message: str) -> None:
    refused = refusal(tmp_path, f"{SMALLEST}{text}\n")

    assert message in refused
    assert refused.endswith(f" ({tmp_path / 'run.yaml'})")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}", "missing key data"),
        ("data: {databases: d, train: t}", "missing key model"),
        ("model: {path: m}\ndata: {databases: d}", "missing key data.train"),
        (SMALLEST.replace("path: some/model", ""), "missing key model.path"),
        (
            SMALLEST.replace("path: some/model", "tiny: {}"),
            "model.tiny was removed: set model.path to a pre-trai",
        ),
        (
            SMALLEST.replace("t.jsonl", "t, demonstrations: s"),
            "data.demonstrations was removed: set sft.questions",
        ),
        (SMALLEST.replace("some/model", "m, quantization: 4bit"), "trains an adapter only: set lora"),
        (SMALLEST.replace("some/model", "m, dtype: float8"), "model.dtype must be 'auto', 'float32', "),
        (SMALLEST.replace("t.jsonl", "3"), "data.train must be a valid string, got 3"),
        (SMALLEST.replace("t.jsonl", "t, test: {a: [b]}"), "data.test.a must be a valid string, got ['b']"),
        (SMALLEST.replace("t.jsonl", "t, train_samples: 0"), "data.train_samples must be >= 1, got 0"),
        ("", "a config must be a mapping of sections, got NoneType"),
        ("- a\n- b", "a config must be a mapping of sections, got list"),
        ("run: {seed: 1", "cannot parse the YAML: "),
        ("run: !!python/object:os.system {}", "cannot parse the YAML: "),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    refused = refusal(tmp_path, text)

    assert message in refused
    assert refused.endswith(f" ({tmp_path / 'run.yaml'})")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvironmentSettings(max_turns=0), "max_turns must be >= 1, got 0"),
        (lambda: EnvironmentSettings(protocol="xml"), "protocol must be 'tags' or 'native', got 'xml'"),
        (lambda: EnvironmentSettings(limits={"timeout_s": 0}), "limits.timeout_s must be > 0, got 0"),
        (lambda: replace(EnvironmentConfig(), max_turn_tokens=-1), "max_turn_tokens must be >= 1, got -1"),
        (lambda: Limits(0.0), "timeout_s must be > 0, got 0.0"),
        (lambda: ObservationLimits(max_rows="all"), "max_rows must be a valid integer"),
        (
            lambda: GradingConfig(server_url="postgresql://h/d?%70assword=pw"),
            "must not contain a password",
        ),
        (lambda: MCPConfig(url="https://me:pw@tools.example/mcp"), "must not contain a password"),
        (lambda: EvaluationConfig(batch_size=0), "batch_size must be >= 1, got 0"),
        (lambda: EvaluationConfig(batch=3), "unknown key batch: did you mean batch_size?"),
        (lambda: ModelConfig("m", quantization="4bit"), "trains an adapter only: set lora"),
        (lambda: DataConfig(databases=3, train="t"), "databases must be a valid string, got 3"),
        (lambda: Config({"path": "m"}, {"databases": "d"}), "missing key data.train"),
    ],
)
def test_settings_made_in_python_are_checked_too(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()

    assert message in str(refused.value)


def test_a_string_becomes_a_path_in_python_too() -> None:
    assert RunConfig(output_dir="runs/mine").output_dir == Path("runs/mine")  # type: ignore[arg-type]


def test_defaults_and_workers_load_no_pydantic() -> None:
    script = (
        "import sys, text2sql_grpo.config as c, text2sql_grpo.sql.bounds; c.EnvironmentConfig();"
        "list(c.config_fields()); assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    refused = refusal(tmp_path, f"{SMALLEST}run: {{seed: x}}\nenvironment: {{max_turn: 3}}\n")

    assert "run.seed must be" in refused
    assert "unknown key environment.max_turn: did you mean max_turns?" in refused


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cannot read the config: .*\({re.escape(str(tmp_path))}\)"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"no such config: .*missing.yaml: text2sql-grpo config > my.yaml"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "config.yaml").write_text(SMALLEST)
    with pytest.raises(ConfigError, match=r"no such config: .*confg.yaml: did you mean .*config.yaml"):
        load_config(tmp_path / "confg.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read the config: .*binary"):
        load_config(tmp_path / "binary.yaml")


def test_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    text = f"{SMALLEST}grpo: {{a: 1e-4, b: 2.5e3, c: -1E+2, d: 1.e-3, e: .5e1, f: e4, g: 1e, h: '1e-4'}}\n"

    config = load(tmp_path, text, "--grpo.a", "5e-6")

    assert config.grpo == {
        **{"a": 5e-6, "b": 2500.0, "c": -100.0, "d": 0.001, "e": 5.0},
        **{"f": "e4", "g": "1e", "h": "1e-4"},
    }
    assert load(tmp_path, dump_config(config)).grpo == config.grpo


def test_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SMALLEST,
        *("--run.seed", "7", "--environment.max_turns=3", "--grpo.max_steps", "2", "--model.lora.r", "4"),
        *(
            "--data.test",
            "{new: n.jsonl}",
            "--data.test_samples=null",
            "--evaluation.before_training",
            "false",
        ),
    )

    assert (config.run.seed, config.environment.max_turns) == (7, 3)
    assert config.grpo == {"max_steps": 2}
    assert config.model.lora is not None and config.model.lora.r == 4
    assert config.data.test == {"new": "n.jsonl"}
    assert config.evaluation.before_training is False


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST, "--run.seed", "1", "--run.seed", "2").run.seed == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--run.seed", "2.5"], "run.seed must be a valid integer, got 2.5"),
        (["--run.sed", "2"], "unknown key run.sed: did you mean seed?"),
        (["run.seed", "2"], "options must be --section.key VALUE, got 'run.seed' (command line)"),
        (["--run.seed"], "options must be --section.key VALUE, got '--run.seed' (command line)"),
        (["--run.output_dir", "[a"], "--run.output_dir must be a YAML value, got '[a' (command line)"),
        (
            ["--model.path.x", "1"],
            "no section before .x in model.path.x, but 'some/model' (command line)",
        ),
    ],
)
def test_refused_overrides(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, SMALLEST, *overrides)


def test_defaults_are_valid() -> None:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"databases": "d", "train": "t"}}

    assert parse_config(tree, source="test").rewards == {"preset": "strict"}


def test_the_packages_own_config_works_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--data.dev", "data/own.jsonl"]
    config = load_config(Path("config/quickstart.yaml"), options)
    assert config.data.databases == str(repo_root / "data/databases")
    assert Path(config.data.test["test_values"]).is_file()
    assert (config.data.dev, config.run.output_dir) == ("data/own.jsonl", Path("runs/quickstart"))

    (tmp_path / "config").mkdir()
    (tmp_path / "config/quickstart.yaml").write_text(SMALLEST)
    assert load_config(Path("config/quickstart.yaml")).model.path == "some/model"


def test_the_config_of_a_run_of_an_earlier_version_is_read(repo_root: Path, tmp_path: Path) -> None:
    """As `train` of 0.2.0 wrote it, with every field; removed ones have their defaults, some are renamed."""
    old = repo_root / "tests" / "golden" / "quickstart_0.2.0.yaml"
    config = load_config(old)
    assert (config.grading.test_databases, config.selection.strata) == (4, {"lookup": 0.5})
    later = tmp_path / "later.yaml"
    later.write_text(dump_config(config))
    assert load_config(later) == config
    changed = tmp_path / "changed.yaml"
    changed.write_text(old.read_text().replace("stop: null", "stop: {accuracy: 0.6}"))
    with pytest.raises(ConfigError, match=r"sft\.stop was removed"):
        load_config(changed)
    alerts = load_config(old, ["--alerts.max_dead_groups", "0.9"]).alerts
    assert alerts is not None and alerts.max_zero_variance_groups == 0.9
