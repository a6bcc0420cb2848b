"""Sessions that arrive while others run: a real (tiny, trained) model answers as it does in one batch."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import shop
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLSession
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.evaluation.sampler import open_sampler
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.rollout import live_slots
from text2sql_grpo.serving.live_engine import MAX_SESSIONS, LocalEngine, WatchedSession

BUDGETS: dict[str, Any] = {"schema_text": "compact", "instructions": False, "max_turns": 3}
BUDGETS |= {"max_turn_tokens": 24, "max_episode_tokens": 120}
QUESTIONS = [f"Staff of the {name} branch?" for name in ("Lisbon", "Porto", "Faro", "Braga")] + [
    "Branches?",
    "All cities?",
]


@pytest.mark.parametrize("engine", ["slots", "generation"])
def test_arrivals_get_the_answers_of_one_batch(tmp_path: Path, started_model: str, engine: Any) -> None:
    with shop(tmp_path, **BUDGETS) as environment:
        examples = [Example(f"{i}", "shop", QUESTIONS[i % 6], "SELECT 1") for i in range(3 * MAX_SESSIONS)]
        policy = load_policy(started_model, dtype="float32")
        options: dict[str, Any] = {"temperature": 0.0, "engine": engine, "batch_size": 8, "bf16": False}
        sampler = open_sampler(policy, environment.sessions, template_options=None, **options)
        expected = {}
        for answer in environment.answer(examples[:6], sampler):
            expected[answer.example.question] = answer.episode
        live = LocalEngine(sampler, environment.sessions)
        taken: list[str] = []
        found: list[Any] = [None] * len(examples)

        def submit(number: int) -> None:
            session = environment.sessions.session(examples[number])
            watched = WatchedSession(session, lambda action: taken.append(action.kind))
            found[number] = live.submit(watched).result(timeout=60)

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(len(examples))]
        for i, thread in enumerate(threads):
            thread.start()
            if i % 7 == 0:
                threading.Event().wait(0.01)
        for thread in threads:
            thread.join()
        for episode in found:
            known = expected[episode.example.question]
            assert episode.completion_ids == known.completion_ids
            assert (episode.final_sql, episode.stop_reason) == (known.final_sql, known.stop_reason)
        assert len(taken) == sum(len(expected[one.example.question].actions) for one in found)
        live.close()
        with pytest.raises(RunError, match="the model has stopped: it was closed"):
            live.submit(WatchedSession(environment.sessions.session(examples[0])))


def test_prefixes_go_when_others_are_used(
    tmp_path: Path, started_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_slots, "MAX_PREFIXES", 2)
    with shop(tmp_path, **BUDGETS) as environment:
        policy = load_policy(started_model, dtype="float32")
        options: dict[str, Any] = {"temperature": 0.0, "engine": "slots", "batch_size": 8, "bf16": False}
        sampler = open_sampler(policy, environment.sessions, template_options=None, **options)
        live = LocalEngine(sampler, environment.sessions)
        whole = live._prefix("shop")
        seen = []
        for length in (len(whole), 3, 5, len(whole), 4, 0, len(whole)):
            live._prefixes["shop"] = whole[:length]
            session = environment.sessions.session(Example("1", "shop", QUESTIONS[0], "SELECT 1"))
            seen.append(live.submit(WatchedSession(session)).result(timeout=60).completion_ids)
        live.close()
        assert all(ids == seen[0] for ids in seen)


def test_a_failing_session_fails_alone_and_a_withdrawn_one_ends(
    tmp_path: Path, started_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop(tmp_path, **BUDGETS) as environment:
        policy = load_policy(started_model, dtype="float32")
        options: dict[str, Any] = {"temperature": 0.0, "engine": "slots", "batch_size": 8, "bf16": False}
        sampler = open_sampler(policy, environment.sessions, template_options=None, **options)
        live = LocalEngine(sampler, environment.sessions)

        def session(number: int) -> WatchedSession:
            example = Example(f"{number}", "shop", QUESTIONS[number], "SELECT 1")
            return WatchedSession(environment.sessions.session(example))

        step = SQLSession.step

        def failing(self: SQLSession, text: str) -> Any:
            if self.episode.example.question == QUESTIONS[1]:
                raise DataError("the database is gone")
            return step(self, text)

        monkeypatch.setattr(SQLSession, "step", failing)
        withdrawn = session(2)
        withdrawn.is_cancelled = True
        futures = [live.submit(one) for one in (session(0), session(1), withdrawn, session(3))]
        with pytest.raises(DataError, match="the database is gone"):
            futures[1].result(timeout=60)
        assert futures[0].result(timeout=60).stop_reason != "error"
        assert futures[2].result(timeout=60).stop_reason == "error"
        assert futures[3].result(timeout=60).actions
        monkeypatch.undo()
        assert live.submit(session(1)).result(timeout=60).actions  # the engine goes on
        live.close()
