"""The agent and its terminal session: confidence, follow-up questions, feedback, errors."""

import getpass
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.chat_endpoint import Answer, served
from tests.scripted_policy import SHOP, shop
from text2sql_grpo.commands import main
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ArgumentError, RunError
from text2sql_grpo.evaluation.endpoint import Endpoint, EndpointFailure
from text2sql_grpo.evaluation.votes import risk_coverage
from text2sql_grpo.reporting.terminal import TextConsole
from text2sql_grpo.serving import agent as serving_agent
from text2sql_grpo.serving.agent import Agent, Exchange, sure_from
from text2sql_grpo.serving.ask_session import AskSession
from text2sql_grpo.serving.live_engine import EndpointEngine, WatchedSession

COUNT = "SELECT count(*) FROM branch"


class Script:
    """Engine that answers each session with the next of some lists of turns."""

    def __init__(self, *episodes: Sequence[str]) -> None:
        self.left = [list(turns) for turns in episodes]
        self.asked: list[str] = []

    def submit(self, session: WatchedSession) -> "Future[Episode]":
        future: Future[Episode] = Future()
        session.start()
        self.asked.append(session.episode.example.question)
        turns = self.left.pop(0)
        while turns and session.step(turns.pop(0)) is not None:
            pass
        future.set_result(session.episode)
        return future

    def close(self) -> None: ...


def answer(sql: str) -> list[str]:
    return [f"<answer>{sql}</answer>"]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Any]:
    with shop(tmp_path, max_turns=3) as environment:
        yield environment


def test_of_several_answers_the_most_frequent_result_wins_with_its_share(environment: Any) -> None:
    script = Script(answer("SELECT 1"), answer(COUNT), answer("SELECT 3"), ["?", "?", "?"])
    agent = Agent(environment, script, "shop", samples=4)
    reply = agent.ask("How many branches?")
    assert (reply.confidence, reply.is_sure) == (0.5, False)
    assert reply.asked.episode.final_sql == COUNT
    assert reply.asked.result is not None and reply.asked.result.rows == ((3,),)
    assert reply.other is not None and reply.other.episode.final_sql == "SELECT 1"
    agent = Agent(environment, Script(*[answer(COUNT)] * 3, answer("SELECT x")), "shop", samples=4)
    reply = agent.ask("How many branches?")
    assert (reply.confidence, reply.is_sure, reply.other) == (0.75, True, None)
    agent = Agent(environment, Script(["?"] * 3, ["?"] * 3), "shop", samples=2)
    reply = agent.ask("?")
    assert (reply.confidence, reply.is_sure) == (0.0, False)
    assert "no final SQL" in reply.asked.failure


def test_a_question_that_follows_is_read_with_the_one_before(environment: Any) -> None:
    agent = Agent(environment, Script(*[answer(COUNT)] * 4), "shop")
    before = [Exchange("How many branches?", COUNT)]
    for question, follows in (
        ("And in Porto?", True),
        ("only those in Porto", True),
        ("Android phones?", False),
        ("Which cities?", False),
    ):
        read = agent.ask(question, before).asked.episode.example.question
        assert read == (f"How many branches?\n{COUNT}\n{question}" if follows else question)
    assert agent.with_history("And?", [Exchange("What?", None)]) == "And?"  # there is nothing to follow
    broken = [Exchange("Branches\x07 of \ud83d?", "SELECT '\udc00'")]
    assert agent.with_history("only \ude00 Porto", broken) == "Branches  of  ?\nSELECT ' '\nonly   Porto"
    for long in (Exchange("x" * 4_000, COUNT), Exchange("How many?", f"SELECT '{'x' * 4_000}'")):
        assert agent.with_history("And in Porto?", [long]) == "And in Porto?"
    for wrong in ("", " \x00\u202e\ud83d ", "x" * 5_000):
        with pytest.raises(ArgumentError, match="1 to 4000 characters"):
            agent.ask(wrong)


