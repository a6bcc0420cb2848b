from pathlib import Path

import pytest

from tests.scripted_policy import SHOP
from tests.tiny_model import write_tokenizer
from tests.tiny_run import QUESTIONS, write_config, write_questions
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.sampler import session_chat


def test_quarantine_is_left_out_of_every_set_and_large_golds_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "quarantine.jsonl").write_text('{"id": "count"}\n')
    questions = str(tmp_path / "questions.jsonl")
    options = [
        *("--data.quarantine", str(tmp_path / "quarantine.jsonl"), "--data.dev", questions),
        *("--evaluation.every", "5", "--environment.limits.max_rows", "2"),  # of three cities
    ]

    bench = Bench.open(load_config(config, options))

    taken = [example.id for example in bench.test["test_values"]]
    assert taken == ["look-Lisbon", "look-Porto", "cities"]
    assert [example.id for example in bench.dev] == taken
    assert [example.id for example in bench.load(Path(questions))] == taken
    assert caplog.text.count("left out 1 question in quarantine") == 3


def test_a_schema_is_cut_to_tokens_of_the_model(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    columns = ", ".join(f"column_{number} TEXT" for number in range(40))
    (tmp_path / "databases" / "shop.sql").write_text(
        f"{SHOP}CREATE TABLE wide ({columns});", encoding="utf-8"
    )
    bench = Bench.open(load_config(config, ["--environment.max_schema_tokens", "200"]))
    sessions = bench.environment.sessions
    by_characters = sessions.schema_text("shop")

    tokenizer = write_tokenizer(tmp_path / "tokenizer")  # a token for each byte
    chat = session_chat(tokenizer, None, sessions, template_options=None)

    counted = sessions.counted_by(chat.count_tokens)
    assert chat.count_tokens(counted.schema_text("shop")) <= 200 < chat.count_tokens(by_characters)
    assert sessions.schema_text("shop") == by_characters  # other models share them


def test_held_out_questions_that_are_training_questions_are_counted_by_file(tmp_path: Path) -> None:
    config, training = write_config(tmp_path), tmp_path / "questions.jsonl"
    (tmp_path / "shards").mkdir()
    for folder in (tmp_path, tmp_path / "shards"):
        write_questions(folder / "few.jsonl", [{**QUESTIONS[2], "id": "x", "question": "BRANCHES? "}])
    bench = Bench.open(
        load_config(config, ["--data.dev", f"{tmp_path}/few.jsonl", "--evaluation.every", "5"])
    )

    text = bench.shared(bench.load(training), training)

    assert f"4 of 4 of data.test.test_values ({training})" in text
    assert f"1 of 1 of data.dev ({tmp_path}/few.jsonl)" in text
    assert "1 of 4 of data.test" in bench.shared(bench.load(tmp_path / "few.jsonl"), "few.jsonl")
    assert bench.shared([], training) == bench.shared(bench.load(tmp_path / "shards"), "shards") == ""


def test_databases_of_the_training_file_are_held_out_for_the_schedule(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "databases" / "copy.sql").write_text((tmp_path / "databases" / "shop.sql").read_text())
    questions = [
        {**one, "database": name, "id": f"{name}-{one['id']}"}
        for one in QUESTIONS
        for name in ("shop", "copy")
    ]
    write_questions(tmp_path / "questions.jsonl", questions)
    chosen = ["--data.dev_databases", "[copy]", "--evaluation.every", "5"]

    bench = Bench.open(load_config(config, chosen))

    trained = bench.load(tmp_path / "questions.jsonl")
    assert {one.database for one in trained} == {"shop"} and len(trained) == len(QUESTIONS)
    assert {one.database for one in bench.dev} == {"copy"} and len(bench.dev) == len(QUESTIONS)

    broken = {**QUESTIONS[0], "id": "broken", "gold_sql": "SELECT absent FROM absent"}
    write_questions(tmp_path / "questions.jsonl", [*questions, broken])
    chosen += ["--data.test", "{}"]
    assert len(Bench.open(load_config(config, chosen)).dev) == len(QUESTIONS)  # golds on shop are not run
    with pytest.raises(DataError, match=r"no question of .* is on data.dev_databases \(other\)"):
        Bench.open(load_config(config, ["--data.dev_databases", "[other]", "--evaluation.every", "5"]))
