"""Test databases of a gold query, and counterexamples of an answer."""

import json
import multiprocessing
import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from tests.databases import sqlite_file
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import prune
from text2sql_grpo.grading.suite import MAX_SUITES, TestSuite
from text2sql_grpo.grading.verdict import CHANGING, Grader, Submission
from text2sql_grpo.sql.executor import SQLExecutor

GOLD = "SELECT name FROM person WHERE age > 30"
IN_2015 = "SELECT code FROM person WHERE strftime('%Y', joined) = '2015'"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, executor: SQLExecutor) -> TestSuite:
    return TestSuite(executor, tmp_path_factory.mktemp("suites"))


@pytest.fixture(scope="module")
def grader(executor: SQLExecutor, suite: TestSuite) -> Grader:
    return Grader(executor, suite=suite)


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
    # By the order of the scan.
    ("SELECT kind FROM visit ORDER BY n", "SELECT kind FROM visit"),
    (
        "SELECT n, paid FROM visit ORDER BY paid DESC, n LIMIT 5",
        "SELECT n, paid FROM visit ORDER BY paid DESC LIMIT 5",
    ),
    ("SELECT kind, min(n) FROM visit GROUP BY kind", "SELECT kind, n FROM visit GROUP BY kind"),
    ("SELECT country FROM city ORDER BY id", "SELECT country FROM city WHERE 'oid' <> '' -- rowid"),
    ("SELECT country FROM city ORDER BY id", "SELECT country FROM city WHERE rowid > 0 OR oid = 3"),
    ("SELECT country FROM city ORDER BY id", "SELECT country AS oid FROM city AS rowid"),
]


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_what_is_right_on_one_database_only_is_refused(
    shop: Path, executor: SQLExecutor, grader: Grader, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(shop, gold, wrong).strict
    verdict = grader.grade(shop, gold, wrong)
    assert (verdict.strict, verdict.reason) == (False, "test_database")
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
    ("SELECT kind FROM visit ORDER BY n", "SELECT kind FROM visit ORDER BY rowid"),
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


ENDS = """
CREATE TABLE policy (id INTEGER PRIMARY KEY, filed TEXT, closed TEXT, ends TEXT);
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)
INSERT INTO policy SELECT i, datetime('2020-03-01', (i * 11) || ' days'),
    iif(i % 5, datetime('2020-03-01', (i * 11 + i % 40) || ' days', i || ' hours'), ''),
    iif(i % 3, datetime('2020-11-01', (i * 13) || ' days'), '9999-12-31 00:00:00') FROM n;
"""


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        ("strftime('%Y', ends) = '2021'", "ends LIKE '2021%'", True),
        ("strftime('%Y', ends) = '2021'", "ends >= '2021-01-01' AND ends < '2022-01-01'", True),
        ("strftime('%Y', ends) = '2021'", "ends BETWEEN '2021-01-01' AND '2021-12-31'", False),
        ("strftime('%Y-%m', closed) = '2021-03'", "substr(closed, 1, 7) = '2021-03'", True),
        ("strftime('%Y-%m', closed) = '2021-03'", "closed BETWEEN '2021-03-01' AND '2021-03-31'", False),
        ("closed <> '' AND closed < '2021-01-01'", "closed < '2021' AND closed > '1'", True),
        ("closed <> '' AND closed < '2021-01-01'", "closed < '2021'", False),
        ("ends < '9999'", "ends < '9000-01-01'", True),
        ("ends < '9999'", "ends <= '2022-12-20'", False),
    ],
)
def test_dates_may_have_placeholders_among_them(
    gold: str, answer: str, is_right: bool, grader: Grader, tmp_path: Path
) -> None:
    path = sqlite_file(tmp_path / "policies.sqlite", ENDS)
    verdict = grader.grade(path, *(f"SELECT id FROM policy WHERE {one}" for one in (gold, answer)))
    assert (verdict.strict, verdict.gap) == (is_right, "")


