"""Questions for queries of a log, by rules, where the words leave one reading."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.optimizer.simplify import Simplifier

from text2sql_grpo.synthesis import words
from text2sql_grpo.synthesis.conditions import day_words, is_calendar_day, superlatives, without_unit
from text2sql_grpo.synthesis.log_queries import tables_of
from text2sql_grpo.synthesis.nouns import identifier_words, is_english, is_plural, plural, with_article
from text2sql_grpo.synthesis.roles import plain_text
from text2sql_grpo.synthesis.words import Column, Database, Source

_MIDNIGHT = re.compile(r"[ T]00:00(:00(\.0+)?)?$")
# What the rules read of a node; with anything else it has no words.
_ARGUMENTS: dict[type[exp.Expr], str] = {
    exp.Select: "expressions from_ joins where group having order limit distinct kind",
    exp.Table: "this db alias",
    exp.TableAlias: "this",
    exp.Join: "this on using kind",
    exp.Group: "expressions",
    exp.Distinct: "expressions",
    exp.Ordered: "this desc nulls_first",
    exp.AggFunc: "this big_int",
    exp.Predicate: "this expression expressions low high negate",
}
# Words of a bound on an amount, and on a day.
_BOUNDS: dict[type[exp.Expr], tuple[str, str]] = {
    exp.GT: ("above", "after"),
    exp.LT: ("below", "before"),
    exp.GTE: ("at least", "on or after"),
    exp.LTE: ("at most", "on or before"),
}
_ADDED: dict[type[exp.Expr], str] = {exp.Avg: "average", exp.Sum: "total"}
_TURNED = Simplifier.INVERSE_COMPARISONS | {exp.EQ: exp.EQ, exp.NEQ: exp.NEQ}
_PARTS = {"%Y": "year", "YEAR": "year", "%Y-%m": "month (YYYY-MM)"}


class _NoWords(Exception):
    """No rule words a part of the query."""


def question_of(tree: exp.Query, database: Database) -> str | None:
    """Question that a query answers; None if no rule words all of it.

    Worded are queries of one table, or of up to three joined by foreign keys, each row counted once, with
    conditions joined by AND, aggregates, groups, an order and a limit.
    """
    try:
        return _Worded(tree, database).question()
    except _NoWords:
        return None


@dataclass(frozen=True)
class _Named:
    """A column, and the words before it: "customer's "; empty for the table whose rows are asked about."""

    column: Column
    owner: str

    @property
    def words(self) -> str:
        return self.owner + self.column.noun


class _Worded:
    def __init__(self, tree: exp.Query, database: Database) -> None:
        _check(isinstance(tree, exp.Select) and len(list(tree.find_all(exp.Query))) == 1)
        for node in tree.walk():
            known = next((known for kind, known in _ARGUMENTS.items() if isinstance(node, kind)), None)
            given = {name for name, value in node.args.items() if value}
            _check(known is None or given <= set(known.split()))
        self._tree = tree
        self._profile = database.profile
        self._declared = {name: one.table for name, one in database.profile.tables.items()}
        self._tables = tables_of(tree, database.tables)
        self._aliases = {one.alias.lower(): one.this for one in tree.selects if one.alias}
        self._source = self._joined(database)
        self._roles = {table.name: role for role, table in self._source.tables.items()}
        self._row = self._source.tables[""].noun
        self._rows = plural(self._row)

    def question(self) -> str:
        """The question; raises `_NoWords` if a part has none."""
        group = self._tree.args.get("group")
        _check(bool(group) or not self._tree.args.get("having"))
        selects = [one.unalias() for one in self._tree.selects]
        where = self._where()
        if group:
            return self._grouped(list(group.expressions), selects, where)
        if all(one.find(exp.AggFunc) for one in selects):
            _check(not self._tree.args.get("order") and not self._tree.args.get("limit"))
            said = [self._aggregate(one) for one in selects]
            if said == [own := f"number of {self._rows}"]:
                return f"How many {self._rows} are there{where}?"
            verb = "is" if len(said) == 1 else "are"
            _check(own not in said[:-1])
            rows = "" if said[-1] == own else f" of all {self._rows}"
            return f"What {verb} {_listed(said, article='the ')}{rows}{where}?"
        if self._tree.args.get("distinct"):
            said = [self._phrase(one) for one in selects]
            what = said[0] if len(said) == 1 else f"combination of {_listed(said)}"
            self._check_groups(selects)
            return f"List each different {what} of the {self._rows}{where}{self._order()}."
        if len(selects) == 1 and isinstance(selects[0], exp.Star):
            _check(len(self._roles) == 1)
            what = "all columns"
        else:
            what = _listed([self._phrase(one) for one in selects], article="the ")
        return self._ranked(what, where) or f"Show {what} of each {self._row}{where}{self._order()}."

    def _ranked(self, what: str, where: str) -> str:
        """Question for the rows with the most or least of one column; empty for any other query."""
        order, count = self._tree.args.get("order"), self._count()
        if not count or not order:
            return ""
        named = self._column(self._unaliased(order.expressions[0].this))
        _check(not named.column.has_nulls)
        if len(order.expressions) > 1 or named.column.kind == "text":
            return ""
        highest, lowest = superlatives(named.column)
        most = highest if order.expressions[0].args.get("desc") else lowest
        those, behind = ("one", "") if count == "1" else (count, f", {most} first")
        among = f"Among the {self._rows}{where}" if where else f"Of all {self._rows}"
        return f"{among}, show {what} of the {those} with the {most} {without_unit(named.words)}{behind}."

    def _grouped(self, keys: list[exp.Expr], selects: list[exp.Expr], where: str) -> str:
        having = self._tree.args.get("having")
        keys = [self._unaliased(key) for key in keys]
        _check(not self._tree.args.get("distinct"))
        self._check_groups(keys)
        shown = [one for one in selects if not one.find(exp.AggFunc)]
        counts = selects[len(shown) :]
        _check(bool(shown and counts) and all(one.find(exp.AggFunc) for one in counts))
        said, counted = [self._phrase(one) for one in shown], [self._aggregate(one) for one in counts]
        if owner := self._owner(keys, shown):
            those = [
                one if one == f"number of {self._rows}" else f"{one} of these {self._rows}" for one in counted
            ]
            what = _listed([*said, *those], article="the ")
            text = f"For each {owner} with {self._rows}{where}, show {what}"
        else:
            _check({one.sql() for one in keys} == {one.sql() for one in shown})
            groups = [self._group(one) for one in shown]
            each = groups[0] if len(said) == 1 else f"combination of {_listed(groups)}"
            rows = "" if counted[-1] == f"number of {self._rows}" else f" of its {self._rows}"
            text = f"Show each {each} with {_listed(counted, article='the ')}{rows}{where}"
        if having:
            test = having.this
            _check(type(test) in _BOUNDS)
            bound = f"{_BOUNDS[type(test)][0]} {_number(test.expression)}"
            text += f", only where the {self._aggregate(test.this)} is {bound}"
        return f"{text}{self._order()}."

    def _group(self, node: exp.Expr) -> str:
        """Words of a group: "city of a customer", or "customer's name" if no two customers share it."""
        words = self._phrase(node)
        owner, _, noun = words.partition("'s ")
        if not noun or not isinstance(node := self._unaliased(node), exp.Column):
            return words
        table, name = self._table(node)
        is_shared = not self._profile.tables[table].columns[name].is_unique
        return f"{noun} of {with_article(owner)}" if is_shared else words

    def _owner(self, keys: list[exp.Expr], shown: list[exp.Expr]) -> str:
        """Noun of the rows of a joined table that the groups are; empty if they are something else."""
        columns = [one for one in (*keys, *shown) if isinstance(one, exp.Column)]
        tables = {self._table(one)[0] for one in columns}
        if len(tables) != 1 or len(columns) < len(keys) + len(shown):
            return ""
        name = tables.pop()
        primary = {one.name for one in self._declared[name].columns if one.is_primary_key}
        if not primary or not primary <= {self._table(key)[1] for key in keys}:
            return ""
        _check(bool(self._roles[name]))  # else a group is one row
        return self._source.owners[self._roles[name]].removesuffix("'s ") or self._row

    def _check_groups(self, keys: Iterable[exp.Expr]) -> None:
        """Raise `_NoWords` if one group is that of missing values, which "each" may mean or not."""
        where = self._tree.args.get("where")
        tested = {one.sql() for one in where.find_all(exp.Column)} if where else set()
        for one in (one for key in keys for one in key.find_all(exp.Column)):
            _check(one.sql() in tested or not self._column(one).column.has_nulls)

    def _aggregate(self, node: exp.Expr) -> str:
        """Words of an aggregate: "average price"."""
        node = self._unaliased(node)
        if isinstance(node, exp.Round):
            digits = _number(node.args["decimals"]) if node.args.get("decimals") else "0"
            places = "a whole number" if digits == "0" else f"{digits} decimal{'s' * (digits != '1')}"
            return f"{self._aggregate(node.this)} (rounded to {places})"
        if isinstance(node, exp.Count):
            if isinstance(node.this, exp.Star):
                return f"number of {self._rows}"
            if isinstance(node.this, exp.Distinct):
                _check(len(node.this.expressions) == 1)
                named = self._column(node.this.expressions[0])
                return f"number of different {named.owner}{plural(named.column.noun)}"
            table, name = self._table(node.this)
            column = next(one for one in self._declared[table].columns if one.name == name)
            _check(not self._roles[table] and (column.is_primary_key or not column.is_nullable))
            return f"number of {self._rows}"
        word = _ADDED.get(type(node), "")
        _check(bool(word) or type(node) in (exp.Max, exp.Min))
        if isinstance(node.this, exp.Mul):
            _check(bool(word))
            sides = [self._column(side) for side in (node.this.this, node.this.expression)]
            _check(all(not one.owner and one.column.kind == "number" for one in sides))
            return f"{word} of {' times '.join(one.words for one in sides)}"
        named = self._column(node.this)
        _check(not named.owner and named.column.kind in (("number",) if word else ("number", "date")))
        if not word:
            highest, lowest = superlatives(named.column)
            word = highest if isinstance(node, exp.Max) else lowest
        if named.words.startswith("total") and word == "total":
            return f"sum of the {plural(named.words)}"
        return f"{word} {named.words}"

    def _order(self) -> str:
        order = self._tree.args.get("order")
        if not order:
            return ""
        said = []
        for one in order.expressions:
            node = self._unaliased(one.this)
            said.append("the " + (self._aggregate(node) if node.find(exp.AggFunc) else self._phrase(node)))
            if one.args.get("desc"):
                said[-1] += " in descending order"
        count = self._count()
        first = count and f", and only the first{'' if count == '1' else f' {count}'}"
        return f", sorted by {', then by '.join(said)}{first}"

    def _count(self) -> str:
        """Number of the rows of a query with an order that are wanted; empty for all."""
        limit = self._tree.args.get("limit")
        count = _number(limit.expression) if limit else ""
        _check(not limit or (bool(self._tree.args.get("order")) and count.isdigit()))
        return count

    def _where(self) -> str:
        where = self._tree.args.get("where")
        tests = _all(where.this) if where else []
        said: dict[str, list[str]] = {}
        for test in tests:
            subject, words = self._condition(test)
            said.setdefault(subject, []).append(words)
        _check(all(len(words) <= 2 for words in said.values()))
        parts = [f"{subject}{' and '.join(words)}" for subject, words in said.items()]
        return f" whose {' and whose '.join(parts)}" if parts else ""

    def _condition(self, test: exp.Expr) -> tuple[str, str]:
        """Subject with its verb, and the words of a test."""
        if isinstance(test, exp.Or):
            sides = list(test.flatten())
            _check(all(type(one) is exp.EQ for one in sides) and len({one.this.sql() for one in sides}) == 1)
            test = exp.In(this=sides[0].this, expressions=[one.expression for one in sides])
        is_not = isinstance(test, exp.Not)
        if is_not:
            test = test.this.unnest()
            _check(isinstance(test, exp.Is | exp.In))
        left, kind = test.this, type(test)
        if kind in _TURNED and isinstance(left, exp.Literal):
            kind, left, right = _TURNED[kind], test.expression, test.this
        else:
            right = test.args.get("expression")
        if part := _part(left):
            named = self._column(part[1])
            _check(kind is exp.EQ and not is_not and named.column.kind == "date")
            _check(bool(re.fullmatch(r"\d{4}", right.unnest().name)))
            return f"{named.words} is ", f"in {right.unnest().name}"
        named = self._column(left)
        column = named.column
        verb = "are" if is_plural(column.noun) else "is"
        subject = f"{named.words} {verb} "
        if kind is exp.Is:
            _check(isinstance(right, exp.Null))
            return subject, "not missing" if is_not else "missing"
        is_negated = is_not or kind is exp.NEQ or test.args.get("negate")
        _check(not (is_negated and column.has_nulls))
        if kind is exp.In:
            values = [self._value(column, one, is_end=True) for one in test.expressions]
            _check(1 <= len(values) <= 5)
            listed = _listed(values, joint="nor" if is_not else "or")
            return subject, f"neither {listed}" if is_not else listed
        if kind is exp.Between:
            low, high = (self._value(column, test.args[end], is_end=end == "high") for end in ("low", "high"))
            return subject, f"from {low} to {high}"
        if kind is exp.Like or kind is exp.ILike:
            found = re.fullmatch(r"(%?)([^%_\\\"]+)(%?)", right.name)
            if not (isinstance(right, exp.Literal) and found and column.kind == "text"):
                raise _NoWords
            before, text, after = found.groups()
            _check(bool(before or after) and text == plain_text(text))
            how = "contain{}" if before and after else "end{} with" if before else "start{} with"
            how = f"does not {how.format('')}" if is_negated else how.format("s")
            return f"{named.words} {how} ", f'"{text}"'
        if isinstance(right, exp.Column):
            other = self._column(right)
            _check(kind in _BOUNDS and column.kind == other.column.kind == "number" and not named.owner)
            return subject, f"{_BOUNDS[kind][0]} the {other.words}"
        if kind in (exp.EQ, exp.NEQ):
            return subject, ("not " if kind is exp.NEQ else "") + self._value(column, right, is_end=True)
        _check(kind in _BOUNDS and column.kind != "text")
        is_year = "year" in column.noun.split() and kind in (exp.GT, exp.LT)
        amount, day = _BOUNDS[kind]
        word = day if column.kind == "date" or is_year else amount
        return subject, f"{word} {self._value(column, right, is_end=kind in (exp.GT, exp.LTE))}"

    def _value(self, column: Column, node: exp.Expr, *, is_end: bool = False) -> str:
        """A literal in words; with `is_end`, a day stands for all of it, so that moments are refused."""
        node = node.unnest()
        node = node.this if isinstance(node, exp.Cast) else node
        if column.kind == "date":
            is_day = all(len(str(value)) == 10 for value in column.values)
            text = node.name if is_day else _MIDNIGHT.sub("", node.name)
            _check(isinstance(node, exp.Literal) and is_calendar_day(text) and (is_day or not is_end))
            return day_words(text)
        if column.kind == "number":
            return _number(node)
        _check(isinstance(node, exp.Literal))
        _check(bool(node.name) and node.name == plain_text(node.name) and '"' not in node.name)
        return f'"{node.name}"'

    def _phrase(self, node: exp.Expr) -> str:
        """Words of a column, or of a part of a date."""
        node = self._unaliased(node)
        if part := _part(node):
            named = self._column(part[1])
            _check(named.column.kind == "date")
            owner = named.owner or f"{self._row}'s "
            return f"{part[0]} of the {owner}{named.column.noun}"
        return self._column(node).words

    def _column(self, node: exp.Expr) -> _Named:
        table, name = self._table(node)
        role = self._roles[table]
        own = self._source.tables[role]
        known = next((one for one in own.columns if one.name == name), None)
        if known is None or (known.is_key and "label" not in known.roles):
            known = self._key(own, name)
        return _Named(known, self._source.owners[role])

    def _key(self, table: words.Table, name: str) -> Column:
        """A key as a column: "ID", or "customer ID" for that of another table."""
        found = self._profile.tables[table.name].columns.get(name)
        said = identifier_words(name)
        noun = said.removesuffix("id").strip()
        if not (found and found.kind and said.endswith("id") and is_english(noun or "key")):
            raise _NoWords
        noun = "ID" if noun in ("", table.noun) else f"{noun} ID"
        return Column(table.name, name, noun, found.kind, True, found.has_nulls, found.values)

    def _table(self, node: exp.Expr) -> tuple[str, str]:
        """Names of the table and the column of a column, as declared."""
        if not isinstance(node, exp.Column):
            raise _NoWords
        names = [self._tables.get(node.table.lower(), "")] if node.table else self._tables.values()
        found = [
            (table, one.name)
            for table in filter(None, names)
            for one in self._declared[table].columns
            if one.name.lower() == node.name.lower()
        ]
        _check(len(found) == 1)
        return found[0]

    def _unaliased(self, node: exp.Expr) -> exp.Expr:
        """Expression that the name of an output column, or its number, stands for."""
        selects = self._tree.selects
        if isinstance(node, exp.Literal) and node.name.isdigit() and int(node.name) <= len(selects):
            return selects[int(node.name) - 1].unalias()
        is_alias = isinstance(node, exp.Column) and not node.table
        return self._aliases.get(node.name.lower(), node) if is_alias else node

    def _joined(self, database: Database) -> Source:
        """Source of the query's tables and joins, each row of whose first table is in it once."""
        names = set(self._tables.values())
        _check(len(names) == len(list(self._tree.find_all(exp.Table))))
        pairs = set[frozenset[tuple[str, str]]]()
        for join in self._tree.args.get("joins") or []:
            _check(join.kind in ("", "INNER"))
            for test in _all(join.args["on"]) if join.args.get("on") else ():
                _check(isinstance(test, exp.EQ))
                pairs.add(frozenset(map(self._table, (test.this, test.expression))))
            for shared in join.args.get("using") or []:
                _check(len(names) == 2)
                pairs.add(frozenset(self._table(exp.column(shared.name, alias)) for alias in self._tables))
        _check(len(pairs) == len(names) - 1)
        fitting = (
            source
            for source in database.sources
            if not source.link and source.pairs == pairs and set(source.names) == names
        )
        source = next(fitting, None)
        if source is None:
            raise _NoWords
        # Rows without a partner are left out: the question must name what they lack.
        group = self._tree.args.get("group")
        parts = [self._unaliased(key) for key in (group.expressions if group else [])]
        parts += [self._tree.args["where"]] if self._tree.args.get("where") else []
        named = {self._table(one)[0] for part in parts for one in part.find_all(exp.Column)}
        for pair in pairs:
            for side in pair:
                values = self._profile.tables[side[0]].columns.get(side[1])
                has_nulls = values is None or values.has_nulls
                _check(not has_nulls or named >= {table for table, _ in pair} - {side[0]})
        return source


