"""No text of a model ends or stalls a run: what it writes is read in bounded work, and never raises."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.tiers import but_first_thorough
from text2sql_grpo.config import load_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.protocols import MalformedTurn, ParsedAction, Protocol, parse_action
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.environment.tool_calls import turn_text
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.files import parse_yaml
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.translation import as_sqlite
from text2sql_grpo.rewards import Answer, Judge, RewardMix
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.hidden import hide
from text2sql_grpo.sql.query import (
    MAX_STEPS,
    Query,
    lexemes,
    literals,
    number_value,
    read_query,
    without_comments,
    write_query,
)
from text2sql_grpo.sql.schema import read_schema

DIALECTS = ("sqlite", "duckdb", "postgres")
MAX_S = 0.2  # of processor time, for one text
N_TOKEN_TEXTS = 20_000
ROOT = Path(__file__).parents[2]

NESTS: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "SELECT " + "(" * n + "1" + ")" * n,
    "dates": lambda n: "SELECT " + "DATE(" * n + "1" + ")" * n,
    "timestamps": lambda n: "SELECT " + "TIMESTAMP(" * n + "1" + ")" * n,
    "integers": lambda n: "SELECT " + "INT(" * n + "1" + ")" * n,
    "struct functions": lambda n: "SELECT " + "STRUCT(" * n + "1" + ")" * n,
    "maps": lambda n: "SELECT " + "MAP<" * n + "1" + ">" * n,
    "functions": lambda n: "SELECT " + "f(" * n + "1" + ")" * n,
    "array types": lambda n: "SELECT CAST(1 AS " + "ARRAY<" * n + "INT" + ">" * n + ")",
    "struct types": lambda n: "SELECT CAST(1 AS " + "STRUCT(a " * n + "INT" + ")" * n + ")",
    "casts": lambda n: "SELECT " + "CAST(" * n + "1" + " AS INT)" * n,
    "cases": lambda n: "SELECT " + "CASE WHEN 1 THEN " * n + "1" + " END" * n,
    "subqueries": lambda n: "SELECT * FROM " + "(SELECT * FROM " * n + "t" + ")" * n,
    "scalar subqueries": lambda n: "SELECT " + "(SELECT " * n + "1" + ")" * n,
    "exists": lambda n: "SELECT " + "EXISTS(SELECT " * n + "1" + ")" * n,
    "minus signs": lambda n: "SELECT " + "- " * n + "1",
    "nots": lambda n: "SELECT " + "NOT " * n + "1",
    "intervals": lambda n: "SELECT " + "INTERVAL " * n + "1",
    "lists": lambda n: "SELECT " + "[" * n + "1" + "]" * n,
    "structs": lambda n: "SELECT " + "{'a': " * n + "1" + "}" * n,
    "JSON": lambda n: "SELECT '" + '{"a": ' * n + "1" + "}" * n + "'->'$.a'",
    "JSON paths": lambda n: "SELECT a -> '$" + "[0].a" * n + "'",
    "comments": lambda n: "SELECT " + "/* " * n + "1" + " */" * n,
    "CTEs": lambda n: "WITH a AS (" * n + "SELECT 1" + ") SELECT 1" * n,
    "windows": lambda n: "SELECT " + "sum(" * n + "1" + ") OVER (ORDER BY 1)" * n,
    "lambdas": lambda n: "SELECT f(" + "x -> f(" * n + "1" + ")" * n + ")",
    "joins": lambda n: "SELECT * FROM " + "(" * n + "t" + " JOIN u ON 1)" * n,
    "largest values": lambda n: "SELECT " + "greatest(" * n + "1" + ", 2)" * n,
    "distances": lambda n: "SELECT " + "date_diff('month', " * n + "a" + ", b)" * n,
    "starts": lambda n: "SELECT " + "date_trunc('quarter', " * n + "a" + ")" * n,
    "parts": lambda n: "SELECT " + "split_part(" * n + "a" + ", '@', 2)" * n,
    "whole months": lambda n: "SELECT " + "date_sub('month', " * n + "a" + ", b)" * n,
    "paddings": lambda n: "SELECT " + "lpad(" * n + "a" + ", 3, '0')" * n,
    "deviations": lambda n: "SELECT " + "stddev(" * n + "a" + ")" * n,
    "largest of others": lambda n: "SELECT " + "arg_max(" * n + "a" + ", b)" * n,
    "joined texts": lambda n: "SELECT " + "concat_ws('-', " * n + "a" + ", b)" * n,
    "any of": lambda n: "SELECT " + "1 > ANY (SELECT " * n + "1" + ")" * n,
    "series": lambda n: "SELECT * FROM " + "generate_series(1, (SELECT max(a) FROM " * n + "t" + "))" * n,
    "lateral subqueries": lambda n: "SELECT a FROM t, LATERAL (" * n + "SELECT 1 AS a" + ") u" * n,
    "open subqueries": lambda n: "SELECT (" * n,
    "open cases": lambda n: "SELECT " + "CASE WHEN " * n,
}
CHAINS: dict[str, Callable[[int], str]] = {
    "lateral subqueries": lambda n: (
        "SELECT a FROM (SELECT 1 AS a) u0"
        + "".join(f", LATERAL (SELECT u{k}.a + u{k}.a AS a) u{k + 1}" for k in range(n))
    ),
    "sums": lambda n: "SELECT 1" + "+1" * n,
    "ands": lambda n: "SELECT 1 FROM t WHERE a = 1" + " AND 1=1" * n,
    "unions": lambda n: "SELECT 1" + " UNION SELECT 1" * n,
    "joins without ON": lambda n: "SELECT * FROM t" + " JOIN t" * n,
    "joins": lambda n: "SELECT * FROM t" + " JOIN t ON 1" * n,
    "columns": lambda n: "SELECT " + ",".join("a" * n),
    "values": lambda n: "VALUES " + ",".join(["(1, 'a')"] * n),
    "IN lists": lambda n: "SELECT 1 FROM t WHERE a IN (" + ",".join("1" * n) + ")",
    "casts": lambda n: "SELECT 1" + "::INT" * n,
    "indices": lambda n: "SELECT a" + "[1]" * n,
    "fields": lambda n: "SELECT a" + ".b" * n,
    "collations": lambda n: "SELECT a" + " COLLATE nocase" * n,
    "ranges": lambda n: "SELECT a" + " BETWEEN 1 AND 2" * n,
    "CTEs": lambda n: "WITH " + ",".join(f"a{i} AS (SELECT 1)" for i in range(n)) + " SELECT 1",
    "statements": lambda n: "SELECT 1;" * n,
    "pivots": lambda n: "SELECT * FROM t" + " PIVOT(sum(a) FOR b IN (1))" * n,
    "laterals": lambda n: "SELECT * FROM t" + ", LATERAL (SELECT 1)" * n,
    "quotes": lambda n: "SELECT " + "'a' " * n,
    "open quotes": lambda n: "'\"" * n,
    "dollar quotes": lambda n: "".join(f"$a{i}$" for i in range(n)),
    "escaped quotes": lambda n: "SELECT E'" + "\\'" * n + "'",
    "comments": lambda n: "SELECT 1" + "/**/--\n" * n,
    "blanks": lambda n: "SELECT" + " \t\n" * n + "1",
    "digits": lambda n: "SELECT 1" + "0" * n,
    "marks": lambda n: "SELECT " + "*?:@#" * n,
}
_TOKEN_TEXT = """
SELECT FROM WHERE GROUP BY ORDER LIMIT OFFSET HAVING UNION ALL EXCEPT INTERSECT WITH RECURSIVE AS JOIN LEFT
ON USING AND OR NOT IN EXISTS BETWEEN LIKE GLOB ESCAPE IS NULL CASE WHEN THEN ELSE END CAST DATE TIMESTAMP
INTERVAL COLLATE DISTINCT OVER PARTITION ROWS VALUES CREATE TABLE INSERT INTO PRAGMA EXPLAIN DESC ASC
LATERAL UNNEST PIVOT FILTER ARRAY STRUCT MAP EXTRACT TRIM SUBSTRING count sum max strftime date json_extract
( ) ( ) [ ] { } , , . ; : :: = == <> < > <= >= + - * / % || | & ~ -> ->> $ $1 ? @ # ! ^ \\ ' " ` '' 'a' "b"
`c` [d] 'O''Hara' E'\\n' $$x$$ x'0f' 1 0 1. .5 1e 7e 1e5 1e999 0x1f 0x 1_000 9223372036854775808 12abc t a b
id name /* */ -- \0 \ud800 \u202e \u00e9 \U0001f600
"""
TOKENS = [*_TOKEN_TEXT.split(), "\n", "\t", "--\n"]


def token_text(rng: Random) -> str:
    glue = rng.choice((" ", " ", " ", ""))
    return glue.join(rng.choices(TOKENS, k=rng.randint(1, 25)))


def mutated(text: str, rng: Random) -> str:
    """A real answer with a few of its characters and words cut, doubled, swapped or replaced."""
    words = text.split(" ")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(words))
        edit = rng.randrange(5)
        if edit == 0:
            words[place] = rng.choice(TOKENS)
        elif edit == 1:
            words[place] = words[place][: rng.randrange(len(words[place]) + 1)]
        elif edit == 2:
            words[place:place] = words[place : place + rng.randint(1, 5)] * rng.randint(1, 3)
        elif edit == 3:
            words[place] = chr(rng.choice((0, 0x27, 0x22, 0x28, 0x29, 0xD800, 0x2028, 0x301))) + words[place]
        else:
            other = rng.randrange(len(words))
            words[place], words[other] = words[other], words[place]
    return " ".join(words)


def golds(*paths: Path) -> list[str]:
    """Distinct gold queries of question files."""
    found: dict[str, None] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        )
        found.update((row.get("gold_sql") or row["query"], None) for row in rows)
    return list(found)


def deep_texts() -> Iterator[tuple[str, str]]:
    for name, make in (NESTS | CHAINS).items():
        for n in (5, 12, 30, 5_000):
            yield f"{name} {n}", make(n)


def assert_quick(read: Callable[[], object], what: str) -> None:
    """Fail if a call takes more than `MAX_S` of processor time, three times."""
    for _ in range(3):
        start = time.process_time()
        read()
        taken = time.process_time() - start
        if taken <= MAX_S:
            return
    pytest.fail(f"{taken:.2f} s: {what[:200]!r}")


def read_all(text: str, dialect: str) -> None:
    query = read_query(text, dialect)
    literals(text, dialect)
    if isinstance(query, Query):
        assert query.steps <= MAX_STEPS
        write_query(query.tree, dialect)
        write_query(query.tree)
    if dialect != "sqlite":
        as_sqlite(text, dialect)


@pytest.mark.parametrize("dialect", but_first_thorough(DIALECTS))
def test_deep_and_long_texts_are_read_in_bounded_work(dialect: str) -> None:
    for what, text in deep_texts():
        assert_quick(lambda text=text: read_all(text, dialect), f"{dialect} {what}")


@pytest.mark.thorough
def test_texts_of_random_tokens_are_read_in_bounded_work() -> None:
    rng = Random(0)
    for number in range(N_TOKEN_TEXTS):
        text, dialect = token_text(rng), DIALECTS[number % 3]
        assert_quick(lambda text=text, dialect=dialect: read_all(text, dialect), text)


def test_mutated_answers_are_read_in_bounded_work() -> None:
    rng = Random(1)
    texts = golds(*sorted((ROOT / "data/questions").glob("test_*.jsonl")))
    for number in range(800):
        text, dialect = mutated(rng.choice(texts), rng), DIALECTS[number % 3]
        assert_quick(lambda text=text, dialect=dialect: read_all(text, dialect), text)


def test_queries_of_spider_are_read_far_below_the_bounds(shared_data: Path) -> None:
    texts = golds(shared_data / "spider/dev.json", shared_data / "spider/train_spider.json")
    for text in Random(2).sample(texts, 500):
        query = read_query(text)
        assert isinstance(query, Query)
        assert query.steps < MAX_STEPS / 10


def test_the_steps_of_the_parser_are_bounded_and_repeatable() -> None:
    """Without the bound 127 characters take 8 s, and each level of nesting doubles it."""
    text = "SELECT " + "DATE(" * 20 + "1" + ")" * 20
    found = read_query(text, "sqlite")
    assert found.tree is None
    assert "steps" in found.reason
    assert found == read_query(text + " ", "sqlite")  # another entry of the cache


def test_the_depth_of_the_callers_stack_does_not_decide_what_can_be_read() -> None:
    def read_from(depth: int, text: str) -> object:
        return read_from(depth - 1, text) if depth else read_query(text, "sqlite").tree

    for levels in (10, 20, 30, 40, 60):
        text = "SELECT " + "(" * levels + "1" + ")" * levels
        assert read_from(0, text) == read_from(600, text + " ")  # another entry of the cache


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "text",
    [
        "SELECT n FROM t WHERE s = 'a'\n/* from",
        "SELECT n /* 'b' */ FROM t WHERE s = 'a' -- 'c'",
        "/* 'b' */ SELECT n FROM t WHERE s = 'a'",
    ],
)
def test_comments_hide_nothing_of_a_query(text: str, dialect: str) -> None:
    query = read_query(text, dialect)
    assert query.tree is not None
    assert query.tree.sql(dialect) == "SELECT n FROM t WHERE s = 'a'"
    assert literals(text, dialect) == ("a",)


def test_comments_end_where_the_engine_ends_them() -> None:
    assert without_comments("SELECT 1 /* a /* b */ + 2", "sqlite").split() == ["SELECT", "1", "+", "2"]
    assert without_comments("SELECT 1 /* a /* b */ + 2 */ + 3", "postgres").split() == [
        "SELECT",
        "1",
        "+",
        "3",
    ]
    assert without_comments("SELECT 1 -- a\r+ 2", "sqlite").split() == ["SELECT", "1"]
    assert without_comments("SELECT 1 -- a\r+ 2", "postgres").split() == ["SELECT", "1", "+", "2"]
    kept = "SELECT '-- a', \"/* b\", E'\\'--', $$--$$"
    assert without_comments(kept, "postgres") == kept


@pytest.mark.parametrize(
    "text",
    [
        "SELECT a FROM t WHERE b = 'Oslo' AND c IN (4711, 2.5)" + " AND 1=1" * 2_000,
        "WITH x AS (SELECT 1 WHERE " + "1=1 AND " * 1_000 + "1) SELECT 'Oslo', 4711, 2.5 FROM x",
        "SELECT )( 'Oslo' 4711 2.5",
        "SELECT ((( 'Oslo', 4711 /* 7 */, 2.5 -- 8",
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_literals_are_found_where_a_text_cannot_be_parsed(text: str, dialect: str) -> None:
    assert read_query(text, dialect).tree is None
    assert {"Oslo", 4711, 2.5} <= set(literals(text, dialect))
    assert not {7, 8} & set(literals(text, dialect))


def test_literals_are_unquoted_as_each_engine_does() -> None:
    text = "SELECT 'O''Hara', \"x\"\"y\", -3, LIMIT 9"
    assert literals(text, "sqlite") == ("O'Hara", 'x"y', 3, -3)
    assert literals(text, "postgres") == ("O'Hara", 3, -3)
    assert literals("SELECT E'it\\'s', $q$ a'b $q$, $1", "duckdb") == ("it's", " a'b ", 1)
    assert literals("SELECT [a b], `c`, 'd", "sqlite") == ("a b", "c")


@pytest.mark.parametrize("text", ["1e", "7e", "1e999", "0x", "1__0", "9" * 5_000, "\u0661", "", "nan", "inf"])
def test_what_is_not_a_finite_number_has_no_value(text: str) -> None:
    assert number_value(text) is None
    assert [number for number in literals(f"SELECT {text}") if not isinstance(number, str)] == []


def test_a_text_in_pieces_is_read_to_the_open_quote() -> None:
    assert [lexeme.value for lexeme in lexemes("SELECT a, 'b' FROM \"t", "sqlite")] == [
        "SELECT",
        "a",
        ",",
        "b",
        "FROM",
    ]


CLINIC = """CREATE TABLE ward (id INTEGER PRIMARY KEY, name VARCHAR(9), beds INTEGER, cost DOUBLE PRECISION);
INSERT INTO ward VALUES (1, 'North', 7, 2.5), (2, 'South', 4, 1e300), (17, 'O''Hara', NULL, 0.5);"""
GOLD = "SELECT name, cost FROM ward WHERE beds > 3 ORDER BY cost"


@dataclass(frozen=True)
class Play:
    """Plays one turn on the clinic, after a look, and judges the episode."""

    judged: Callable[[str], Answer]
    is_sqlite: bool

    def __call__(self, turn: str) -> Answer:
        return self.judged(turn)


@pytest.fixture(
    scope="module",
    params=but_first_thorough(["sqlite", "duckdb", "postgresql"]),
)
def play(
    request: pytest.FixtureRequest,
    make_database: Callable[[str, str], Path | str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Play]:
    """Play on the clinic of each engine; on SQLite with test databases."""
    engine = request.param
    address = make_database(engine, CLINIC)
    # A right answer takes a twentieth of this on an idle processor.
    settings = EnvironmentSettings(max_turns=3, limits=Limits(timeout_s=2))
    with SQLExecutor(settings.limits, workers=1) as executor:
        suite = None
        if engine == "sqlite":
            suite = TestSuite(executor, tmp_path_factory.mktemp("suites"), size=1)
        judge = Judge(Grader(executor, suite=suite), executor, RewardMix(dict(REWARDS)))
        example = Example(id="wards", database="clinic", question="Which wards?", gold_sql=GOLD)
        hidden = hide(read_schema(address), [])
        backend = ExecutorBackend(executor, address, settings.limits, settings.observation, hidden)

        def played(turn: str) -> Answer:
            session = SQLSession(example, schema_text="", backend=backend, settings=settings)
            session.start()
            session.step("<sql>SELECT id, name, beds, cost FROM ward</sql>")
            session.step(turn)
            answer = judge.judge(session.episode, address)
            json.dumps(answer.record())
            return answer

        played(f"<answer>{GOLD}</answer>")  # makes the test databases
        yield Play(played, engine == "sqlite")


REWARDS = {"execution": 1.0, "schema_linking": 0.1, "ngrams": 0.1}


def hostile_answers(rng: Random) -> Iterator[str]:
    yield from (make(n) for make in (NESTS | CHAINS).values() for n in (25, 340))
    for _ in range(60):
        yield token_text(rng)
        yield mutated(
            "SELECT name , cost FROM ward WHERE beds > 3 AND id IN ( 17 , 2.50 ) ORDER BY cost", rng
        )
    for number in ("1e", "7e", "1e999", "-1e", "9" * 400, "0x", "17e0", "1_7", ".", "1.e", "\u0661"):
        yield f"SELECT name, cost FROM ward WHERE id = {number} ORDER BY cost LIMIT {number}"
    yield from ("SELECT 9e999, -9e999, 0 * 9e999", "SELECT 10::numeric ^ 400, 1", "SELECT 10.0 ^ 300, 1")
    yield from (GOLD + "\n/* from", GOLD + " --", GOLD + ";;", f"({GOLD})", f"/*{'a' * 30_000}*/ {GOLD}")
    yield from (
        "SELECT 'North', " + "9" * 309,
        "SELECT name, '" + "9" * 5_000 + "' FROM ward",
        "\0",
        "\ud800",
    )


def test_no_answer_ends_or_stalls_a_run(play: Play) -> None:
    rng = Random(3)
    texts = list(hostile_answers(rng))
    if not play.is_sqlite:  # the other engines' workers take longer
        texts = rng.sample(texts, 80) + texts[-25:]
    for text in texts:
        for turn in (f"<answer>{text}</answer>", f"<sql>{text}</sql>"):
            assert_quick(lambda turn=turn: play(turn), text)


def test_an_answer_with_thousands_of_literals_costs_little_more_than_one(play: Play) -> None:
    """On SQLite 3 s of processor time, once: all of them were drawn for each of 30 databases."""
    where = f"name NOT IN ({', '.join(repr(f'n{number}') for number in range(1_500))})"
    started = time.process_time()
    assert play(f"<answer>{GOLD.replace('WHERE', f'WHERE ({where} OR 1 = 1) AND')}</answer>").verdict.strict
    assert time.process_time() - started < 1


def test_a_right_answer_stays_right_behind_a_comment_and_is_flagged_by_its_tokens(
    play: Play,
) -> None:
    padding = " AND 1 = 1" * 1_500
    assert play(f"<answer>{GOLD} -- 'a'</answer>").verdict.strict
    answer = play(f"<answer>SELECT 'O''Hara', 17 WHERE 1 = 1{padding}</answer>")
    assert set(answer.flags) >= {"no_table", "copied_literal"}


def test_numbers_beyond_floats_are_outcomes(play: Play) -> None:
    answer = play("<answer>SELECT name, 10::numeric ^ 400 FROM ward WHERE beds > 3</answer>")
    assert not answer.verdict.strict
    assert "not_flagged" not in answer.flags


@pytest.mark.parametrize(
    "text",
    [
        "<sql>",
        "<answer>",
        "<sql><answer>",
        "<sql>a</sql>",
        "<sql>a</answer>",
        "<",
        "</sql>",
        "<think>",
        "</think>",
    ],
)
def test_tags_are_read_in_linear_time(text: str) -> None:
    assert_quick(lambda: read_turn(text * (120_000 // len(text)), "tags"), text)


@pytest.mark.parametrize(
    "text", ["<tool_call>", "[TOOL_CALLS]", "{", "[", '{"a":', "</tool_call>", '<tool_call>{"', "9"]
)
def test_tool_calls_are_read_in_linear_time(text: str) -> None:
    assert_quick(lambda: read_turn(text * (120_000 // len(text)), "native"), text)
    call = '<tool_call>{"name": "run_sql", "arguments": {"sql": %s}}</tool_call>'
    assert_quick(lambda: read_turn(call % (text * (120_000 // len(text))), "native"), text)


def test_deep_JSON_is_a_malformed_turn_at_any_depth() -> None:
    for depth in (*range(50, 400, 7), *range(900, 1_000, 3), 5_000, 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            arguments = f"{opening * depth}1{closing * depth}"
            read_turn(f'<tool_call>{{"name": "run_sql", "arguments": {arguments}}}</tool_call>', "native")
            json.dumps(turn_text(None, None, [("run_sql", arguments)]))


def read_turn(text: str, protocol: Protocol) -> object:
    try:
        return parse_action(text, protocol)
    except MalformedTurn as malformed:
        return str(malformed)


def test_tags_pair_as_they_are_written() -> None:
    assert parse_action("<answer> <sql>SELECT 1</sql>", "tags") == ParsedAction("run_sql", "SELECT 1")
    assert parse_action("<sql><answer>SELECT 1</sql>", "tags") == ParsedAction("run_sql", "<answer>SELECT 1")
    assert "got 2" in str(read_turn("<sql>a</sql><answer>b</answer>", "tags"))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        *(BOMB, MERGES, "a: &a [*a]", "a: " + "[" * 800, "a: " + "{a: " * 5_000, "- " * 5_000),
        *("a: " + "[" * 100_000, "a: " + "{a: " * 30_000, "? " * 30_000, "- [" * 30_000),
        *("run: !!bool x", "run: !!timestamp x", "run: 2020-99-99", "run: " + "9" * 5_000, "run: !!int x"),
        *("run: 1" + ":1" * 3_000, 'run: "\\ud800"', "run: !!float x", "\0", "run: !!python/object:a.b {}"),
    ],
)
def test_hostile_YAML_is_a_config_error_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")

    def load() -> None:
        with pytest.raises(ConfigError):
            load_config(path)

    load()  # imports
    assert_quick(load, text)


def test_YAML_may_use_aliases() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