@pytest.mark.parametrize(("gold", "right"), RIGHT)
def test_right_rewrites_are_accepted(shop: Path, grader: Grader, gold: str, right: str) -> None:
    assert grader.grade(shop, gold, right).reason == "equal"


@pytest.mark.parametrize(
    ("clock", "gap"),
    [("date('now')", None), ('date("now")', None), ("date(trim(' now '))", CHANGING), ("'{}'", "")],
)
def test_what_is_right_today_only_is_refused_or_a_gap(
    shop: Path, grader: Grader, clock: str, gap: str | None
) -> None:
    today = str(datetime.now(UTC).date())
    query = "SELECT code FROM person WHERE joined < {}"
    verdict = grader.grade(shop, query.format(f"'{today}'"), query.format(clock.format(today)))
    assert (verdict.strict, verdict.gap) == (gap is not None, gap or "")


def test_a_wrong_answer_starts_no_search(shop: Path, executor: SQLExecutor, tmp_path: Path) -> None:
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    assert grader.grade(shop, GOLD, "SELECT 1").reason != "test_database"
    assert not (tmp_path / "cache").exists()


def of(suite: TestSuite, database: Path, gold: str) -> list[Path]:
    return [Path(found) for found in suite.databases(database, gold).databases]


def test_test_databases_keep_the_rules_and_are_small(shop: Path, suite: TestSuite) -> None:
    paths = of(suite, shop, GOLD)
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


def test_suites_are_kept_by_content(shop: Path, executor: SQLExecutor, tmp_path: Path) -> None:
    first = TestSuite(executor, tmp_path)
    paths = of(first, shop, GOLD)
    record = json.loads((paths[0].parent / "record.json").read_text())
    assert record["gold"] == GOLD and 0 < record["killed"] <= record["mutants"]
    again = TestSuite(executor, tmp_path)
    assert of(again, shop, GOLD) == paths and (first.n_searched, again.n_searched) == (1, 0)
    elsewhere = tmp_path / "elsewhere.sqlite"
    elsewhere.write_bytes(shop.read_bytes())
    assert of(again, elsewhere, GOLD) == paths
    with closing(sqlite3.connect(elsewhere)) as connection, connection:
        connection.execute("UPDATE person SET age = 31 WHERE code = 'p00'")
    assert not set(of(again, elsewhere, GOLD)) & set(paths)
    assert not set(of(again, shop, GOLD + " AND city = 1")) & set(paths)
    assert again.n_searched == 2


def test_suites_that_no_longer_fit_in_memory_stay_in_the_folder(
    shop: Path, executor: SQLExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_SUITES, "sqlite", 1)
    suite = TestSuite(executor, tmp_path)
    paths = of(suite, shop, GOLD)
    assert of(suite, shop, GOLD + " AND city = 1") and of(suite, shop, GOLD) == paths
    assert all(path.exists() for path in paths) and suite.n_searched == 2


