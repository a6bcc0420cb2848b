"""Reading of SQL that a model may have written: the only module that parses it.

sqlglot's parser backtracks: nested type names, or joins without ON, double its work at each level. So its
steps are counted, up to a bound that no honest query comes near: the longest of 6,000 queries of Spider and
of this package takes 132.
"""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from math import isfinite
from typing import Any, ClassVar, Literal, NamedTuple

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ErrorLevel, SqlglotError
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import Token, TokenType

from text2sql_grpo.sql.engines import DIALECTS
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema import Schema

logging.getLogger("sqlglot").setLevel(logging.ERROR)  # a model may write any text, any number of times

MAX_CHARS = 100_000  # of a text with its comments; the executor refuses longer ones
MAX_PARSED_CHARS = 16_000  # without comments
MAX_STEPS = 2_500  # of the parser, at 10 to 40 microseconds each
MAX_WRITTEN_NODES = 1_000
_REPEATED = (exp.Greatest, exp.Least)  # functions that SQLite lacks
_COPIED = (exp.DateAdd, exp.DateSub)  # with all that they hold, when they are written for PostgreSQL
MAX_COPIED = 24
MAX_LEXEMES = 30_000  # with comments; about 2 microseconds each
MAX_DIGITS = 400  # of a number; a longer one is beyond floats

LexemeKind = Literal["word", "name", "text", "number", "mark"]


@dataclass(frozen=True)
class Query:
    """A statement that was parsed.

    Attributes:
        tree: The statement without comments, or a `Block` of several; the caller's own, to be changed.
        steps: Steps that the parser took, at most `MAX_STEPS`.
    """

    tree: exp.Expr
    steps: int


@dataclass(frozen=True)
class Unread:
    """A text that was not parsed, and the reason; `literals` and `lexemes` still read it."""

    reason: str
    tree: ClassVar[None] = None


class Lexeme(NamedTuple):
    """Word, quoted name, text in single quotes, number or mark of a query; quotes are removed."""

    kind: LexemeKind
    value: str


def read_query(text: str, dialect: str = "sqlite") -> Query | Unread:
    """Parse one statement in bounded work, whatever the text: it never raises.

    The result depends on the text alone, not on the machine's speed or the depth of the caller's stack.

    Args:
        text: The statement; comments are removed first.
        dialect: Name of its SQL in sqlglot.

    >>> read_query("SELECT a FROM t /* from").tree.sql()
    'SELECT a FROM t'
    >>> read_query("SELECT " + "DATE(" * 40 + "1" + ")" * 40)
    Unread(reason='sqlglot needs more than 2500 steps to parse it')
    """
    found = _read(text, dialect)
    # An edit of a shared tree would change what the next caller reads: which columns are hidden, say.
    return replace(found, tree=found.tree.copy()) if isinstance(found, Query) else found


@lru_cache(maxsize=256)
def _read(text: str, dialect: str) -> Query | Unread:
    if len(text) > MAX_CHARS:
        return Unread(f"it is longer than {MAX_CHARS} characters")
    text = without_comments(text, dialect)
    if len(text) > MAX_PARSED_CHARS:
        return Unread(f"it is longer than {MAX_PARSED_CHARS} characters without comments")
    language = Dialect.get_or_raise(dialect)
    try:
        tokens = language.tokenize(text)
    except SqlglotError:
        return Unread("sqlglot cannot split it into tokens")
    try:
        return _parsed(tokens, text, language)
    except RecursionError:  # once more with all of Python's limit, wherever the caller stands
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(_parsed, tokens, text, language).result()
            except RecursionError:
                return Unread("it is nested too deeply")