def test_a_withdrawn_question_stops_its_sessions(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Script):
        def submit(self, session: WatchedSession) -> "Future[Episode]":
            self.session = session
            return Future()

    slow, event = Slow(), Event()
    event.set()
    with pytest.raises(RunError, match="withdrawn"):
        Agent(environment, slow, "shop").ask("How many?", is_cancelled=event)
    assert slow.session.is_cancelled

    def interrupted(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving_agent, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Agent(environment, slow, "shop").ask("How many?")
    assert slow.session.is_cancelled


def test_samples_of_an_endpoint_have_seeds_of_their_own(environment: Any) -> None:
    requests: list[dict[str, Any]] = []

    def asked(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return Answer({"role": "assistant", "content": f"<answer>SELECT {request['seed']}</answer>"}, 20, 10)

    with served(asked) as url:
        engine = EndpointEngine(Endpoint(url, "script"), environment.sessions, temperature=1.0)
        reply = Agent(environment, engine, "shop", samples=3).ask("How many?")
        engine.close()
    assert len({request["seed"] for request in requests}) == 3
    assert reply.confidence == pytest.approx(1 / 3)


def test_an_endpoint_that_fails_is_an_error_of_the_run(environment: Any) -> None:
    class Unreachable(Script):
        def submit(self, session: WatchedSession) -> "Future[Episode]":
            future: Future[Episode] = Future()
            future.set_exception(EndpointFailure("APIConnectionError: Connection error."))
            return future

    with pytest.raises(RunError, match="endpoint did not answer: APIConnectionError"):
        Agent(environment, Unreachable(), "shop").ask("How many?")


def test_right_feedback_is_a_question_file(environment: Any, tmp_path: Path) -> None:
    agent = Agent(environment, Script(), "shop")
    agent.save_feedback(tmp_path, "How many branches?", COUNT, is_right=True)
    path = agent.save_feedback(tmp_path, "Cities?", "SELECT 1", is_right=False)
    with pytest.raises(ArgumentError, match="a question and a query"):
        agent.save_feedback(tmp_path, " ", COUNT, is_right=True)
    (question,) = read_questions(path)
    assert (question.example.question, question.example.gold_sql, question.example.database) == (
        *("How many branches?", COUNT),
        "shop",
    )


def test_feedback_is_saved_where_the_system_has_no_login_name(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")  # as in some containers

    monkeypatch.setattr(getpass, "getuser", nameless)
    path = Agent(environment, Script(), "shop").save_feedback(tmp_path, "Cities?", COUNT, is_right=True)
    assert [one.example.question for one in read_questions(path)] == ["Cities?"]


def test_the_last_judgement_of_an_answer_counts(environment: Any, tmp_path: Path) -> None:
    agent = Agent(environment, Script(), "shop")
    for question, verdicts in {"Kept?": (False, True, True), "Taken back?": (True, False)}.items():
        for is_right in verdicts:
            path = agent.save_feedback(tmp_path, question, COUNT, is_right=is_right)
    assert [one.example.question for one in read_questions(path)] == ["Kept?"]


def test_a_session_on_a_terminal(environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "sed -i s/count/max/;s/[*]/staff/")
    script = Script(["<sql>SELECT city FROM branch</sql>", *answer(COUNT)], answer("SELECT x"), answer(COUNT))
    lines = [
        "",
        "\\sql",
        "How many branches?",
        "\\edit",
        "\\right",
        "And [bold]now[/bold]?",
        "\\wrong",
        "x" * 5_000,
    ]
    lines += [
        "\\sql DELETE FROM branch",
        "\\history",
        "\\new",
        "And?",
        "\\schema",
        "\\help",
        "\\quit",
        "never read",
    ]
    console = TextConsole(file=StringIO(), width=100)
    given = iter(lines)
    AskSession(Agent(environment, script, "shop"), console, lambda _: next(given), tmp_path).run()
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert next(given) == "never read"
    for text in (
        *("There is no answer yet.", "run_sql", "Lisbon", "SELECT max(staff)", "no such column: x"),
        *(
            "(follows: How many branches?)",
            "not allowed",
            "1 to 4000 characters, got 5000",
            "TABLE branch",
            "\\right",
        ),
        "2. And [bold]now[/bold]?",
    ):
        assert text in out
    saved = [json.loads(line) for line in (tmp_path / "feedback.jsonl").read_text().splitlines()]
    assert [(one["verdict"], one["sql"]) for one in saved] == [
        ("right", "SELECT max(staff) FROM branch"),
        ("wrong", "SELECT x"),
    ]
    assert saved[1]["question"] == "How many branches?\nSELECT max(staff) FROM branch\nAnd [bold]now[/bold]?"
    assert script.asked[-1] == "And?"  # after \new


@pytest.mark.parametrize("question", ["caf\udce9 orders?", "How many\u202c orders?", "\x07And?"])
def test_a_first_question_that_cannot_be_read_whole_follows_none(environment: Any, question: str) -> None:
    console, lines = TextConsole(file=StringIO()), iter([question, "\\quit"])
    AskSession(Agent(environment, Script(answer(COUNT)), "shop"), console, lambda _: next(lines)).run()
    assert "follows" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_threshold_is_that_of_the_run_s_evaluation(tmp_path: Path) -> None:
    assert sure_from(tmp_path / "merged") == 0.75
    never = float("inf")
    for levels, level in (((0.5, 0.875), 0.875), ((0.5, None), never), ((None,), never), ((), 0.75)):
        sets = {str(i): {"samples": {"sure_from": level}} for i, level in enumerate(levels)}
        (tmp_path / "evaluation.json").write_text(json.dumps({"sets": sets | {"old": {}}}))
        assert sure_from(tmp_path / "merged") == sure_from(tmp_path) == level


def test_without_a_level_no_answer_is_sure(environment: Any) -> None:
    script = Script(*[answer(COUNT)] * 2)
    reply = Agent(environment, script, "shop", samples=2, sure_from=float("inf")).ask("How many?")
    assert reply.confidence == 1 and not reply.is_sure


@pytest.mark.parametrize(
    "level", [2 / 3, risk_coverage([1.0, 2 / 3, 1 / 3], [True, True, False])["sure_from"]]
)
def test_an_answer_at_the_threshold_is_sure(environment: Any, level: float) -> None:
    script = Script(answer(COUNT), answer(COUNT), answer("SELECT 1"))
    assert Agent(environment, script, "shop", samples=3, sure_from=level).ask("How many?").is_sure


def test_wrong_options_of_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shop.sql").write_text(SHOP)
    db = ["--db", str(tmp_path / "shop.sql")]
    assert main(["ask", *db, "--base_url", "http://x"]) == 1
    assert "--served_model go together" in capsys.readouterr().err
    assert main(["ask", *db, "--model", str(tmp_path / "nowhere")]) == 1
    assert "no such" in capsys.readouterr().err
    assert main(["ask", *db, "--base_url", "http://x", "--served_model", "m", "--json"]) == 1
    assert "--json needs a question" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ask", "How many?", *db])
