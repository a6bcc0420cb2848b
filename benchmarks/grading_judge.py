"""Databases, mutants and rewrites with which `grading.py` tests the grader.

The grader uses nothing of this and never sees these databases. They are made in another way than its test
databases: copies of up to 200 rows a table whose columns are shuffled each by itself, with literals of
the gold and of all suspects thrown into any column of a fitting type. They keep the declared keys,
foreign keys, types and NOT NULL, and hold NULLs only where the original does.
"""

import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlglot import exp, parse_one

from text2sql_grpo.grading.gold_result import with_ties_decided
from text2sql_grpo.grading.strict import compare_strict, has_top_level_order
from text2sql_grpo.sql.outcome import ExecutionOutcome

Rows = list[list[Any]]
MAX_JUDGE_ROWS = 200
LITERAL = re.compile(r"'((?:[^']|'')*)'|\"([^\"]*)\"|(?<![\w.])(\d+(?:\.\d+)?)")


def execute(connection: sqlite3.Connection, sql: str, steps: int = 3_000_000) -> ExecutionOutcome:
    """The outcome of one query, stopped after some hundred million SQLite instructions."""
    connection.set_progress_handler(lambda: 1, steps)
    try:
        with closing(connection.execute(sql)) as cursor:
            rows = cursor.fetchmany(10_001)
            columns = tuple(entry[0] for entry in cursor.description or ())
    except (sqlite3.Error, sqlite3.Warning) as error:
        return ExecutionOutcome("error", error=str(error))
    return ExecutionOutcome("ok", columns, tuple(rows[:10_000]), len(rows) > 10_000)


def stable_result(connection: sqlite3.Connection, gold: str) -> ExecutionOutcome | None:
    """The gold's result if no tie decides about it; None if one does, or if it fails or is cut."""
    result = execute(connection, gold)
    if not result.is_ok or result.is_truncated:
        return None
    tree = parse_one(gold, dialect="sqlite")
    assert isinstance(tree, exp.Query), gold
    for sql in with_ties_decided(tree):
        again = execute(connection, sql)
        if not again.is_ok or compare_strict(result, again, ordered=has_top_level_order(gold)) != "equal":
            return None
    return result


class Original:
    """A database read whole: rows (a random part of large tables), keys, foreign keys."""

    def __init__(self, path: Path) -> None:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            self.create = dict(
                connection.execute(
                    "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
                ).fetchall()
            )
            self.rows = {t: connection.execute(f'SELECT * FROM "{t}"').fetchall() for t in self.create}
            self.info = {t: connection.execute(f'PRAGMA table_info("{t}")').fetchall() for t in self.create}
            self.foreign = {t: self._foreign(connection, t) for t in self.create}
            self.unique = {t: self._unique(connection, t) for t in self.create}

    def _foreign(self, connection: sqlite3.Connection, table: str) -> list[tuple[int, str, int]]:
        """Column, parent and its column, for single columns; a key that rows break is none."""
        names = {t.lower(): t for t in self.create}
        found = []
        for _, _, parent, column, reference, *_ in connection.execute(f'PRAGMA foreign_key_list("{table}")'):
            parent = names.get(parent.lower())
            if parent is None:
                continue
            place = self._place(table, column)
            primary = [row[1] for row in self.info[parent] if row[5]]
            other = self._place(parent, reference or primary[0])
            known = {row[other] for row in self.rows[parent]}
            if {row[place] for row in self.rows[table]} - known <= {None}:
                found.append((place, parent, other))
        return found

    def _place(self, table: str, column: str) -> int:
        return [row[1].lower() for row in self.info[table]].index(column.lower())

    def _unique(self, connection: sqlite3.Connection, table: str) -> set[int]:
        places = {row[0] for row in self.info[table] if row[5]}
        for _, index, is_unique, *_ in connection.execute(f'PRAGMA index_list("{table}")'):
            if is_unique:
                places |= {row[1] for row in connection.execute(f'PRAGMA index_info("{index}")')}
        return places

    def judge(self, rng: random.Random, literals: Sequence[str]) -> "JudgeDatabase":
        """One random database under the same schema."""
        kept = {t: list(map(list, rng.sample(r, min(len(r), MAX_JUDGE_ROWS)))) for t, r in self.rows.items()}
        dropped, mixed, planted = rng.choice([0, 0.2, 0.5]), rng.choice([0.5, 1]), rng.choice([0.1, 0.4])
        few = rng.random() < 0.4
        for table, rows in kept.items():
            rows[:] = [row for row in rows if rng.random() >= dropped] or rows
            referring = {place for place, _, _ in self.foreign[table]}
            for place in range(len(self.info[table])):
                if place not in self.unique[table] | referring:
                    self._mix(rng, table, place, rows, literals, mixed, planted, few)
        for table in kept:
            for place, parent, other in self.foreign[table]:
                parents = [row[other] for row in kept[parent]]
                favoured = rng.sample(parents, min(len(parents), rng.choice([2, 5, 1000])))
                for row in kept[table]:
                    if row[place] is not None and place not in self.unique[table] and favoured:
                        row[place] = rng.choice(favoured)
        return JudgeDatabase(self, kept)

    def _mix(
        self,
        rng: random.Random,
        table: str,
        place: int,
        rows: Rows,
        literals: Sequence[str],
        mixed: float,
        planted: float,
        few: bool,
    ) -> None:
        original = [row[place] for row in self.rows[table]]
        kinds = {type(value) for value in original if value is not None}
        fitting: list[Any] = [text for text in literals if str in kinds]
        numbers = [float(text) for text in literals if re.fullmatch(r"\d+(\.\d+)?", text)]
        if kinds and str not in kinds:
            fitting = [
                kind(n + step) for kind in kinds & {int, float} for n in numbers for step in (0, 0, 1, -1)
            ]
        if rng.random() < mixed:
            values = rng.sample(original, min(3, len(original))) if few else original
            if values:
                for row in rows:
                    row[place] = rng.choice(values)
        if fitting and rng.random() < 0.7:
            some = rng.sample(fitting, min(4, len(fitting)))
            for row in rows:
                if rng.random() < planted:
                    row[place] = rng.choice(some)


