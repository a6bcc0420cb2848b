"""`text2sql-grpo review`: the real server over HTTP, the page in a real browser, and the summary."""

import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.scripted_policy import SHOP
from tests.tiny_run import json_lines
from text2sql_grpo.commands import main
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.loading import load_examples, read_quarantine
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.errors import ConfigError, DataError, RunError
from text2sql_grpo.evaluation.statistics import Accuracy, prediction_powered
from text2sql_grpo.files import write_jsonl
from text2sql_grpo.rewards import open_grader
from text2sql_grpo.serving.question_review import Review, drawn
from text2sql_grpo.serving.review_server import ReviewServer
from text2sql_grpo.serving.verdicts import read_verdicts, save_verdict, summary
from text2sql_grpo.sql import SQLExecutor

ROWS: list[dict[str, Any]] = [
    {"id": "q0", "question": "How many branches?", "gold_sql": "SELECT COUNT(*) FROM branch"},
    {"id": "q1", "question": "Cities? ", "gold_sql": "SELECT city FROM branch WHERE city IS NOT NULL"},
    {"id": "q2", "question": "Largest staff?", "gold_sql": "SELECT MAX(staff) FROM branch"},
    {
        "id": "q3",
        "question": "Staff in <b>Lisbon</b>?",
        "gold_sql": "SELECT staff FROM branch WHERE city = 'Lisbon'",
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "questions").mkdir()
    rows = [row | {"database": "shop", "template": f"t{n % 2}"} for n, row in enumerate(ROWS)]
    write_jsonl(tmp_path / "questions" / "train.jsonl", rows)
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as connection:
        connection.executescript(SHOP)
    return tmp_path


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(workers=1) as executor:
        yield executor


def review_of(folder: Path, executor: SQLExecutor, by: str = "ann", *, test_databases: int = 0) -> Review:
    questions = read_questions(folder / "questions" / "train.jsonl")
    suite = open_grader(executor, test_databases=test_databases).suite
    clock = iter(range(1_000, 2_000))
    databases = Databases(folder / "shop.sqlite")
    return Review(folder, questions, databases, executor, suite, by=by, now=lambda: next(clock))


@contextmanager
def served(review: Review) -> Iterator[ReviewServer]:
    with ReviewServer(review) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def send(
    server: ReviewServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, headers and JSON (or text) of a request; `path` is behind the token unless it begins with /."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    with closing(connection):
        whole = path if path.startswith("/") else urlsplit(server.url).path + path
        own = {"Host": f"127.0.0.1:{server.server_port}"}
        if method == "POST":
            own |= {"Origin": f"http://127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
        text = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = own | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, whole, text, {name: value for name, value in sent.items() if value})
        answer = connection.getresponse()
        content = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, answer.headers, json.loads(content) if is_json else content


def test_verdicts_are_saved_in_the_form_of_verified_queries(folder: Path, executor: SQLExecutor) -> None:
    edit = {"question": "How many branches have staff?", "sql": "SELECT COUNT(staff) FROM branch"}
    with served(review_of(folder, executor)) as server:
        status, _, shown = send(server, "GET", "question?id=q0")
        assert (status, shown["result"]["rows"]) == (200, [["3"]])
        phrasings = ["Count the branches with staff.", " "]
        asked = {"id": "q0", "verdict": "edit", **edit, "as_example": True, "phrasings": phrasings}
        assert send(server, "POST", "verdict", asked)[0] == 200
        seen = send(server, "GET", "question?id=q1")[2]
        send(
            server,
            "POST",
            "verdict",
            {"id": "q1", "verdict": "right", "question": seen["question"], "sql": seen["sql"]},
        )
        send(server, "POST", "verdict", {"id": "q2", "verdict": "wrong"})
        state = send(server, "POST", "verdict", {"id": "q3", "verdict": "skip"})[2]
        assert [one["verdict"] for one in state["questions"]] == ["edit", "right", "wrong", "skip"]
    first, second, *_ = json_lines(folder / "verified.jsonl")
    assert first == {
        **{"id": "q0", **edit, "verdict": "edit", "verified_by": "ann", "verified_at": 1000},
        **{"use_as_onboarding_question": True, "phrasings": ["Count the branches with staff."]},
        **{"database": "shop", "difficulty": "medium", "split": "train", "family": "other", "template": "t0"},
        "was": {"question": ROWS[0]["question"], "sql": ROWS[0]["gold_sql"]},
    }
    written = {"verdict": "right", "question": ROWS[1]["question"], "sql": ROWS[1]["gold_sql"]}
    assert second | written == second  # not as it was shown
    databases = Databases(folder / "shop.sqlite")
    examples = load_examples(folder / "verified.jsonl", databases, executor)
    assert [(one.id, one.gold_sql) for one in examples] == [
        ("q0-edited", edit["sql"]),
        ("q1", ROWS[1]["gold_sql"]),
    ]
    quarantine = read_quarantine(folder / "quarantine.jsonl")
    train = load_examples(folder / "questions" / "train.jsonl", databases, executor, leave_out=quarantine)
    assert [one.id for one in train] == ["q1", "q3"]
    both = load_examples(folder / "verified.jsonl", databases, executor, leave_out=quarantine)
    assert both == examples


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("SELECT nowhere FROM branch", "nowhere"),
        ("DELETE FROM branch", "not allowed"),
        ("DROP TABLE branch", "not allowed"),
        ("", "empty"),
    ],
)
def test_an_edit_that_fails_or_writes_is_refused(
    folder: Path, executor: SQLExecutor, sql: str, word: str
) -> None:
    with served(review_of(folder, executor)) as server:
        asked = {"id": "q0", "verdict": "edit", "question": "How many?", "sql": sql}
        status, _, answer = send(server, "POST", "verdict", asked)
        assert status == 422 and word in answer["error"], answer
    assert not (folder / "verified.jsonl").exists()
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM branch").fetchone() == (3,)


