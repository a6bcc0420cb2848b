"""The command line: help without heavy imports, one line for each error, and the small verbs for real."""

import errno
import functools
import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.file_limits import file_size_limit
from text2sql_grpo import __version__
from text2sql_grpo.commands import main, verbs
from text2sql_grpo.commands.default_config import REQUIRED
from text2sql_grpo.config import AlertsConfig, Config, config_fields, load_config, parse_config
from text2sql_grpo.errors import RunError

HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "matplotlib", "pandas", "wandb"}
HEAVY |= {"pydantic", "sqlglot", "asyncio"}  # a tenth of a second each
VERBS = (["train"], ["evaluate"], ["merge"], ["push"], ["data", "make"], ["data", "overlap"], ["data"])
VERBS += (["compare"], ["ask"], ["audit", "data"], ["audit", "reward"], ["audit"], ["collect"], ["sft"])
VERBS += (["data", "teach"], ["doctor"], ["mcp"], ["config"], ["review"], ["role"], [])
HELP = f"""
import sys
from text2sql_grpo.commands import main
for verb in {VERBS!r}:
    try:
        main([*verb, "--help"])
    except SystemExit as end:
        assert end.code == 0, verb
print("loaded:", sorted(set(sys.modules) & {HEAVY!r}))
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `.env` but the test's own, and nothing of it left behind."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_KEY", "DEVICE_TYPE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_config_of_the_package_is_printed_and_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--example", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"quickstart", "qwen2.5_coder_1.5b_lora", "accelerate/ddp"} < set(names)
    for name in names:
        assert main(["config", "--example", name]) == 0
        (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
        if not name.startswith("accelerate"):
            data = load_config("mine.yaml").data
            assert not str(data.train).startswith("data/") and not str(data.databases).startswith("data/")
    assert main(["config", "--example", "config/quickstart.yaml"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert Path(load_config("mine.yaml").data.train).is_file()
    with pytest.raises(SystemExit):
        main(["config", "--example", "quikstart"])
    assert "no example 'quikstart': there are accelerate/ddp, " in capsys.readouterr().err


def test_db_and_databases_are_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = {
        "--databases": ["ask", "How many?", "--model", "smollm2-135m", "--databases", "none"],
        "--databases of mcp": ["mcp", "--databases", "none"],
        "--databases of audit": ["audit", "data", "none.jsonl", "--databases", "none"],
        "--db": ["data", "make", "--db", "none"],
        "--db of overlap": ["data", "overlap", "--db", "none"],
    }
    for argv in refusals.values():
        assert "no such file or folder (at none)" in refused(*argv, capsys=capsys)


def test_without_a_config_a_line_names_the_quickstart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb in ("train", "doctor"):
        assert main([verb, "--run.sed", "1"]) == 1
        first, error = capsys.readouterr().err.splitlines()
        assert "this is the quickstart, " in first and "config/quickstart.yaml" in first
        assert "config --example quickstart" in first and "did you mean seed?" in error


def refused(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that fails."""
    assert main(argv) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_help_of_every_verb_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: text2sql-grpo") == len(VERBS)
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize(
    ("script", "usage"),
    [
        ("train", "[--section.key VALUE ...]"),
        ("evaluate", "--model_path"),
        ("merge", "--adapter"),
        ("push_to_hub", "--repo_id"),
    ],
)
def test_scripts_are_verbs(repo_root: Path, script: str, usage: str) -> None:
    command = [sys.executable, str(repo_root / "scripts" / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert usage in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["data", "fly"],
        ["data"],
        ["data", "overlap", "--run.seed", "1"],
        ["train", "--confg", "a.yaml"],
        ["train", "--conf", "a.yaml"],
        ["train", "--run.seed", "1", "--resum=auto"],
        ["merge"],
        ["compare", "one"],
        ["collect", "--out", "e.jsonl"],
        ["collect", "--out", "e.jsonl", "--model_path", "m", "--base_url", "u"],
        ["collect", "--out", "e.jsonl", "--model_path", "m", "--keep", "correct", "best"],
        ["push", "--repo_id", "b", "--folder", "a", "--run_folder", "a"],
        ["mcp", "--db", "d", "--port", "65536"],
        ["evaluate", "--model_path", "m", "--num_samples", "0"],
        ["evaluate", "--model_path", "m", "--temperature", "cold"],
        ["evaluate", "--model_path", "m", "--temperature", "-1"],
        ["evaluate", "--model_path", "m", "--temperature", "inf"],
        ["audit"],
        ["audit", "data", "a.jsonl"],
        ["audit", "data", "a.jsonl", "--db", "d", "--slow_s", "0"],
        ["audit", "data", "a.jsonl", "--db", "d", "--slow_s", "soon"],
        ["audit", "data", "a.jsonl", "--db", "d", "--max_prompt_tokens", "-1"],
        ["audit", "data", "a.jsonl", "--db", "d", "--test_databases", "-1"],
        ["review", "d", "--test_databases", "-1"],
        ["audit", "data", "a.jsonl", "--db", "d", "--run.seed", "1"],
        ["audit", "reward"],
    ],
)
def test_wrong_options_are_refused_with_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: text2sql-grpo")


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["trian"], "did you mean train?"),
        (["audit", "rewards"], "did you mean reward?"),
        (["train", "--confg", "a.yaml"], "(did you mean --config?)"),
        (["push", "--repo_id", "a", "--folder", "b", "--publc"], "(did you mean --public?)"),
        (["merge", "--adapter", "a", "--dtype", "flota32"], "did you mean float32?"),
    ],
)
def test_misspelt_verbs_and_options_get_a_suggestion(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert meant in capsys.readouterr().err.splitlines()[-1]


def test_the_package_runs_as_a_module_and_names_its_version() -> None:
    command = [sys.executable, "-m", "text2sql_grpo", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{__version__}\n"


@pytest.mark.parametrize("verb", verbs())
def test_help_of_a_verb_has_an_example_with_its_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    text = capsys.readouterr().out
    [example] = re.findall(rf"^  text2sql-grpo {verb}.*", text, re.M)
    options = re.findall(r" (--\w+)(?= |$)", example)
    assert [option for option in options if f"  {option}" not in text] == []
    assert "(default: )" not in text


def test_config_and_help_of_train_explain_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text_of_help = " ".join(capsys.readouterr().out.split())
    assert main(["config"]) == 0
    text = "".join(capsys.readouterr().out.replace("#", " ").split())
    for field in config_fields():
        sentences = field.about.split(". ")
        assert field.about, field.name
        assert len({*sentences}) == len(sentences), field.name
        assert f"{''.join(field.about.split())}{field.name.rpartition('.')[2]}:" in text
        assert f"{'' if field.section else '--'}{field.name} {field.about}" in text_of_help
    assert 'Oneof`last`,`best`.keep:"last"' in text


def test_the_printed_config_loads_as_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    Path("a.yaml").write_text(text, encoding="utf-8")
    data = {"databases": REQUIRED["data.databases"], "train": REQUIRED["data.train"]}
    defaults = parse_config({"model": {"path": REQUIRED["model.path"]}, "data": data}, source="test")
    assert load_config(Path("a.yaml")) == defaults
    for field in config_fields():
        assert f" {field.name.rpartition('.')[2]}:" in text.replace("\n", "\n ")
    above, _, rest = text.partition("\n# alerts:\n")  # a section counts once its marks are taken away
    section = "".join(re.findall(r"^#   .*\n", rest, re.M)).replace("# ", "", 1)
    Path("a.yaml").write_text(f"{above}\nalerts:\n" + section.replace("\n# ", "\n"), encoding="utf-8")
    assert load_config(Path("a.yaml")).alerts == AlertsConfig()


def test_errors_of_every_verb_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing.yaml" in refused("train", "--config", "missing.yaml", capsys=capsys)
    Path("a.yaml").write_text("run: {sed: 1}\n")
    assert "did you mean seed?" in refused("train", "--config", "a.yaml", capsys=capsys)
    (tmp_path / "runs").mkdir()
    assert "no such folder" in refused("evaluate", "--model_path", "runs/none", capsys=capsys)
    assert "a folder as --model_path" in refused("evaluate", "--model", "runs/none", capsys=capsys)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert "add --config FILE" in refused("evaluate", "--model_path", "mine", capsys=capsys)
    assert "name one of " in refused("evaluate", "--model_path", str(tmp_path), capsys=capsys)
    assert "nowhere" in refused("merge", "--adapter", "nowhere", capsys=capsys)
    assert "no such folder" in refused("push", "--folder", "a", "--repo_id", "me/a", capsys=capsys)
    assert "nowhere" in refused("data", "make", "--databases", "nowhere", capsys=capsys)
    assert "nowhere" in refused("data", "overlap", "--questions", "nowhere", capsys=capsys)
    assert "nowhere" in refused("audit", "data", "a.jsonl", "--db", "nowhere", capsys=capsys)
    assert "a.jsonl" in refused("audit", "data", "a.jsonl", "--db", ".", capsys=capsys)
    line = refused("audit", "data", "a.jsonl", "--db", ".", "--keep", "error", "ties", capsys=capsys)
    assert "--keep must be of error, hidden, empty, slow, " in line and "got 'ties'" in line
    assert "nowhere.yaml" in refused("audit", "reward", "--config", "nowhere.yaml", capsys=capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", "a.yaml", "--run.seed", "1", "stray"],
        ["compare", "a", "--run.seed", "1"],
        ["ask", "?", "--model", "m", "--db", "d", "--run.seed", "1"],
    ],
)
def test_words_that_no_option_takes_are_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    err = capsys.readouterr().err
    assert any(word in err for word in ("stray", "TRAINED", "--run.seed"))


def test_a_value_of_a_setting_is_never_a_positional_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("text2sql_grpo.commands.compare.compare", _recording(seen))
    assert main(["compare", "a", "--run.seed", "1", "b", "--sft", "null", "--grpo.max_steps=2"]) == 0
    assert main(["compare", "--run.seed", "1", "--out", "c.json", "a", "b"]) == 0
    settings = ["--run.seed", "1", "--sft", "null", "--grpo.max_steps=2"]
    assert [call[:3] for call in seen] == [("a", "b", settings), ("a", "b", ["--run.seed", "1"])]


def _recording(seen: list[Any]) -> Any:
    from text2sql_grpo.commands.compare import compare

    @functools.wraps(compare)
    def recorded(base: str, trained: str, *, settings: Any = (), **_: Any) -> int:
        seen.append((base, trained, settings))
        return 0

    return recorded


def test_null_leaves_out_a_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = "model: {path: m}\ndata: {databases: d, train: t}\n"
    Path("absent.yaml").write_text(f"sft: null\nalerts: null\n{rest}")
    absent = load_config(Path("absent.yaml"))
    assert (absent.sft, absent.alerts) == (None, None)
    Path("a.yaml").write_text(f"sft: {{max_steps: 1}}\nalerts: {{}}\n{rest}")
    read: list[Config] = []

    def noted(path: Path, settings: Sequence[str], **_: bool) -> Config:
        read.append(load_config(path, settings))
        raise RunError("read")

    options = ["--sft", "null", "--alerts=null", "--run.seed", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("text2sql_grpo.commands.train.config_with_files", noted)
        refused("train", "--config", "a.yaml", *options, capsys=capsys)
    assert (read[0].sft, read[0].alerts, read[0].run.seed) == (None, None, 1)
    line = refused("train", "--config", "a.yaml", "--grpo", "null", capsys=capsys)
    assert "grpo must be a mapping, got None" in line


def test_a_missing_kernel_of_bitsandbytes_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    main(["config"])
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no module")
    logger.warning("another message")
    assert caplog.messages == ["another message"]


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_threads_of_torch_sleep_while_they_wait(policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user chose; no verb loads torch before (`test_help_of_every_verb_loads_nothing_heavy`)."""
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    main(["config"])
    assert os.environ["OMP_WAIT_POLICY"] == (policy or "PASSIVE")


def test_env_file_of_the_current_folder_is_read_and_the_older_token_name_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".env").write_text("HF_KEY=hf_older\nDEVICE_TYPE=cpu\n")
    monkeypatch.setenv("DEVICE_TYPE", "mps")  # the shell wins
    refused("data", "overlap", "--questions", "nowhere", capsys=capsys)
    assert os.environ["HF_TOKEN"] == "hf_older"
    assert os.environ["DEVICE_TYPE"] == "mps"


def test_interrupts_full_disks_and_bugs_end_as_they_should(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: BaseException) -> list[str]:
        def overlap(*_: object) -> None:
            raise error

        monkeypatch.setattr("text2sql_grpo.data.overlap.overlap", overlap)
        return ["data", "overlap"]

    assert main(fails(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/metrics.jsonl")
    assert "disk full while writing runs/a/metrics.jsonl" in refused(*fails(full), capsys=capsys)
    for bug in (PermissionError(errno.EACCES, "no"), ZeroDivisionError("bug"), EOFError(), BrokenPipeError()):
        with pytest.raises(type(bug)):
            main(fails(bug))


def test_a_verb_of_one_process_refuses_a_launcher_of_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap = ["data", "overlap", "--questions", "none"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "overlap runs in one process" not in refused(*overlap, capsys=capsys)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "overlap runs in one process" in refused(*overlap, capsys=capsys)


def test_a_reader_that_ends_early_ends_the_program_quietly() -> None:
    command = [sys.executable, "-m", "text2sql_grpo", "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1


def test_a_full_disk_names_the_file_and_leaves_none_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shop(tmp_path / "databases")
    with file_size_limit(2_000):
        code = main(["data", "make", "--databases", "databases", "--out", "full"])
    assert code == 1 and "error: cannot write full/" in capsys.readouterr().err
    assert not list((tmp_path / "full").glob("*.jsonl"))


def write_shop(folder: Path) -> None:
    folder.mkdir()
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.execute("CREATE TABLE sale (id INTEGER PRIMARY KEY, status TEXT, town TEXT, price REAL)")
        sales = [
            (i, ("IN_TRANSIT", "ON_HOLD", "NOT_PAID")[i % 3], ("Lisbon", "Porto")[i % 2], i * 37 % 90 + 0.5)
            for i in range(60)
        ]
        connection.executemany("INSERT INTO sale VALUES (?, ?, ?, ?)", sales)
        connection.commit()


def test_questions_are_made_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(tmp_path / "databases")
    assert main(["data", "make", "--databases", "databases", "--out", "made", "--seed", "3"]) == 0
    count = sum(len(path.read_text("utf-8").splitlines()) for path in (tmp_path / "made").glob("*.jsonl"))
    out = capsys.readouterr().out
    assert out.endswith(f"wrote {count} questions for databases to made\n")
    assert re.search(rf"sale +60 +{count}", out)
    lines = (tmp_path / "made" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["database"] for line in lines} == {"shop"}

    assert main(["data", "overlap", "--questions", "made"]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.startswith("training set")
    assert first.split()[:2] == ["demonstrations", "train"]


def test_text_of_a_model_that_no_terminal_can_show_is_printed_escaped() -> None:
    code = "from text2sql_grpo.commands import main; main(['config']); print('\\ud800')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\\ud800\n")
