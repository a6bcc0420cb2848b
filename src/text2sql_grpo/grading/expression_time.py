"""Bound on the time that the expressions of one database's schema take in this process.

Test databases are made here, so the generated columns, CHECKs, indexes and views of a file run here too.
SQLite counts its instructions, but one instruction may call a function that takes seconds: `replace` on long
texts. A function's time grows with the lengths of its arguments, so values are short in test databases. Time
beyond what the count explains is taken from a budget of the database.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from text2sql_grpo.errors import DataError

MAX_BYTES = 16_000  # of a value: a call of `replace` takes 10 ms at most
BUDGET_S = 5.0  # processor seconds
_STEP_S = 2e-6  # of one instruction, ten times what most take
_FREE_S = 1e-3  # of one statement
_STEPS_OF_A_CALL = 500


class SlowExpressionsError(DataError):
    """The expressions of a schema have used up their budget."""

    def __init__(self) -> None:
        super().__init__(
            f"generated columns, CHECKs, indexes or views of the database took {BUDGET_S:g} s longer than"
            " their number of instructions explains"
        )


class ExpressionTime:
    """Budget of one database.

    Attributes:
        left_s: Processor seconds that are left.
    """

    def __init__(self) -> None:
        self.left_s = BUDGET_S

    @contextmanager
    def metered(self, connection: sqlite3.Connection, max_steps: float = float("inf")) -> Iterator[None]:
        """Context of one statement, or a few; SQLite interrupts it after `max_steps` instructions.

        Raises:
            SlowExpressionsError: The budget is used up, before or by this statement.
        """
        if self.left_s <= 0:
            raise SlowExpressionsError
        started, calls = time.thread_time(), 0

        def excess_s() -> float:
            return time.thread_time() - started - _FREE_S - calls * _STEPS_OF_A_CALL * _STEP_S

        def is_over() -> bool:
            nonlocal calls
            calls += 1
            return calls * _STEPS_OF_A_CALL >= max_steps or excess_s() > self.left_s

        connection.set_progress_handler(is_over, _STEPS_OF_A_CALL)
        try:
            yield
        finally:
            connection.set_progress_handler(None, 0)
            self.left_s -= max(0.0, excess_s())
            if self.left_s <= 0:
                raise SlowExpressionsError