def test_requests_of_other_sites_are_refused(folder: Path, executor: SQLExecutor) -> None:
    with served(review_of(folder, executor)) as server:
        status, headers, page = send(server, "GET", "")
        assert status == 200 and page.startswith("<!doctype html>")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert send(server, "GET", "review.js")[0] == send(server, "GET", "review.css")[0] == 200
        verdict = {"id": "q0", "verdict": "wrong"}
        for status, method, path, body, own in [
            (403, "GET", "state", None, {"Host": "evil.example"}),
            (403, "GET", "state", None, {"Origin": "http://evil.example"}),
            (403, "POST", "verdict", verdict, {"Origin": "null"}),
            (403, "POST", "verdict", verdict, {"Origin": ""}),
            (400, "POST", "verdict", verdict, {"Content_Type": "text/plain"}),
            (400, "POST", "verdict", b"[1", {}),
            (400, "POST", "verdict", b'{"id": "q0", "verdict": "edit", "question": "\\ud800"}', {}),
            (400, "POST", "state", verdict, {}),
            (413, "POST", "verdict", None, {"Content_Length": "99999999"}),
            (422, "POST", "verdict", {"id": "q0", "verdict": "good"}, {}),
            (422, "POST", "verdict", {"id": 7, "verdict": "right"}, {}),
            (422, "POST", "verdict", {"id": "q0", "verdict": "wrong", "phrasings": [1]}, {}),
            (422, "GET", "question?id=none", None, {}),
            (404, "GET", "/wrong-token/state", None, {}),
            (404, "GET", "/", None, {}),
            (404, "GET", "../review.py", None, {}),
        ]:
            found, _, answer = send(server, method, path, body, **own)
            assert (found, list(answer)) == (status, ["error"]), (path, own, answer)
        assert not (folder / "verified.jsonl").exists()


