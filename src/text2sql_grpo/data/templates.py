"""Templates of questions: SQL patterns, each with at least five phrasings.

Slots are drawn in order (by `drafts.py`), each from the columns of the template's table; `parent.` before a
slot draws from the other table of a join. Kinds of slots:

- `said`: a condition on a value stored otherwise than people say it; phrases with `{said}` and `{value}`
  are not used for flags;
- `text`, `amount`, `date`, `null`: other conditions;
- `column`: any column to show; `short`: one with few distinct values; `repeated`: one with repeats;
- `number`: a column to average or rank by (`{measure}`: without its unit); `total`: one to add up;
- `group`: a column of categories.

The conditions together are `{where}`; `{k}` is a small number; `{row}`, `{rows}` and `{parents}` are the
nouns of the tables' rows; an `s` behind any other slot makes its plural (`{columns}`); `{join}` is the
table with its parent.
"""

from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["easy", "medium", "hard"]


@dataclass(frozen=True)
class Template:
    """One SQL pattern.

    Attributes:
        is_held_out: Used for the questions of `test_templates` alone.
        weight: Number of questions for each one of a template of weight 1. Plain look-ups are the most
            frequent.
    """

    name: str
    difficulty: Difficulty
    slots: tuple[str, ...]
    sql: str
    phrases: tuple[str, ...]
    is_held_out: bool = False
    weight: int = 1

    @property
    def family(self) -> str:
        return self.name.partition("_")[0]

    @property
    def is_join(self) -> bool:
        return "{join}" in self.sql


# Shared by templates with and without conditions; the gap that an empty {where} leaves is closed.
_COUNTED = (
    "How many {rows} {where} are there?",
    "How many {rows} {where} do we have?",
    "Count the {rows} {where}.",
    "What is the number of {rows} {where}?",
    "Please count all {rows} {where}.",
    "I need the number of {rows} {where}.",
    "Can you tell me how many {rows} {where} are on file?",
    "Number of {rows} {where}?",
)
_LISTED = (
    "List the {column} of every {row} {where}.",
    "What is the {column} of each {row} {where}?",
    "Show the {column} of all {rows} {where}.",
    "Give me the {columns} of the {rows} {where}.",
    "I would like to see the {column} of each {row} {where}.",
    "What are the {columns} of the {rows} {where}?",
    "For all {rows} {where}, show the {column}.",
    "{columns} of all {rows} {where}, please.",
)
_AVERAGED = (
    "What is the average {number} of {rows} {where}?",
    "Find the mean {number} of all {rows} {where}.",
    "On average, what is the {number} of {rows} {where}?",
    "Average {number} of the {rows} {where}?",
    "Work out the average {number} across all {rows} {where}.",
    "I want to know the average {number} of {rows} {where}.",
    "Taking all {rows} {where} together, what is their mean {number}?",
)
_TOTALLED = (
    "What is the total {total} of {rows} {where}?",
    "Add up the {total} of all {rows} {where}.",
    "Find the sum of the {total} over all {rows} {where}.",
    "What does the {total} of all {rows} {where} add up to?",
    "I need the total {total} for {rows} {where}.",
    "Sum of the {total} of all {rows} {where}?",
)
_HIGHEST = (
    "What is the highest {number} of {rows} {where}?",
    "Find the largest {number} among {rows} {where}.",
    "What is the maximum {number} of all {rows} {where}?",
    "Among {rows} {where}, what is the greatest {number}?",
    "How high does the {number} of {rows} {where} go?",
    "Highest {number} of any of the {rows} {where}?",
    "Tell me the top {number} among all {rows} {where}.",
)
_DISTINCT_COUNTED = (
    "How many different values of {repeated} do {rows} {where} have?",
    "Count the distinct values of {repeated} among {rows} {where}.",
    "What is the number of different values of {repeated} of {rows} {where}?",
    "How many different {repeateds} occur among {rows} {where}?",
    "Counting each {repeated} once, how many are there among {rows} {where}?",
    "Number of distinct values of {repeated} of {rows} {where}?",
)
_GROUP_COUNTED = (
    "How many {rows} {where} are there for each {group}?",
    "Count the {rows} {where} for each {group}.",
    "For each {group}, show the number of {rows} {where}.",
    "For every {group}, how many {rows} {where} do we have?",
    "Give me the {group} and the number of {rows} {where} for each.",
    "Number of {rows} {where} by {group}?",
    "Break down the number of {rows} {where} by {group}.",
)
_ACROSS_COUNTED = (
    "How many {rows} belong to {parents} {where}?",
    "Count the {rows} of {parents} {where}.",
    "What is the number of {rows} of {parents} {where}?",
    "How many {rows} do we have for {parents} {where}?",
    "Please count all {rows} that go with {parents} {where}.",
    "Looking only at {parents} {where}, how many {rows} are there?",
)
_ACROSS_LISTED = (
    "List the {column} of every {row} that belongs to {parents} {where}.",
    "Show the {column} of all {rows} of {parents} {where}.",
    "What is the {column} of each {row} of {parents} {where}?",
    "Give me the {columns} of the {rows} that go with {parents} {where}.",
    "For {parents} {where}, show the {column} of each {row}.",
    "I am looking for the {columns} of all {rows} of {parents} {where}.",
)
_ACROSS_AVERAGED = (
    "What is the average {number} of {rows} that belong to {parents} {where}?",
    "Find the mean {number} of all {rows} of {parents} {where}.",
    "On average, what is the {number} of {rows} of {parents} {where}?",
    "For {parents} {where}, what is the average {number} of the {rows}?",
    "Work out the average {number} of the {rows} that go with {parents} {where}.",
)
_ABOVE = (
    "How many {rows} have an above-average {measure}?",
    "Count the {rows} whose {measure} is above the average.",
    "How many {rows} have a higher {measure} than the average?",
    "What is the number of {rows} whose {measure} is higher than average?",
    "Compared with the average {measure}, how many {rows} are above it?",
    "How many of the {rows} exceed the average {measure}?",
)
_BELOW = (
    "How many {rows} have a below-average {measure}?",
    "Count the {rows} whose {measure} is below the average.",
    "How many {rows} have a lower {measure} than the average?",
    "What is the number of {rows} whose {measure} is lower than average?",
    "Compared with the average {measure}, how many {rows} are below it?",
    "How many of the {rows} stay under the average {measure}?",
)

