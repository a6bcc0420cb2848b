"""Words and values of a database, for the question generator."""

import logging
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import write_text
from text2sql_grpo.sql import schema as sql_schema
from text2sql_grpo.sql.names import plain_name, quote_name
from text2sql_grpo.synthesis.nouns import (
    column_noun,
    count_noun,
    flag_noun,
    identifier_words,
    is_english,
    is_flag_name,
    singular,
    singular_row,
    table_noun,
    vocabulary,
    with_article,
    without_layers,
    words_of,
)
from text2sql_grpo.synthesis.profile import Kind, Profile, TableProfile, Value, Values
from text2sql_grpo.synthesis.roles import names_rows, roles_of
from text2sql_grpo.synthesis.words_file import Words, read_words

logger = logging.getLogger(__name__)
MANY_FLAGS = 5  # columns of 0 and 1 in a table: they say which of many things a row has
_KEY_ENDING = re.compile("_?(id|code|no|num|number|key)$", re.I)
_TIMES = ("second", "minute", "hour", "day", "night", "week", "month", "quarter", "year")
_HEADER = """# How people call what the database holds. Edit any line; `data words` adds what is new.
# tables: a row, in the singular; null: no questions. columns: null: not asked about.
# said: stored value: as people say it. clauses: phrases for the value of a column, such as "on floor {}".
"""


@dataclass(frozen=True)
class Column:
    """One column, its noun phrase and its values.

    Attributes:
        is_key: Part of a primary or foreign key.
        values: Distinct values without NULL, sorted, see `profile.Values`.
        said: Stored value -> value as people say it, if the two differ; empty for most columns.
        clauses: Value as people say it -> phrases behind the plural of a row's noun ("on the Lisbon ward");
            under `""` those of any other value, with `{}` in its place.
        roles: See `roles_of`.
        repeated: Values that several rows hold.
    """

    table: str
    name: str
    noun: str
    kind: Kind
    is_key: bool
    has_nulls: bool
    values: tuple[Value, ...]
    said: Mapping[Value, str] = field(default_factory=dict)
    clauses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: frozenset[str] = frozenset()
    repeated: frozenset[Value] = frozenset()

    @property
    def sql(self) -> str:
        """Name in SQL, quoted if needed."""
        return quote_name(self.name)

    @cached_property
    def longest(self) -> int:
        """Number of characters of its longest value."""
        return max(len(str(value)) for value in self.values)


@dataclass(frozen=True)
class Table:
    """One table; `noun` names one row, and `is_link` says that rows only link those of two others.

    Attributes:
        row_count: Number of rows whose values were read.
    """

    name: str
    noun: str
    row_count: int
    columns: tuple[Column, ...]
    is_link: bool

    @property
    def sql(self) -> str:
        """Name in SQL, quoted if needed."""
        return quote_name(self.name)


@dataclass(frozen=True)
class Source:
    """Tables of a query: one, or one with one or two others joined to it.

    Attributes:
        sql: Text behind FROM.
        tables: The table whose rows are asked about under `""`, its parent under `parent`, another parent
            under `other`, the parent's parent under `far`.
        owners: Words before a column of each table: "customer's ".
        join: Text that joins the parent; empty for one table.
        on: Condition that joins the parent; empty for one table, or if rows of a third link the two.
        link: Name of the table that links the two, which no question is about; empty for none.
        pairs: Table and column of both sides of each join; empty for one table, or with a link.
    """

    sql: str
    tables: dict[str, Table]
    owners: dict[str, str]
    join: str = ""
    on: str = ""
    link: str = ""
    pairs: frozenset[frozenset[tuple[str, str]]] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables that it reads."""
        return (*(table.name for table in self.tables.values()), *filter(None, [self.link]))

    @property
    def has_parents_noun(self) -> bool:
        """True if the parent is called by its table's noun, not by that of the key."""
        return self.owners["parent"] in ("", f"{self.tables['parent'].noun}'s ")


@dataclass(frozen=True)
class Database:
    """A database with its words.

    Attributes:
        profile: Its tables, and the way to query it.
        tables: Its tables by name, with their nouns.
        sources: Tables and joins that a question may be asked about.
    """

    name: str
    split: str
    profile: Profile
    tables: Mapping[str, Table]
    sources: tuple[Source, ...]


