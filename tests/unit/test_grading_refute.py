from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shop_database import make_shop
from text2sql_grpo.grading.base_sample import BaseSample, read_sample
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.grading.refute import Refuter
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor

ITALY = "SELECT name FROM city WHERE country = 'Italy'"
OLD = "SELECT name FROM person WHERE age > 30"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="module")
def base(shop: Path) -> BaseSample:
    return read_sample(shop)


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as opened:
        yield opened


@pytest.fixture(scope="module")
def refuter(executor: SQLExecutor) -> Refuter:
    return Refuter(executor)


# Each is right on the shop itself, by a value, a column or a size that the gold does not have.
WRONG = [
    (ITALY, f"{ITALY} OR country = 'zz'"),
    (ITALY, f"{ITALY} OR name = 'zz'"),
    (ITALY, "SELECT name FROM city WHERE country BETWEEN 'Italy' AND 'Italyz'"),
    (ITALY, "SELECT name FROM city WHERE country IN ('Italy', 'Ital', 'It')"),
    (ITALY, "SELECT name FROM city WHERE country NOT IN ('Norway', 'Peru')"),
    (OLD, f"{OLD} AND rating < 77.5"),
    (OLD, f"{OLD} LIMIT 25"),
    ("SELECT count(*) FROM visit", "SELECT count(*) FROM visit WHERE paid < 800"),
    ("SELECT count(*) FROM person", "SELECT count(DISTINCT joined) FROM person"),
    (
        "SELECT code FROM person WHERE strftime('%Y', joined) = '2015'",
        "SELECT code FROM person WHERE joined BETWEEN '2015-01-01' AND '2015-12-28'",
    ),
    ("SELECT kind FROM visit GROUP BY kind", "SELECT kind FROM visit GROUP BY kind HAVING count(*) < 40"),
    (
        "SELECT code FROM person WHERE name LIKE '%ame%'",
        "SELECT code FROM person WHERE name LIKE '%ame%' AND name NOT LIKE 'zz%'",
    ),
    # Wrong only where all rows of a group share a value.
    (
        "SELECT city FROM person GROUP BY city HAVING count(*) > 1",
        "SELECT city FROM person GROUP BY city HAVING count(DISTINCT age) > 1",
    ),
    (
        "SELECT city FROM person GROUP BY city HAVING count(*) > 2",
        "SELECT city FROM person GROUP BY city HAVING max(joined) > min(joined) AND count(*) > 2",
    ),
    # Texts that must not keep the variants from being made.
    (ITALY, f"{ITALY} OR country = 'zz' OR id > 1e300 OR id > {10**30} OR id = {2**62}"),
    (ITALY, f"{ITALY} OR country = 'zz' LIMIT {2**63 - 1}"),
    (ITALY, f"{ITALY} OR country = 'zz' OR country = hex(zeroblob(1000))"),
    (ITALY, f"{ITALY} OR country = 'zz' OR country = date('9999-12-31') OR country < '1000-01-01'"),
]


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_an_answer_is_refuted_by_its_own_literals_columns_and_sizes(
    shop: Path, base: BaseSample, executor: SQLExecutor, refuter: Refuter, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(shop, gold, wrong).strict
    assert refuter.refutes(base, shop, gold, wrong)


@pytest.mark.parametrize(
    ("gold", "right"),
    [
        (ITALY, "SELECT name FROM city WHERE country IN ('Italy')"),
        (ITALY, "WITH c AS (SELECT * FROM city) SELECT name FROM c WHERE NOT country <> 'Italy'"),
        (OLD, "SELECT name FROM person WHERE 30 < age LIMIT -1"),
        ("SELECT count(*) FROM person", "SELECT sum(CASE WHEN age > 60 THEN 1 ELSE 1 END) FROM person"),
        (ITALY, ITALY.lower().replace("italy", "Italy")),
        (OLD, f"{OLD} OR {'(' * 60}age > 31{')' * 60}"),
        (OLD, f"{OLD} AND age NOT IN ({', '.join(map(str, range(-1_000, 0)))})"),  # too long to read
    ],
)
def test_right_answers_are_not_refuted(
    shop: Path, base: BaseSample, refuter: Refuter, gold: str, right: str
) -> None:
    assert not refuter.refutes(base, shop, gold, right)


def test_a_refuted_answer_is_wrong_and_each_pair_is_tried_once(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    grader = Grader(executor, neighbours=Neighbours(executor, tmp_path))
    assert grader.refuter is not None
    for _ in range(2):
        verdict = grader.grade(shop, ITALY, f"{ITALY} OR country = 'zz'")
        assert (verdict.strict, verdict.reason) == (False, "neighbour")
        assert grader.grade(shop, ITALY, "SELECT name FROM city WHERE country IN ('Italy')").strict
        assert not grader.grade(shop, ITALY, "SELECT 1").strict
    assert grader.refuter.tried == 2


def test_an_internal_error_refutes_nothing(
    shop: Path, base: BaseSample, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("text2sql_grpo.grading.refute.perturbed", fail)
    assert not Refuter(executor).refutes(base, shop, ITALY, f"{ITALY} OR country = 'zz'")
