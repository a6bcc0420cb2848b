"""`init`: a folder for one's own database, made again without losing edits."""

import json
import shlex
import sqlite3
import subprocess
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
import yaml

from tests.databases import sqlite_file
from text2sql_grpo.commands import main
from text2sql_grpo.commands.options import writing_to
from text2sql_grpo.config import load_config
from text2sql_grpo.models.hardware import GIB
from text2sql_grpo.run.new_project import can_train_coder, minutes_for, size_for, write_config
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.synthesis.profile import SAMPLE_ROWS, TIMEOUT_S, Profile

SHOP = """
CREATE TABLE stg_customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, stg_customers_id INTEGER, status TEXT, amount REAL, day TEXT);
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    file = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SHOP)
        people = [
            (i, f"Ann {chr(97 + i)}", ("Oslo", "Rome", "Bonn")[i % 3], f"2023-0{i % 9 + 1}-11")
            for i in range(26)
        ]
        orders = [
            (i, i % 25, ("PAID", "OPEN", "VOID")[i % 3], i * 7 % 90 / 4, f"2024-0{i % 9 + 1}-0{i % 7 + 1}")
            for i in range(400)
        ]
        connection.executemany("INSERT INTO stg_customers VALUES (?, ?, ?, ?)", people)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders)
        connection.commit()
    return file


def test_init_writes_a_folder_that_can_be_trained_on(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "of $HOME"
    assert main(["init", str(shop), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "stg_customers_id -> stg_customers (mined)" in " ".join(shown.split())
    commands = [line.strip() for line in shown.splitlines() if line.startswith("  text2sql-grpo ")]
    assert [line.split()[1] for line in commands][1:] == ["train", "ask"]
    assert shlex.split(commands[1])[2:] == ["--config", str(out / "config.yaml")]
    assert len(shlex.split(commands[2])) == 7
    config = load_config(out / "config.yaml")
    assert str(config.data.databases) == str(shop) and set(config.data.test) == {
        "test_values",
        "test_templates",
    }
    rows = [json.loads(line) for line in Path(str(config.data.train)).read_text("utf-8").splitlines()]
    files = {file.stem: file.read_text("utf-8").splitlines() for file in (out / "questions").glob("*.jsonl")}
    assert len(rows) > 100 and {"dev", "demonstrations"} <= set(files)
    golds = [{json.loads(line)["gold_sql"] for line in lines} for lines in files.values()]
    assert sum(map(len, golds)) == len(set().union(*golds))


def test_queries_on_large_tables_get_the_time_that_gold_queries_may_take(tmp_path: Path) -> None:
    limits = []
    for n_rows in (20, SAMPLE_ROWS + 1):
        script = f"""CREATE TABLE reading AS WITH RECURSIVE r (n) AS
            (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < {n_rows}) SELECT n, n % 9 AS level FROM r;"""
        file = sqlite_file(tmp_path / f"{n_rows}.sqlite", script)
        with SQLExecutor() as executor:
            profile = Profile(executor, file)
        config = tmp_path / f"{n_rows}.yaml"
        size = size_for({"type": "cpu", "memory_bytes": 0})
        assert write_config(config, profile, size, 1.0, database=str(file), files=[])
        limits.append(load_config(config).environment.limits.timeout_s)
    assert limits[0] < TIMEOUT_S < limits[1]


@pytest.mark.thorough
def test_names_and_values_are_printed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "odd.sqlite", f"$(touch {tmp_path / 'made by a shell'})"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(
            f'CREATE TABLE "{run}" (id INTEGER PRIMARY KEY, "\x1b]0;x\x07[/red]\u2028a\x85b" TEXT, kg REAL)'
        )
        rows = [(i, f"\x1b[31m{i % 7}", i * 1.5) for i in range(40)]
        connection.executemany(f'INSERT INTO "{run}" VALUES (?, ?, ?)', rows)
        connection.commit()
    main(["init", str(file), "--out", str(tmp_path / "made")])
    shown = "".join(capsys.readouterr())
    assert "[/red]" in shown and all(char.isprintable() or char == "\n" for char in shown)
    command = next(line for line in shown.splitlines() if line.startswith("  text2sql-grpo ask"))
    assert run in command
    subprocess.run(["sh", "-c", command.replace("text2sql-grpo", "true")], check=True)
    assert not (tmp_path / "made by a shell").exists()


@pytest.mark.parametrize("argv", [["audit", "data", "q.jsonl", "--db", "\x1b[31mx"], ["view", "\x1b[31mx"]])
def test_errors_are_printed_as_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1 and "\ufffd[31mx" in capsys.readouterr().err


@pytest.mark.thorough
def test_init_again_keeps_what_was_edited(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    main(["init", str(shop), "--out", str(out)])
    words = out / "words.yaml"
    words.write_text(
        words.read_text("utf-8").replace("stg_customers: customer", "stg_customers: patron"), "utf-8"
    )
    (out / "config.yaml").write_text("edited: true\n", "utf-8")
    assert main(["init", str(shop), "--out", str(out)]) == 0
    assert (out / "config.yaml").read_text("utf-8") == "edited: true\n"
    assert yaml.safe_load(words.read_text("utf-8"))["tables"]["stg_customers"] == "patron"
    assert "patrons" in (out / "questions" / "train.jsonl").read_text("utf-8")
    (out / "questions" / "train.jsonl").write_text("edited\n", "utf-8")
    capsys.readouterr()
    assert main(["init", str(shop), "--out", str(out)]) == 1
    assert "train.jsonl" in capsys.readouterr().err
    assert (out / "questions" / "train.jsonl").read_text("utf-8") == "edited\n"


def test_init_without_a_database_asks(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([str(shop), str(tmp_path / "asked")])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert main(["init"]) == 0
    assert (tmp_path / "asked" / "config.yaml").exists()


@pytest.mark.parametrize(("is_database_given", "option"), [(False, "init DATABASE"), (True, "--out FOLDER")])
def test_init_without_a_terminal_names_the_option(
    is_database_given: bool,
    option: str,
    shop: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{shop}\n" if is_database_given else ""))
    assert main(["init"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere.sqlite", "no such file"),
        ("postgresql://reader@127.0.0.1:1/shop", "127.0.0.1"),
        ("mysql://reader@127.0.0.1/shop", "unknown URL scheme 'mysql'"),
    ],
)
def test_a_wrong_database_is_refused_at_once(
    where: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", where, "--out", "made"]) == 1
    assert message in capsys.readouterr().err


def test_the_config_follows_the_machine() -> None:
    sizes = [size_for({"type": "cuda", "memory_bytes": gib * GIB}).example for gib in (4, 8, 16, 24, 80)]
    larger = [f"qwen2.5_coder_{name}" for name in ("0.5b_lora", "1.5b_qlora", "7b_qlora", "7b_qlora")]
    assert sizes == ["quickstart", *larger]
    cpu = size_for({"type": "cpu", "memory_bytes": 64 * GIB})
    assert cpu.example == "quickstart"
    coder = size_for({"type": "cpu", "memory_bytes": 64 * GIB}, has_coder=True)
    assert coder.example == "qwen2.5_coder_0.5b_cpu"
    assert [can_train_coder({"type": "cpu", "memory_bytes": gib * GIB}) for gib in (8, 16)] == [False, True]
    assert minutes_for(coder, 2) == 20
    assert minutes_for(cpu, 4) == pytest.approx(minutes_for(cpu, 2) / 2)
    assert minutes_for(size_for({"type": "cuda", "memory_bytes": 8 * GIB}), 2) is None


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("smolm2-135m", "there is smollm2-135m"),
        ("SmolLM2-135M-Instruct", "there is smollm2-135m"),
        ("./models/coder", "no such folder"),
        ("coder.gguf", "no such file"),
    ],
)
def test_init_refuses_a_model_that_does_not_exist_before_it_writes(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, hint: str
) -> None:
    out = tmp_path / "made"
    assert main(["init", str(shop), "--out", str(out), "--model", model]) == 1
    assert hint in capsys.readouterr().err and not out.exists()


@pytest.mark.thorough
def test_init_with_a_model_follows_the_config_of_an_instruct_model(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    Path("coder.gguf").touch()
    out = tmp_path / "made"
    assert main(["init", str(shop), "--out", str(out), "--model", "coder.gguf"]) == 0
    shown = capsys.readouterr().out
    commands = [line.split()[1] for line in shown.splitlines() if line.startswith("  text2sql-grpo ")]
    assert commands == ["doctor", "train", "ask"]
    config = load_config(out / "config.yaml")
    assert config.model.path == "coder.gguf"
    assert config.sft is not None and config.sft.max_steps == 16
    assert (config.grpo["max_steps"], config.evaluation.keep) == (8, "best")
    assert str(config.data.databases) == str(shop)


@pytest.mark.parametrize("verb", ["init", "data make --databases", "data words --databases"])
def test_a_place_that_cannot_be_written_is_one_line(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    out = taken / "words.yaml" if "words" in verb else taken
    assert main([*verb.split(), str(shop), "--out", str(out)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: cannot write to {out}: File exists ({taken})"


def test_a_timeout_is_no_failure_to_write(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="slow"), writing_to(tmp_path):
        raise TimeoutError("slow")