class JudgeDatabase:
    """The database, and the same rows without keys and backwards, to see whether a gold is stable."""

    def __init__(self, original: Original, rows: dict[str, Rows]) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.backwards = sqlite3.connect(":memory:", isolation_level=None)
        for statement in original.create.values():
            self.connection.execute(statement)
        for table, content in rows.items():
            marks = ", ".join("?" * len(original.info[table]))
            self.connection.executemany(f'INSERT OR IGNORE INTO "{table}" VALUES ({marks})', content)
        while self._delete_orphans(original):
            pass
        for table, info in original.info.items():
            columns = ", ".join(f'"{row[1]}" {row[2]}' for row in info)
            marks = ", ".join("?" * len(info))
            self.backwards.execute(f'CREATE TABLE "{table}" ({columns})')
            content = self.connection.execute(f'SELECT * FROM "{table}"').fetchall()[::-1]
            self.backwards.executemany(f'INSERT INTO "{table}" VALUES ({marks})', content)

    def _delete_orphans(self, original: Original) -> int:
        before = self.connection.total_changes
        for table, keys in original.foreign.items():
            for place, parent, other in keys:
                column, reference = original.info[table][place][1], original.info[parent][other][1]
                self.connection.execute(
                    f'DELETE FROM "{table}" WHERE "{column}" IS NOT NULL'
                    f' AND "{column}" NOT IN (SELECT "{reference}" FROM "{parent}")'
                )
        return self.connection.total_changes - before

    def stable_result(self, gold: str) -> ExecutionOutcome | None:
        """The gold's result if it does not hang on the order of visits."""
        again = execute(self.backwards, gold)
        result = stable_result(self.connection, gold)
        if result is None or not again.is_ok:
            return None
        same = compare_strict(result, again, ordered=has_top_level_order(gold)) == "equal"
        return result if same else None

    def close(self) -> None:
        self.connection.close()
        self.backwards.close()


def literals_in(texts: Sequence[str]) -> list[str]:
    """The literals of all texts, LIKE patterns with and without their wildcards."""
    found = {a or b or c for text in texts for a, b, c in LITERAL.findall(text)}
    found |= {text.strip("%") for text in found}
    return sorted(text for text in found if text and len(text) < 60)