def test_entries_that_no_run_used_for_long_are_deleted(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    paths = of(TestSuite(executor, tmp_path / "a"), shop, GOLD)
    old = paths[0].parents[1] / "0123"
    old.mkdir()
    os.utime(old, (0, 0))
    prune(paths[0].parents[1])
    assert not old.exists() and paths[0].exists()


def test_the_same_test_databases_are_made_everywhere(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    both = [of(TestSuite(executor, tmp_path / name), shop, GOLD) for name in "ab"]
    contents = [["\n".join(sqlite3.connect(path).iterdump()) for path in paths] for paths in both]
    assert contents[0] == contents[1]


def test_tables_that_no_query_reads_are_filled_at_the_end_alone(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    """A search on a wide schema makes the tables that are read; the files hold all tables."""
    path = tmp_path / "wide.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE a (id INTEGER PRIMARY KEY, x INTEGER)")
        connection.execute("CREATE TABLE b (id INTEGER PRIMARY KEY, a INTEGER REFERENCES a, y TEXT)")
        connection.execute("CREATE VIEW v AS SELECT y FROM b WHERE a IN a2")
        connection.execute("CREATE TABLE a2 (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO a VALUES (?, ?)", [(n, n % 5) for n in range(30)])
        connection.executemany("INSERT INTO b VALUES (?, ?, ?)", [(n, n % 9, f"y{n}") for n in range(30)])
        connection.executemany("INSERT INTO a2 VALUES (?)", [(n,) for n in range(30)])
    suite = TestSuite(executor, tmp_path / "cache")
    for found in of(suite, path, "SELECT count(*) FROM a WHERE x > 2"):
        with closing(sqlite3.connect(found)) as connection:
            assert connection.execute("SELECT count(*) FROM b JOIN a ON b.a = a.id").fetchone()[0] > 0
    grader = Grader(executor, suite=suite)
    for right in ("SELECT count(y) FROM v", "SELECT count(*) FROM b WHERE a IN a2"):  # `IN table` names none
        assert grader.grade(path, "SELECT count(*) FROM b WHERE a IN (SELECT id FROM a2)", right).strict


@pytest.mark.parametrize(
    "gold", ["SELECT 3", "SELECT name FROM city WHERE random() > 0", "SELECT rowid FROM friend2"]
)
def test_some_golds_have_no_test_databases(shop: Path, suite: TestSuite, gold: str) -> None:
    assert of(suite, shop, gold) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gold", "gap"),
    [
        ("SELECT 3", "reads no table"),
        ("SELECT name FROM city WHERE random() > 0", "runs again"),
        ("SELECT name FROM city WHERE id IN (" + "1, " * 1_000 + "2)", "too long"),
        ("SELECT nothing FROM city", "failed"),
        ("SELECT body FROM letter WHERE letter MATCH 'hello'", "virtual table letter"),
        ("SELECT kind FROM visit GROUP BY kind HAVING count(*) > 5000", "returns no rows"),
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
def test_an_answer_that_was_checked_less_than_asked_for_is_counted_with_its_reason(
    executor: SQLExecutor, shop: Path, tmp_path: Path, gold: str, gap: str
) -> None:
    letters = tmp_path / "shop.sqlite"
    letters.write_bytes(shop.read_bytes())
    with closing(sqlite3.connect(letters)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE letter USING fts5 (body)")
        connection.execute("INSERT INTO letter VALUES ('hello world')")
        connection.execute('CREATE VIEW stay ("as", spent) AS SELECT n, paid FROM visit WHERE paid > 10')
    for _ in range(2):  # made, and found in the folder
        suite = TestSuite(executor, tmp_path / "cache")
        found = suite.databases(letters, gold).gap
        assert gap in found and bool(gap) == bool(found)
        grader = Grader(executor, suite=suite)
        verdict = grader.grade(letters, gold, gold)
        assert (verdict.strict, verdict.gap) in ((True, found), (False, ""))
        assert grader.accepted == ({verdict.gap: 1} if verdict.strict else {})


@pytest.mark.thorough
def test_a_table_without_rows_ends_no_search(suite: TestSuite, tmp_path: Path) -> None:
    path = tmp_path / "linked.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE a (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE b (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE c (b REFERENCES b, a REFERENCES a, size INTEGER)")
        connection.executemany("INSERT INTO b VALUES (?, ?)", [(i, f"b{i}") for i in range(20)])
    for number in range(20):
        found = suite.databases(path, f"SELECT count(*) FROM b WHERE name <> 'b{number}'")
        assert found.databases and not found.gap


@pytest.mark.parametrize("other", ["104", b"x", float("inf")])
def test_numbers_as_texts_may_stand_among_other_values(
    suite: TestSuite, tmp_path: Path, other: object
) -> None:
    path = tmp_path / "readings.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE reading (value)")
        connection.executemany("INSERT INTO reading VALUES (?)", [("62",), ("88",), ("7",), (other,)])
    found = suite.databases(path, "SELECT count(*) FROM reading WHERE value <> 'n/a' AND value * 2 > 140")
    assert len(found.databases) == 4 and not found.gap


def test_an_error_of_the_search_is_counted_and_ends_nothing(
    shop: Path, executor: SQLExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("text2sql_grpo.grading.search.read_gold", fail)
    verdict = Grader(executor, suite=TestSuite(executor, tmp_path)).grade(shop, GOLD, GOLD)
    assert (verdict.strict, verdict.gap) == (True, "internal error: RecursionError: too deep")


@pytest.mark.parametrize("gold", ["SELECT nothing FROM city", "SELECT 3", "SELECT min(random()) FROM city"])
def test_a_gold_without_test_databases_is_not_kept_in_the_folder(
    shop: Path, executor: SQLExecutor, tmp_path: Path, gold: str
) -> None:
    assert of(TestSuite(executor, tmp_path), shop, gold) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_our_error(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache folder"):
        TestSuite(executor, tmp_path / "file").databases(shop, GOLD)


@pytest.mark.thorough
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
        queue.put([str(path) for path in of(TestSuite(executor, folder), shop, GOLD)])


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
def test_no_test_database_refuses_all_rows_of_a_tie(
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
    refused = [gold for gold, reason in judged.items() if reason == "test_database"]
    assert [gold for gold in refused if "LifeExpectancy" not in gold] == []  # a NULL comes before the minimum


ITALY = "SELECT name FROM city WHERE country = 'Italy'"
OLD = "SELECT name FROM person WHERE age > 30"


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
    # Texts that must not keep the databases from being made.
    (ITALY, f"{ITALY} OR country = 'zz' AND id NOT IN ({', '.join(map(str, range(-1_000, 0)))})"),
    (ITALY, f"{ITALY}\nOR country = 'zz' /* from"),
    (ITALY, f"WITH w AS (SELECT {' AND '.join(['1=1'] * 340)}) {ITALY} OR country = 'zz'"),
    (ITALY, f"{ITALY} OR country = CAST('zz' AS long odd text(1, 2))"),
    (ITALY, f"{ITALY} OR country = 'zz' OR id > 1e300 OR id > {10**30} OR id = {2**62}"),
    (ITALY, f"{ITALY} OR country = 'zz' LIMIT {2**63 - 1}"),
    (ITALY, f"{ITALY} OR country = 'zz' OR country = hex(zeroblob(1000))"),
    (ITALY, f"{ITALY} OR country = 'zz' OR country = date('9999-12-31') OR country < '1000-01-01'"),
]


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_an_answer_is_refuted_by_its_own_literals_columns_and_sizes(
    shop: Path, executor: SQLExecutor, suite: TestSuite, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(shop, gold, wrong).strict
    assert suite.counterexample(shop, gold, wrong).is_refuted


@pytest.mark.parametrize(
    ("gold", "right", "gap"),
    [
        (ITALY, "SELECT name FROM city WHERE country IN ('Italy')", ""),
        (ITALY, "WITH c AS (SELECT * FROM city) SELECT name FROM c WHERE NOT country <> 'Italy'", ""),
        (OLD, "SELECT name FROM person WHERE 30 < age LIMIT -1", ""),
        ("SELECT count(*) FROM person", "SELECT sum(CASE WHEN age > 60 THEN 1 ELSE 1 END) FROM person", ""),
        (ITALY, ITALY.lower().replace("italy", "Italy"), ""),
        (OLD, f"{OLD} OR {'(' * 20}age > 31{')' * 20}", ""),
        (OLD, f"{OLD} AND age NOT IN ({', '.join(map(str, range(-1_000, 0)))})", "2500 steps"),
    ],
)
def test_right_answers_are_not_refuted(shop: Path, suite: TestSuite, gold: str, right: str, gap: str) -> None:
    trial = suite.counterexample(shop, gold, right)
    assert not trial.is_refuted and gap in trial.gap and bool(gap) == bool(trial.gap)


def test_a_refuted_answer_is_wrong_and_each_pair_is_tried_once(
    shop: Path, executor: SQLExecutor, tmp_path: Path
) -> None:
    suite = TestSuite(executor, tmp_path)
    grader = Grader(executor, suite=suite)
    for _ in range(2):
        verdict = grader.grade(shop, ITALY, f"{ITALY} OR country = 'zz'")
        assert (verdict.strict, verdict.reason) == (False, "test_database")
        assert grader.grade(shop, ITALY, "SELECT name FROM city WHERE country IN ('Italy')").strict
        assert not grader.grade(shop, ITALY, "SELECT 1").strict
    assert suite.n_tried == 2


def test_a_search_that_fails_is_a_gap_and_tried_again(
    shop: Path, executor: SQLExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, wrong = TestSuite(executor, tmp_path), f"{ITALY} OR country = 'zz'"
    grader = Grader(executor, suite=suite)
    assert grader.grade(shop, ITALY, ITALY).gap == ""

    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    with monkeypatch.context() as patched:
        patched.setattr("text2sql_grpo.grading.search.draw_rows", fail)
        verdict = grader.grade(shop, ITALY, wrong)
        assert (verdict.strict, verdict.gap) == (True, "internal error: RecursionError: too deep")
        patched.setattr("text2sql_grpo.grading.search.draw_rows", unread)
        with pytest.raises(DataError):
            grader.grade(shop, ITALY, wrong)
    assert grader.grade(shop, ITALY, wrong).reason == "test_database"


def test_the_search_for_a_slow_answer_ends_and_is_a_gap(
    shop: Path, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grader.grade(shop, ITALY, f"{ITALY} AND 1 > 0").gap == ""
    monkeypatch.setattr("text2sql_grpo.grading.search.MAX_SEARCH_S", 0.0)
    verdict = grader.grade(shop, ITALY, f"{ITALY} AND 2 > 0")
    assert verdict.strict and "took over 0 s" in verdict.gap


def unread(*_: object, **__: object) -> None:
    raise DataError("disk error")


def test_a_batch_is_graded_as_its_answers_one_by_one(shop: Path, grader: Grader) -> None:
    answers = [sql for gold, sql in (*WRONG, *RIGHT) if gold == ITALY]
    answers += [ITALY.lower().replace("italy", "Italy"), None, "SELECT", "SELECT 1"]
    asked = [
        Submission(shop, ITALY, sql, other_golds=("SELECT nothing",)[:n]) for sql in answers for n in (0, 1)
    ]
    one_by_one = [
        grader.grade(one.database, one.gold_sql, one.sql, other_golds=one.other_golds) for one in asked
    ]
    assert grader.grade_many(asked) == one_by_one
    assert {verdict.reason for verdict in one_by_one} >= {"equal", "test_database", "query_failed"}


# On a shop without an open order, with whole amounts, and with codes in capitals alone.
UNSEEN_VALUES = [
    ("SELECT count(*) FROM bill WHERE paid IS NULL", "SELECT 0"),
    ("SELECT id FROM bill WHERE paid IS NULL AND amount > 20", "SELECT id FROM bill WHERE paid = ''"),
    ("SELECT count(*) FROM bill WHERE amount > 500", "SELECT count(*) FROM bill WHERE round(amount) > 500"),
    ("SELECT count(*) FROM bill WHERE amount > 500", "SELECT count(*) FROM bill WHERE amount >= 501"),
    ("SELECT id FROM bill WHERE code LIKE 'Z%'", "SELECT id FROM bill WHERE code GLOB 'Z*'"),
    *(
        ("SELECT count(*) FROM bill", f"SELECT count({counted}) FROM bill WHERE {condition}")
        for counted, condition in [
            ("*", "code IS NOT 'B77'"),
            ("*", "code IS DISTINCT FROM 'B77'"),
            ("nullif(code, 'B77')", "true"),
            ("CASE code WHEN 'B77' THEN NULL ELSE 1 END", "true"),
        ]
    ),
]


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bills") / "bills.sqlite"
    rows = [(n, f"{'ZAK'[n % 3]}{n:02}", 90 * n, f"2024-05-{n + 1:02}") for n in range(20)]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE bill (id INTEGER PRIMARY KEY, code TEXT, amount DECIMAL(10, 2), paid DATE)"
        )
        connection.executemany("INSERT INTO bill VALUES (?, ?, ?, ?)", rows)
    return path


@pytest.mark.parametrize(("gold", "wrong"), UNSEEN_VALUES)
def test_values_that_the_schema_allows_and_no_row_holds_are_tried(
    bills: Path, executor: SQLExecutor, grader: Grader, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(bills, gold, wrong).strict
    assert grader.grade(bills, gold, wrong).reason == "test_database"


def test_padded_codes_compare_as_their_numbers(bills: Path, grader: Grader) -> None:
    number = "CAST(substr(code, 2) AS INTEGER)"
    for gold, right, wrong in [
        ("substr(code, 2) <= '09'", f"{number} <= 9", f"{number} < 9"),
        ("code <= 'A05'", f"code GLOB 'A*' AND {number} <= 5", f"{number} <= 5"),
        ("code = 'A04'", f"code GLOB 'A*' AND {number} = 4", "code LIKE 'A_4'"),
    ]:
        answers = (f"SELECT id FROM bill WHERE {condition}" for condition in (right, wrong))
        reasons = [grader.grade(bills, f"SELECT id FROM bill WHERE {gold}", sql).reason for sql in answers]
        assert reasons[0] == "equal" != reasons[1]


@pytest.mark.parametrize(
    ("gold", "right"),
    [
        ("SELECT id FROM bill WHERE paid IS NULL", "SELECT id FROM bill WHERE coalesce(paid, '') = ''"),
        # NULLs in a column that no query asks for stay away: none is observed
        ("SELECT count(*) FROM bill WHERE amount > 500", "SELECT count(code) FROM bill WHERE amount > 500"),
        ("SELECT id FROM bill WHERE paid IS NOT NULL", "SELECT id FROM bill"),
    ],
)
def test_nulls_are_drawn_where_the_gold_asks_for_them(
    bills: Path, grader: Grader, gold: str, right: str
) -> None:
    assert grader.grade(bills, gold, right).strict


def test_the_missing_side_of_an_outer_join_needs_no_nulls_of_its_own(shop: Path, grader: Grader) -> None:
    gold = "SELECT c.name FROM city AS c LEFT JOIN person AS p ON p.city = c.id WHERE p.code IS NULL"
    right = "SELECT name FROM city WHERE NOT EXISTS (SELECT 1 FROM person WHERE person.city = city.id)"
    assert grader.grade(shop, gold, right).strict


@pytest.mark.parametrize("join", ["JOIN kind USING (kind_id)", "NATURAL JOIN kind"])
def test_golds_join_by_names_on_tables_with_generated_columns(
    join: str, grader: Grader, tmp_path: Path
) -> None:
    path = sqlite_file(
        tmp_path / "pets.sqlite",
        "CREATE TABLE kind (kind_id INTEGER PRIMARY KEY, label TEXT);"
        "CREATE TABLE pet (id INTEGER PRIMARY KEY, kind_id INTEGER REFERENCES kind, kg INT, g AS (kg * 9));"
        "INSERT INTO kind VALUES (1, 'dog'), (2, 'cat'), (3, 'owl');"
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40) "
        "INSERT INTO pet (id, kind_id, kg) SELECT i, i % 3 + 1, i FROM n;",
    )
    gold = f"SELECT label, count(*) FROM pet {join} GROUP BY label"
    right = "SELECT label, count(*) FROM pet AS p JOIN kind AS k ON p.kind_id = k.kind_id GROUP BY label"
    verdicts = [grader.grade(path, gold, sql) for sql in (right, right.replace("GROUP", "AND kg > 0 GROUP"))]
    assert [(one.official, one.strict, one.gap) for one in verdicts] == [(True, True, ""), (True, False, "")]


@pytest.fixture(scope="module")
def awards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("awards") / "awards.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE award (id INTEGER PRIMARY KEY, winner TEXT, bonus REAL)")
        winners = [
            winner for winner, wins in (("Ann", 6), ("Bo", 4), ("Cy", 2), ("Di", 1)) for _ in range(wins)
        ]
        rows = [(n, winner, 1000.0 + n) for n, winner in enumerate(winners)]
        connection.executemany("INSERT INTO award VALUES (?, ?, ?)", rows)
    return path


TOP = "SELECT winner FROM award GROUP BY winner ORDER BY {} DESC LIMIT 1"


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        ("count(*)", "sum(bonus)"),
        ("count(*)", "TOTAL(bonus)"),
        ("sum(bonus)", "count(*)"),
        ("sum(bonus)", "count(id)"),
    ],
)
def test_the_largest_sum_is_not_always_that_of_the_most_rows(
    awards: Path, executor: SQLExecutor, grader: Grader, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(awards, TOP.format(gold), TOP.format(wrong)).strict
    assert grader.grade(awards, TOP.format(gold), TOP.format(wrong)).reason == "test_database"


def test_numbers_whose_sum_would_overflow_get_no_outlier(tmp_path: Path, grader: Grader) -> None:
    path = tmp_path / "stars.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE star (id INTEGER PRIMARY KEY, kind TEXT, mass INTEGER)")
        rows = [(n, "abc"[n % 3], 2**55 + n) for n in range(12)]
        connection.executemany("INSERT INTO star VALUES (?, ?, ?)", rows)
    verdict = grader.grade(path, "SELECT avg(mass) FROM star", "SELECT total(mass) / count(*) FROM star")
    assert (verdict.strict, verdict.gap) == (True, "")


@pytest.mark.parametrize(
    ("gold", "right"), [("sum(bonus)", "avg(bonus) * count(bonus)"), ("avg(bonus)", "sum(bonus) / count(*)")]
)
def test_a_sum_is_right_whatever_its_largest_part(
    awards: Path, grader: Grader, gold: str, right: str
) -> None:
    assert grader.grade(awards, TOP.format(gold), TOP.format(right)).strict


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("papers") / "papers.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE paper (id INTEGER PRIMARY KEY, pages INTEGER, cited INTEGER)")
        rows = [(n, 4 + n * 7 % 37, n * n * 13 % 300) for n in range(60)]
        connection.executemany("INSERT INTO paper VALUES (?, ?, ?)", rows)
    return path


WHERE = "SELECT id FROM paper WHERE "


@pytest.mark.parametrize(
    ("gold", "right"),
    [
        # no paper has 0 pages or fewer
        ("cited >= 10 * pages", "cited * 1.0 / pages >= 10"),
        ("100.0 * pages / (cited + 1) > 5", "20 * pages > cited + 1"),
        ("100.0 * cited / pages > 250", "cited > 2.5 * pages"),
        ("pages % 2 = 0", "pages % 2 <> 1"),
        ("pages % 2 = 0", "pages & 1 = 0"),
        ("cited / 2 > 50", "cited >= 102"),
    ],
)
def test_arithmetic_is_tried_on_values_that_the_column_may_hold(
    papers: Path, grader: Grader, gold: str, right: str
) -> None:
    assert grader.grade(papers, WHERE + gold, WHERE + right).strict


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        ("cited >= 10 * pages", "cited > 10 * pages"),
        ("cited >= 10 * pages", "cited / pages > 10"),
        ("pages % 2 = 0", "pages % 4 = 0"),
        ("cited * 1.0 / pages > 2.5", "cited / pages > 2.5"),
    ],
)
def test_arithmetic_that_is_nearly_right_is_refused(
    papers: Path, grader: Grader, gold: str, wrong: str
) -> None:
    assert not grader.grade(papers, WHERE + gold, WHERE + wrong).strict