def with_words(profile: Profile, name: str, words: Words, *, place: object) -> Database:
    """A database with the words that people use for its content; what they lack is worded by its names.

    Words for what is hidden are left out.

    Args:
        place: Where the words come from, for errors.

    Raises:
        DataError: The words name a table or column that the database lacks.
    """
    declared = [each.table for each in profile.tables.values()]
    known = {f"{table.name}.{column.name}" for table in declared for column in table.columns}
    asked = {*words.columns, *(words.said or {}), *words.clauses}
    absent = set(words.tables) - set(profile.tables) | (asked - known)
    hidden = [f"{name}." for name in profile.hidden]
    unknown = sorted(one for one in absent if not f"{one}.".lower().startswith(tuple(hidden)))
    if unknown:
        raise DataError(f"unknown tables or columns of the database {name!r}: {unknown} (at {place})")
    nouns = _table_nouns(profile, words)
    tables = {each: _with_words(profile.tables, each, noun, words) for each, noun in nouns.items()}
    single = [Source(table.sql, {"": table}, {"": ""}) for table in tables.values()]
    links = list(_links(profile, tables))
    every = (*single, *_joins(links), *_across(links))
    sources = tuple(source for source in every if not source.tables[""].is_link)
    return Database(name, words.split or "train", profile, tables, sources)


def add_words(profile: Profile, name: str, path: Path) -> int:
    """Write the words of a database for people to edit; what the file holds already stays.

    Returns:
        Number of words that were added.

    Raises:
        DataError: The file holds something else, or names what the database lacks.
    """
    kept = read_words(path if path.exists() else None)
    tables = with_words(profile, name, kept, place=path).tables
    columns = {f"{table.name}.{column.name}": column for table in tables.values() for column in table.columns}
    named: dict[str, dict[str, Any]] = {"tables": {}, "columns": {}, "said": {}}
    for table, one in profile.tables.items():
        named["tables"][table] = tables[table].noun if table in tables else None
        for place in (f"{table}.{column.name}" for column in one.table.columns):
            named["columns"][place] = columns[place].noun if place in columns else None
    for place, column in columns.items():
        if column.said:
            named["said"][place] = {str(value): form for value, form in column.said.items()}
    if kept.said is None and not named["said"]:
        del named["said"]  # an empty mapping would stop deriving said forms
    merged = {part: value for part, value in asdict(kept).items() if value}
    added = 0
    for part, words in named.items():
        known = merged.get(part, {})
        added += len(words.keys() - known.keys())
        merged[part] = words | known
    text = yaml.safe_dump(merged, allow_unicode=True, sort_keys=False, width=110)
    if any(mark in text for mark in "\x85\u2028\u2029"):  # PyYAML folds lines there, and reads another name
        text = yaml.safe_dump(merged, sort_keys=False, width=110)
    write_text(path, _HEADER + text)
    return added


def _joins(links: Sequence[Source]) -> Iterator[Source]:
    """Joins of a table with its parent, and with another parent or the parent's parent."""
    for link in links:
        yield link
        for second in links:
            child, parent = second.tables[""], second.tables["parent"]
            if parent not in link.tables.values() and child in link.tables.values():
                role, owner = ("other", "") if child is link.tables[""] else ("far", link.owners["parent"])
                tables = link.tables | {role: parent}
                owners = link.owners | {role: owner + second.owners["parent"]}
                pairs = link.pairs | second.pairs
                yield Source(f"{link.sql} {second.join}", tables, owners, pairs=pairs)