def test_evidence_is_a_near_query_that_test_databases_refute(
    folder: Path, executor: SQLExecutor, own_cache: Path
) -> None:
    with served(review_of(folder, executor, test_databases=4)) as server:
        found = send(server, "GET", "evidence?id=q3")[2]
        assert 1 <= found["databases"] <= 4
        assert found["near"]["right"] != found["near"]["result"]
        asked = {"id": "q3", "verdict": "edit", "question": "Who?", "sql": "SELECT 7"}
        assert send(server, "POST", "verdict", asked)[0] == 200
        found = send(server, "GET", "evidence?id=q3")[2]
        assert found["databases"] == 0 and found["near"] is None and found["gap"]


def test_two_people_at_once_lose_nothing(folder: Path, executor: SQLExecutor) -> None:
    write_jsonl(folder / "quarantine.jsonl", [{"id": "q9", "reasons": ["slow"], "details": ["9 s"]}])
    ann, bob = review_of(folder, executor), review_of(folder, executor, "bob")
    with ThreadPoolExecutor(8) as pool:
        for person, ids in ((ann, ("q0", "q1", "q2")), (bob, ("q2", "q3"))):
            for id in ids:
                pool.submit(person.save, {"id": id, "verdict": "skip"})
    bob.save({"id": "q2", "verdict": "wrong"})
    verdicts = read_verdicts(folder)
    assert sorted(verdicts) == ["q0", "q1", "q2", "q3"]
    assert sorted(verdicts["q2"]["verified_by"].split(", ")) == ["ann", "bob"]
    late = verdicts["q2"] | {"verdict": "right", "verified_by": "cem", "verified_at": 5_000}
    early = late | {"verdict": "skip", "verified_by": "ann", "verified_at": 1}
    save_verdict(folder, late)
    assert read_quarantine(folder / "quarantine.jsonl") == {"q9"}
    merged = save_verdict(folder, early)["q2"]
    assert merged["verdict"] == "right" and {*merged["verified_by"].split(", ")} == {"ann", "bob", "cem"}


def test_verdicts_on_questions_that_were_made_again_are_refused(folder: Path, executor: SQLExecutor) -> None:
    review_of(folder, executor).save({"id": "q0", "verdict": "wrong"})
    review_of(folder, executor)
    write_jsonl(folder / "questions" / "train.jsonl", [ROWS[1] | {"id": "q0", "database": "shop"}])
    with pytest.raises(DataError, match="made again"):
        review_of(folder, executor)


def test_a_database_that_goes_is_a_message_on_the_page(folder: Path, executor: SQLExecutor) -> None:
    with served(review_of(folder, executor)) as server:
        (folder / "shop.sqlite").unlink()
        status, _, answer = send(server, "GET", "question?id=q2")
        assert status == 503 and "shop.sqlite" in answer["error"]
    with pytest.raises(RunError, match=r"shop\.sqlite"):
        review_of(folder, executor)


def test_questions_are_drawn_evenly(tmp_path: Path) -> None:
    tables = ["a"] * 70 + ["b"] * 20 + ["c"] * 10
    rows = [
        {"id": f"{n}", "database": "d", "question": f"{n}?", "gold_sql": f'SELECT 1 FROM "{table}"'}
        | {"template": "rare" if n % 10 == 0 else "common"}
        for n, table in enumerate(tables)
    ]
    write_jsonl(tmp_path / "all.jsonl", rows)
    questions = read_questions(tmp_path / "all.jsonl")
    chosen = drawn(questions, 12, seed=3)
    assert sum(one.example.template == "rare" for one in chosen) == 6
    assert [sum(f'"{name}"' in one.example.gold_sql for one in chosen) for name in "abc"] >= [4, 3, 3]
    assert drawn(questions, 12, seed=3) == chosen == drawn(questions, 30, seed=3)[:12]
    assert drawn(questions, 12, seed=4) != chosen
    assert len(drawn(questions, 500)) == 100


def answered(
    id: str, strict: bool, final_sql: str = "SELECT 1", gold_sql: str = "SELECT 2"
) -> dict[str, Any]:
    questions = {row["id"]: row["question"] for row in ROWS}
    return {
        **{"set": "test", "example": id, "database": "shop", "family": "other", "difficulty": "easy"},
        **{"question": questions.get(id, "?"), "gold_sql": gold_sql, "final_sql": final_sql},
        **{"strict": strict},
        **{"official": strict, "reason": "equal" if strict else "values"},
    }