def proved_wrong(
    original: Original, gold: str, suspects: Sequence[str], rng: random.Random, tries: int
) -> set[str]:
    """The suspects whose result differs from a stable gold's on at least one judge database."""
    literals = literals_in([gold, *suspects])
    ordered = has_top_level_order(gold)
    wrong: set[str] = set()
    for _ in range(tries):
        judge = original.judge(rng, literals)
        result = judge.stable_result(gold)
        if result is not None:
            for suspect in set(suspects) - wrong:
                outcome = execute(judge.connection, suspect)
                if not outcome.is_ok or compare_strict(result, outcome, ordered=ordered) != "equal":
                    wrong.add(suspect)
        judge.close()
    return wrong


Edit = Callable[[Any], Sequence[exp.Expr]]  # of a node of one of the kinds that stand beside it


def held_out_mutants(
    gold: str, base: sqlite3.Connection, original: Original, others: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Operator and SQL of mutants that the grader's own operators do not make (some may coincide)."""
    tree = parse_one(gold, dialect="sqlite")
    answer = execute(base, gold)
    for operator, kinds, edit in EDITS:
        for node in tree.find_all(*kinds):
            for number, _ in enumerate(edit(node)):
                copy = tree.copy()
                index = [id(n) for n in tree.find_all(*kinds)].index(id(node))
                target = list(copy.find_all(*kinds))[index]
                replacement = edit(target)[number]
                if target is copy:
                    copy = replacement
                else:
                    target.replace(replacement)
                yield operator, copy.sql("sqlite")
    yield from _coincidences(tree, answer, base, original)
    yield from _other_literals(gold, original, rng)
    same_width = [other for other in others if len(execute(base, other).columns) == len(answer.columns)]
    agreeing = [other for other in same_width if set(execute(base, other).rows) == set(answer.rows)]
    for other in agreeing[:6] + rng.sample(same_width, min(2, len(same_width))):
        yield "other_question", other
    by_rowid = re.sub(r"count\s*\(\s*\*\s*\)", "max(rowid)", gold, flags=re.IGNORECASE)
    if by_rowid != gold:
        yield "rowid_for_count", by_rowid


def _coincidences(
    tree: exp.Expr, answer: ExecutionOutcome, base: sqlite3.Connection, original: Original
) -> Iterator[tuple[str, str]]:
    """The condition replaced by `column = value` that happens to give the same result."""
    if not isinstance(tree, exp.Select) or tree.args.get("where") is None or not answer.is_ok:
        return
    n_found = 0
    for source in tree.find_all(exp.Table):
        names = {name.lower(): name for name in original.create}
        table = names.get(source.name.lower())
        if table is None or source.find_ancestor(exp.Select) is not tree:
            continue
        for place, info in enumerate(original.info[table]):
            for value in list(dict.fromkeys(row[place] for row in original.rows[table]))[:12]:
                if value is None or isinstance(value, bytes) or n_found == 3:
                    continue
                copy = tree.copy()
                column = exp.column(info[1], table=source.alias_or_name, quoted=True)
                copy.set("where", exp.Where(this=exp.EQ(this=column, expression=exp.convert(value))))
                if execute(base, copy.sql("sqlite")).rows == answer.rows:
                    n_found += 1
                    yield "coincidence", copy.sql("sqlite")


def _other_literals(gold: str, original: Original, rng: random.Random) -> Iterator[tuple[str, str]]:
    for match in LITERAL.finditer(gold):
        text = match[1] or match[2]
        columns = [
            (t, place)
            for t, rows in original.rows.items()
            for place in range(len(original.info[t]))
            if text and any(row[place] == text for row in rows)
        ]
        for table, place in columns[:1]:
            values = sorted(
                {row[place] for row in original.rows[table] if isinstance(row[place], str)} - {text}
            )
            for value in rng.sample(values, min(2, len(values))):
                quoted = "'" + value.replace("'", "''") + "'"
                yield "other_literal", gold[: match.start()] + quoted + gold[match.end() :]


def _function(name: str) -> Edit:
    return lambda node: [exp.Anonymous(this=name, expressions=[node.copy()])]


def _fewer_rows(node: exp.Expr) -> list[exp.Expr]:
    copy = node.copy()
    copy.set("offset", exp.Offset(expression=exp.Literal.number(1)))
    if copy.args.get("limit") is None:
        copy.set("limit", exp.Limit(expression=exp.Literal.number(-1)))
    return [copy]


def _more_order(node: exp.Expr) -> list[exp.Expr]:
    select = node.find_ancestor(exp.Select)
    if select is None or not select.selects:
        return []
    copy = node.copy()
    copy.set("expressions", [exp.Ordered(this=select.selects[0].unalias().copy()), *copy.expressions])
    return [copy]


def _more_groups(node: exp.Expr) -> list[exp.Expr]:
    select = node.find_ancestor(exp.Select)
    columns = list(select.find_all(exp.Column)) if select else []
    return [_set(node, expressions=[*node.expressions, column.copy()]) for column in columns[:2]]


def _set(node: exp.Expr, **args: Any) -> exp.Expr:
    copy = node.copy()
    for name, value in args.items():
        copy.set(name, value)
    return copy


def _by_intuition(node: exp.SetOperation) -> list[exp.Expr]:
    """INTERSECT as AND, EXCEPT as AND NOT, in one WHERE: how people get them wrong."""
    left, right = node.this.copy(), node.expression
    if (
        not (isinstance(left, exp.Select) and isinstance(right, exp.Select))
        or right.args.get("where") is None
    ):
        return []
    condition = right.args["where"].this.copy()
    return [left.where(exp.Not(this=exp.paren(condition)) if isinstance(node, exp.Except) else condition)]


def _shifted(node: exp.Expr) -> list[exp.Expr]:
    if node.is_string or isinstance(node.parent, exp.Limit | exp.Offset):
        return []
    number = float(node.this)
    return [exp.Literal.number(n) for n in (number + 0.5, number * 10, int(number * 0.8))]


def _loosened(node: exp.Expr) -> list[exp.Expr]:
    right = node.expression
    if not (isinstance(right, exp.Literal) and right.is_string):
        return []
    patterns = [right.this + "%", "%" + right.this, right.this[:3] + "%"]
    return [exp.Like(this=node.this.copy(), expression=exp.Literal.string(p)) for p in patterns]


def _top_for_extreme(node: exp.Select) -> list[exp.Expr]:
    """`x = (SELECT max(x) ..)` as ORDER BY x DESC LIMIT 1, which keeps one of several."""
    where = node.args.get("where")
    condition = where.this if where is not None else None
    if not isinstance(condition, exp.EQ) or not isinstance(condition.expression, exp.Subquery):
        return []
    inner = condition.expression.this
    extreme = inner.selects[0] if isinstance(inner, exp.Select) else None
    if not isinstance(extreme, exp.Max | exp.Min):
        return []
    copy = node.copy()
    copy.set("where", None)
    ordered = exp.Ordered(this=condition.this.copy(), desc=isinstance(extreme, exp.Max))
    return [copy.order_by(ordered).limit(1)]


def _joined_elsewhere(node: exp.Expr) -> list[exp.Expr]:
    """ON with both sides replaced by the row number: tables put side by side."""
    on = node.args.get("on")
    if not isinstance(on, exp.EQ):
        return []
    sides = [s for s in (on.this, on.expression) if isinstance(s, exp.Column) and s.table]
    if len(sides) < 2:
        return []
    rowids = [exp.column("rowid", table=s.table) for s in sides]
    return [_set(node, on=exp.EQ(this=rowids[0], expression=rowids[1]))]


def _null_as_zero(node: exp.Expr) -> list[exp.Expr]:
    return [exp.Coalesce(this=node.copy(), expressions=[exp.Literal.number(0)])]


def _distinct_inside(node: exp.Expr) -> list[exp.Expr]:
    return [_set(node, this=exp.Distinct(expressions=[node.this.copy()]))]


EDITS: list[tuple[str, tuple[type[exp.Expr], ...], Edit]] = [
    ("rounded", (exp.Avg,), _function("round")),
    ("whole", (exp.Avg, exp.Sum), lambda node: [exp.cast(node.copy(), "INTEGER")]),
    ("null_as_zero", (exp.Avg, exp.Min, exp.Sum), _null_as_zero),
    ("distinct_inside", (exp.Avg, exp.Sum), _distinct_inside),
    ("offset", (exp.Select,), _fewer_rows),
    ("first_sort_key", (exp.Order,), _more_order),
    ("group_key_added", (exp.Group,), _more_groups),
    ("set_as_condition", (exp.Intersect, exp.Except), _by_intuition),
    ("shifted_number", (exp.Literal,), _shifted),
    ("loosened", (exp.EQ,), _loosened),
    ("top_for_extreme", (exp.Select,), _top_for_extreme),
    ("joined_elsewhere", (exp.Join,), _joined_elsewhere),
]


def hard_coded(answer: ExecutionOutcome, tables: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The gold's answer written down, in the ways a policy has found."""
    if len(answer.rows) > 100:
        return
    table = f'"{tables[0]}"'
    if not answer.rows:
        nothing = ", ".join(["1"] * len(answer.columns))
        yield "no_rows", f"SELECT {nothing} WHERE 0"
        yield "no_rows_of_table", f"SELECT {nothing} FROM {table} WHERE 1 = 2"
        return
    rows = [", ".join(exp.convert(cell).sql("sqlite") for cell in row) for row in answer.rows]
    values = "VALUES " + ", ".join(f"({row})" for row in rows)
    yield "values", values
    yield "union", " UNION ALL ".join(f"SELECT {row}" for row in rows)
    yield "beside_table", f"SELECT v.* FROM ({values}) AS v WHERE EXISTS (SELECT 1 FROM {table})"


def right_rewrites(gold: str) -> Iterator[tuple[str, str]]:
    """Other ways to write the same query."""
    tree = parse_one(gold, dialect="sqlite")
    plain = gold.rstrip().rstrip(";")
    yield "comment", f"/* the answer */ {plain} -- done"
    yield "formatted", tree.sql("sqlite", pretty=True, normalize_functions="lower")
    if not has_top_level_order(gold):
        yield "cte", f"WITH answer AS ({plain}) SELECT * FROM answer"
        yield "subquery", f"SELECT * FROM ({plain})"
    for operator, kinds, edit in RIGHT_EDITS:
        copy = tree.copy()
        changed = False
        for node in list(copy.find_all(*kinds)):
            replacement = edit(node)
            if replacement:
                changed = True
                copy = replacement[0] if node is copy else copy
                if node is not copy and node.parent is not None:
                    node.replace(replacement[0])
        if changed:
            yield operator, copy.sql("sqlite")
    aliases = {t.alias: f"renamed_{t.alias}" for t in tree.find_all(exp.Table) if t.alias}
    if aliases:
        copy = tree.copy()
        for source in copy.find_all(exp.Table):
            if source.alias in aliases:
                source.set("alias", exp.TableAlias(this=exp.to_identifier(aliases[source.alias])))
        names = {alias.lower(): name for alias, name in aliases.items()}
        for column in copy.find_all(exp.Column):
            if column.table.lower() in names:
                column.set("table", exp.to_identifier(names[column.table.lower()]))
        yield "aliases", copy.sql("sqlite")


def _mirrored(node: exp.Binary) -> list[exp.Expr]:
    mirror = {exp.EQ: exp.EQ, exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE}
    if any(isinstance(side, exp.Literal | exp.Subquery) for side in (node.this, node.expression)):
        return [mirror[type(node)](this=node.expression.copy(), expression=node.this.copy())]
    return []


def _negated(node: exp.Binary) -> list[exp.Expr]:
    opposite = {exp.GT: exp.LTE, exp.LT: exp.GTE, exp.GTE: exp.LT, exp.LTE: exp.GT, exp.NEQ: exp.EQ}
    inner = opposite[type(node)](this=node.this.copy(), expression=node.expression.copy())
    return [exp.paren(exp.Not(this=exp.paren(inner)))]


def _between(node: exp.Expr) -> list[exp.Expr]:
    low = exp.GTE(this=node.this.copy(), expression=node.args["low"].copy())
    high = exp.LTE(this=node.this.copy(), expression=node.args["high"].copy())
    return [exp.paren(exp.and_(low, high))]


def _exists(node: exp.Expr) -> list[exp.Expr]:
    """`x IN (SELECT y ..)` as EXISTS; not under NOT, where NULLs make them differ."""
    query = node.args.get("query")
    query = query.this if isinstance(query, exp.Subquery) else query
    if not isinstance(query, exp.Select) or node.find_ancestor(exp.Not):
        return []
    if query.args.get("group") or query.args.get("limit") or query.find(exp.AggFunc):
        return []
    outer, inner = node.this.copy(), query.selects[0].unalias().copy()
    if not (isinstance(outer, exp.Column) and isinstance(inner, exp.Column)):
        return []
    for column, select in ((outer, node.find_ancestor(exp.Select)), (inner, query)):
        if column.table:
            continue
        if select is None or select.args.get("joins"):
            return []
        column.set("table", exp.to_identifier(select.args["from_"].this.alias_or_name))
    inside = {t.alias_or_name.lower() for t in query.find_all(exp.Table)}
    if outer.table.lower() in inside:
        return []
    same = exp.EQ(this=inner, expression=outer)
    return [exp.Exists(this=query.copy().where(same).select("1", append=False))]


def _average(node: exp.Expr) -> list[exp.Expr]:
    if isinstance(node.this, exp.Distinct):
        return []
    total = exp.Sum(this=node.this.copy())
    count = exp.Count(this=node.this.copy())
    real = exp.Mul(this=total, expression=exp.Literal.number("1.0"))
    return [exp.Div(this=real, expression=count)]


def _count(node: exp.Expr) -> list[exp.Expr]:
    return [exp.Count(this=exp.Literal.number(1))] if isinstance(node.this, exp.Star) else []


def _join_order(node: exp.Select) -> list[exp.Expr]:
    joins = node.args.get("joins") or []
    source = node.args.get("from_")
    if len(joins) != 1 or joins[0].args.get("side") or source is None or any(s.is_star for s in node.selects):
        return []
    copy = node.copy()
    first, second = copy.args["from_"].this.copy(), copy.args["joins"][0].this.copy()
    copy.args["from_"].set("this", second)
    copy.args["joins"][0].set("this", first)
    return [copy]


def _comma_join(node: exp.Select) -> list[exp.Expr]:
    joins = node.args.get("joins") or []
    if not joins or any(join.args.get("side") or join.args.get("on") is None for join in joins):
        return []
    conditions = [join.args["on"].copy() for join in joins]
    copy = node.copy()
    for join in copy.args["joins"]:
        join.set("on", None)
        join.set("kind", "CROSS")
    return [copy.where(*conditions)]


def _group_for_distinct(node: exp.Select) -> list[exp.Expr]:
    columns = [part.unalias() for part in node.selects]
    if node.args.get("distinct") is None or node.args.get("group") or node.args.get("order"):
        return []
    if not all(isinstance(column, exp.Column) and not column.is_star for column in columns):
        return []
    return [_set(node, distinct=None, group=exp.Group(expressions=[c.copy() for c in columns]))]


def _set_as_in(node: exp.SetOperation) -> list[exp.Expr]:
    """INTERSECT as IN, EXCEPT as NOT IN, for one column; disproved where that may be NULL."""
    left, right = node.this, node.expression
    if not (isinstance(left, exp.Select) and isinstance(right, exp.Select)) or node.args.get("order"):
        return []
    if len(left.selects) != 1 or not isinstance(left.selects[0], exp.Column) or left.args.get("group"):
        return []
    found: exp.Expr = exp.In(this=left.selects[0].copy(), query=exp.Subquery(this=right.copy()))
    return [left.where(exp.Not(this=found) if isinstance(node, exp.Except) else found).distinct()]


RIGHT_EDITS: list[tuple[str, tuple[type[exp.Expr], ...], Edit]] = [
    ("mirrored", (exp.EQ, exp.GT, exp.LT, exp.GTE, exp.LTE), _mirrored),
    ("negated", (exp.GT, exp.LT, exp.GTE, exp.LTE, exp.NEQ), _negated),
    ("between", (exp.Between,), _between),
    ("exists", (exp.In,), _exists),
    ("average", (exp.Avg,), _average),
    ("count", (exp.Count,), _count),
    ("set_as_in", (exp.Intersect, exp.Except), _set_as_in),
    ("join_order", (exp.Select,), _join_order),
    ("comma_join", (exp.Select,), _comma_join),
    ("group_for_distinct", (exp.Select,), _group_for_distinct),
]