def _all(test: exp.Expr) -> list[exp.Expr]:
    """Tests that AND joins."""
    test = test.unnest()
    return [one.unnest() for one in test.flatten()] if isinstance(test, exp.And) else [test]


def _part(node: exp.Expr) -> tuple[str, exp.Expr] | None:
    """Name of a part of a date, and the date; None for anything else."""
    while isinstance(node, exp.Cast | exp.Paren):
        node = node.this
    if isinstance(node, exp.Extract):
        part, source = _PARTS.get(node.name.upper()), node.expression
    elif isinstance(node, exp.TimeToStr):
        part, source = _PARTS.get(node.args["format"].name), node.this
    elif isinstance(node, exp.Year):
        part, source = "year", node.this
    else:
        return None
    while isinstance(source, exp.Cast | exp.TsOrDsToTimestamp | exp.TsOrDsToDate):
        source = source.this
    return (part, source) if part else None


def _number(node: exp.Expr) -> str:
    """A number as it is written; raises `_NoWords` for anything else."""
    sign = "-" if isinstance(node, exp.Neg) else ""
    literal = node.this if sign else node
    _check(isinstance(literal, exp.Literal) and bool(re.fullmatch(r"-?\d+(\.\d+)?", literal.name)))
    return sign + str(literal.name)


def _listed(words: Sequence[str], *, joint: str = "and", article: str = "") -> str:
    """Words in a row: "a, b and c".

    >>> _listed(["name", "city"], article="the ")
    'the name and the city'
    """
    parts = [article + word for word in words]
    return f" {joint} ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _check(is_worded: bool) -> None:
    """Raise `_NoWords` unless a rule applies."""
    if not is_worded:
        raise _NoWords
