"""The trained agent on one database: answers with a confidence, follow-up questions, and feedback."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from text2sql_grpo.config import Config, DataConfig, ModelConfig
from text2sql_grpo.data.databases import open_address
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action
from text2sql_grpo.errors import ArgumentError, RunError
from text2sql_grpo.evaluation.bench import Asked, Environment
from text2sql_grpo.evaluation.endpoint import Endpoint, EndpointFailure
from text2sql_grpo.evaluation.sampler import open_sampler
from text2sql_grpo.evaluation.votes import vote
from text2sql_grpo.files import append_jsonl
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.run_folder import read_evaluation
from text2sql_grpo.serving.live_engine import MAX_SESSIONS, EndpointEngine, LocalEngine, WatchedSession
from text2sql_grpo.serving.verdicts import login_name
from text2sql_grpo.sql import ExecutionOutcome

SURE_FROM = 0.75  # share of answers that agree, where no evaluation of the model has chosen one
FEEDBACK = "feedback.jsonl"
MAX_QUESTION_CHARS = 4_000
_FOLLOWS = re.compile(
    r"(and|but|also|only|now|instead|what about|how about|of (those|these|them)|the same|same)\b",
    re.IGNORECASE,
)
# Control characters, and halves of surrogate pairs, which no tokenizer accepts.
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def readable(text: str) -> str:
    """Text as a model may read it: a blank for each control character, and none at its ends."""
    return _UNREADABLE.sub(" ", text).strip()


@dataclass(frozen=True)
class Exchange:
    """A question that was answered before.

    Attributes:
        sql: The final query; None if there was none.
        read_as: Question as the model read it, with the one that it follows; empty if it follows none.
    """

    question: str
    sql: str | None
    read_as: str = ""


@dataclass(frozen=True)
class Reply:
    """Answer to one question.

    Attributes:
        asked: The answer that most of the answers agree with; the only one of one.
        confidence: Share of the answers that have its result, in [0, 1]; None of one answer.
        is_sure: False if the confidence is below the threshold.
        other: Another reading of the question, of those that disagree; None if there is none.
        seconds: Time until the answer.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Sampled tokens of all answers.
    """

    asked: Asked
    confidence: float | None = None
    is_sure: bool = True
    other: Asked | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Agent:
    """Agent of one database; safe to use from several threads.

    Attributes:
        samples: Answers of each question; with several, the model must be sampled.
        sure_from: Confidence from which an answer is sure.
    """

    environment: Environment
    engine: LocalEngine | EndpointEngine
    database: str
    samples: int = 1
    sure_from: float = SURE_FROM
    name: str = "text2sql-grpo"

    def ask(
        self,
        question: str,
        history: Sequence[Exchange] = (),
        *,
        on_action: Callable[[Action], None] | None = None,
        is_cancelled: Event | None = None,
    ) -> Reply:
        """Answer a question; one that follows an earlier one is asked with it.

        Args:
            history: Earlier questions, oldest first.
            on_action: Called with each turn of the first answer, in another thread.
            is_cancelled: Set to stop after the current turn.

        Raises:
            ArgumentError: The question is empty or too long.
            RunError: The model or the database failed.
        """
        started = time.monotonic()
        example = Example(uuid4().hex, self.database, self.with_history(question, history), gold_sql="")
        sessions = [
            WatchedSession(self.environment.sessions.session(example), on_action if i == 0 else None)
            for i in range(self.samples)
        ]
        try:
            futures = [self.engine.submit(session) for session in sessions]
            while wait(futures, timeout=0.05).not_done:
                if is_cancelled is not None and is_cancelled.is_set():
                    raise RunError("the question was withdrawn")
            episodes = [future.result() for future in futures]
        except EndpointFailure as failure:
            raise RunError(f"the endpoint did not answer: {failure}") from failure
        finally:
            for session in sessions:
                session.is_cancelled = True
        queries = [episode.final_sql for episode in episodes]
        chosen, other, confidence = 0, None, None
        if self.samples > 1:
            chosen, other, confidence = self._vote(queries)

        def read(place: int) -> Asked:
            sql = queries[place]
            return Asked(episodes[place], None if sql is None else self.run(sql))

        return Reply(
            read(chosen),
            confidence,
            # `evaluation.json` holds the level rounded to 6 digits.
            is_sure=confidence is None or round(confidence, 6) >= round(self.sure_from, 6),
            other=None if other is None else read(other),
            seconds=time.monotonic() - started,
            prompt_tokens=len(episodes[0].prompt_ids),
            completion_tokens=sum(sum(episode.completion_mask) for episode in episodes),
        )

    def _vote(self, queries: Sequence[str | None]) -> tuple[int, int | None, float]:
        """Places of the chosen answer and of the first reading without its result, and its share."""
        grader = self.environment.grader
        database = self.environment.databases.address(self.database)
        best = vote(queries, [database], grader)
        if best.place is None:
            return 0, None, 0.0
        chosen = queries[best.place]
        rest = [None if vote([sql, chosen], [database], grader).share == 1 else sql for sql in queries]
        return best.place, vote(rest, [database], grader).place, best.share

    def run(self, sql: str) -> ExecutionOutcome:
        """Run a query of the model or of a person, read-only, under the limits of the environment."""
        return self.environment.sessions.guarded(self.database).run(sql)

    def with_history(self, question: str, history: Sequence[Exchange]) -> str:
        """The question as the model reads it.

        Raises:
            ArgumentError: It is empty or too long.
        """
        text = readable(question)
        if not text or len(text) > MAX_QUESTION_CHARS:
            raise ArgumentError(f"a question must have 1 to {MAX_QUESTION_CHARS} characters, got {len(text)}")
        last = history[-1] if history else None
        if last is None or last.sql is None or not _FOLLOWS.match(text):
            return text
        before = f"{last.question}\n{last.sql}"
        # A client may send any history: a longer prompt would occupy the model for minutes.
        return text if len(before) > MAX_QUESTION_CHARS else readable(f"{before}\n{text}")

    def save_feedback(self, folder: Path, question: str, sql: str, *, is_right: bool) -> Path:
        """Append a verdict of a person to `feedback.jsonl`, a question file of which right answers are read.

        Raises:
            ArgumentError: Question or query is empty.
            RunError: The file cannot be written.
        """
        if not question.strip() or not sql.strip():
            raise ArgumentError("feedback needs a question and a query")
        path = folder / FEEDBACK
        record: dict[str, Any] = {
            "id": f"feedback-{uuid4().hex[:12]}",
            "database": self.database,
            "question": question.strip(),
            "sql": sql.strip(),
            "verdict": "right" if is_right else "wrong",
            "verified_by": login_name(),
            "verified_at": int(time.time()),
        }
        append_jsonl(path, [record])
        return path


@contextmanager
def open_agent(
    model: str | Endpoint, db: str, config: Config | None = None, *, samples: int = 1
) -> Iterator[Agent]:
    """Open the agent of a model on one database; the end stops its threads and processes.

    Args:
        model: Model folder, adapter, run folder or Hub id; or an endpoint.
        db: One database; see `open_address`.
        config: Config of the model's run; None for the defaults.
        samples: Answers of each question, sampled if there are several.

    Raises:
        RunError: The model or the database cannot be read.
    """
    run = config or Config(model=ModelConfig(path="none"), data=DataConfig(databases=db, train="none"))
    name, address = open_address(db)
    settings = vars(replace(run.environment, mcp=None))
    with Environment({name: address}, test_databases=0, hide=run.data.hide, **settings) as environment:
        environment.sessions.schema_text(name)  # fails before anything slow
        temperature = run.evaluation.samples_temperature if samples > 1 else 0.0
        engine: LocalEngine | EndpointEngine
        if isinstance(model, Endpoint):
            engine, title = EndpointEngine(model, environment.sessions, temperature), model.model
        else:
            sampler = open_sampler(
                load_policy(model),
                environment.sessions,
                temperature=temperature,
                engine=run.rollout.engine,
                batch_size=MAX_SESSIONS,
                bf16=run.evaluation.bf16,
                template_options=run.grpo.get("chat_template_kwargs"),
            )
            environment.sessions = environment.sessions.counted_by(sampler.chat.count_tokens)
            engine, title = LocalEngine(sampler, environment.sessions), _title(model)
        level = SURE_FROM if isinstance(model, Endpoint) else sure_from(Path(model))
        try:
            yield Agent(environment, engine, name, samples, level, title)
        finally:
            engine.close()


def _title(model: str) -> str:
    """Name of a model's folder; of RUN/merged that of the run."""
    path = Path(model)
    return (path.resolve().parent.name if path.name in ("merged", "adapter") else path.name) or model


def sure_from(model: Path) -> float:
    """Confidence from which 80% were right in the evaluation of a model's run; 0.75 if unknown.

    Infinity if a set has no such confidence: no answer is sure.
    """
    sets = (read_evaluation(model) or read_evaluation(model.parent)).get("sets", {})
    known = [one["samples"]["sure_from"] for one in sets.values() if "sure_from" in one.get("samples", {})]
    return max((inf if level is None else level for level in known), default=SURE_FROM)
