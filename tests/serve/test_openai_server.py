"""The server under the `openai` client, as chat front ends call it, and on its page in a real browser."""

import gc
import http.client
import json
import os
import re
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from tests.scripted_policy import shop
from tests.serve.test_agent import COUNT, Script, answer
from text2sql_grpo.commands import main
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.serving.agent import Agent
from text2sql_grpo.serving.live_engine import MAX_SESSIONS
from text2sql_grpo.serving.openai_server import AgentServer

openai = pytest.importorskip("openai", reason="needs the extra endpoints")
TOKEN = "secret-token"
HOSTILE = '<script>document.title="owned"</script>'
LOOK = "SELECT city FROM branch"


class Served:
    """A running server of a scripted agent.

    Attributes:
        url: Its address.
    """

    def __init__(self, agent: Agent, folder: Path, **options: Any) -> None:
        self.server = AgentServer(agent, TOKEN, folder, **options)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.server.app(), log_level="warning"))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]})

    def __enter__(self) -> "Served":
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.uvicorn.should_exit = True
        self.thread.join()

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, {"Authorization": f"Bearer {TOKEN}", **headers})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Any]:
    with shop(tmp_path, max_turns=3) as environment:
        yield environment


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def test_the_openai_client_reads_answers_looks_and_usage(environment: Any, tmp_path: Path) -> None:
    script = Script(
        [f"<sql>{LOOK}</sql>", *answer(COUNT)], answer(COUNT), answer("SELECT x"), ["?", "?", "?"]
    )
    with Served(Agent(environment, script, "shop"), tmp_path) as served:
        client = served.client()
        assert [model.id for model in client.models.list()] == ["text2sql-grpo"]
        first = client.chat.completions.create(model="any", messages=chat("How many branches?"))
        message = first.choices[0].message
        assert message.content.startswith(f"```sql\n{COUNT}\n```\n\n| count(\\*) |\n| --- |\n| 3 |")
        assert message.reasoning == message.reasoning_content
        assert message.reasoning.startswith(f"```\n{LOOK}\n\ncity\nLisbon")
        follow = chat("How many branches?", message.content, "And in Porto?")
        client.chat.completions.create(model="any", messages=follow)
        assert script.asked[-1] == f"How many branches?\n{COUNT}\nAnd in Porto?"
        failed = client.chat.completions.create(model="any", messages=chat("x?")).choices[0].message.content
        assert "no such column: x\n```\n\nThe query, to edit:\n\n```sql\nSELECT x\n```" in failed
        nothing = client.chat.completions.create(model="any", messages=chat("?")).choices[0].message.content
        assert nothing.startswith("There is no answer:\n\n```\nno final SQL")
        log = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert [one["question"] for one in log] == ["How many branches?", "And in Porto?", "x?", "?"]
        assert log[0]["status"] == "ok" and "no such column" in log[2]["status"]
        assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_rows_and_errors_reach_a_front_end_as_text(environment: Any, tmp_path: Path) -> None:
    image = "![x](https://evil.example/?rows)"
    script = Script([f"<sql>SELECT '{image}', '```'</sql>", *answer(f'SELECT x."{image}"')])
    with Served(Agent(environment, script, "shop"), tmp_path) as served:
        message = json.loads(served.post("/v1/chat/completions", {"messages": chat("?")})[1])["choices"][0]
    for text in (message["message"]["content"], message["message"]["reasoning"]):
        outside = re.sub(r"^(`{3,})\w*\n.*?^\1\n?", "", f"{text}\n", flags=re.MULTILINE | re.DOTALL)
        assert image in text and image not in outside


