"""Values of CSV files as people write them: amounts, dates and codes, which DuckDB takes for other kinds."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.sql.names import quote_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_CURRENCY = r"(?:[$€£¥₽₹₺₩]|[A-Z]{2,3}\$?|zł|kr\.?|Kč|Fr\.?)?"
_AMOUNT = rf"\s*[-+(]?\s*{_CURRENCY}\s*[-+]?\s*(?:BODY)\s*{_CURRENCY}\s*%?\s*[-)]?\s*"
_PATTERNS = {
    "code": r"[-+]?0\d+|\+\d{7,}",  # and offsets of UTC, phone numbers
    "thousands": r"-?\d{1,3}(?:\.\d{3})+",
    "either": r"(?:0?[1-9]|1[0-2])[/.-](?:0?[1-9]|1[0-2])[/.-]\d{4}.*",
}
_TEXT_PATTERNS = {
    "1,234.5": _AMOUNT.replace("BODY", r"\d{1,3}(?:[,\x27\x{2019} ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"),
    "1.234,5": _AMOUNT.replace("BODY", r"\d{1,3}(?:[.\x27\x{2019} \x{a0}]\d{3})+(?:,\d+)?|\d+(?:,\d+)?"),
    "separated": r".*\d[.,\x27\x{2019} ]\d.*",
    "lettered": ".*[A-Za-z].*",
    "blank": r"\s.*",
    "priced": ".*[$€£¥₽₹₺₩].*",
    "comma": ".*,.*",
    "point": r".*\..*",
}
_NOT_UNIT = r"[\d\s.,\x27\x{2019}\x{a0}()+-]"
_MARKS = (
    "'', ' ', '#N/A', 'N/A', 'NA', 'n/a', 'na', '#NA', '<NA>', 'NULL', 'null', 'None', 'none', 'NaN', 'nan', "
    "'-', '--', '\u2014', '?', '.', '..', '#DIV/0!', '#VALUE!', '#REF!'"
)
_SIGN = "CASE WHEN regexp_matches({0}, '[(-]') THEN -1 ELSE 1 END"
_NUMBERS = {
    "1,234.5": f"{_SIGN} * CAST(regexp_replace({{0}}, '[^0-9.]', '', 'g') AS DOUBLE)",
    "1.234,5": f"{_SIGN} * CAST(replace(regexp_replace({{0}}, '[^0-9,]', '', 'g'), ',', '.') AS DOUBLE)",
}
_DAYS = (
    *("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y.%m.%d", "%d %b %Y", "%d %B %Y"),
    *("%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d. %B %Y", "%a %d %b %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_MOMENTS = tuple(f"{day}{time}" for day in _DAYS for time in _TIMES)
_KEPT_AS_TEXT = "holds codes that begin with 0: kept as text"

_logger = logging.getLogger(__name__)


def columns_of_csv(connection: "DuckDBPyConnection", file: Path, reader: str) -> tuple[str, str]:
    """Columns of a CSV file in SQL, and the call that reads them.

    An amount such as `$1,115.50`, `1.234,56 EUR` or `(12,5)` and a date such as `12 Jan 2024` become a number
    and a date, if all values of the column can be read so, in one way, and all amounts have one unit. A mark
    such as `N/A` among numbers or dates is a missing value. A code such as `01067` or `+4915112345` stays a
    text. What is changed, and what can be read in two ways, is logged.

    Args:
        reader: DuckDB's call that reads the file, with a parameter for its path.
    """
    path, options = [str(file)], reader.removesuffix(")")
    kinds, unmarked = (
        {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE FROM {call}", path).fetchall()}
        for call in (reader, f"{options}, nullstr = [{_MARKS}])")
    )
    tests = [
        (name, form, test)
        for name, kind in kinds.items()
        for form, test in _tests(name, kind, unmarked[name])
    ]
    counted = [f"count({_unmarked(name)})" for name in kinds]
    counted += [test for _, _, test in tests]
    counting = f"SELECT {', '.join(counted)} FROM {options}, all_varchar = true)"
    found = connection.execute(counting, path).fetchone() or ()
    sizes = dict(zip(kinds, found, strict=False))
    counts = {(name, form): n for (name, form, _), n in zip(tests, found[len(kinds) :], strict=True)}
    shown, changed = [], defaultdict[str, list[str]](list)
    for name, kind in kinds.items():
        some = {form for (owner, form), n in counts.items() if owner == name and n}
        every = {form for form in some if counts[name, form] == sizes[name]}
        change, column = _change(name, kind, unmarked[name], every=every, some=some)
        if change:
            changed[change].append(name)
        shown.append(f"{column} AS {quote_name(name, 'duckdb')}")
    for change, names in changed.items():
        columns = f"column {names[0]}" if len(names) == 1 else f"each of the columns {', '.join(names)}"
        _logger.warning("%s: %s %s", file.name, columns, change)
    kept = [name.replace("'", "''") for name in changed[_KEPT_AS_TEXT]]
    types = ", ".join(f"'{name}': 'VARCHAR'" for name in kept)
    return ", ".join(shown), f"{options}, types = {{{types}}})" if types else reader


def _unmarked(name: str) -> str:
    """A column of texts in SQL, NULL where it holds a mark of a missing value."""
    column = quote_name(name, "duckdb")
    return f"CASE WHEN trim({column}) NOT IN ({_MARKS}) THEN {column} END"


def _tests(name: str, kind: str, unmarked: str) -> Iterator[tuple[str, str]]:
    """Forms that values of a column may have, and the number of values in SQL of each; see `_change`.

    `units` counts 1 if the amounts have different units.
    """
    is_text = kind == "VARCHAR"
    column = _unmarked(name) if is_text else quote_name(name, "duckdb")
    for form, pattern in (_PATTERNS | _TEXT_PATTERNS if is_text else _PATTERNS).items():
        yield form, f"count_if(regexp_full_match({column}, '{pattern}'))"
    if is_text:
        unit = f"regexp_replace({column}, '{_NOT_UNIT}', '', 'g')"
        yield "units", f"(min({unit}) <> max({unit}))::INT"
        yield "cast", f"count(try_cast({column} AS {unmarked}))"
    for form in _MOMENTS if is_text else ():
        yield form, f"count(try_strptime({column}, '{form}'))"


def _change(name: str, kind: str, unmarked: str, *, every: set[str], some: set[str]) -> tuple[str, str]:
    """Change of a column, for the log, or empty, and its SQL.

    Without marks of missing values DuckDB takes it for `unmarked`. All values have each form of `every`, at
    least one has each form of `some`.
    """
    column = quote_name(name, "duckdb")
    if kind == "VARCHAR" and "code" not in some:
        if unmarked != kind and "cast" in every:  # not for 31.12.2024, which only the reader of CSV takes
            change = "holds marks of missing values: read as without them"
            return change, f"CAST({_unmarked(name)} AS {unmarked})"
        change, read = _read_as(_unmarked(name), every, some)
        if not change and "blank" in every:
            return "begins with a blank in all rows: read without it", f"trim({column})"
        return change, read or column
    if kind in ("BIGINT", "DOUBLE") and "code" in some:
        return _KEPT_AS_TEXT, column
    if kind == "DOUBLE" and "thousands" in every:
        return "holds numbers such as 1.234: read as decimals, not as thousands", column
    if kind.startswith(("DATE", "TIMESTAMP")) and "either" in every:
        return "holds dates that can be read with the day or the month first", column
    return "", column


def _read_as(column: str, every: set[str], some: set[str]) -> tuple[str, str]:
    """Change of a column of texts and its SQL, see `_change`; both empty for the column as it is."""
    numbers = [form for form in _NUMBERS if form in every]
    days = [form for form in _MOMENTS if form in every]
    is_code = "lettered" in some and "separated" not in some  # JAF-001, or USD 5
    if numbers and "units" in some:
        return "" if is_code else "holds amounts in different units: kept as text", ""
    if len(numbers) == 1:
        return f"holds amounts like {numbers[0]}: read as numbers", _NUMBERS[numbers[0]].format(column)
    if numbers and "priced" in every and len({"comma", "point"} & some) == 1:  # no price has three decimals
        form = "1,234.5" if "comma" in some else "1.234,5"
        return f"holds prices like ${form[:5]}: read as thousands", _NUMBERS[form].format(column)
    if numbers and "separated" in some:
        return "holds amounts that can be read in two ways: kept as text", ""
    if numbers and is_code:
        return "", ""
    if numbers:
        return "holds amounts like $5 or 5%: read as numbers", _NUMBERS["1,234.5"].format(column)
    if len(days) > 1:
        return "holds dates that can be read in two ways: kept as text", ""
    if not days:
        return "", ""
    kind = "DATE" if not any(time in days[0] for time in ("%H", "%I")) else "TIMESTAMP"
    return f"holds dates like {days[0]}: read as dates", f"CAST(strptime({column}, '{days[0]}') AS {kind})"
