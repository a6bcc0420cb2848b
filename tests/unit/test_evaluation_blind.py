from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from text2sql_grpo.evaluation.blind import BlindCap, blind_cap

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader
from text2sql_grpo.sql import SQLExecutor

# Stored forms: a code, "LAST, F.", and one that is stored as it is said but for its case.
SCRIPT = """
CREATE TABLE person (name TEXT, city TEXT, pay INTEGER);
INSERT INTO person VALUES
    ('SMITH, J.', 'LIS-02', 1), ('SMYTHE, A.', 'OPO-01', 2), ('JONES, M.', 'lisburn', 3), ('Zoe', 'XX-9', 4);
"""


def lookup(said: str, stored: str, column: str) -> Example:
    gold = f"SELECT pay FROM person WHERE {column} = '{stored}'"
    guess = f"SELECT pay FROM person WHERE {column} = '{said}'"
    return Example(id=said, database="staff", question=f"{said}?", gold_sql=gold, guess_sql=guess)


SMITH = lookup("Jon Smith", "SMITH, J.", "name")
LISBON = lookup("Lisbon", "LIS-02", "city")
ZOE = lookup("zoe", "Zoe", "name")
PORTO = lookup("Porto", "OPO-01", "city")


def cap(folder: Path, *examples: Example) -> BlindCap:
    (folder / "staff.sql").write_text(SCRIPT, "utf-8")
    with SQLExecutor() as executor:
        return blind_cap(examples, Databases(folder), Grader(executor))


def rights(result: BlindCap) -> dict[str, int]:
    return {name: accuracy.correct for name, accuracy in result.by_strategy.items() if accuracy.correct}


def test_cap_computed_by_hand(tmp_path: Path) -> None:
    result = cap(tmp_path, SMITH, LISBON, ZOE, PORTO)

    assert rights(result) == {
        "as said": 1,  # zoe
        "begins as said": 1,
        "contains what is said": 1,
        "contains the last word": 2,  # zoe; %Smith% finds SMITH, J.
        "begins with 3 letters": 1,  # zoe; Lis% also finds lisburn, Jon% finds JONES
        "contains 3 letters": 1,
        "begins with 1 letter": 1,  # zoe; L% also finds lisburn
        "contains 1 letter": 2,  # zoe; %P% finds OPO-01 alone, %J% also JONES
        "begins with the initials": 1,  # z%
    }
    assert (result.best.correct, result.best.total) == (2, 4)
    assert (result.any.correct, result.any.total) == (3, 4)  # all but Lisbon


def test_value_that_stands_in_two_places(tmp_path: Path) -> None:
    gold = "SELECT (SELECT count(*) FROM person WHERE city = '{0}') + pay FROM person WHERE city = '{0}'"
    twice = replace(LISBON, gold_sql=gold.format("OPO-01"), guess_sql=gold.format("Porto"))

    assert rights(cap(tmp_path, twice)) == {"contains 1 letter": 1}


def test_number_in_the_gold_stays(tmp_path: Path) -> None:
    gold = "SELECT count(*) FROM person WHERE pay > 3 AND name = '{}'"
    example = replace(ZOE, gold_sql=gold.format("Zoe"), guess_sql=gold.format("zoe"))

    assert cap(tmp_path, example).any.correct == 1


def test_questions_without_a_guess_are_left_out(tmp_path: Path) -> None:
    plain = replace(ZOE, guess_sql=None)

    assert cap(tmp_path, plain, ZOE).any.total == 1
    assert cap(tmp_path, plain).any.total == cap(tmp_path).best.total == 0


@pytest.mark.parametrize(
    "guess",
    [
        ZOE.gold_sql,  # nothing changed
        "SELECT pay FROM person WHERE name = 'zoe' AND city = 'x'",  # more values than the gold
        "SELECT pay FROM person",
        "SELECT (",
    ],
)
def test_guess_that_is_not_the_gold_with_other_values(tmp_path: Path, guess: str) -> None:
    with pytest.raises(DataError, match=r"a guess_sql must be the gold .*\(question zoe\)"):
        cap(tmp_path, replace(ZOE, guess_sql=guess))


def test_guess_that_changes_two_values(tmp_path: Path) -> None:
    gold = "SELECT pay FROM person WHERE name = '{}' AND city = '{}'"
    example = replace(ZOE, gold_sql=gold.format("Zoe", "XX-9"), guess_sql=gold.format("zoe", "xx"))

    found = rights(cap(tmp_path, example))

    assert "as said" not in found  # 'xx' is not the whole city
    assert found["begins as said"] == found["contains what is said"] == 1


def test_cap_in_the_dialect_of_another_engine(tmp_path: Path) -> None:
    with duckdb.connect(str(tmp_path / "staff.duckdb")) as connection:
        connection.execute(SCRIPT)
    gold = "SELECT pay FROM person WHERE name = '{}' AND pay // 2 = 2"
    top = replace(ZOE, gold_sql=gold.format("Zoe"), guess_sql=gold.format("zoe"))
    with SQLExecutor() as executor:
        found = rights(blind_cap([top], Databases(tmp_path), Grader(executor)))
    assert found["as said"] == 1  # whatever the case, as in SQLite