def write_query(tree: exp.Expr, dialect: str = "sqlite") -> str | None:
    """SQL of a tree, without comments; None if sqlglot cannot write it in the dialect, or it is too long.

    >>> write_query(exp.column("a"))
    'a'
    """
    if sum(1 for _ in islice(tree.walk(), MAX_WRITTEN_NODES + 1)) > MAX_WRITTEN_NODES:
        return None
    if max(map(_n_written, tree.find_all(*_REPEATED)), default=0) > MAX_WRITTEN_NODES:
        return None
    if sum(1 for _ in tree.find_all(*_COPIED)) > MAX_COPIED:
        return None
    try:
        return tree.sql(dialect, comments=False, unsupported_level=ErrorLevel.IGNORE)
    except (SqlglotError, ValueError, RecursionError):
        return None


def _n_written(node: exp.Expr | None) -> int:
    """How often sqlglot may write an argument of GREATEST: once for each argument, of each one around it."""
    n_written = 1
    while node is not None:
        n_written *= 1 + len(node.expressions) if isinstance(node, _REPEATED) else 1
        node = node.parent
    return n_written


def generated_columns(create: str) -> dict[str, str]:
    """Expressions of the generated columns of SQLite's CREATE TABLE, by name in lower case.

    Empty if it cannot be parsed.

    >>> generated_columns("CREATE TABLE t (a, B AS (a * 2) STORED)")
    {'b': '(a * 2)'}
    """
    tree = read_query(create).tree
    found = dict[str, str]()
    for column in tree.find_all(exp.ColumnDef) if tree else ():
        for constraint in column.constraints:
            if isinstance(constraint.kind, exp.ComputedColumnConstraint):
                found[column.name.lower()] = f"({constraint.kind.this.unnest().sql('sqlite')})"
    return found


def in_dialect(sql: str, schema: Schema, dialect: str) -> str | None:
    """A query of SQLite in a dialect of sqlglot, with its tables' namespaces; None if it cannot be said.

    NULLs are ordered by the dialect's default, not by SQLite's: `NULLS FIRST` is unusual SQL for the lowest
    value, and finds a NULL.
    """
    tree = read_query(sql).tree
    if tree is None:
        return None
    found_last = sorted(schema.tables, key=lambda table: not table.namespace)  # by their bare names
    namespaces = {table.name.lower(): table.namespace for table in found_last}
    for table in tree.find_all(exp.Table):
        if namespace := namespaces.get(table.name.lower()):
            table.set("db", exp.to_identifier(namespace))
    for identifier in tree.find_all(exp.Identifier):
        identifier.set("quoted", quote_name(identifier.name, schema.dialect) != identifier.name)
    are_large = Dialect.get_or_raise(dialect).NULL_ORDERING == "nulls_are_large"
    for key in tree.find_all(exp.Ordered):
        key.set("nulls_first", are_large and bool(key.args.get("desc")))
    return write_query(tree, dialect)


def number_value(text: str) -> int | float | None:
    """Value of a number as SQL writes it; None if it is not one, or beyond floats.

    >>> number_value("12"), number_value("1_000.5"), number_value("0x10"), number_value("1e"), number_value("1e999")
    (12, 1000.5, 16, None, None)
    """  # noqa: E501 (an example)
    if len(text) > MAX_DIGITS or not text.isascii():
        return None
    try:
        value = int(text, 16) if text[:2].lower() == "0x" else int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            return None
        return number if isfinite(number) else None
    return value if value.bit_length() <= 1023 else None


def literals(text: str, dialect: str = "sqlite") -> tuple[str | int | float, ...]:
    """Distinct texts and numbers that stand in a query, read by token: it need not be one that parses.

    Numbers of LIMIT and OFFSET are left out. A number after a minus sign is listed with either sign. SQLite
    may take "text in double quotes" for a string, so such names count there.

    >>> literals("SELECT a FROM t WHERE b = 'O''Hara' AND c > -2.5 AND (d = 1e /* 7 */ LIMIT 3")
    ("O'Hara", 2.5, -2.5)
    """
    found: dict[str | int | float, None] = {}
    before = Lexeme("mark", "")
    for lexeme in lexemes(text, dialect):
        kind, value = lexeme
        if kind == "text" or (kind == "name" and DIALECTS[dialect].has_quoted_texts):
            found[value] = None
        elif kind == "number" and before.value.lower() not in ("limit", "offset"):
            number = number_value(value)
            if number is not None:
                found[number] = None
                if before == ("mark", "-"):
                    found[-number] = None
        before = lexeme
    return tuple(found)


