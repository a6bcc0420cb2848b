"""Values of CSV files as people write them: amounts, dates and codes, which DuckDB takes for other kinds."""

import logging
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.sql.names import quote_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_CURRENCY = r"(?:[$€£¥₽₹₺₩]|[A-Z]{2,3}\$?|zł|kr\.?|Kč|Fr\.?)?"
_AMOUNT = rf"\s*[-+(]?\s*{_CURRENCY}\s*[-+]?\s*(?:BODY)\s*{_CURRENCY}\s*%?\s*[-)]?\s*"
_POINT = _AMOUNT.replace("BODY", r"\d{1,3}(?:[,'\x{2019} ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_COMMA = _AMOUNT.replace("BODY", r"\d{1,3}(?:[.'\x{2019} \x{a0}]\d{3})+(?:,\d+)?|\d+(?:,\d+)?")
_CODE = r"0\d+"
_MISSING = (
    *("", " ", "#N/A", "N/A", "NA", "n/a", "na", "#NA", "<NA>", "NULL", "null", "None", "none", "NaN", "nan"),
    *("-", "--", "\u2014", "?", ".", "..", "#DIV/0!", "#VALUE!", "#REF!"),
)
_EITHER = r"(?:0?[1-9]|1[0-2])[/.-](?:0?[1-9]|1[0-2])[/.-]\d{4}.*"
_SEPARATED = r".*\d[.,'\x{2019} ]\d.*"
_THOUSANDS = r"-?\d{1,3}(?:\.\d{3})+"
_FORMS = {"1,234.5": _POINT, "1.234,5": _COMMA}
_SIGN = "CASE WHEN regexp_matches({0}, '[(-]') THEN -1 ELSE 1 END"
_NUMBERS = {
    "1,234.5": f"{_SIGN} * CAST(regexp_replace({{0}}, '[^0-9.]', '', 'g') AS DOUBLE)",
    "1.234,5": f"{_SIGN} * CAST(replace(regexp_replace({{0}}, '[^0-9,]', '', 'g'), ',', '.') AS DOUBLE)",
}
_DAYS = (
    *("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y.%m.%d", "%d %b %Y", "%d %B %Y"),
    *("%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d. %B %Y", "%a %d %b %Y"),
)
_TIMES = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M:%S %p")

_logger = logging.getLogger(__name__)


def columns_of_csv(connection: "DuckDBPyConnection", file: Path, reader: str) -> tuple[str, str]:
    """Columns of a CSV file in SQL, and the call that reads them.

    An amount such as `$1,115.50`, `1.234,56 EUR` or `(12,5)` and a date such as `12 Jan 2024` become a number
    and a date, if all values of the column can be read so, in one way. A mark such as `N/A` among numbers or
    dates is a missing value. A code such as `01067` stays a text. What is changed, and what can be read in
    two ways, is logged.

    Args:
        connection: Any connection to DuckDB.
        file: The file.
        reader: DuckDB's call that reads it, with a parameter for its path.
    """
    path = [str(file)]
    described = connection.execute(f"DESCRIBE SELECT * FROM {reader}", path).fetchall()
    kinds = {name: kind for name, kind, *_ in described}
    marks = ", ".join(f"'{mark}'" for mark in _MISSING)
    marked = f"DESCRIBE SELECT * FROM {reader.removesuffix(')')}, nullstr = [{marks}])"
    unmarked = {name: kind for name, kind, *_ in connection.execute(marked, path).fetchall()}
    texts = f"{reader.removesuffix(')')}, all_varchar = true)"
    times = ("", *(f" {time}" for time in _TIMES))
    formats = [f"{day}{time}" for day in _DAYS for time in times]
    asked: list[tuple[str, str, str]] = []
    for name, kind in kinds.items():
        column = _without(marks, name) if kind == "VARCHAR" else quote_name(name, "duckdb")
        patterns = {"code": _CODE, "thousands": _THOUSANDS, "either": _EITHER}
        if kind == "VARCHAR":
            patterns |= _FORMS | {"separated": _SEPARATED, "lettered": ".*[A-Za-z].*"}
            patterns |= {"blank": r"\s.*", "priced": ".*[$€£¥₽₹₺₩].*", "comma": ".*,.*", "point": r".*\..*"}
            asked += [(name, form, f"try_strptime({column}, '{form}') IS NOT NULL") for form in formats]
        asked += [(name, form, _matches(column, pattern)) for form, pattern in patterns.items()]
    counted = [f"count({_without(marks, name)})" for name in kinds]
    counted += [f"count_if({test})" for _, _, test in asked]
    found = connection.execute(f"SELECT {', '.join(counted)} FROM {texts}", path).fetchone() or ()
    sizes = dict(zip(kinds, found, strict=False))
    counts = {(name, form): n for (name, form, _), n in zip(asked, found[len(kinds) :], strict=True)}
    shown, kept, changed = [], [], defaultdict[str, list[str]](list)
    for name, kind in kinds.items():
        column = quote_name(name, "duckdb")
        some = [form for (owner, form), n in counts.items() if owner == name and n]
        every = [form for form in some if counts[name, form] == sizes[name]]
        change = ""
        if kind == "VARCHAR" and "code" not in some and unmarked[name] != kind:
            change = "holds marks of missing values: read as without them"
            column = f"CAST({_without(marks, name)} AS {unmarked[name]})"
        elif kind == "VARCHAR" and "code" not in some:
            change, read = _read_as(_without(marks, name), every, set(some))
            column = read or column
            if not change and "blank" in every:
                change, column = "begins with a blank in all rows: read without it", f"trim({column})"
        elif kind in ("BIGINT", "DOUBLE") and "code" in some:
            kept.append(name)
            change = "holds codes that begin with 0: kept as text"
        elif kind == "DOUBLE" and "thousands" in every:
            change = "holds numbers such as 1.234: read as decimals, not as thousands"
        elif kind.startswith(("DATE", "TIMESTAMP")) and "either" in every:
            change = "holds dates that can be read with the day or the month first"
        if change:
            changed[change].append(name)
        shown.append(f"{column} AS {quote_name(name, 'duckdb')}")
    for change, names in changed.items():
        columns = f"column {names[0]}" if len(names) == 1 else f"each of the columns {', '.join(names)}"
        _logger.warning("%s: %s %s", file.name, columns, change)
    types = ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}': 'VARCHAR'" for name in kept)
    call = f"{reader.removesuffix(')')}, types = {{{types}}})" if kept else reader
    return ", ".join(shown), call


def _without(marks: str, name: str) -> str:
    """A column of texts in SQL, NULL where it holds one of these marks."""
    column = quote_name(name, "duckdb")
    return f"CASE WHEN trim({column}) NOT IN ({marks}) THEN {column} END"


def _matches(column: str, pattern: str) -> str:
    return f"regexp_full_match({column}, '{pattern.replace(chr(39), chr(39) * 2)}')"


def _read_as(column: str, forms: list[str], some: set[str]) -> tuple[str, str]:
    """Change of a column of texts, for the log, and its SQL; empty for the column as it is.

    Args:
        column: Name in SQL.
        forms: Forms in which all its values can be read.
        some: Forms that at least one value has.
    """
    numbers = [form for form in forms if form in _NUMBERS]
    days = [form for form in forms if form.startswith("%")]
    if len(numbers) == 1:
        return f"holds amounts like {numbers[0]}: read as numbers", _NUMBERS[numbers[0]].format(column)
    if numbers and "priced" in forms and len({"comma", "point"} & some) == 1:  # no price has three decimals
        form = "1,234.5" if "comma" in some else "1.234,5"
        return f"holds prices like ${form[:5]}: read as thousands", _NUMBERS[form].format(column)
    if numbers and "separated" in some:
        return "holds amounts that can be read in two ways: kept as text", ""
    if numbers and "lettered" in some:
        return "", ""  # codes such as JAF-001, or USD 5
    if numbers:
        return "holds amounts like $5 or 5%: read as numbers", _NUMBERS["1,234.5"].format(column)
    if len(days) > 1:
        return "holds dates that can be read in two ways: kept as text", ""
    if not days:
        return "", ""
    kind = "DATE" if not any(time in days[0] for time in ("%H", "%I")) else "TIMESTAMP"
    return f"holds dates like {days[0]}: read as dates", f"CAST(strptime({column}, '{days[0]}') AS {kind})"
