"""The attacks of this folder, one JSON object a line; see `Attack`."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SHORT_LIMIT_S = 0.1  # of attacks on the time limit
LONG_LIMIT_S = 60.0  # of the others, which end by themselves


@dataclass(frozen=True)
class Attack:
    """One text that a model may write, and what becomes of it.

    Attributes:
        category: What it is after.
        name: Of this attack, for a human; the beginning of its text if the line gives none.
        sql: Its text. In the file, a word in braces may stand for a part repeated many times: `repeat`
            gives the part and the number.
        status: The outcomes allowed; several where SQLite was built without something, or where either of
            two limits comes first.
        rows: What a harmless one returns; None if it must not return rows, or if they are cut at a cap.
        is_truncated: True if its rows are cut at a cap.
    """

    category: str
    name: str
    sql: str
    status: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...] | None = None
    is_truncated: bool = False

    @property
    def timeout_s(self) -> float:
        return SHORT_LIMIT_S if "timeout" in self.status else LONG_LIMIT_S


@cache
def load_attacks(engine: str) -> list[Attack]:
    """The attacks on `sqlite`, `duckdb` or `postgresql`."""
    lines = (Path(__file__).parent / f"{engine}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_attack(**json.loads(line)) for line in lines]


def _attack(
    category: str,
    status: list[str],
    sql: str,
    name: str = "",
    repeat: dict[str, tuple[str, int]] | None = None,
    rows: list[list[Any]] | None = None,
    is_truncated: bool = False,
) -> Attack:
    name = name or " ".join(sql[:60].encode("ascii", "backslashreplace").decode().split())
    for word, (part, times) in (repeat or {}).items():
        sql = sql.replace(word, part * times)
    kept = None if rows is None else tuple(map(tuple, rows))
    return Attack(category, name, sql, tuple(status), kept, is_truncated)