def lexemes(text: str, dialect: str = "sqlite") -> Iterator[Lexeme]:
    """First `MAX_LEXEMES` lexemes of any text, without comments; they end before a quote that is not closed.

    >>> [lexeme.value for lexeme in lexemes('SELECT "a b" -- c')]
    ['SELECT', 'a b']
    """
    for kind, start, end in islice(_spans(text, dialect), MAX_LEXEMES):
        value = text[start:end]
        if kind == "quoted":
            yield _unquoted(value, dialect)
        elif kind != "comment":
            yield Lexeme(kind, value)  # type: ignore[arg-type]


def quotes_alike(text: str, dialect: str) -> bool:
    """True if sqlglot and `lexemes` find the same texts in quotes, so that neither takes code for a text.

    >>> quotes_alike("SELECT 'a' || $$b$$", "postgres")
    True
    """
    try:
        tokens = Dialect.get_or_raise(dialect).tokenize(text)
    except SqlglotError:
        return False
    read = [token.text for token in tokens if token.token_type.name.endswith("STRING")]
    return read == [lexeme.value for lexeme in lexemes(text, dialect) if lexeme.kind == "text"]


def without_comments(text: str, dialect: str = "sqlite") -> str:
    """Replace each comment by a blank, as the engines do; a quote that is not closed ends the reading.

    >>> without_comments("SELECT/* a */'--' -- b")
    "SELECT '--'  "
    """
    if "--" not in text and "/*" not in text:
        return text
    kept = []
    last = 0
    for kind, start, end in _spans(text, dialect):
        if kind == "comment":
            kept += [text[last:start], " "]
            last = end
    return "".join([*kept, text[last:]])


def split_statements(text: str, dialect: str = "sqlite") -> tuple[list[str], str]:
    """Statements that a semicolon ends, and the text behind the last of them.

    >>> split_statements("SELECT ';'; SELECT 2 -- ;")
    (["SELECT ';'"], ' SELECT 2 -- ;')
    """
    found, last = [], 0
    for kind, start, end in _spans(text, dialect):
        if kind == "mark" and text[start] == ";":
            found.append(text[last:start])
            last = end
    return found, text[last:]


_TEXT = r"'[^']*+(?:''[^']*+)*+'"
_NAME = r'"[^"]*+(?:""[^"]*+)*+"'
_WORDS_AND_NUMBERS = (
    r"(?P<word>[^\W\d][\w$]*)|(?P<number>(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?)[\w$]*"
)


def _pattern(quoted: str, opening: str, comment: str) -> re.Pattern[str]:
    """Pattern of one lexeme; of a nested block comment or a quote that is not closed only the start."""
    marks = rf"(?P<quoted>{quoted})|(?P<open>{opening})|(?P<comment>{comment})|(?P<block>/\*)"
    return re.compile(rf"\s*(?:{marks}|{_WORDS_AND_NUMBERS}|(?P<mark>\S))", re.DOTALL)


_SQLITE = _pattern(
    rf"{_TEXT}|{_NAME}|`[^`]*+(?:``[^`]*+)*+`|\[[^]]*+\]", r"['\"`[]", r"--[^\n]*|/\*(?:.*?\*/|.*)"
)
_OTHERS = _pattern(
    rf"[eE]'[^'\\]*+(?:(?:\\.|'')[^'\\]*+)*+'|(\$(?:[^\W\d]\w*)?\$).*?\2|{_TEXT}|{_NAME}",
    r"[eE]'|\$(?:[^\W\d]\w*)?\$|['\"]",
    r"--[^\n\r]*",
)
_PATTERNS = {"sqlite": _SQLITE, "duckdb": _OTHERS, "postgres": _OTHERS}
_BLOCK_EDGE = re.compile(r"/\*|\*/")


