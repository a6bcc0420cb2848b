"""One hardened PostgreSQL connection for untrusted SQL.

Effects are bounded by the role, which may not write or read files (`postgres_role.EXCESS`), by a read-only
transaction that is always rolled back, by a cursor (`DECLARE ... CURSOR FOR` accepts one query and nothing
else), by names that no query may hold (`postgres_role.guard_of`), and by `DISCARD ALL` after each query.
Time is bounded by the server's `statement_timeout`; if the server ignores it, the query is cancelled from
outside and the connection dropped.

What begins a transaction, the query and its first rows are asked for in one message (libpq's pipeline mode),
and the answers to what ends it are read before the next query: a query waits for one round trip.
"""

import contextlib
import json
import math
import os
import re
import selectors
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
from psycopg import postgres, pq
from psycopg.adapt import Buffer, Loader, Transformer
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import TextLoader

from text2sql_grpo.errors import DataError, ServerGoneError
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql.bounds import (
    TimeLimitReachedError,
    exact_number,
    failure,
    first_word,
    is_blank,
    keep_rows,
)
from text2sql_grpo.sql.failure_text import (
    NO_MEMORY,
    NO_PASSWORD,
    NOTHING_TO_RUN,
    ONLY_READING,
    SEVERAL_STATEMENTS,
    late_text,
)
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row
from text2sql_grpo.sql.postgres_role import DEFINERS, EXCESS, guard_of

CONNECT_TIMEOUT_S = 10
STARTING_UP_TIMEOUT_S = 15.0
FETCHED_ROWS = 100
GRACE_S = 0.05  # for the server's own time limit to be reported, before the connection is dropped
CLEANUP_TIMEOUT_S = 5.0
MAX_RIGHTS_SHOWN = 3

APPLICATION = "text2sql-grpo"  # in pg_stat_activity, unless the URL or PGAPPNAME names another

# Startup options, which `DISCARD ALL` restores. Nothing interrupts the compiling of a query (jit).
_OPTIONS = (
    "-c default_transaction_read_only=on -c jit=off -c cursor_tuple_fraction=1.0"
    " -c statement_timeout=60s -c lock_timeout=1s -c idle_in_transaction_session_timeout=60s"
    " -c TimeZone=UTC -c DateStyle=ISO -c IntervalStyle=postgres -c bytea_output=hex"
)
# Refused by their names, for a clearer text than the server's; the cursor would refuse them too.
_NOT_READING = frozenset(
    """
    ABORT ALTER ANALYZE BEGIN CALL CHECKPOINT CLOSE CLUSTER COMMENT COMMIT COPY CREATE DEALLOCATE DECLARE
    DELETE DISCARD DO DROP END EXECUTE FETCH GRANT IMPORT INSERT LISTEN LOAD LOCK MERGE MOVE NOTIFY PREPARE
    REASSIGN REFRESH REINDEX RELEASE RESET REVOKE ROLLBACK SAVEPOINT SECURITY SET SHOW START TRUNCATE
    UNLISTEN UPDATE VACUUM
    """.split()  # noqa: SIM905 (a list would take 50 lines)
)
# EXPLAIN ANALYZE makes temporary tables even in a read-only transaction. Keywords have one spelling.
_MAKING = re.compile(r"(?<![a-z_$])(?:create|into|refresh|execute|declare)(?![\w$])", re.IGNORECASE)
# The server starts, or recovers from a crash.
_STARTING_UP = ("starting up", "recovery mode", "not yet accepting", "closed the connection unexpectedly")
# Errors of a connection have no state. Those of a server that will not answer later either:
_REFUSED = re.compile(r"authentication|password|does not exist|no pg_hba|not permitted|certificate|translate")
_DENIED_STATES = frozenset(("42501", "25006", "42P11"))  # no right; read-only; not a query (SELECT INTO)
_SIZE_STATES = frozenset(("53100", "53200", "53400", "54000"))  # disk, memory, temporary files, value size
# Lost connection, shutdown, locked table, system error, corrupt data: never the query's fault.
_FAULT_STATES = ("08", "57P", "55P03", "58", "XX001", "XX002")


class _NumericLoader(Loader):
    def load(self, data: Buffer) -> int | float | str:
        return exact_number(Decimal(bytes(data).decode()))


class _BoolLoader(Loader):
    def load(self, data: Buffer) -> int:
        return int(data == b"t")


# The cheapest to set up; Windows has no poll.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)

# Read as values; every other type as the server's text.
_VALUE_TYPES = frozenset(("int2", "int4", "int8", "oid", "float4", "float8", "bytea", "numeric", "bool"))