def _links(profile: Profile, tables: Mapping[str, Table]) -> Iterator[Source]:
    """Joins that a question can name without ambiguity.

    Their foreign key is the only one from its table to the other. Of two tables that refer to each other, one
    key has a name of its own: the department's head, the employee's department.
    """
    declared = {name: profile.tables[name].table for name in tables}
    n_keys = Counter((name, key.table) for name, table in declared.items() for key in table.foreign_keys)
    found: dict[tuple[str, str], Source] = {}
    for name, table in declared.items():
        for key in table.foreign_keys:
            child, parent = tables[name], tables.get(key.table)
            is_plain = len(key.columns) == len(key.references) == 1 and key.table != name
            if not is_plain or n_keys[name, key.table] > 1:
                continue
            if parent is None or not parent.columns or not (child.columns or child.is_link):
                continue
            (column,), (target,) = key.columns, key.references
            on = f"{child.sql}.{quote_name(column)} = {parent.sql}.{quote_name(target)}"
            join = f"JOIN {parent.sql} ON {on}"
            role = None
            if column.lower() != target.lower() or parent.noun == "person":
                role = column_noun(_KEY_ENDING.sub("", column), child.noun)
            is_role = role and role != child.noun and '"' not in role and not {"in", "of"} & set(role.split())
            owner = role if is_role else parent.noun
            # A candidate who is a person has the person's name.
            own_key = profile.tables[name].columns.get(column)
            is_person = owner == "person" and own_key is not None and own_key.is_unique
            owners = {"": "", "parent": "" if is_person else f"{owner}'s "}
            joined = {"": child, "parent": parent}
            pairs = frozenset([frozenset([(name, column), (key.table, target)])])
            source = Source(f"{child.sql} {join}", joined, owners, join, on, pairs=pairs)
            found[name, key.table] = source
    for (name, other), source in found.items():
        back = found.get((other, name))
        if back is None or not (source.has_parents_noun and back.has_parents_noun):
            yield source


def _across(links: Sequence[Source]) -> Iterator[Source]:
    """Joins of two tables over one whose rows link them: the actors of a film."""
    for first in links:
        link, other = first.tables[""], first.tables["parent"]
        for second in links if link.is_link else ():
            row = second.tables["parent"]
            if second.tables[""] is link and row is not other:
                sql = f"{link.sql} {second.join} {first.join}"
                owners = {"": "", "parent": f"with {with_article(other.noun)} whose "}
                yield Source(sql, {"": row, "parent": other}, owners, first.join, link=link.name)


def _table_nouns(profile: Profile, words: Words) -> dict[str, str]:
    """Noun of a row of each table that is asked about.

    Of tables with the same noun the only one that is named so keeps it (`orders`, next to `stg_orders`); the
    others have their names in quotes.
    """
    given = words.tables
    nouns = {name: given.get(name, _row_noun(profile.tables, name)) for name in profile.tables}
    holders = Counter(filter(None, nouns.values()))
    plain = {name: singular_row(identifier_words(name)) for name, noun in nouns.items() if noun is not None}
    named = Counter(plain.values())
    found = {}
    for name, noun in nouns.items():
        if noun is not None:
            is_named_so = plain[name] == noun and named[noun] == 1
            is_clear = holders[noun] == 1 or name in given or is_named_so
            found[name] = noun if noun and is_clear else f'"{name}" row'
    return found


def _row_noun(tables: Mapping[str, TableProfile], of: str) -> str:
    """Noun of a table's row by names; empty for a row that links others, and for a name that is not read."""
    profile = tables[of]
    foreign = {name for key in profile.table.foreign_keys for name in key.columns}
    is_bare = len(foreign) > 1 and foreign >= {column.name for column in profile.table.columns}
    if profile.is_link or is_bare or _is_foreign(profile):
        return ""
    return table_noun(_rows_name(profile.table), tables) or ""


def _is_foreign(profile: TableProfile) -> bool:
    """True if fewer than half of a table's names are English: then all of them are asked in quotes."""
    names = [without_layers(profile.table.name), *(column.name for column in profile.table.columns)]
    are_english = [is_english(name) for name in names if re.search(r"[^\W\d_]{4,}", name)]
    return 2 * sum(are_english) < len(are_english)


