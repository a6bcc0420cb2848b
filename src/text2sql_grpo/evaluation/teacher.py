"""Questions that a teacher model words for golds; another sample must answer each one as its gold does."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example, folded
from text2sql_grpo.data.question_files import only_name, read_questions
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.endpoint import Client, Endpoint, EndpointFailure, RequestRefused, in_parallel
from text2sql_grpo.files import append_jsonl, cut_lines, jsonl_text, read_jsonl, write_text
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.phrases import many
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.hidden import hide
from text2sql_grpo.sql.personal import PERSONAL
from text2sql_grpo.sql.schema import Schema, read_schema
from text2sql_grpo.sql.schema_text import estimated_tokens, schema_text
from text2sql_grpo.synthesis.teacher_prompts import (
    MAX_SQL,
    MAX_TOKENS,
    REASONS,
    STYLES,
    Messages,
    answer_prompt,
    question_prompt,
    read_question,
    read_sql,
    rows_text,
)

TEMPERATURE = 0.7
MAX_SCHEMA_TOKENS = 6_000
USUAL_TOKENS = 80  # of a reply, for estimates


@dataclass(frozen=True)
class Wording:
    """Question for one gold.

    Attributes:
        style: A key of `STYLES`.
        reason: `kept`, or a key of `REASONS`; empty if it was not graded yet.
        question: The question; empty if the reply holds none.
        sql: The query of the sample that answered it; empty if there is none.
        gap: Why a kept one was checked less than on its test databases; empty if it was not.
    """

    example: Example
    style: str
    reason: str = ""
    question: str = ""
    sql: str = ""
    gap: str = ""


def read_golds(path: Path, databases: Databases) -> list[Example]:
    """Rows of a question file; in JSONL the question may be absent or empty."""
    only = only_name(databases)
    if path.suffix.lower() in (".csv", ".json"):
        found = read_questions(path, database=only)
    else:
        lines = read_jsonl(path, "golds", skip_blank=True)
        rows = [row | {"question": row.get("question") or "-"} for row in lines]
        found = read_questions(rows, database=only)
    for question in found:
        databases.source(question.example.database)
    return [question.example for question in found]


class Teacher:
    """Wording of questions by a served model, with a log of each request that resumes a stopped run.

    Attributes:
        examples: The golds.
        wordings: Outcome for each gold so far, by its index.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        databases: Databases,
        executor: SQLExecutor,
        grader: Grader,
        endpoint: Endpoint,
        out: Path,
        *,
        seed: int = 0,
        real_rows: bool = False,
        prices: Sequence[float] = (0.0, 0.0),
    ) -> None:
        """Read the log, if there is one; nothing is sent.

        Args:
            out: File to write; its log stands next to it.
            real_rows: Show rows of the database instead of made-up ones.
            prices: Price of a million tokens read, and of a million written.

        Raises:
            ConfigError: `out` exists, and is not as a run with this log wrote it.
        """
        self.examples, self.wordings = examples, dict[int, Wording]()
        self.out, self.log = out, out.with_name(f"{out.stem}_log.jsonl")
        self._databases, self._executor, self._grader = databases, executor, grader
        self._endpoint, self._seed, self._real_rows, self._prices = endpoint, seed, real_rows, prices
        self._schema = cache(self._read_schema)
        self._lock = Lock()
        cut_lines(self.log)
        self._lines = list(read_jsonl(self.log, "the teacher's log")) if self.log.exists() else []
        asked = [line for line in self._lines if "text" in line]
        self._replies: dict[str, dict[str, Any]] = {_key(one["model"], one["messages"]): one for one in asked}
        self._verdicts = {json.dumps(line) for line in self._lines if "verdict" in line}
        written = {line.get("written") for line in self._lines}
        if out.exists() and hashlib.sha256(out.read_bytes()).hexdigest() not in written:
            raise ConfigError(f"--out would overwrite a file that was edited or is not of {self.log}: {out}")

    def style(self, place: int) -> str:
        """Style of the gold with this index: the styles take turns, from one of the seed."""
        return list(STYLES)[(place + self._seed) % len(STYLES)]

    def prompt(self, place: int) -> Messages:
        """Prompt for the question of a gold; it shows a test database, with made-up values, or real rows."""
        example = self.examples[place]
        engine, schema, text = self._schema(example.database)
        address, suite = self._databases.address(example.database), self._grader.suite
        shown = suite.databases(address, example.gold_sql).databases if suite else ()
        where = address if self._real_rows else shown[0] if shown else None
        masked = not self._real_rows
        rows = where and rows_text(self._executor, where, schema, example.gold_sql, is_masked=masked)
        return question_prompt(engine, text, rows or "", example.gold_sql, self.style(place))

    def _read_schema(self, database: str) -> tuple[str, Schema, str]:
        """Engine, schema and its text without stored values."""
        address = self._databases.address(database)
        schema = hide(read_schema(address), [PERSONAL]).schema
        text = schema_text(schema, "ddl", max_tokens=MAX_SCHEMA_TOKENS)
        return parse_address(address).engine.title, schema, text

    def estimate(self) -> tuple[int, int]:
        """Tokens to read and to write for all golds, from the prompts of three of them."""
        places = range(0, len(self.examples), -(-len(self.examples) // 3))
        read = 0
        for place in places:
            engine, _, text = self._schema(self.examples[place].database)
            read += _size(self.prompt(place)) + _size(answer_prompt(engine, text, "")) + USUAL_TOKENS
        n = len(self.examples)
        return read * n // len(places), 2 * n * USUAL_TOKENS

    def cost(self, read: float, written: float) -> float:
        """Price of tokens."""
        return (read * self._prices[0] + written * self._prices[1]) / 1e6

    def run(self, on_gold: Callable[[], None] = lambda: None) -> None:
        """Ask for every question and its answer, and write those that are kept, also if the endpoint fails.

        Raises:
            RunError: The endpoint refused the key or the model, or failed several times in a row.
        """

        def on_end(place: int, found: Wording) -> None:
            self._end(place, found if found.reason else self._graded(found))
            on_gold()

        def on_failure(place: int, failure: EndpointFailure) -> None:
            reason = "refused" if isinstance(failure, RequestRefused) else "failed"
            on_end(place, Wording(self.examples[place], self.style(place), reason))

        try:
            with closing(Client(self._endpoint, TEMPERATURE)) as client:
                tasks = [partial(self._worded, client, place) for place in range(len(self.examples))]
                in_parallel(tasks, self._endpoint, on_end, on_failure)
        finally:
            self._write_kept()

    def _end(self, place: int, found: Wording) -> None:
        """Store an outcome, and log it unless an earlier run did."""
        self.wordings[place] = found
        line = {"id": found.example.id, "verdict": found.reason, "style": found.style}
        line |= {"question": found.question, "sql": found.sql, "gap": found.gap}
        if json.dumps(line) not in self._verdicts:
            self._write(line)

    def _write_kept(self) -> None:
        """Write the kept questions in the order of the golds, each once."""
        kept: dict[tuple[str, str], Wording] = {}
        for place, one in sorted(self.wordings.items()):
            key = one.example.database, folded(one.question)
            if one.reason == "kept" and kept.setdefault(key, one) is not one:
                self._end(place, replace(one, reason="duplicated"))
        if kept:
            text = jsonl_text(map(_row, kept.values()))
            self._write({"written": hashlib.sha256(text.encode()).hexdigest()})
            write_text(self.out, text)

    def _worded(self, client: Client, place: int) -> Wording:
        """Question for a gold and the answer to it, not graded."""
        example = self.examples[place]
        found = Wording(example, self.style(place))
        address = self._databases.address(example.database)
        if not self._grader.gold_result(address, example.gold_sql).is_usable:
            return replace(found, reason="gold_failed")
        reply = self._reply(client, example.id, self.prompt(place))
        question, reason = ("", "cut") if reply["is_cut"] else read_question(reply["text"])
        if reason:
            return replace(found, reason=reason)
        engine, _, schema = self._schema(example.database)
        reply = self._reply(client, example.id, answer_prompt(engine, schema, question))
        sql = read_sql(reply["text"])
        reason = "cut" if reply["is_cut"] else "" if sql else "no_sql"
        return replace(found, question=question, sql=sql, reason=reason)

    def _reply(self, client: Client, id: str, messages: Messages) -> dict[str, Any]:
        """Line of the log with the reply to a prompt, asked for if it is not there."""
        model = self._endpoint.model
        if known := self._replies.get(key := _key(model, messages)):
            return known
        started = time.monotonic()
        line: dict[str, Any] = {"id": id, "model": model, "messages": messages}
        try:
            completion = client.complete(messages, max_tokens=MAX_TOKENS, seed=self._seed, tools=None)
        except EndpointFailure as failure:
            self._write(line | {"failure": str(failure)[:300]})
            raise
        choice, usage = completion.choices[0], completion.usage
        content = getattr(getattr(choice, "message", None), "content", None)
        text = content.rpartition("</think>")[2][: MAX_SQL + 1] if isinstance(content, str) else ""
        counts: list[Any] = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        is_counted = all(type(count) is int and count >= 0 for count in counts)
        sizes = [_size(messages), estimated_tokens(text)]
        read, written = counts if is_counted else sizes
        line |= {"text": text, "is_cut": getattr(choice, "finish_reason", None) == "length"}
        line |= {"read": read, "written": written, "is_counted": is_counted, "estimated": sizes}
        line |= {"cost": self.cost(read, written), "seconds": round(time.monotonic() - started, 2)}
        self._write(line)
        self._replies[key] = line
        return line

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            append_jsonl(self.log, [line])
            self._lines.append(line)

    def _graded(self, found: Wording) -> Wording:
        example = found.example
        address = self._databases.address(example.database)
        verdict = self._grader.grade(address, example.gold_sql, found.sql, other_golds=example.other_golds)
        if not verdict.strict:
            reason = verdict.reason if verdict.reason in REASONS else "other_result"
            return replace(found, reason=reason)
        rows = self._grader.gold_result(address, example.gold_sql).outcome.rows
        example = replace(example, gold_is_empty=not rows)
        return replace(found, reason="kept", gap=verdict.gap, example=example)

    def report(self) -> list[str]:
        """Lines on what was kept, why the rest was not, and what all requests of the log took."""
        found = Counter(one.reason for one in self.wordings.values())
        styles = Counter(one.style for one in self.wordings.values() if one.reason == "kept")
        gaps = sum(bool(one.gap) for one in self.wordings.values() if one.reason == "kept")
        lines = [f"kept {found['kept']} of {many(len(self.examples), 'question')}"]
        lines += [f"{found[name]:>7}  {name}: {text}" for name, text in REASONS.items() if found[name]]
        if found["kept"]:
            lines.append("kept by style: " + ", ".join(f"{name} {styles[name]}" for name in STYLES))
        if gaps:
            lines.append(f"{gaps} of the kept were judged with fewer test databases: `gap` in the log")
        asked = [line for line in self._lines if "text" in line]
        read, written = (sum(line[name] for line in asked) for name in ("read", "written"))
        price = f", cost {self.cost(read, written):.4f}" if any(self._prices) else ""
        lines.append(f"{many(len(asked), 'reply')}: {read:,} tokens read, {written:,} written{price}")
        estimates = sum(sum(line["estimated"]) for line in asked)
        if uncounted := sum(not line["is_counted"] for line in asked):
            lines.append(f"{many(uncounted, 'reply')} had no valid token counts: estimated")
        if asked and not estimates / 4 <= read + written <= estimates * 4:
            lines.append(f"the endpoint's counts are far from the estimate of {estimates:,}: check its bill")
        return lines


def _key(model: str, messages: Messages) -> str:
    return json.dumps([model, messages])


def _size(messages: Messages) -> int:
    return sum(estimated_tokens(message["content"]) for message in messages)


def _row(kept: Wording) -> dict[str, Any]:
    """Row of a question file; fields on the wording of the earlier question are left out."""
    texts: Any = dict.fromkeys(("template", "look_sql", "guess_sql", "check_sql"))
    row = replace(kept.example, id=f"{kept.example.id}-{kept.style}", question=kept.question, **texts)
    return {name: value for name, value in asdict(row).items() if value is not None and value != ()}
