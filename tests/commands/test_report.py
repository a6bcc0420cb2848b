"""`report.html`: figures, hostile texts in a real browser, and run folders that lack files."""

import base64
import gzip
import json
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tokenizer
from text2sql_grpo.commands import main
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.reporting import report_page
from text2sql_grpo.reporting.live_view import open_live
from text2sql_grpo.reporting.report_page import episodes_report, write_page, write_report
from text2sql_grpo.run_folder import CONFIG, ENERGY, EVALUATION, METRICS, PAGE, PAGE_DATA, ROLLOUTS, SCHEDULE

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\x1b[31mred\x1b[0m \u202eright to left",
    "x" * 1_000_000,
    "\udcff half a letter",
    "'; rm -rf $(pwd) #",
)


def episode(number: int, *, strict: bool, **fields: Any) -> dict[str, Any]:
    question = HOSTILE[number % len(HOSTILE)]
    return {
        "example": f"q-{number}",
        "database": "shop" if number % 2 else HOSTILE[0],
        "family": "count",
        "difficulty": "easy",
        "question": question,
        "gold_sql": f"SELECT '{question[:20]}'",
        "final_sql": "SELECT 1",
        "strict": strict,
        "official": True,
        "reason": "equal" if strict else "values",
        "gap": "",
        "flags": [] if strict else ["copied_literal"],
        "scores": {"execution": float(strict)},
        "reward": float(strict),
        "is_masked": False,
        "stop_reason": "submitted",
        "completion_ids": [5, 6, 7, 8],
        "completion_mask": [1, 1, 0, 1],
        "log_probs": [-0.1, -2.5, None],
        "messages": [
            {"role": "system", "content": "Answer by one query."},
            {"role": "user", "content": f"table t.a\n\n{question}"},
            {"role": "assistant", "content": f"<sql>{question[:50]}</sql>"},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "<answer>SELECT 1</answer>"},
        ],
        "actions": [
            {"kind": "run_sql", "sql": "SELECT", "outcome": {"status": "timeout", "error": "late"}},
            {"kind": "submit_sql", "sql": "SELECT 1"},
        ],
        "evidence": {
            "on": "test database",
            "gold": "n\n1\n2",
            "answer": "n\n2\n3",
            "tables": ["a | b\n1 | 2"],
        },
    } | fields


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_run(folder: Path, episodes: int = 24) -> Path:
    """A run of steps of eight episodes, two groups of four, and six held-out questions."""
    folder.mkdir()
    write_tokenizer(folder / "merged")
    rows = [episode(i // 4, strict=i % 3 == 0, step=i // 8) for i in range(episodes)]
    write_lines(folder / ROLLOUTS, rows)
    steps = range(1, episodes // 8 + 1)
    write_lines(folder / METRICS, [{"step": i, "loss": 0.1, "frac_reward_zero_std": 0.75} for i in steps])
    accuracy = Accuracy(3, 6, {"shop": (3, 6)}).record()
    write_lines(folder / SCHEDULE, [{"step": i, "accuracy": accuracy} for i in steps])
    for name, right in (("evaluation-before", {0}), ("evaluation", {1, 3, 5})):
        answers = [episode(i, strict=i in right, set="dev") for i in range(6)]
        write_lines(folder / f"{name}.jsonl", answers)
    scores = {"dev": {"overall": {"strict": accuracy}}}
    record = {"sets": scores, "before": {"sets": scores}, "step": 2, "change": {"verdict": HOSTILE[0]}}
    (folder / EVALUATION).write_text(json.dumps(record | {"seconds": {"GRPO": 70.0}}), encoding="utf-8")
    return folder


def data_of(page: Path) -> dict[str, Any]:
    text = re.search(r'<script id="data" type="text/plain">([^<]*)<', page.read_text("utf-8"))
    assert text
    [found] = json.loads(gzip.decompress(base64.b64decode(text[1])))
    return dict(found)


def test_the_verb_writes_the_figures_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["view", str(run), "--no-browser"]) == 0
    assert capsys.readouterr().out.strip() == str(run / PAGE)
    data = data_of(run / PAGE)
    assert data == json.loads((run / PAGE_DATA).read_text("utf-8"))
    (dev,) = data["sets"]
    assert (dev["after"]["correct"], dev["after"]["total"]) == (3, 6)
    assert [point["step"] for point in data["curve"]] == [1, 2, 3]
    assert data["costs"]["episodes"] == data["costs"]["queries"] == 24
    assert data["diagnosis"][0].startswith("75% of the groups")
    assert "run sft first" in data["diagnosis"][0]
    assert [len(group["episodes"]) for group in data["groups"]] == [4] * 6
    assert [group["step"] for group in data["groups"]] == [1, 1, 2, 2, 3, 3]  # those of the curve
    assert [row["after"]["strict"] for row in data["answers"]] == [False, True] * 3
    assert data["heat"]["shop"] == {"plain": [2, 2], "unread": [1, 1]}
    assert data["reasons"] == [["values", 3], ["equal", 3]]
    assert all(data["reason_texts"][reason] for reason, _ in data["reasons"])
    assert max(len(row["question"]) for row in data["answers"]) < 2_100  # the long one is cut
    assert not data["missing"]
    assert data["schemas"]["shop"] == "table t.a"
    assert [role for role, _ in data["answers"][0]["after"]["turns"]] == ["assistant", "user", "assistant"]
    assert [len(one.get("pieces", ())) for one in data["groups"][-1]["episodes"]] == [4] * 4
    assert [mark for _, mark in data["groups"][-1]["episodes"][0]["pieces"]] == [-0.1, -2.5, None, None]


@pytest.mark.parametrize("is_mapping", [False, True])
def test_the_command_that_asks_again_names_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mapping: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run, shop = write_run(tmp_path / "run"), Path("databases/shop.sqlite")
    shop.parent.mkdir()
    shop.touch()
    databases = {"shop": str(shop), "other": "postgresql://reader@host/other"} if is_mapping else "databases"
    (run / CONFIG).write_text(json.dumps({"data": {"databases": databases}}), encoding="utf-8")
    assert data_of(write_report(run))["sources"] == {"shop": str(shop)}
    shutil.rmtree(shop.parent)
    assert data_of(write_report(run))["sources"] == {}


def test_skills_are_read_in_the_dialect_of_the_database(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for path in (run / ROLLOUTS, run / "evaluation.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(
            path, [row | {"database": "shop", "gold_sql": "SELECT a FROM t WHERE a ~ 'b'"} for row in rows]
        )
    databases = {"shop": "postgresql://reader@host/shop"}
    (run / CONFIG).write_text(json.dumps({"data": {"databases": databases}}), encoding="utf-8")
    data = data_of(write_report(run))
    assert data["heat"] == {"shop": {"string match": [3, 6]}}
    assert all(group["skills"] == ["string match"] for group in data["groups"])
    shutil.copy(run / EVALUATION, run / "more.json")
    shutil.copy(run / "evaluation.jsonl", run / "more.jsonl")
    assert main(["view", str(run / "more.json"), "--no-browser"]) == 0
    assert data_of(run / "more.html")["heat"] == data["heat"]
    (run / CONFIG).unlink()
    assert data_of(write_report(run))["heat"] == {"shop": {"unread": [3, 6]}}


def test_energy_that_codecarbon_wrote_is_a_cost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    main(["view", str(run), "--no-browser"])
    assert data_of(run / PAGE)["costs"]["kwh"] is None
    lines = "timestamp,duration,energy_consumed\n2026-11-27,60.0,0.004\n2026-11-28,30.0,0.0021\n"
    (run / ENERGY).write_text(lines, encoding="utf-8")  # a run that was resumed
    main(["view", str(run), "--no-browser"])
    assert data_of(run / PAGE)["costs"]["kwh"] == pytest.approx(0.0061)


@pytest.mark.parametrize("absent", [EVALUATION, ROLLOUTS, METRICS, SCHEDULE])
def test_a_run_that_lacks_a_file_has_a_page_that_names_it(tmp_path: Path, absent: str) -> None:
    run = write_run(tmp_path / "run")
    (run / absent).unlink()
    data = data_of(write_report(run))
    assert len(data["missing"]) == 1


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((ROLLOUTS, field) for field in ("example", "question", "messages", "completion_ids")),
        *(("evaluation.jsonl", field) for field in ("set", "database", "gold_sql", "strict")),
        ("evaluation-before.jsonl", "final_sql"),
        (SCHEDULE, "accuracy"),
    ],
)
def test_a_record_that_lacks_a_field_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, field: str
) -> None:
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    del rows[1][field]
    write_lines(run / name, rows)
    assert main(["view", str(run), "--no-browser"]) == 1
    assert f"no field '{field}' ({run / name}, line 2)" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == main(["view", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert "no run:" in error and "no such folder" in error


def test_a_long_run_keeps_its_last_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", episodes=160)
    whole = write_report(run).stat().st_size
    monkeypatch.setattr(report_page, "MAX_PAGE_BYTES", whole - 500)
    data = data_of(write_report(run))
    assert (run / PAGE).stat().st_size < whole
    assert 0 < len(data["groups"]) < 40 and data["groups"][-1]["step"] == 20
    assert "left out" in data["left_out"]


def test_an_evaluation_and_collected_episodes_have_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    record = json.loads((run / EVALUATION).read_text("utf-8"))
    share = record["sets"]["dev"]["overall"]["strict"]
    names = ("mean", "vote", "soft_vote", "oracle")
    record["sets"]["dev"]["samples"] = {"samples": 2, **dict.fromkeys(names, share)}
    del record["before"]
    (tmp_path / "e.json").write_text(json.dumps(record), encoding="utf-8")
    (run / "evaluation.jsonl").rename(tmp_path / "e.jsonl")
    assert main(["view", str(tmp_path / "e.json"), "--no-browser"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "e.html")
    data = data_of(tmp_path / "e.html")
    assert (data["name"], len(data["answers"]), data["groups"]) == ("e", 6, [])
    assert [row["name"] for row in data["samples"]] == ["dev"]
    rows = [json.loads(line) for line in (run / ROLLOUTS).read_text().splitlines()]
    data = data_of(write_page(tmp_path / "c.html", episodes_report("c", rows, Databases({}))))
    assert [len(group["episodes"]) for group in data["groups"]] == [4] * 6
    assert data["result"] == "8 of 24 episodes right"


@contextmanager
def live(runs: list[Path]) -> Iterator[str]:
    """Address of the page of some runs, while it is served."""
    server, listener, address = open_live(runs, 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            thread.join(0.05)
        yield address
    finally:
        server.should_exit = True
        thread.join()


def test_runs_are_shown_live_on_this_machine_alone(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]

    def get(url: str, host: str | None = None) -> str:
        request = urllib.request.Request(url, headers={"Host": host} if host else {})
        return str(urllib.request.urlopen(request).read().decode())

    with live(runs) as address:
        assert "connect-src &#39;self&#39;" in get(address) or "connect-src 'self'" in get(address)
        assert [one["name"] for one in json.loads(get(f"{address}data"))] == ["one", "two"]
        with (runs[0] / ROLLOUTS).open("a") as file:
            file.write(json.dumps(episode(99, strict=True, step=9)) + "\n")
        assert [len(one["groups"]) for one in json.loads(get(f"{address}data"))] == [7, 6]
        with (runs[0] / ROLLOUTS).open("a") as file:
            file.write('{"half')
        for url, host, code in (
            (f"{address}data", None, 503),
            (address, "evil.example", 400),
            (address[: address.index("/", 8)] + "/", None, 404),
        ):
            with pytest.raises(urllib.error.HTTPError, match=str(code)):
                get(url, host)
        with pytest.raises(ConfigError, match="leave --port out"):
            open_live(runs, int(address.split(":")[2].split("/")[0]))


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if not shutil.which("chromium"):
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def test_a_live_page_keeps_what_is_open(tmp_path: Path, browser: Any) -> None:
    run = write_run(tmp_path / "run")
    with live([run]) as address:
        page = browser.new_page()
        page.goto(address)
        page.get_by_role("button", name="all 6").first.wait_for()
        for i in (1, 3):
            page.locator(f"[id='answer/dev%2Fq-{i}'] > summary").click()
        page.locator("details[open] > .body").nth(1).wait_for()
        page.evaluate("document.querySelectorAll('details[open]').forEach((one) => { one.isSame = true; })")
        with (run / ROLLOUTS).open("a") as file:
            file.write(json.dumps(episode(99, strict=True, step=9)) + "\n")
        page.get_by_role("button", name="all 7").wait_for()
        opened = page.locator("details[open]").evaluate_all("(all) => all.map((one) => [one.id, one.isSame])")
        page.close()  # which asks no more
    assert opened == [["answer/dev%2Fq-1", True], ["answer/dev%2Fq-3", True]]


def test_hostile_texts_stay_texts_in_a_browser(tmp_path: Path, browser: Any) -> None:
    run = write_run(tmp_path / "run")
    (run / CONFIG).write_text("data: {databases: postgresql://reader@host/shop}", encoding="utf-8")
    page_file = write_report(run)
    page = browser.new_page(viewport={"width": 390, "height": 844})
    said, asked = list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{page_file.as_uri()}#answer/dev%2Fq-1")
    page.wait_for_selector("details[open] .side")
    assert page.title() == "run - text2sql-grpo"
    assert f"95% intervals {data_of(page_file)['interval_unit']}." in page.inner_text("body")
    assert HOSTILE[1] in page.inner_text("details[open] summary")
    assert "--db 'postgresql://reader@host/shop'" in page.inner_text("body")
    assert page.locator("img").count() == 0 and page.locator(".result").inner_text() == HOSTILE[0]
    page.get_by_role("button", name="gained 3").click()
    marks = page.get_by_role("group", name="answers").locator("xpath=following-sibling::details")
    assert page.get_by_role("button", name="gained 3").get_attribute("aria-pressed") == "true"
    assert marks.first.inner_text().startswith("gained")
    page.get_by_role("searchbox").first.fill("no such question")
    page.wait_for_selector("text=None.")
    page.keyboard.press("Tab")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("searchbox").first.fill("")
    page.locator("details summary", has_text="step 2").first.click()
    page.locator(".tokens summary").first.click()
    assert page.locator(".token").count() >= 3 and page.locator(".environment").count() >= 1
    assert page.locator(".missing").first.inner_text() == "1"
    assert said == [] and len(asked) == 1
    if axe := os.environ.get("AXE_CORE"):  # path of axe.min.js
        context = browser.new_context(bypass_csp=True)
        page = context.new_page()
        page.goto(f"{page_file.as_uri()}#answer/dev%2Fq-1")
        page.wait_for_selector("details[open] .side")
        page.add_script_tag(path=axe)
        found = page.evaluate("axe.run().then((result) => result.violations)")
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