def _with_words(tables: Mapping[str, TableProfile], of: str, noun: str, words: Words) -> Table:
    profile, table = tables[of], tables[of].table
    is_named = not noun.endswith('" row') or not words.split
    given, keys = words.columns, {profile.key, *(one.name for one in table.columns if one.is_primary_key)}
    keys.update(name for key in table.foreign_keys for name in key.columns)
    derived = _column_nouns(profile, noun, keys)
    own = _column_nouns(profile, _row_noun(tables, of) or noun, keys)
    has_flags = sum(set(found.values) == {0, 1} for found in profile.columns.values()) >= MANY_FLAGS
    columns = []
    for declared in table.columns:
        name, found = declared.name, profile.columns.get(declared.name)
        if found is None or found.kind is None:
            continue
        place = f"{table.name}.{name}"
        is_key = name in keys
        flag = "" if is_key or words.split else _flag_role(declared, found, has_flags)
        phrase = given.get(place)
        if place not in given and is_named:
            phrase = flag_noun(name) if flag else derived[name]
            phrase = None if phrase and '"' in phrase and words.split else phrase
        if phrase is None:
            continue
        # A given word changes the text of questions, and what is asked only where the name is not read.
        read = own[name]
        known = phrase if words.split or read is None or '"' in read else read
        refers = is_key or _refers(known, found, (one for each, one in tables.items() if each != of))
        roles = (
            frozenset(["category", flag]) if flag else roles_of(known, found, profile.n_read, is_key=refers)
        )
        columns.append(
            Column(
                table=table.name,
                name=name,
                noun=phrase,
                kind=found.kind,
                is_key=is_key,
                has_nulls=found.has_nulls,
                values=found.values,
                said=_said(place, phrase, found.values, words),
                clauses=words.phrases(place),
                roles=roles,
                repeated=found.repeated or frozenset(),
            )
        )
    if not words.split and not any("label" in column.roles for column in columns):
        columns = _with_label(columns, profile, given)
    nouns = Counter(column.noun for column in columns)
    distinct = tuple(one if nouns[one.noun] == 1 else replace(one, noun=f'"{one.name}"') for one in columns)
    is_link = profile.is_link and noun.endswith('" row')
    return Table(table.name, noun, profile.n_read, distinct, is_link)


def _with_label(
    columns: Sequence[Column], profile: TableProfile, given: Mapping[str, str | None]
) -> list[Column]:
    """Columns with one that names a row, by its values; else with the key."""
    for number, column in enumerate(columns):
        found = profile.columns[column.name]
        if not column.is_key and names_rows(found):
            roles = roles_of(column.noun, found, profile.n_read, is_key=False, is_named=True)
            if "label" in roles:
                return [*columns[:number], replace(column, roles=roles), *columns[number + 1 :]]
    return [*(column for column in columns if column.name != profile.key), *_key_as_label(profile, given)]


def _key_as_label(profile: TableProfile, given: Mapping[str, str | None]) -> Iterator[Column]:
    """Key of a table whose rows have no name, by which a question shows them."""
    name = profile.key
    found = profile.columns.get(name) if name else None
    if name and found and found.kind in ("number", "text") and len(found.values) > 1:
        table, roles = profile.table, frozenset(["label"])
        stem = name.lower().removesuffix("id").strip("_ ")
        is_declared = any(column.is_primary_key for column in table.columns)
        is_own = name.lower().endswith("id") and (is_declared or stem in table.name.lower())
        derived = "ID" if is_own else f'"{name}"'
        if noun := given.get(f"{table.name}.{name}", derived):
            yield Column(table.name, name, noun, found.kind, True, False, found.values, roles=roles)


def _column_nouns(profile: TableProfile, table: str, keys: Container[str | None]) -> dict[str, str | None]:
    """Nouns of columns by their names, which are put in quotes if they are not English.

    The table's word at the beginning stays where another column ends in the same noun: "order date", next to
    "shipped date".
    """
    if _is_foreign(profile):
        return {name: None if name in keys else f'"{name}"' for name in profile.columns}
    nouns = {name: _column_noun(name, table, found) for name, found in profile.columns.items()}
    ends = [" ".join(["", *words_of(noun)]) for noun in nouns.values() if noun]
    for name, noun in nouns.items():
        if noun not in vocabulary()["names"] and sum(end.endswith(f" {noun}") for end in ends) > 1:
            nouns[name] = _column_noun(name, "", profile.columns[name])
    return nouns


def _column_noun(name: str, table: str, found: Values) -> str | None:
    noun = column_noun(name, table)
    if noun == table and found.kind == "text":
        return "name"
    if noun and found.kind == "date" and noun.split()[-1] in _TIMES:
        return "date" if noun in _TIMES else f'"{name}"'
    return count_noun(noun) or f'"{name}"' if noun and found.kind == "number" else noun


