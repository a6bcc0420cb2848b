"""Engines that roll out sessions as they arrive: a local model in one thread, or an endpoint."""

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from threading import Lock, Thread
from typing import Any

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode, Message
from text2sql_grpo.environment.session import SQLEnvironment, SQLSession
from text2sql_grpo.errors import RunError
from text2sql_grpo.evaluation.endpoint import Client, Endpoint, served_episode
from text2sql_grpo.evaluation.sampler import Sampler
from text2sql_grpo.models.hardware import inference_autocast
from text2sql_grpo.rollout.engine import Budgets, SlotPolicy, run
from text2sql_grpo.rollout.live_slots import Arrival, serve
from text2sql_grpo.rollout.slots import shared_length
from text2sql_grpo.rollout.turns import Session, start_all

MAX_SESSIONS = 16  # at once; more wait
_logger = logging.getLogger(__name__)


class WatchedSession:
    """Session of one question that reports its actions, and can be cancelled between two turns.

    Args:
        on_action: Called after each turn, in the thread of the engine or of its tools.
    """

    def __init__(self, session: SQLSession, on_action: Any = None) -> None:
        self._session, self._on_action = session, on_action
        self.is_cancelled = False

    @property
    def episode(self) -> Episode:
        return self._session.episode

    def start(self) -> list[Message]:
        """Build the prompt."""
        return self._session.start()

    def step(self, assistant_text: str) -> Message | None:
        """Take one turn; None once the session is cancelled."""
        if self.is_cancelled:
            self.episode.stop_reason, self.episode.is_masked = "error", True
            return None
        reply = self._session.step(assistant_text)
        if self._on_action is not None:
            self._on_action(self.episode.actions[-1])
        return reply

    def holds_action(self, cut_text: str) -> bool:
        """True if a turn that was cut is taken as it is."""
        return self._session.holds_action(cut_text)


class LocalEngine:
    """Engine of a local model: one thread, in which all sessions share forward passes.

    Args:
        sampler: The model.
        environment: Sessions of its questions; the schema of each database stays in the cache.
    """

    def __init__(self, sampler: Sampler, environment: SQLEnvironment) -> None:
        settings = environment.settings
        self._sampler, self._environment = sampler, environment
        self._budgets = Budgets(settings.max_turn_tokens, settings.max_episode_tokens, sampler.context_tokens)
        self._arrivals: queue.Queue[Arrival | None] = queue.Queue()
        self._futures: dict[int, Future[Episode]] = {}
        self._prefixes: dict[str, tuple[int, ...]] = {}
        self._lock, self._failure = Lock(), ""
        self._thread = Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def submit(self, session: WatchedSession) -> "Future[Episode]":
        """Roll out a session.

        Raises:
            RunError: The engine has ended.
        """
        future: Future[Episode] = Future()
        start_all([session], self._sampler.chat, self._budgets)
        episode = session.episode
        if episode.stop_reason is not None:  # its prompt left no room for an answer
            future.set_result(episode)
            return future
        prefix = self._prefix(episode.example.database)
        begins = tuple(episode.prompt_ids[: len(prefix)]) == prefix
        is_shared = begins and len(prefix) < len(episode.prompt_ids)
        with self._lock:
            if self._failure:
                raise RunError(f"the model has stopped: {self._failure}; start the server again")
            self._futures[id(session)] = future
        self._arrivals.put(Arrival(session, prefix if is_shared else ()))
        return future

    def close(self) -> None:
        """End; sessions that wait fail."""
        self._arrivals.put(None)
        self._thread.join()

    def take(self, *, wait: bool) -> Sequence[Arrival] | None:
        """See `Inbox`."""
        found: list[Arrival] = []
        try:
            while True:
                one = self._arrivals.get(block=wait and not found)
                if one is None:
                    self._arrivals.put(None)  # for the next call
                    return found or None
                found.append(one)
        except queue.Empty:
            return found

    def end(self, session: Session[Any], error: BaseException | None) -> None:
        """See `Inbox`."""
        with self._lock:
            future = self._futures.pop(id(session))
        if error is None:
            future.set_result(session.episode)
        else:
            future.set_exception(error)

    def _prefix(self, database: str) -> tuple[int, ...]:
        """Token ids that the prompts of a database's questions begin with."""
        if database not in self._prefixes:
            prompts = []
            for question in ("A", "Which?"):
                session = self._environment.session(Example("", database, question, ""))
                prompts.append(self._sampler.chat.prompt_ids(session.start()))
            self._prefixes[database] = tuple(prompts[0][: shared_length(*prompts)])
        return self._prefixes[database]

    def _run(self) -> None:
        sampler = self._sampler
        model = sampler.model
        try:
            with nullcontext() if model is None else inference_autocast(model, bf16=sampler.bf16):
                if isinstance(sampler.policy, SlotPolicy):
                    serve(self, sampler.policy, sampler.chat, self._budgets, max_rows=MAX_SESSIONS)
                else:
                    self._run_in_batches()
            self._stop("it was closed")
        except Exception as error:  # out of memory, for example: every waiting question gets it
            _logger.exception("the model has stopped")
            self._stop(f"{type(error).__name__}: {error}")

    def _run_in_batches(self) -> None:
        while (arrived := self.take(wait=True)) is not None:
            sessions = [one.session for one in arrived]
            run(sessions, self._sampler.policy, self._sampler.chat, self._budgets)
            for session in sessions:
                self.end(session, None)

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._failure = reason
            waiting = list(self._futures.values())
            self._futures.clear()
        for future in waiting:
            future.set_exception(RunError(f"the model has stopped: {reason}"))


class EndpointEngine:
    """Engine of a model behind an OpenAI-compatible endpoint."""

    def __init__(self, endpoint: Endpoint, environment: SQLEnvironment, temperature: float) -> None:
        self._client, self._environment = Client(endpoint, temperature), environment
        self._seeds = count()  # the samples of a question differ
        self._pool = ThreadPoolExecutor(endpoint.parallel, thread_name_prefix="endpoint")

    def submit(self, session: WatchedSession) -> "Future[Episode]":
        """Ask the endpoint for the turns of a session."""
        seed = next(self._seeds)
        return self._pool.submit(served_episode, session, self._environment, self._client, seed=seed)

    def close(self) -> None:
        """End; sessions that wait are cancelled."""
        self._pool.shutdown(cancel_futures=True)
        self._client.close()
