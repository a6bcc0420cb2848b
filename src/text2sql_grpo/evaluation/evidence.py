"""Rows that show why an answer is wrong: the rows of the gold query and of the answer."""

from collections.abc import Sequence
from dataclasses import replace

from sqlglot import exp

from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.gold_result import have_one_result
from text2sql_grpo.rewards import Answer
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.names import dotted_name, quote_name
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema

SHOWN = ObservationLimits(max_rows=12, max_cell_chars=60)
MAX_TABLES = 4


def with_evidence(answer: Answer, sessions: SQLEnvironment, grader: Grader, database: Database) -> Answer:
    """The answer with the rows of both queries; a right one, or one without a query, as it is.

    They are those on the question's database; or, of an answer that is right there by chance, those on the
    test database that refutes it, with the rows of the tables that are read. What is hidden from the model is
    not shown.
    """
    sql, gold_sql, reason = answer.episode.final_sql, answer.example.gold_sql, answer.verdict.reason
    if answer.verdict.strict or sql is None or reason == "gold_failed":
        return answer
    place, on, tables = database, "database", list[str]()
    backend = sessions.guarded(answer.example.database)
    if reason == "test_database" and grader.suite is not None:
        suite = grader.suite.databases(database, gold_sql, sql)
        refuting = (
            one
            for one in suite.databases
            if not have_one_result(grader.gold_result(one, gold_sql), grader.gold_result(one, sql))
        )
        place, on = next(refuting, database), "test database"
        if place == database:  # a counterexample that the search drew refutes it, and is gone
            return replace(answer, evidence={"on": "counterexample"})
        tables = _reads(backend.hidden.schema, (gold_sql, sql), parse_address(database).dialect)
    run = replace(backend, database=place, limits=sessions.executor.limits).run
    gold, own, *rows = (observation_text(run(text), SHOWN) for text in (gold_sql, sql, *tables))
    return replace(answer, evidence={"on": on, "gold": gold, "answer": own, "tables": rows})


def _reads(schema: Schema, queries: Sequence[str], dialect: str) -> list[str]:
    """Queries for the rows of the tables that are read."""
    trees = [tree for tree in (read_query(sql, dialect).tree for sql in queries) if tree is not None]
    read = {table.name.lower() for tree in trees for table in tree.find_all(exp.Table)}
    return [
        f"SELECT {', '.join(quote_name(column.name, schema.dialect) for column in table.columns)} "
        f"FROM {dotted_name(table.namespace, table.name, schema.dialect)}"
        for table in schema.tables
        if table.name.lower() in read and table.columns
    ][:MAX_TABLES]