def _refers(noun: str, found: Values, others: Iterable[TableProfile]) -> bool:
    """True if a column ends in the noun of another table, and its numbers are keys of that table."""
    last = words_of(noun)[-1:]
    called = (one for one in others if singular_row(without_layers(one.table.name)).split()[-1:] == last)
    keys = (one.columns.get(one.key or "") for one in called)
    return found.kind == "number" and any(key and set(found.values) <= set(key.values) for key in keys)


def _flag_role(declared: sql_schema.Column, found: Values, has_flags: bool) -> Literal["boolean", "flag", ""]:
    """Role of a column that is true or false, else empty; `has_flags` if none needs the name of a flag."""
    if set(found.values) != {0, 1}:
        return ""
    if declared.cast_type.upper() in ("BOOLEAN", "BOOL"):
        return "boolean"
    return "flag" if has_flags or is_flag_name(declared.name) else ""


def _rows_name(table: sql_schema.Table) -> str:
    """Name of what a row is: the table's, or its key's if the table is called by its columns (`ZIP_CITY`)."""
    keys = [column.name for column in table.columns if column.is_primary_key]
    parts = [plain_name(column.name) for column in table.columns]
    is_called = len(parts) > 1 and "".join(parts) == plain_name(table.name)
    return keys[0] if is_called and len(keys) == 1 else table.name


def _said(place: str, noun: str, values: tuple[Value, ...], words: Words) -> dict[Value, str]:
    """Stored -> said for one column: from `words` if it maps any column, else derived."""
    if words.said is not None:
        given = words.said.get(place, {})
        said = {value: given[str(value)] for value in values if str(value) in given}
        if absent := sorted(set(given) - set(map(str, said))):
            logger.warning("said of %s: no row that was read holds %s", place, absent)
        if given and not _is_usable(said):
            raise DataError(f"said forms must be distinct and not the stored ones, got {said} ({place})")
        return said
    if set(noun.split()) & set(vocabulary()["contacts"]):
        return {}
    texts = [value for value in values if isinstance(value, str)]
    found: dict[Value, str] = {value: form for value in texts if (form := said_form(value))}
    found |= _without_numbers(texts)
    return found if len(found) * 2 > len(values) and len(found) > 1 and _is_usable(found) else {}


def _is_usable(said: Mapping[Value, str]) -> bool:
    forms = [form.lower() for form in said.values()]
    return len(set(forms)) == len(forms) and all(
        str(value).lower() != form.lower() for value, form in said.items()
    )


def said_form(stored: str) -> str | None:
    """Stored value as people say it, by a few rules; None if none applies.

    >>> said_form("IN_TRANSIT"), said_form("SMITH, J."), said_form("Lisbon")
    ('in transit', 'J. Smith', None)
    """
    if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", stored):
        return stored.replace("_", " ").lower()
    if person := re.fullmatch(r"([A-Z][\w'-]+), ([A-Z]\w*\.?)", stored):
        return f"{person[2]} {person[1].title()}"
    return None


def _without_numbers(stored: Sequence[str]) -> dict[Value, str]:
    """Values without the numbers that sort them (`02-Lisbon`); empty if these may be amounts (`14 days`).

    >>> _without_numbers(["01-Porto", "07-Rome"]), _without_numbers(["3 months", "6 months"])
    ({'01-Porto': 'Porto', '07-Rome': 'Rome'}, {})
    """
    found = [one for one in (re.fullmatch(r"(\d+)[-_. ]+([A-Za-z].*)", text) for text in stored) if one]
    numbers = sorted(int(one[1]) for one in found)
    is_padded = len({len(one[1]) for one in found}) == 1 and any(one[1].startswith("0") for one in found)
    is_serial = numbers[:1] in ([0], [1]) and numbers == [*range(numbers[0], numbers[-1] + 1)]
    names = [singular(one[2].lower()) for one in found]
    units = {*_TIMES, *map(singular, vocabulary()["measures"])}
    is_amount = any(not units.isdisjoint(map(singular, name.split())) for name in names)
    is_each_once = len(set(numbers)) == len(set(names)) == len(found)
    is_order = is_each_once and not is_amount and (is_padded or is_serial)
    return {one[0]: one[2] for one in found} if is_order else {}