def test_summary_joins_reviewed_and_automatic_verdicts(
    folder: Path, executor: SQLExecutor, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    review = review_of(folder, executor)
    edit = {"question": "How many have staff?", "sql": "SELECT COUNT(staff) FROM branch"}
    for id, verdict in (("q0", "edit"), ("q1", "right"), ("q2", "wrong"), ("q3", "skip")):
        shown = review.shown(id)
        texts = edit if verdict == "edit" else {"question": shown["question"], "sql": shown["sql"]}
        review.save({"id": id, "verdict": verdict, **texts})
    answers = [
        answered("q0", False, "SELECT COUNT(staff) FROM branch", ROWS[0]["gold_sql"]),  # right after the edit
        answered("q1", True),
        answered("q2", True),  # agrees with a wrong gold query
        answered("q0", True) | {"set": "dev", "question": "A different one?"},
        answered("q1", True) | {"set": "dev", "database": "bank"},
        *(answered(f"other{n}", n % 4 > 0) for n in range(200)),
    ]
    path = folder / "evaluation.jsonl"
    write_jsonl(path, answers)
    words = ["review", str(folder), "--db", str(folder / "shop.sqlite"), "--summary"]
    assert main([*words, "--evaluation", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"] == {"right": 1, "wrong": 1, "edit": 1, "skip": 1}
    assert (found["questions"]["right"], found["questions"]["total"]) == (1, 3)
    assert (found["reviewed"]["right"], found["reviewed"]["total"]) == (2, 3)
    assert (found["automatic"]["right"], found["automatic"]["total"]) == (150, 200)
    assert found["rectifier"] == 0 and found["joined"]["share"] == 0.75
    assert main([*words, "--evaluation", str(path)]) == 0
    assert "both joined: 75.0% (" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--db"):
        summary(read_verdicts(folder), path)
    for lines, word in ((answers[-2:], "--file"), ([*answers, answered("q1", False)], "q1 more than once")):
        write_jsonl(path, lines)
        assert main([*words, "--evaluation", str(path)]) == 1
        assert word in capsys.readouterr().err


def test_the_joined_interval_covers_the_accuracy() -> None:
    """Verdicts that are right 9 times of 10: 95% intervals hold the accuracy, and are narrower than alone."""
    import numpy as np

    draw, covered, widths = np.random.default_rng(0), 0, list[float]()
    for _ in range(400):
        truth = draw.random(540) < 0.7
        seen = np.where(draw.random(540) < 0.9, truth, ~truth)
        labels, automatic, others = (part.astype(float) for part in (truth[:40], seen[:40], seen[40:]))
        joined = prediction_powered(labels, automatic, others)
        covered += joined.interval[0] <= 0.7 <= joined.interval[1]
        widths.append(joined.interval[1] - joined.interval[0])
    assert covered >= 0.92 * 400
    assert np.mean(widths) < 2 * 1.96 * (0.7 * 0.3 / 40) ** 0.5


@pytest.mark.parametrize(("right", "automatic", "others"), [(0, 1, 0.25), (4, 0, 0.75)])
def test_a_correction_beyond_the_bounds_leaves_the_reviewed_answers(
    right: int, automatic: int, others: float
) -> None:
    labels = [1.0] * right + [0.0] * (4 - right)
    rest = [1.0] * int(40 * others) + [0.0] * int(40 * (1 - others))
    joined = prediction_powered(labels, [automatic] * 4, rest)
    assert (joined.mean, joined.interval) == (right / 4, Accuracy(right, 4).interval)


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = ["--db", str(folder / "shop.sqlite")]
    (folder / "empty").mkdir()
    (folder / "bad.jsonl").write_bytes(b"\xff\xfe{")
    (folder / "other.jsonl").write_text('{"question": "?"\n')
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for word, words in [
            ("no such folder", [str(folder / "none")]),
            ("--db", [str(folder)]),
            ("data make", [str(folder / "empty"), *db]),
            ("gone.sqlite", [str(folder), "--db", str(folder / "gone.sqlite")]),
            ("bad.jsonl", [str(folder), *db, "--file", str(folder / "bad.jsonl")]),
            ("other.jsonl", [str(folder), *db, "--file", str(folder / "other.jsonl")]),
            ("--port", [str(folder), *db, "--port", str(taken.getsockname()[1])]),
            ("--by", [str(folder), *db, "--by", " "]),
            ("nothing was reviewed", [str(folder), "--summary"]),
            ("--summary", [str(folder), "--json"]),
        ]:
            assert main(["review", *words, "--no-browser"]) == 1, word
            printed = capsys.readouterr()
            (line,) = printed.err.splitlines()
            assert word in line, line
    (folder / "verified.jsonl").write_text('{"id": "q0", "verdict": "good"}\n')
    assert main(["review", str(folder), "--summary"]) == 1
    assert "verified.jsonl, line 1" in capsys.readouterr().err


def test_the_command_serves_until_ctrl_c(folder: Path) -> None:
    data = {"databases": str(folder / "shop.sqlite"), "train": str(folder / "questions" / "train.jsonl")}
    (folder / "config.yaml").write_text(json.dumps({"model": {"path": "none"}, "data": data}))
    words = ["review", str(folder), "--no-browser", "--test_databases", "0"]
    command = [sys.executable, "-m", "text2sql_grpo", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "4 questions for " in line
        url = urlsplit(line.split()[-1])
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
        own = {"Origin": f"http://{url.netloc}", "Content-Type": "application/json"}
        connection.request("POST", f"{url.path}verdict", json.dumps({"id": "q2", "verdict": "wrong"}), own)
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "1 wrong" in out and "Traceback" not in err
    assert json_lines(folder / "verified.jsonl")[0]["verdict"] == "wrong"


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_a_person_reviews_by_keyboard(folder: Path, executor: SQLExecutor, width: int, scheme: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with (
        playwright.sync_playwright() as driver,
        served(review_of(folder, executor)) as server,
        driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        faults: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(server.url)

        def see(text: str, where: str = "#question") -> None:
            page.locator(where, has_text=text).wait_for(timeout=10_000)

        see("How many branches?")
        page.keyboard.press("r")
        see("Cities?")
        page.keyboard.press("w")
        see("Largest staff?")
        page.keyboard.press("e")
        page.get_by_label("SQL", exact=True).and_(page.locator("textarea")).fill("DELETE FROM branch")
        page.keyboard.press("Control+Enter")
        see("not allowed", "#alert")
        page.locator("[name=sql]").fill("SELECT MIN(staff) FROM branch")
        page.locator("[name=question]").fill("Smallest staff? rw")
        page.keyboard.press("Control+Enter")
        see("edit, by ann", "#verdict")
        see("4", "#rows td")
        page.keyboard.press("x")
        page.locator("#status", has_text="Saved: edit. 3 of 4").wait_for(state="attached")
        page.keyboard.press("j")
        see("Staff in <b>Lisbon</b>?")
        page.keyboard.press("k")
        see("Smallest staff?")
        page.keyboard.press("?")
        page.get_by_role("button", name="Close").click()
        page.keyboard.press("j")
        see("Staff in <b>Lisbon</b>?")
        page.keyboard.press("s")
        see("4 of 4", "#count")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        unnamed = "() => [...document.querySelectorAll('button, textarea, input, progress')].filter("
        unnamed += "one => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).length"
        assert page.evaluate(unnamed) == 0
        assert faults == []
        assert {urlsplit(url).netloc for url in requests if not url.startswith("data:")} == {
            f"127.0.0.1:{server.server_port}"
        }
    verdicts = read_verdicts(folder)
    assert [verdicts[f"q{n}"]["verdict"] for n in range(4)] == ["right", "wrong", "edit", "skip"]
    assert verdicts["q2"]["question"] == "Smallest staff? rw"
    assert verdicts["q2"]["use_as_onboarding_question"] is True
    assert os.listdir(folder).count("verified.jsonl") == 1