def _spans(text: str, dialect: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each lexeme; ends before a quote that is not closed."""
    pattern = _PATTERNS[dialect]
    position = 0
    while (found := pattern.match(text, position)) and found.lastgroup != "open":
        kind = str(found.lastgroup)
        start, position = found.start(kind), found.end()
        if kind == "block":
            kind, position = "comment", _block_end(text, position)
        yield kind, start, position


def _block_end(text: str, position: int) -> int:
    """End of a block comment, which may hold others; the end of the text if it is not closed."""
    depth = 1
    for found in _BLOCK_EDGE.finditer(text, position):
        depth += 1 if found.group() == "/*" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _unquoted(value: str, dialect: str) -> Lexeme:
    opening = value[0]
    if opening == "$":
        tag = value.index("$", 1) + 1
        return Lexeme("text", value[tag:-tag])
    if opening in "eE":
        return Lexeme("text", re.sub(r"\\(.)|''", lambda part: part[1] or "'", value[2:-1], flags=re.DOTALL))
    inner = value[1:-1] if opening == "[" else value[1:-1].replace(opening * 2, opening)
    return Lexeme("text" if opening == "'" else "name", inner)


class _TooManySteps(Exception):
    """The parser took `MAX_STEPS`. Not a ParseError, after which it would try another way."""


@cache
def _bounded(parser: type[Parser]) -> Any:
    """Parser of a dialect that counts its steps."""

    class BoundedParser(parser):  # type: ignore[valid-type, misc]
        steps = 0
        LAMBDAS: ClassVar = {  # `->` reads JSON; DuckDB no longer takes it for a function
            kind: read for kind, read in parser.LAMBDAS.items() if kind != TokenType.ARROW
        }

        def _spend(self, steps: int) -> None:
            self.steps += steps
            if self.steps > MAX_STEPS:
                raise _TooManySteps

        def _advance(self, times: int = 1) -> None:
            self._spend(1)
            super()._advance(times)

        def _parse_term(self, **options: Any) -> exp.Expr | None:
            if parser is not Dialect.get_or_raise("duckdb").parser_class:  # which has `LIMIT 5 %`
                options.pop("parse_mod", None)
            found: exp.Expr | None = super()._parse_term(**options)
            return found

        def _parse_bracket(self, this: exp.Expr | None = None) -> exp.Expr | None:
            if this is not None and self._curr.token_type == TokenType.L_BRACKET:
                self._spend(sum(1 for _ in this.walk()))  # each index annotates all that it is put on
            found: exp.Expr | None = super()._parse_bracket(this)
            return found

    return BoundedParser


def _parsed(tokens: list[Token], text: str, dialect: Dialect) -> Query | Unread:
    parser = _bounded(dialect.parser_class)(dialect=dialect)
    try:
        trees = parser.parse(tokens, text)
    except _TooManySteps:
        return Unread(f"sqlglot needs more than {MAX_STEPS} steps to parse it")
    except RecursionError:
        raise
    except SqlglotError:
        return Unread("sqlglot cannot parse it")
    except Exception as error:  # a fault of sqlglot, on a text that no test has
        return Unread(f"sqlglot cannot parse it: {type(error).__name__}")
    tree = exp.Block(expressions=trees) if len(trees) > 1 else next(iter(trees), None)
    if tree is None:
        return Unread("it is empty")
    for order in tree.find_all(exp.Order):
        _name_columns(order)
    return Query(tree, parser.steps)


def _name_columns(order: exp.Order) -> None:
    """Write DuckDB's ORDER BY ALL with the numbers of the columns, unless a star stands for some."""
    query, (first, *_) = order.parent, order.expressions
    is_all = isinstance(first.this, exp.Var) and first.name.upper() == "ALL"
    if not is_all or not isinstance(query, exp.Query) or query.is_star:
        return
    if any(column.find(exp.Columns) for column in query.selects):
        return
    terms = [first.copy() for _ in query.selects]
    for place, term in enumerate(terms, 1):
        term.set("this", exp.Literal.number(place))
    order.set("expressions", terms)