_CHANGING = """
    SELECT proname::text FROM pg_proc WHERE provolatile = 'v' OR (provolatile = 's' AND pronargs = 0)
    UNION VALUES ('age')
"""
_TEXTS = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|(\$\w*\$).*?\1", re.DOTALL)
_CALLED = re.compile(r'(\w+)"?\s*\(')
_DAYS = re.compile(r"'\s*(now|today|tomorrow|yesterday)\s*'", re.IGNORECASE)  # dates, if they are cast to one
_CHANGING_WORDS = re.compile(r"\b(current_(date|time|timestamp)|localtime|localtimestamp|tablesample)\b")


def connected(location: str, **options: Any) -> psycopg.Connection[Any]:
    """New connection to a server.

    Raises:
        psycopg.Error: It failed, or took longer than `CONNECT_TIMEOUT_S`.
    """
    return psycopg.connect(
        location,
        client_encoding="UTF8",
        fallback_application_name=APPLICATION,
        connect_timeout=CONNECT_TIMEOUT_S,
        **options,
    )


def fingerprint_of(location: str) -> None:
    """None: a server has none."""


class HardenedPostgres:
    """One connection to one database, reopened when lost.

    Attributes:
        location: The URL, password included: never shown.
        is_volatile: True if the last query samples, or calls a function that the catalog declares volatile,
            or stable and without arguments, as those of the clock.
    """

    def __init__(self, location: str, fingerprint: None = None) -> None:
        """Connect.

        Raises:
            DataError: No such server, database or role, a wrong password, or a role with too many rights.
        """
        self.location = location
        self._shown = without_password(location)
        self.is_volatile = False
        self._n_pending = 0  # messages whose answers were not read to the end
        self._deadline = 0.0  # of `time.monotonic`, for the server to answer
        self._connection: psycopg.Connection[Any] | None = self._connected()

    def is_current(self) -> bool:
        """True: a lost connection is opened again."""
        return True

    def is_unchanged(self) -> bool:
        """True: a query reads one snapshot."""
        return True

    def close(self) -> None:
        """Close the connection; a later `run` opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._n_pending = 0

    def run(self, sql: str, limits: Limits) -> ExecutionOutcome:
        """Run a query that `why_unfit` accepts; the outcome has no time yet.

        Raises:
            DataError: The server is at fault, not the query.
        """
        text = _TEXTS.sub(" ", sql.lower())
        called = self._changing.intersection(_CALLED.findall(text))
        self.is_volatile = bool(called or _CHANGING_WORDS.search(text) or _DAYS.search(sql))
        if is_blank(sql):
            return failure("error", NOTHING_TO_RUN)
        word = first_word(sql)
        if word in _NOT_READING:
            return failure("denied", f"not allowed: {word}; {ONLY_READING}")
        guarded = self._guard.search(sql)
        if guarded:
            return failure("denied", f"not allowed: {guarded[0].lower()}; {ONLY_READING}")
        if word != "EXPLAIN":
            cursor = f"DECLARE result NO SCROLL CURSOR FOR {sql}"
            return self._answer([cursor, _fetch(limits.max_rows + 1)], limits)
        if making := _MAKING.search(sql):
            return failure("denied", f"not allowed: EXPLAIN with {making[0].upper()}; {ONLY_READING}")
        return self._answer([sql], limits)  # not of a cursor: the transaction and the role bound it

    def _answer(self, asked: list[str], limits: Limits) -> ExecutionOutcome:
        """Outcome of a query and its first FETCH, or of an EXPLAIN."""
        try:
            self._begin(asked, limits)
            return self._result(limits, is_explain=len(asked) == 1)
        except TimeLimitReachedError:
            self._abandon()
            return failure("timeout", late_text(limits.timeout_s))
        except MemoryError:
            self._abandon()
            return failure("memory", NO_MEMORY)
        except psycopg.Error as error:
            return self._outcome_of(error, limits)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._clean_up()

    def _result(self, limits: Limits, *, is_explain: bool) -> ExecutionOutcome:
        columns: list[str] = []
        self._read_answer()  # of SET
        if is_explain:
            fetched = self._rows(columns)
        else:
            self._read_answer()
            fetched = self._rows_of_cursor(limits.max_rows + 1, columns)
        rows, is_truncated = keep_rows(fetched, limits, self._deadline)
        if is_truncated and len(rows) < limits.max_rows:
            self._abandon()  # more bytes wait than are wanted
        return ExecutionOutcome("ok", tuple(columns), rows, is_truncated)

    def _outcome_of(self, error: psycopg.Error, limits: Limits) -> ExecutionOutcome:
        state = error.sqlstate or ""
        text = error.diag.message_primary or str(error)
        if state == "08P01":  # a protocol violation: no value was sent for a parameter
            return failure("error", "expected a query without parameters such as $1")
        if state == "57014" and time.monotonic() > self._deadline - 2 * GRACE_S:
            return failure("timeout", late_text(limits.timeout_s))
        if state.startswith(_FAULT_STATES) or state == "57014":
            raise self._fault(error) from None
        if not state and self._is_lost():
            return failure("error", "the database server closed the connection while the query ran")
        is_character = "character" in text  # chr(0) is over a limit too
        if (state in _SIZE_STATES and not is_character) or "out of memory" in text:
            return failure("memory", f"stopped: {text}")
        if state in _DENIED_STATES or (state == "0A000" and "data-modifying" in text):
            return failure("denied", f"not allowed: {text}; {ONLY_READING}")
        if "multiple commands" in text:
            return failure("error", SEVERAL_STATEMENTS)
        hint = f" ({error.diag.message_hint})" if error.diag.message_hint else ""
        return failure("error", text + hint)

    def _connected(self, patience_s: float = STARTING_UP_TIMEOUT_S) -> psycopg.Connection[Any]:
        give_up = time.monotonic() + patience_s
        chosen = conninfo_to_dict(self.location).get("options") or os.environ.get("PGOPTIONS", "")
        while True:
            connection = None
            try:
                # The URL's options, such as a search_path, come first: the last ones win.
                connection = connected(self.location, autocommit=True, options=f"{chosen} {_OPTIONS}")
                excess, definers, changing = (
                    [name for (name,) in connection.execute(query)] for query in (EXCESS, DEFINERS, _CHANGING)
                )
                break
            except psycopg.Error as error:
                if connection is not None:
                    connection.close()
                is_starting = any(text in str(error) for text in _STARTING_UP)
                if not is_starting or time.monotonic() > give_up:
                    raise self._fault(error) from None
            time.sleep(0.1)
        if excess:
            connection.close()
            raise DataError(
                f"the PostgreSQL role {listed(excess, MAX_RIGHTS_SHOWN)} (at {self._shown});"
                " use one that can only read tables: `text2sql-grpo role --print` prints its SQL"
            )
        self._guard = guard_of(definers)
        self._changing = set(changing)
        for kind in postgres.types:
            if kind.name not in _VALUE_TYPES:
                connection.adapters.register_loader(kind.oid, TextLoader)
        connection.adapters.register_loader("numeric", _NumericLoader)
        connection.adapters.register_loader("bool", _BoolLoader)
        connection.pgconn.enter_pipeline_mode()
        return connection

    def _fault(self, error: psycopg.Error) -> DataError:
        found = " ".join(str(error).split())
        is_gone = isinstance(error, psycopg.OperationalError) and (
            (error.sqlstate or "57P").startswith(("08", "57P")) and not _REFUSED.search(found)
        )
        kind = ServerGoneError if is_gone else DataError
        hint = f": {NO_PASSWORD}" if "password" in found else ""
        return kind(f"PostgreSQL failed: {found} (at {self._shown}){hint}")

    def _begin(self, asked: list[str], limits: Limits, *, is_last: bool = False) -> None:
        """Send a query in a new read-only transaction; reconnects once if the server had closed."""
        timeout_ms = max(1, math.ceil(limits.timeout_s * 1000))
        if not self._is_ready():
            self.close()
            # In time for the parent of a worker to wait for the server, instead of the query's time-out.
            self._connection = self._connected(0.8 * limits.timeout_s)
        self._deadline = time.monotonic() + limits.timeout_s + GRACE_S
        self._send("BEGIN READ ONLY", f"SET LOCAL statement_timeout = {timeout_ms}", *asked)
        try:
            self._read_answer()  # of BEGIN, which the server sends before it ends in a query
        except psycopg.errors.AdminShutdown:
            if is_last:
                raise
            self.close()
            self._begin(asked, limits, is_last=True)

    def _is_ready(self) -> bool:
        """False if there is no connection, the server has closed it, or `_clean_up` failed."""
        if self._connection is None:
            return False
        self._deadline = time.monotonic() + CLEANUP_TIMEOUT_S
        try:
            self._finish()
            self._connection.pgconn.consume_input()
        except (psycopg.Error, TimeLimitReachedError):
            return False
        return not self._is_lost()

    def _clean_up(self) -> None:
        """Ask for the end of the transaction and a reset of the session; `_finish` reads the answers."""
        if self._connection is None:
            return
        try:
            self._send("ROLLBACK")
            self._send("DISCARD ALL")
        except psycopg.Error:
            self.close()

    def _finish(self) -> None:
        """Read the rest of all answers; raises psycopg.Error if the session may not be as it was."""
        while self._n_pending:
            result = self._next_result()
            if result is None:
                continue
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                self._n_pending -= 1
            elif self._n_pending <= 2 and result.status == pq.ExecStatus.FATAL_ERROR:  # of `_clean_up`
                raise psycopg.errors.error_from_result(result, "utf-8")

    def _abandon(self) -> None:
        """Cancel the running query from outside, and drop the connection."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):  # the server does not answer: drop it all the same
                self._connection.cancel_safe(timeout=1.0)
            self.close()

    def _is_lost(self) -> bool:
        return self._connection is None or self._connection.pgconn.status != pq.ConnStatus.OK

    def _rows_of_cursor(self, n_rows: int, columns: list[str]) -> Iterator[Row]:
        while n_rows > 0:
            n_got = 0
            for row in self._rows(columns):
                n_got += 1
                yield row
            n_rows = n_rows - n_got if n_got == FETCHED_ROWS else 0
            if n_rows > 0:
                self._send(_fetch(n_rows))
                self._next_result()  # the end of the message before
                self._n_pending -= 1

    def _rows(self, columns: list[str]) -> Iterator[Row]:
        """Rows one by one, as the server sends them; sets the column names first."""
        transformer = None
        for result in self._results(one_by_one=True):
            if transformer is None:
                transformer = Transformer(self._connection)
                transformer.set_pgresult(result)
                columns[:] = [(result.fname(i) or b"").decode() for i in range(result.nfields)]
            else:
                transformer.set_pgresult(result, set_loaders=False)
            for row in transformer.load_rows(0, result.ntuples, tuple):
                yield tuple(map(_cell, row)) if list in map(type, row) else row

    def _send(self, *commands: str) -> None:
        """Send commands in one message; each is one statement, as the extended protocol takes no more."""
        assert self._connection is not None
        pgconn = self._connection.pgconn
        for command in commands:
            pgconn.send_query_params(command.encode(), None)
        pgconn.pipeline_sync()
        self._n_pending += 1

    def _read_answer(self) -> None:
        """Read the answer to a command that returns no rows."""
        for _ in self._results():
            pass

    def _results(self, *, one_by_one: bool = False) -> Iterator[pq.abc.PGresult]:
        """Results of the next command that was sent."""
        assert self._connection is not None
        if one_by_one:
            self._connection.pgconn.set_single_row_mode()
        error = None
        while (result := self._next_result()) is not None:
            if result.status in (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED):
                error = error or psycopg.errors.error_from_result(result, "utf-8")
            else:
                yield result
        if error is not None:
            raise error

    def _next_result(self) -> pq.abc.PGresult | None:
        """Next result, until the deadline; None after the last one of a command."""
        assert self._connection is not None
        pgconn = self._connection.pgconn
        with contextlib.suppress(psycopg.OperationalError):  # lost: the next result holds the reason
            while pgconn.is_busy():
                with _Selector() as selector:
                    selector.register(pgconn.socket, selectors.EVENT_READ)
                    if not selector.select(max(0.0, self._deadline - time.monotonic())):
                        raise TimeLimitReachedError
                pgconn.consume_input()
        result = pgconn.get_result()
        if result is None and self._is_lost():
            raise psycopg.OperationalError("the connection was lost")
        return result


def _fetch(n_rows: int) -> str:
    # The server stores what one FETCH asks for before it sends any of it.
    return f"FETCH FORWARD {min(n_rows, FETCHED_ROWS)} FROM result"


def _cell(value: Any) -> Any:
    if isinstance(value, list):  # an array
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=bytes.hex)
    return value


def without_password(location: str) -> str:
    """URL of a database for messages.

    Raises:
        DataError: It is malformed; names no part of it.
    """
    try:
        parts = conninfo_to_dict(location)
    except psycopg.ProgrammingError:
        parts = {"host": "@"}
    host, port, database = (str(parts.get(key, "")) for key in ("host", "port", "dbname"))
    # An unescaped `@` or `/` in the password moves a piece of it to another part, which errors would show.
    if "@" in host + database or not (port.replace(",", "") or "0").isdecimal():  # of several hosts
        raise DataError(
            "malformed PostgreSQL URL: write postgresql://user@host:5432/database and set PGPASSWORD;"
            " special characters in a URL are percent-encoded"
        )
    return f"postgresql://{parts.get('user', '')}@{host or 'localhost'}:{port or 5432}/{database}"
