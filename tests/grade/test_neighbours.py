"""Test databases of a gold query, and counterexamples of an answer."""

import json
import multiprocessing
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.base_sample import BaseSample
from text2sql_grpo.grading.neighbours import Neighbours, code_alone
from text2sql_grpo.grading.refute import Refuter
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor

GOLD = "SELECT name FROM person WHERE age > 30"
IN_2015 = "SELECT code FROM person WHERE strftime('%Y', joined) = '2015'"


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory, executor: SQLExecutor) -> Neighbours:
    return Neighbours(executor, tmp_path_factory.mktemp("neighbours"))


@pytest.fixture(scope="module")
def grader(executor: SQLExecutor, neighbours: Neighbours) -> Grader:
    return Grader(executor, neighbours=neighbours)


# Each is right on the shop itself.
WRONG = [
    ("SELECT count(*) FROM person", "SELECT 14"),
    ("SELECT count(*) FROM person", "SELECT count(*) FROM friend"),
    ("SELECT count(*) FROM person", "SELECT 14 FROM person LIMIT 1"),
    ("SELECT name FROM city WHERE id = 2", "VALUES ('Oslo')"),
    ("SELECT name FROM person WHERE age > 100", "SELECT name FROM person WHERE 0"),
    ("SELECT name FROM person WHERE age > 100", "SELECT note FROM person WHERE age > 110"),
    ("SELECT name FROM person WHERE age > 30", "SELECT name FROM person WHERE age >= 33"),
    ("SELECT name FROM city WHERE country = 'Italy'", "SELECT name FROM city WHERE id IN (1, 3)"),
    ("SELECT name FROM city WHERE country = 'Italy'", "SELECT name FROM city WHERE country LIKE 'Ital%'"),
    ("SELECT DISTINCT country FROM city WHERE id < 3", "SELECT country FROM city WHERE id < 3"),
    ("SELECT max(age) FROM person", "SELECT age FROM person ORDER BY code DESC LIMIT 1"),
    ("SELECT name FROM person ORDER BY age DESC LIMIT 1", "SELECT name FROM person WHERE age > 52"),
    (
        "SELECT name FROM person ORDER BY age DESC LIMIT 1",
        "SELECT name FROM person WHERE age = (SELECT max(age) FROM person WHERE city = 2)",
    ),
    (
        "SELECT name FROM city WHERE id NOT IN (SELECT city FROM person)",
        "SELECT name FROM city WHERE name = 'Paris'",
    ),
    (
        "SELECT DISTINCT c.name FROM city AS c JOIN person AS p ON p.city = c.id",
        "SELECT DISTINCT name FROM city",
    ),
    ("SELECT kind FROM visit GROUP BY kind HAVING count(*) >= 15", "SELECT DISTINCT kind FROM visit"),
    ("SELECT name FROM adult WHERE age = 18", "SELECT name FROM person WHERE code = 'p01'"),
]


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_what_is_right_on_one_database_only_is_refused(
    shop: Path, executor: SQLExecutor, grader: Grader, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(shop, gold, wrong).strict
    verdict = grader.grade(shop, gold, wrong)
    assert (verdict.strict, verdict.reason) == (False, "neighbour")
    assert grader.grade(shop, gold, gold).strict


RIGHT = [
    (GOLD, "WITH old AS (SELECT * FROM person WHERE NOT age <= 30) SELECT name FROM old"),
    ("SELECT max(age) FROM person", "SELECT age FROM person ORDER BY age DESC LIMIT 1"),
    (
        "SELECT name FROM person WHERE code IN (SELECT a FROM friend)",
        "SELECT name FROM person WHERE EXISTS (SELECT 1 FROM friend WHERE a = code)",
    ),
    (
        "SELECT c.name, count(*) FROM person AS p JOIN city AS c ON p.city = c.id GROUP BY c.id",
        "SELECT c.name, count(p.code) FROM city c, person p WHERE c.id = p.city GROUP BY c.name",
    ),
    (  # not declared, but every visit has its person
        "SELECT v.n FROM visit AS v JOIN person AS p ON p.code = v.person WHERE v.paid > 10",
        "SELECT n FROM visit WHERE 10 < paid",
    ),
    ("SELECT avg(paid) / 3.0 FROM visit", "SELECT sum(paid) * (1.0 / 3) / count(*) FROM visit"),
    # Where no row matches, one is NULL and the other 0 or no row.
    (
        "SELECT max(age) FROM person WHERE rating > 1",
        "SELECT age FROM person WHERE rating > 1 ORDER BY age DESC LIMIT 1",
    ),
    ("SELECT count(*) FROM person WHERE age > 30", "SELECT sum(age > 30) FROM person"),
    (
        "SELECT code FROM person ORDER BY age DESC LIMIT 3",
        "/* oldest */ SELECT code FROM person ORDER BY age DESC LIMIT 3 -- three",
    ),
    # All rows of a tie that the LIMIT of the gold cuts through.
    (
        "SELECT name FROM person ORDER BY age DESC LIMIT 1",
        "SELECT name FROM person WHERE age = (SELECT max(age) FROM person)",
    ),
    (
        "SELECT name, code FROM person ORDER BY rating LIMIT 1",
        "SELECT code, name FROM (SELECT *, rank() OVER (ORDER BY rating) AS r FROM person) WHERE r = 1",
    ),
    (
        "SELECT name FROM person ORDER BY age DESC LIMIT 3",
        "SELECT name FROM person AS p WHERE (SELECT count(*) FROM person WHERE age > p.age) < 3 "
        "ORDER BY age DESC",
    ),
    (
        "SELECT country FROM city GROUP BY country ORDER BY count(*) DESC LIMIT 1",
        "WITH n AS (SELECT country, count(*) AS c FROM city GROUP BY country) "
        "SELECT country FROM n WHERE c = (SELECT max(c) FROM n)",
    ),
    ("SELECT count(*) FROM person", "SELECT count(rating) FROM person"),  # never NULL here
    ("SELECT name FROM person WHERE age > 120", "SELECT name FROM person WHERE 0"),  # a CHECK forbids it
    ("SELECT count(*) FROM adult", "SELECT count(*) FROM person WHERE age >= 18"),
    *(
        (IN_2015, f"SELECT code FROM person WHERE {condition}")
        for condition in (
            "joined LIKE '2015%'",
            "substr(joined, 1, 4) = '2015'",
            "CAST(strftime('%Y', joined) AS INTEGER) = 2015",
            "joined >= '2015-01-01' AND joined < '2016-01-01'",
        )
    ),
    (
        "SELECT name FROM person WHERE joined > date('2014-03-05', '+1 day')",
        "SELECT name FROM person WHERE julianday(joined) > julianday('2014-03-05') + 1",
    ),
]


@pytest.mark.parametrize(("gold", "right"), RIGHT)
def test_right_rewrites_are_accepted(shop: Path, grader: Grader, gold: str, right: str) -> None:
    assert grader.grade(shop, gold, right).reason == "equal"


def test_a_wrong_answer_makes_no_neighbours(shop: Path, executor: SQLExecutor, tmp_path: Path) -> None:
    grader = Grader(executor, neighbours=Neighbours(executor, tmp_path / "cache"))
    assert grader.grade(shop, GOLD, "SELECT 1").reason != "neighbour"
    assert not (tmp_path / "cache").exists()


def test_neighbours_keep_the_rules_and_are_small(shop: Path, neighbours: Neighbours) -> None:
    paths = neighbours.of(shop, GOLD)
    assert 2 <= len(paths) <= 4
    with closing(sqlite3.connect(shop)) as connection:
        schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
    for path in paths:
        assert path.stat().st_size < 50_000
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert (
                connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
                == schema
            )


def test_neighbours_are_kept_by_content(shop: Path, executor: SQLExecutor, tmp_path: Path) -> None:
    first = Neighbours(executor, tmp_path)
    paths = first.of(shop, GOLD)
    record = json.loads((paths[0].parent / "record.json").read_text())
    assert record["gold"] == GOLD and 0 < record["killed"] <= record["mutants"]
    again = Neighbours(executor, tmp_path)
    assert again.of(shop, GOLD) == paths and (first.made, again.made) == (1, 0)
    elsewhere = tmp_path / "elsewhere.sqlite"
    elsewhere.write_bytes(shop.read_bytes())
    assert again.of(elsewhere, GOLD) == paths
    with closing(sqlite3.connect(elsewhere)) as connection, connection:
        connection.execute("UPDATE person SET age = 31 WHERE code = 'p00'")
    assert not set(again.of(elsewhere, GOLD)) & set(paths)
    assert not set(again.of(shop, GOLD + " AND city = 1")) & set(paths)
    assert again.made == 2


def test_the_same_neighbours_are_made_everywhere(shop: Path, executor: SQLExecutor, tmp_path: Path) -> None:
    both = [Neighbours(executor, tmp_path / name).of(shop, GOLD) for name in "ab"]
    contents = [["\n".join(sqlite3.connect(path).iterdump()) for path in paths] for paths in both]
    assert contents[0] == contents[1]


def test_rewording_comments_and_docstrings_changes_no_neighbours() -> None:
    first = 'x = 1  # one\ndef f(a: int) -> int:\n    """Old."""\n    return a + 1\n'
    second = '"""New."""\nx = 1\n\ndef f(\n    a: int) -> int:\n    """Other."""  # why\n    return a + 1\n'
    assert code_alone(first) == code_alone(second) != code_alone(first.replace("+ 1", "+ 2"))


@pytest.mark.parametrize(
    "gold", ["SELECT 3", "SELECT name FROM city WHERE random() > 0", "SELECT rowid FROM friend2"]
)
def test_some_golds_have_no_neighbours(shop: Path, neighbours: Neighbours, gold: str) -> None:
    assert neighbours.of(shop, gold) == ()


@pytest.mark.parametrize(
    ("gold", "gap"),
    [
        ("SELECT 3", "reads no table"),
        ("SELECT name FROM city WHERE random() > 0", "random()"),
        ("SELECT name FROM city WHERE id IN (" + "1, " * 1_000 + "2)", "too long"),
        ("SELECT nothing FROM city", "failed"),
        ("SELECT body FROM letter WHERE letter MATCH 'hello'", "virtual table letter"),
        ("SELECT kind FROM visit GROUP BY kind HAVING count(*) > 5000", "finds nothing"),
        ("SELECT count(*) FROM person WHERE age > 120", "hard-coded"),  # a CHECK forbids it
        ("SELECT code FROM visit FULL JOIN person ON person = code WHERE n IS NULL", ""),
        ("SELECT name FROM person WHERE name LIKE '%\\_%' ESCAPE '\\'", ""),
        ("SELECT code FROM person ORDER BY code LIMIT 9223372036854775807", ""),
        ("SELECT kind FROM visit GROUP BY kind HAVING count(*) < 20000000", ""),
        (GOLD, ""),
        ("SELECT n FROM visit WHERE doubled > 100", ""),  # a generated column
        ("SELECT spent FROM stay WHERE spent > 30", ""),  # a view that names its columns
    ],
)
def test_a_gold_without_the_neighbours_asked_for_is_counted_with_its_reason(
    executor: SQLExecutor, shop: Path, tmp_path: Path, gold: str, gap: str
) -> None:
    letters = tmp_path / "shop.sqlite"
    letters.write_bytes(shop.read_bytes())
    with closing(sqlite3.connect(letters)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE letter USING fts5 (body)")
        connection.execute("INSERT INTO letter VALUES ('hello world')")
        connection.execute('CREATE VIEW stay ("as", spent) AS SELECT n, paid FROM visit WHERE paid > 10')
    for _ in range(2):  # made, and found in the folder
        neighbours = Neighbours(executor, tmp_path / "cache")
        found = neighbours.cover(letters, gold).gap
        assert gap in found and bool(gap) == bool(found)
        assert neighbours.gaps == ({(str(letters), gold): found} if gap else {})
        verdict = Grader(executor, neighbours=neighbours).grade(letters, gold, gold)
        assert (verdict.strict, verdict.uncovered) in ((True, found), (False, ""))


def test_an_error_while_making_neighbours_is_counted_and_ends_nothing(
    shop: Path, executor: SQLExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("text2sql_grpo.grading.neighbours.read_gold", fail)
    verdict = Grader(executor, neighbours=Neighbours(executor, tmp_path)).grade(shop, GOLD, GOLD)
    assert (verdict.strict, verdict.uncovered) == (True, "internal error: RecursionError: too deep")


def test_other_kinds_of_databases_have_no_neighbours_yet(neighbours: Neighbours) -> None:
    assert neighbours.of("duckdb:////nowhere/shop.duckdb", GOLD) == ()


def test_a_failing_gold_is_not_remembered_in_the_folder(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    assert Neighbours(executor, tmp_path).of(shop, "SELECT nothing FROM city") == ()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_our_error(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache folder"):
        Neighbours(executor, tmp_path / "file").of(shop, GOLD)


def test_several_processes_share_a_folder(shop: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_make, args=(shop, tmp_path, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert found[0] == found[1] and len(found[0]) >= 2
    assert not list(tmp_path.rglob(".partial-*"))


def _make(shop: Path, folder: Path, queue: "multiprocessing.Queue[list[str]]") -> None:
    with SQLExecutor() as executor:
        queue.put([str(path) for path in Neighbours(executor, folder).of(shop, GOLD)])


def with_all_that_tie(gold: str) -> str | None:
    """The gold `ORDER BY x LIMIT 1` as `x = (SELECT max(x) ..)`; None for a gold of another form."""
    tree = sqlglot.parse_one(gold, dialect="sqlite")
    order, limit = tree.args.get("order"), tree.args.get("limit")
    is_read = isinstance(tree, exp.Select) and order and limit and limit.expression.name == "1"
    if not is_read or len(order.expressions) > 1 or tree.args.get("distinct") or tree.args.get("having"):
        return None
    key, is_grouped = order.expressions[0].this, tree.args.get("group") is not None
    if not isinstance(key, exp.Count if is_grouped else exp.Column):
        return None
    best = "MAX" if order.expressions[0].args.get("desc") else "MIN"
    for part in ("order", "limit"):
        tree.set(part, None)
    if is_grouped:
        inner = tree.copy().select(exp.alias_(key.copy(), "c"), append=False).sql("sqlite")
        condition = f"{key.sql('sqlite')} = (SELECT {best}(c) FROM ({inner}))"
        return tree.having(condition, dialect="sqlite").sql("sqlite")
    inner = tree.copy().select(exp.func(best, key.copy()), append=False).sql("sqlite")
    return tree.where(f"{key.sql('sqlite')} = ({inner})", dialect="sqlite").sql("sqlite")


@pytest.mark.slow
def test_no_neighbour_refuses_all_rows_of_a_tie(
    shared_data: Path, executor: SQLExecutor, grader: Grader
) -> None:
    spider = shared_data / "spider"
    golds = {
        (row["db_id"], row["query"]): with_all_that_tie(row["query"])
        for row in json.loads((spider / "dev.json").read_text("utf-8"))
    }
    judged = {
        gold: grader.grade(spider / "database" / database / f"{database}.sqlite", gold, rewritten).reason
        for (database, gold), rewritten in golds.items()
        if rewritten is not None
    }
    assert len(judged) > 80
    assert sum(reason == "equal" for reason in judged.values()) > 60  # some tie on their database
    refused = [gold for gold, reason in judged.items() if reason == "neighbour"]
    assert [gold for gold in refused if "LifeExpectancy" not in gold] == []  # a NULL comes before the minimum


ITALY = "SELECT name FROM city WHERE country = 'Italy'"
OLD = "SELECT name FROM person WHERE age > 30"


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