TEMPLATES = (
    Template(
        "lookup_count",
        "easy",
        ("said",),
        "SELECT COUNT(*) FROM {table} WHERE {where}",
        (
            *_COUNTED,
            "How many {rows} have the {said} {value}?",
            "For the {said} {value}, how many {rows} are there?",
        ),
        weight=4,
    ),
    Template(
        "lookup_list",
        "easy",
        ("said", "column"),
        "SELECT {column} FROM {table} WHERE {where}",
        (*_LISTED, "For the {said} {value}, show the {column} of each {row}."),
        weight=3,
    ),
    Template(
        "lookup_average",
        "easy",
        ("said", "number"),
        "SELECT AVG({number}) FROM {table} WHERE {where}",
        (*_AVERAGED, "For the {said} {value}, what is the average {number} of the {rows}?"),
        weight=3,
    ),
    Template(
        "lookup_total",
        "easy",
        ("said", "total"),
        "SELECT SUM({total}) FROM {table} WHERE {where}",
        (*_TOTALLED, "For the {said} {value}, what is the total {total} of the {rows}?"),
        is_held_out=True,
    ),
    Template(
        "lookup_highest",
        "easy",
        ("said", "number"),
        "SELECT MAX({number}) FROM {table} WHERE {where}",
        (*_HIGHEST, "For the {said} {value}, what is the highest {number} of the {rows}?"),
        weight=3,
    ),
    Template(
        "lookup_distinct",
        "medium",
        ("said", "repeated"),
        "SELECT COUNT(DISTINCT {repeated}) FROM {table} WHERE {where}",
        (
            *_DISTINCT_COUNTED,
            "For the {said} {value}, how many different values of {repeated} do the {rows} have?",
        ),
    ),
    Template(
        "lookup_both",
        "medium",
        ("said", "amount"),
        "SELECT COUNT(*) FROM {table} WHERE {where}",
        _COUNTED,
    ),
    Template(
        "lookup_top",
        "medium",
        ("said", "number", "column"),
        "SELECT {column} FROM {table} WHERE {where} ORDER BY {number} DESC LIMIT 1",
        (
            "Among {rows} {where}, what is the {column} of the one with the highest {measure}?",
            "For the {said} {value}, show the {column} of the {row} with the highest {measure}.",
            "Of all {rows} {where}, show the {column} of the one with the largest {measure}.",
            "Take the {rows} {where}: what is the {column} of the one with the highest {measure}?",
            "Which {column} belongs to the {row} with the highest {measure} among {rows} {where}?",
            "Give me the {column} of the one with the top {measure} among all {rows} {where}.",
        ),
        weight=2,
    ),
    Template(
        "lookup_group",
        "medium",
        ("said", "group"),
        "SELECT {group}, COUNT(*) FROM {table} WHERE {where} GROUP BY {group}",
        (*_GROUP_COUNTED, "For the {said} {value}, count the {rows} for each {group}."),
    ),
    Template(
        "lookup_join",
        "hard",
        ("parent.said",),
        "SELECT COUNT(*) FROM {join} WHERE {where}",
        (*_ACROSS_COUNTED, "For {parents} with the {said} {value}, how many {rows} are there?"),
    ),
    Template(
        "lookup_across",
        "hard",
        ("parent.said", "column"),
        "SELECT {column} FROM {join} WHERE {where}",
        (*_ACROSS_LISTED, "For {parents} with the {said} {value}, show the {column} of each {row}."),
    ),
    Template(
        "lookup_mean",
        "hard",
        ("parent.said", "number"),
        "SELECT AVG({number}) FROM {join} WHERE {where}",
        (
            *_ACROSS_AVERAGED,
            "For {parents} with the {said} {value}, what is the average {number} of the {rows}?",
        ),
        is_held_out=True,
    ),
    Template(
        "list_column",
        "easy",
        ("column",),
        "SELECT {column} FROM {table}",
        _LISTED,
    ),
    Template(
        "list_distinct",
        "easy",
        ("short",),
        "SELECT DISTINCT {short} FROM {table}",
        (
            "What different values of {short} do {rows} have?",
            "List the distinct values of {short} among {rows}.",
            "Show every {short} of {rows} once.",
            "Which values of {short} occur among {rows}?",
            "Which different {shorts} are there among the {rows}?",
            "Give me a list of all {shorts} of {rows} without repeats.",
        ),
    ),
    Template(
        "count_rows",
        "easy",
        (),
        "SELECT COUNT(*) FROM {table}",
        (
            *_COUNTED,
            "How many {rows} are on record?",
            "How many {rows} are there in total?",
            "What is the total count of {rows}?",
            "How large is the number of {rows} in the database?",
        ),
    ),
    Template(
        "count_distinct",
        "easy",
        ("repeated",),
        "SELECT COUNT(DISTINCT {repeated}) FROM {table}",
        _DISTINCT_COUNTED,
    ),
    Template(
        "filter_text",
        "easy",
        ("text", "column"),
        "SELECT {column} FROM {table} WHERE {where}",
        _LISTED,
        weight=2,
    ),
    Template(
        "filter_amount",
        "easy",
        ("amount",),
        "SELECT COUNT(*) FROM {table} WHERE {where}",
        _COUNTED,
    ),
    Template(
        "filter_date",
        "easy",
        ("date", "column"),
        "SELECT {column} FROM {table} WHERE {where}",
        _LISTED,
    ),
    Template(
        "filter_both",
        "medium",
        ("date", "amount", "column"),
        "SELECT {column} FROM {table} WHERE {where}",
        _LISTED,
        is_held_out=True,
    ),
    Template(
        "aggregate_average",
        "easy",
        ("number",),
        "SELECT AVG({number}) FROM {table}",
        _AVERAGED,
    ),
    Template(
        "aggregate_total",
        "easy",
        ("total",),
        "SELECT SUM({total}) FROM {table}",
        _TOTALLED,
    ),
    Template(
        "aggregate_highest",
        "easy",
        ("number",),
        "SELECT MAX({number}) FROM {table}",
        _HIGHEST,
    ),
    Template(
        "aggregate_lowest",
        "easy",
        ("number",),
        "SELECT MIN({number}) FROM {table}",
        (
            "What is the lowest {number} of {rows}?",
            "Find the smallest {number} among {rows}.",
            "What is the minimum {number} of all {rows}?",
            "Among {rows}, what is the least {number}?",
            "How low does the {number} of {rows} go?",
            "Lowest {number} of any of the {rows}?",
        ),
    ),
    Template(
        "aggregate_some",
        "easy",
        ("date", "number"),
        "SELECT AVG({number}) FROM {table} WHERE {where}",
        _AVERAGED,
        is_held_out=True,
    ),
    Template(
        "order_highest",
        "medium",
        ("number", "column"),
        "SELECT {column} FROM {table} ORDER BY {number} DESC LIMIT 1",
        (
            "What is the {column} of the {row} with the highest {measure}?",
            "Show the {column} of the {row} with the largest {measure}.",
            "Which {column} does the {row} with the highest {measure} have?",
            "Give me the {column} of the {row} that has the largest {measure}.",
            "Of all {rows}, which one has the highest {measure}? Show its {column}.",
            "Looking at the {measure} of {rows}, what is the {column} of the highest one?",
        ),
    ),
    Template(
        "order_lowest",
        "medium",
        ("number", "column"),
        "SELECT {column} FROM {table} ORDER BY {number} LIMIT 1",
        (
            "What is the {column} of the {row} with the lowest {measure}?",
            "Show the {column} of the {row} with the smallest {measure}.",
            "Which {column} does the {row} with the lowest {measure} have?",
            "Give me the {column} of the {row} that has the smallest {measure}.",
            "Of all {rows}, which one has the lowest {measure}? Show its {column}.",
            "Looking at the {measure} of {rows}, what is the {column} of the lowest one?",
        ),
    ),
    Template(
        "order_top",
        "medium",
        ("number", "column"),
        "SELECT {column} FROM {table} ORDER BY {number} DESC LIMIT {k}",
        (
            "List the {column} of the {k} {rows} with the highest {measure}.",
            "Show the {column} of the top {k} {rows} by {measure}.",
            "What is the {column} of the {k} {rows} with the largest {measure}?",
            "Which {k} {rows} have the highest {measure}? Show the {column}.",
            "Give me the {columns} of the {k} {rows} with the largest {measure}.",
            "Top {k} {rows} by {measure}: what is their {column}?",
        ),
    ),
    Template(
        "order_bottom",
        "medium",
        ("number", "column"),
        "SELECT {column} FROM {table} ORDER BY {number} LIMIT {k}",
        (
            "List the {column} of the {k} {rows} with the lowest {measure}.",
            "Show the {column} of the bottom {k} {rows} by {measure}.",
            "What is the {column} of the {k} {rows} with the smallest {measure}?",
            "Which {k} {rows} have the lowest {measure}? Show the {column}.",
            "Give me the {columns} of the {k} {rows} with the smallest {measure}.",
            "Bottom {k} {rows} by {measure}: what is their {column}?",
        ),
        is_held_out=True,
    ),
    Template(
        "group_count",
        "medium",
        ("group",),
        "SELECT {group}, COUNT(*) FROM {table} GROUP BY {group}",
        _GROUP_COUNTED,
    ),
    Template(
        "group_average",
        "medium",
        ("group", "number"),
        "SELECT {group}, AVG({number}) FROM {table} GROUP BY {group}",
        (
            "What is the average {number} of {rows} for each {group}?",
            "For each {group}, show the mean {number} of {rows}.",
            "Find the average {number} of {rows} per {group}.",
            "For every {group}, what is the average {number} of its {rows}?",
            "Average {number} of {rows} by {group}?",
            "Give me the {group} and the mean {number} of the {rows} for each.",
        ),
    ),
    Template(
        "group_highest",
        "medium",
        ("group", "number"),
        "SELECT {group}, MAX({number}) FROM {table} GROUP BY {group}",
        (
            "What is the highest {number} of {rows} for each {group}?",
            "For each {group}, show the largest {number} of {rows}.",
            "Find the maximum {number} of {rows} per {group}.",
            "For every {group}, how high does the {number} of {rows} go?",
            "Highest {number} of {rows} by {group}?",
        ),
        is_held_out=True,
    ),
    Template(
        "join_list",
        "hard",
        ("parent.text", "column"),
        "SELECT {column} FROM {join} WHERE {where}",
        _ACROSS_LISTED,
        weight=2,
    ),
    Template(
        "join_count",
        "hard",
        ("parent.amount",),
        "SELECT COUNT(*) FROM {join} WHERE {where}",
        _ACROSS_COUNTED,
    ),
    Template(
        "join_average",
        "hard",
        ("parent.text", "number"),
        "SELECT AVG({number}) FROM {join} WHERE {where}",
        _ACROSS_AVERAGED,
        is_held_out=True,
    ),
    Template(
        "compare_count",
        "hard",
        ("number",),
        "SELECT COUNT(*) FROM {table} WHERE {number} > (SELECT AVG({number}) FROM {table})",
        _ABOVE,
    ),
    Template(
        "compare_list",
        "hard",
        ("number", "column"),
        "SELECT {column} FROM {table} WHERE {number} < (SELECT AVG({number}) FROM {table})",
        (
            "List the {column} of every {row} with a below-average {measure}.",
            "Show the {column} of all {rows} whose {measure} is below the average.",
            "What is the {column} of each {row} whose {measure} is lower than the average?",
            "Give me the {columns} of the {rows} that stay under the average {measure}.",
            "Which {rows} have a lower {measure} than average? Show the {column}.",
        ),
    ),
    Template(
        "compare_fewer",
        "hard",
        ("number",),
        "SELECT COUNT(*) FROM {table} WHERE {number} < (SELECT AVG({number}) FROM {table})",
        _BELOW,
        is_held_out=True,
    ),
    Template(
        "null_count",
        "easy",
        ("null",),
        "SELECT COUNT(*) FROM {table} WHERE {where}",
        _COUNTED,
    ),
    Template(
        "null_list",
        "easy",
        ("null", "column"),
        "SELECT {column} FROM {table} WHERE {where}",
        _LISTED,
    ),
)