def test_a_stream_begins_with_a_role_and_ends_with_usage(environment: Any, tmp_path: Path) -> None:
    """As Open WebUI and LibreChat read it: both names of reasoning, a finish reason, and a text."""
    script = Script([f"<sql>{LOOK}</sql>", *answer(COUNT)])
    with Served(Agent(environment, script, "shop"), tmp_path) as served:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        parts = [{"type": "text", "text": "How many branches?"}]
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
        chunks = list(served.client().chat.completions.create(model="any", messages=messages, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert deltas[1].reasoning == deltas[1].reasoning_content and LOOK in deltas[1].reasoning
    assert COUNT in "".join(delta.content or "" for delta in deltas)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None and script.asked == ["How many branches?"]


def test_the_page_reads_all_rows_that_were_kept(environment: Any, tmp_path: Path) -> None:
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 700) SELECT i FROM n"
    with Served(Agent(environment, Script(answer(rows)), "shop"), tmp_path) as served:
        _, events = served.post("/api/ask", {"question": "Numbers?"})
        found = json.loads(events.partition("data: ")[2])["answer"]["result"]
        again = json.loads(served.post("/api/run", {"sql": rows})[1])
    assert len(found["rows"]) == len(again["rows"]) == 700
    assert not found["is_truncated"] and not again["is_truncated"]


def test_the_page_reads_integers_that_javascript_would_round_as_text(
    environment: Any, tmp_path: Path
) -> None:
    sql = "SELECT 9007199254740991, 9007199254740993, -9007199254740993, 1e300"
    with Served(Agent(environment, Script([f"<sql>{sql}</sql>", *answer(sql)]), "shop"), tmp_path) as served:
        parts = served.post("/api/ask", {"question": "Ids?"})[1].split("data: ")[1:]
        look, reply = (json.loads(part) for part in parts)
        found = [look["look"]["result"], reply["answer"]["result"]]
        found.append(json.loads(served.post("/api/run", {"sql": sql})[1]))
    row = [9007199254740991, "9007199254740993", "-9007199254740993", 1e300]
    assert [one["rows"] for one in found] == [[row]] * 3


def test_both_readings_on_the_page_have_the_question_as_the_model_read_it(
    environment: Any, tmp_path: Path
) -> None:
    agent = Agent(environment, Script(answer(COUNT), answer("SELECT 1")), "shop", samples=2)
    asked = {"question": "And in Porto?", "history": [{"question": "How many branches?", "sql": COUNT}]}
    with Served(agent, tmp_path) as served:
        found = json.loads(served.post("/api/ask", asked)[1].partition("data: ")[2])["answer"]
    assert found["question"] == found["other"]["question"] == f"How many branches?\n{COUNT}\nAnd in Porto?"


def test_an_image_is_refused(environment: Any, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How many branches?"}, {"type": "image_url"}]
    with Served(Agent(environment, Script(answer(COUNT)), "shop"), tmp_path) as served:
        chat = served.client().chat.completions
        with pytest.raises(openai.BadRequestError, match="image"):
            chat.create(model="any", messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"n": 2}, "n must be left out here, got 2"),
        ({"n": 0}, "n must"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_asks_for_another_form_of_reply_is_refused(
    form: dict[str, Any], name: str, environment: Any, tmp_path: Path
) -> None:
    plain = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tool_choice": "auto"}
    with Served(Agent(environment, Script(answer(COUNT)), "shop"), tmp_path) as served:
        create = served.client().chat.completions.create
        with pytest.raises(openai.BadRequestError, match=name):
            create(model="any", messages=chat("How many?"), **form)
        sampling: dict[str, Any] = plain | {"temperature": 0.7, "max_tokens": 1, "stop": ["SELECT"]}
        assert COUNT in create(model="any", messages=chat("How many?"), **sampling).choices[0].message.content
        create(model="any", messages=chat("### Task:\nGenerate a title"), **form)


def test_an_address_that_is_not_there_names_those_that_are(environment: Any, tmp_path: Path) -> None:
    with Served(Agent(environment, Script(), "shop"), tmp_path) as served:
        with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings.*/v1/chat/completions") as caught:
            served.client().embeddings.create(model="any", input="x")
        assert caught.value.type == "invalid_request_error"


def test_side_tasks_of_a_front_end_cost_no_model(environment: Any, tmp_path: Path) -> None:
    with Served(Agent(environment, Script(), "shop"), tmp_path) as served:
        asked = chat("### Task:\nGenerate a concise, 3-5 word title")
        text = served.client().chat.completions.create(model="any", messages=asked).choices[0].message.content
        assert json.loads(text) == {"title": "Question"}


def test_wrong_requests_get_their_reason(environment: Any, tmp_path: Path) -> None:
    with Served(Agent(environment, Script(), "shop"), tmp_path, per_minute=16) as served:
        path = "/v1/chat/completions"
        for body, headers, status, reason in (
            ({"messages": chat("?")}, {"Authorization": ""}, 401, "missing or wrong token"),
            ({"messages": chat("?")}, {"Authorization": "Bearer no"}, 401, "missing or wrong token"),
            ({"messages": chat("?")}, {"Origin": "http://evil.example"}, 403, "another site"),
            ({"messages": chat("?")}, {"Host": "evil.example"}, 400, "Invalid host"),
            (b"[" * 100_000, {}, 400, "must be a JSON object"),
            (b"x" * 1_100_000, {}, 413, "at most 1000000 bytes"),
            ({"messages": "?"}, {}, 400, "must be a list"),
            ({"messages": chat("?", "no question")}, {}, 400, "must be a question of the user"),
            ({"messages": chat("\x00")}, {}, 400, "1 to 4000 characters"),
            ({"messages": chat("x" * 5_000)}, {}, 400, "1 to 4000 characters"),
        ):
            found, text = served.post(path, body, **headers)
            assert (found, reason in text) == (status, True), text
        assert served.post("/api/feedback", {"question": "?", "sql": 1, "right": True})[0] == 400
        for history in ([{"sql": "SELECT 1"}], [{"question": "?", "sql": 1}], ["?"], {"question": "?"}):
            assert served.post("/api/ask", {"question": "?", "history": history})[0] == 400
        assert json.loads(served.post("/api/run", {"sql": "DROP TABLE branch"})[1])["error"].startswith(
            "not allowed"
        )
        statuses = [served.post("/api/run", {"sql": "SELECT 1"})[0] for _ in range(8)]
        assert statuses[-1] == 429 and statuses[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok", "running": 0}
        connection.close()


@pytest.mark.thorough
def test_many_at_once_are_answered_or_refused_and_clients_may_leave(environment: Any, tmp_path: Path) -> None:
    class Slow(Script):
        def submit(self, session: Any) -> Any:
            time.sleep(0.2)
            if session.episode.example.question == "slow?":
                session.start()
                return Future()  # never done
            return super().submit(session)

    script = Slow(*[answer(COUNT)] * 1_000)
    with Served(Agent(environment, script, "shop"), tmp_path, per_minute=10_000) as served:
        body = {"messages": chat("How many?")}
        with ThreadPoolExecutor(1_000) as pool:
            found = list(pool.map(lambda _: served.post("/v1/chat/completions", body), range(1_000)))
        counts = {status: sum(one[0] == status for one in found) for status in (200, 429)}
        assert counts[200] + counts[429] == 1_000 and counts[200] >= 64 and counts[429] > 0
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        leaving = json.dumps({"messages": chat("slow?"), "stream": True}).encode()
        connection.request("POST", "/v1/chat/completions", leaving, {"Authorization": f"Bearer {TOKEN}"})
        connection.getresponse().read(20)
        assert served.server.running == 1
        connection.close()
        end = time.monotonic() + 10
        while served.server.running and time.monotonic() < end:
            time.sleep(0.05)
        assert served.server.running == 0


def test_as_many_questions_run_at_once_as_the_engine_takes_on_few_cores(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(MAX_SESSIONS)

    class Together(Script):
        def submit(self, session: Any) -> Any:
            together.wait(timeout=10)
            return super().submit(session)

    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # by which asyncio sizes its default pool
    script = Together(*[answer(COUNT)] * MAX_SESSIONS)
    with Served(Agent(environment, script, "shop"), tmp_path) as served:
        body = {"messages": chat("How many?")}
        with ThreadPoolExecutor(MAX_SESSIONS) as pool:
            found = list(pool.map(lambda _: served.post("/v1/chat/completions", body), range(MAX_SESSIONS)))
    assert [status for status, _ in found] == [200] * MAX_SESSIONS


def test_a_client_that_leaves_logs_no_error(
    environment: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Waiting(Script):
        def submit(self, session: Any) -> Any:
            session.start()
            return Future()  # never done

    with Served(Agent(environment, Waiting(), "shop"), tmp_path) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        asked = json.dumps({"messages": chat("slow?"), "stream": True}).encode()
        connection.request("POST", "/v1/chat/completions", asked, {"Authorization": f"Bearer {TOKEN}"})
        connection.getresponse().read(20)
        connection.close()
        end = time.monotonic() + 10
        while served.server.running and time.monotonic() < end:
            time.sleep(0.05)
        assert served.server.running == 0
    gc.collect()  # which logs the failures of tasks that nobody looked at
    assert "withdrawn" not in caplog.text


def test_a_database_that_changes_or_goes_during_a_session(
    environment: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "own.sqlite"
    shutil.copyfile(environment.databases.address("shop"), path)
    own = Environment({"own": path}, test_databases=0, **vars(environment.settings))
    with own, Served(Agent(own, Script(*[answer(COUNT)] * 3), "own"), tmp_path) as served:
        ask = {"messages": chat("How many?")}
        rows = len(json.loads(served.post("/api/run", {"sql": LOOK})[1])["rows"])
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("INSERT INTO branch VALUES ('AVE-01', 'Aveiro', 2)")
        assert len(json.loads(served.post("/api/run", {"sql": LOOK})[1])["rows"]) == rows + 1
        away = path.rename(tmp_path / "away.sqlite")
        status, text = served.post("/v1/chat/completions", ask)
        texts = [text, *(served.post(where, {"sql": LOOK} | ask)[1] for where in ("/api/run", "/api/ask"))]
        assert status == 503 and not any(str(tmp_path) in text for text in texts)
        assert "cannot be read" in texts[0] and "cannot be read" in texts[1]
        assert str(path) in caplog.text
        away.rename(path)
        assert served.post("/v1/chat/completions", ask)[0] == 200


def test_the_page_asks_edits_charts_and_saves(environment: Any, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if not shutil.which("chromium"):
        pytest.skip("needs Chromium: apt-get install chromium")
    staff = f"SELECT '=' || city || '{HOSTILE}' AS city, staff FROM branch WHERE city IS NOT NULL"
    script = Script([f"<sql>{LOOK}</sql>", *answer("SELECT x")], answer(staff))
    with Served(Agent(environment, script, "shop"), tmp_path) as served, playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        said, asked = list[str](), list[str]()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{served.url}/#token={TOKEN}")
        page.wait_for_selector("form")
        page.keyboard.type("How many?")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no such column: x. Edit the query and run it.")
        page.locator("article textarea").fill(staff)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("article svg")
        assert HOSTILE in page.locator("article td").last.locator("xpath=preceding-sibling::td").inner_text()
        assert page.title() == "Ask the database"
        page.get_by_role("button", name="Right").click()
        page.wait_for_selector("text=Saved as right.")
        with page.expect_download() as downloaded:
            page.get_by_role("button", name="CSV").click()
        doubled = HOSTILE.replace('"', '""')
        rows = Path(downloaded.value.path()).read_bytes().decode().split("\r\n")
        assert rows[:2] == ["city,staff", f'"\'=Lisbon{doubled}",7']
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert said == [] and all(url.startswith(served.url) for url in asked)
        assert "token" not in page.url
        if axe := os.environ.get("AXE_CORE"):
            context = browser.new_context(bypass_csp=True)
            checked = context.new_page()
            checked.goto(f"{served.url}/#token={TOKEN}")
            checked.wait_for_selector("summary")
            checked.add_script_tag(path=axe)
            faults = checked.evaluate("axe.run().then((result) => result.violations)")
            assert [one["id"] for one in faults if one["impact"] in ("serious", "critical")] == []
        served.uvicorn.should_exit = True
        served.thread.join()
        page.get_by_label("Question").fill("Still there?")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server does not answer.")
        assert page.get_by_role("button", name="Ask again").is_visible()
        browser.close()
    saved = json.loads((tmp_path / "feedback.jsonl").read_text())
    assert (saved["question"], saved["sql"], saved["verdict"]) == ("How many?", staff, "right")


def test_wrong_options_of_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        served = ["--base_url", "http://x", "--served_model", "m", "--db", str(tmp_path)]
        assert main(["serve", *served, "--port", port]) == 1
        assert "try --port 0" in capsys.readouterr().err
    for host in ("0.0.0.0", "::"):
        assert main(["serve", *served, "--host", host]) == 1
        assert "needs --allowed_host" in capsys.readouterr().err
    assert main(["serve", *served, "--folder", str(tmp_path / "none")]) == 1
    assert "--folder must be an existing folder" in capsys.readouterr().err
    assert main(["serve", *served, "--port", "0"]) == 1
    assert "one database is needed" in capsys.readouterr().err


def test_a_server_on_every_address_prints_one_that_it_answers(
    environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: apps.append(self.config.app))
    apps = list[Any]()
    served = [
        "--base_url",
        "http://x",
        "--served_model",
        "m",
        "--db",
        str(environment.databases.address("shop")),
    ]
    served += ["--folder", str(tmp_path), "--host", "0.0.0.0", "--port", "0", "--allowed_host", "sql.example"]
    assert main(["serve", *served]) == 0
    address = capsys.readouterr().out.split()[1].partition("#")[0]
    assert address.startswith("http://localhost:")
    for host in (address, "http://sql.example"):
        assert TestClient(apps[0], base_url=host).get("/health").status_code == 200
    assert TestClient(apps[0], base_url="http://other.example").get("/health").status_code == 400
