"""Probes: right and wrong answers that released reward functions misjudged."""

SCRIPT = """
CREATE TABLE dept (name TEXT PRIMARY KEY, city TEXT NOT NULL);
CREATE TABLE emp (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, dept TEXT REFERENCES dept (name), age INTEGER, pay REAL
);
INSERT INTO dept VALUES ('IT', 'Oslo'), ('HR', 'Rome'), ('PR', 'Oslo');
INSERT INTO emp VALUES
    (1, 'Ann', 'IT', 30, 50.5), (2, 'Bob', 'IT', 30, 40.0), (3, 'Cid', 'HR', 45, 40.0), (4, 'Dee', 'HR', 51, 62.25),
    (5, 'Eve', 'IT', 30, 71.0), (6, 'Fay', NULL, 27, 33.3), (7, 'Gus', 'PR', 38, NULL);
"""  # noqa: E501 (rows)
"""Database of the probes."""

_IT = "SELECT name FROM emp WHERE dept = 'IT'"
_COUNT = "SELECT count(*) FROM emp WHERE dept = 'IT'"
_NOBODY = "SELECT name FROM emp WHERE age > 90"
_OLDEST = "SELECT name FROM emp ORDER BY age DESC LIMIT 3"

WRONG = (
    ("nothing for an empty gold", _NOBODY, "SELECT 1 WHERE 0"),
    ("nothing, with other columns, for an empty gold", _NOBODY, "SELECT name, pay FROM emp WHERE 1 = 2"),
    ("UPDATE for an empty gold", _NOBODY, "UPDATE emp SET age = 1 WHERE id = 1"),
    ("DELETE", _IT, "DELETE FROM emp"),
    ("DELETE for an empty gold", _NOBODY, "DELETE FROM emp"),
    ("a comment alone for an empty gold", _NOBODY, "-- nobody"),
    ("BEGIN for an empty gold", _NOBODY, "BEGIN"),
    ("a hard-coded number", _COUNT, "SELECT 3"),
    ("hard-coded rows by UNION", _IT, "SELECT 'Ann' UNION SELECT 'Bob' UNION SELECT 'Eve'"),
    ("hard-coded rows by VALUES", _IT, "VALUES ('Ann'), ('Bob'), ('Eve')"),
    ("hard-coded keys", _IT, "SELECT name FROM emp WHERE id IN (1, 2, 5)"),
    ("a coincidence", _IT, "SELECT name FROM emp WHERE age = 30"),
    ("DISTINCT added", "SELECT city FROM dept", "SELECT DISTINCT city FROM dept"),
    ("DISTINCT dropped", "SELECT DISTINCT city FROM dept", "SELECT city FROM dept"),
    ("the other direction", _OLDEST.replace(" LIMIT 3", ""), "SELECT name FROM emp ORDER BY age"),
    ("no order", _OLDEST.replace(" LIMIT 3", ""), "SELECT name FROM emp"),
    ("swapped columns", "SELECT min(age), max(age) FROM emp", "SELECT max(age) AS a, min(age) AS b FROM emp"),
    ("a column too many", _IT, "SELECT name, age FROM emp WHERE dept = 'IT'"),
    ("a row too many", _OLDEST, "SELECT name FROM emp ORDER BY age DESC LIMIT 4"),
    ("a gold that fails", "SELECT nickname FROM emp", "SELECT 1"),
    ("a failing query", _COUNT, "SELECT count(*) FROM staff WHERE dept = 'IT'"),
)
"""Name, gold and answer of each probe that must not be paid."""
RIGHT = (
    ("the gold itself", _IT, _IT),
    ("0.1 + 0.2 for 0.3", "SELECT pay * 0.3 FROM emp", "SELECT pay * (0.1 + 0.2) FROM emp"),
    ("times a third", "SELECT avg(pay) / 3.0 FROM emp", "SELECT avg(pay) * (1.0 / 3) FROM emp"),
    ("a comment inside", _COUNT, "SELECT count(*) -- how many\nFROM emp WHERE dept = 'IT'"),
    ("a comment before", _COUNT, f"/* how many */ {_COUNT}"),
    ("a CTE", _COUNT, "WITH it AS (SELECT * FROM emp WHERE dept = 'IT') SELECT count(*) FROM it"),
    ("an alias and a semicolon", _IT, "SELECT e.name AS who FROM emp AS e WHERE 'IT' = e.dept;"),
    (
        "tables joined in the other order",
        "SELECT emp.name FROM emp JOIN dept ON emp.dept = dept.name WHERE dept.city = 'Oslo'",
        "SELECT e.name FROM dept AS d JOIN emp AS e ON d.name = e.dept WHERE d.city = 'Oslo'",
    ),
    (
        "another choice among ties",
        "SELECT name FROM emp WHERE age <= 30 ORDER BY age DESC LIMIT 1",
        "SELECT name FROM emp WHERE age <= 30 ORDER BY age DESC, name DESC LIMIT 1",
    ),
    ("columns in another order, by name", "SELECT name, age FROM emp", "SELECT age, name FROM emp"),
    ("a float for an integer", "SELECT sum(age) FROM emp", "SELECT sum(age * 1.0) FROM emp"),
)
"""The same of each probe that must be paid."""
