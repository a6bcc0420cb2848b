import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ask, shop_environment
from text2sql_grpo.environment.episode import Message
from text2sql_grpo.environment.protocols import TOOLS, Protocol
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment, SQLSession
from text2sql_grpo.environment.tools import ToolResult
from text2sql_grpo.errors import DataError

LOOK = "SELECT code FROM branch WHERE city LIKE 'Lis%'"
ANSWER = "SELECT staff FROM branch WHERE code = 'LIS-02'"


def say(protocol: Protocol, kind: str, sql: str) -> str:
    """A turn as a model writes it."""
    if protocol == "native":
        return f"<tool_call>{json.dumps({'name': kind, 'arguments': {'sql': sql}})}</tool_call>"
    return f"<sql>{sql}</sql>" if kind == "run_sql" else f"<answer>{sql}</answer>"


def begin(folder: Path, protocol: Protocol = "tags", *, max_turns: int = 3) -> SQLSession:
    settings = EnvironmentSettings(protocol=protocol, max_turns=max_turns)
    return shop_environment(folder, settings).session(ask("How many people work in Lisbon?"))


@pytest.mark.parametrize(("protocol", "role"), [("tags", "user"), ("native", "tool")])
def test_look_then_submit(tmp_path: Path, protocol: Protocol, role: str) -> None:
    session = begin(tmp_path, protocol)
    episode = session.episode
    look, answer = say(protocol, "run_sql", LOOK), say(protocol, "submit_sql", ANSWER)

    prompt = session.start()
    reply = session.step(look)
    assert episode.stop_reason is None
    end = session.step(answer)

    same = {"tags": f"write <answer>{LOOK}</answer>", "native": f"call submit_sql with {LOOK}"}
    hint = same[protocol]
    expected = f"code\nLIS-02\n(2 turns left: if these rows answer the question, {hint})"
    assert reply == {"role": role, "content": expected}
    assert end is None
    assert episode.messages == [
        *prompt,
        {"role": "assistant", "content": look},
        reply,
        {"role": "assistant", "content": answer},
    ]
    assert [(action.kind, action.sql) for action in episode.actions] == [
        ("run_sql", LOOK),
        ("submit_sql", ANSWER),
    ]
    assert episode.actions[0].outcome is not None and episode.actions[0].outcome.rows == (("LIS-02",),)
    assert episode.actions[1].outcome is None
    assert (episode.final_sql, episode.stop_reason, episode.is_masked) == (ANSWER, "submitted", False)


def test_rows_whose_header_begins_like_an_error_are_none(tmp_path: Path) -> None:
    session = begin(tmp_path, "tags", max_turns=3)
    session.start()
    reply = session.step("<sql>SELECT 404 AS ErrorCode</sql>")
    assert reply is not None and "if these rows answer the question" in reply["content"]


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_malformed_turn_is_answered_and_the_episode_goes_on(tmp_path: Path, protocol: Protocol) -> None:
    session = begin(tmp_path, protocol, max_turns=5)
    session.start()

    reply = session.step("I do not know.")
    session.step(say(protocol, "submit_sql", ANSWER))

    assert reply is not None and reply["content"].startswith("Error: expected one ")
    malformed = session.episode.actions[0]
    assert (malformed.kind, malformed.sql, malformed.outcome) == ("malformed", "", None)
    hint = {
        "tags": "write <answer>SELECT ...</answer>",
        "native": "call submit_sql with the query",
    }
    assert reply["content"] == f"Error: {malformed.error}\n(4 turns left: {hint[protocol]})"
    assert (session.episode.final_sql, session.episode.stop_reason) == (ANSWER, "submitted")


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_query_in_a_code_block_is_run_and_in_the_last_turn_submitted(
    tmp_path: Path, protocol: Protocol
) -> None:
    session = begin(tmp_path, protocol, max_turns=2)
    session.start()

    reply = session.step(f"This query shows it:\n```sql\n{LOOK}\n```\nIt lists the codes.")
    end = session.step(f"```sql\n{ANSWER}\n```")

    assert reply is not None and reply["content"].startswith("code\nLIS-02\n(1 turn left: ")
    assert end is None
    assert [action.kind for action in session.episode.actions] == ["run_sql", "submit_sql"]
    assert (session.episode.final_sql, session.episode.stop_reason) == (ANSWER, "submitted")


@pytest.mark.parametrize("call", [{"name": "branch", "arguments": {"sql": ANSWER}}, {"sql": ANSWER}])
def test_the_query_of_an_unknown_tool_is_run_and_in_the_last_turn_submitted(
    tmp_path: Path, call: dict[str, Any]
) -> None:
    session = begin(tmp_path, "native", max_turns=3)
    session.start()

    session.step(json.dumps(call))
    session.step(json.dumps({"name": "branch", "arguments": {"code": "LIS-02"}}))
    session.step(json.dumps(call))

    assert [action.kind for action in session.episode.actions] == ["run_sql", "malformed", "submit_sql"]
    assert (session.episode.final_sql, session.episode.stop_reason) == (ANSWER, "submitted")


def test_last_turn_is_announced_and_then_over(tmp_path: Path) -> None:
    session = begin(tmp_path, max_turns=3)
    session.start()

    replies = [session.step(f"<sql>SELECT {turn}</sql>") for turn in range(2)]
    end = session.step("<sql>SELECT 2</sql>")

    assert [reply and reply["content"] for reply in replies] == [
        "0\n0\n(2 turns left: if these rows answer the question, write <answer>SELECT 0</answer>)",
        "1\n1\n(1 turn left: write <answer>SELECT 1</answer>)",
    ]
    assert end is None
    assert session.episode.messages[-1]["role"] == "assistant"
    assert len(session.episode.actions) == 3
    assert (session.episode.final_sql, session.episode.stop_reason) == (None, "max_turns")


def test_malformed_turns_count(tmp_path: Path) -> None:
    session = begin(tmp_path, max_turns=2)
    session.start()

    reply, end = session.step(""), session.step("")

    assert reply is not None and reply["content"].endswith(
        "\n(1 turn left: write <answer>SELECT ...</answer>)"
    )
    assert end is None
    assert session.episode.stop_reason == "max_turns"


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_result_in_place_of_a_query_is_answered(tmp_path: Path, protocol: Protocol) -> None:
    session = begin(tmp_path, protocol)
    session.start()
    reply = session.step(say(protocol, "submit_sql", "1900"))
    assert reply is not None and "expected the SQL query itself, got a value or text" in reply["content"]
    assert session.step(say(protocol, "submit_sql", ANSWER)) is None
    assert (session.episode.final_sql, session.episode.stop_reason) == (ANSWER, "submitted")


def test_a_repeated_query_is_named_so(tmp_path: Path) -> None:
    session = begin(tmp_path, max_turns=4)
    session.start()
    replies = [session.step(f"<sql>{LOOK}</sql>") for _ in range(3)]
    found = [reply is not None and "the same query as before; " in reply["content"] for reply in replies]
    assert found == [False, True, True]


def test_a_single_turn_offers_the_answer_alone(tmp_path: Path) -> None:
    (system, _) = begin(tmp_path, max_turns=1).start()
    assert "<sql>" not in system["content"] and system["content"].endswith("You have 1 turn.")
    native = EnvironmentSettings(protocol="native", max_turns=1)
    (system, _) = SQLSession(ask("?"), schema_text="", backend=Parrot(calls=1), settings=native).start()
    assert "run_sql" not in system["content"]


def test_single_turn_leaves_no_look(tmp_path: Path) -> None:
    session = begin(tmp_path, max_turns=1)
    session.start()

    assert session.step(f"<sql>{LOOK}</sql>") is None
    assert session.episode.stop_reason == "max_turns"


@pytest.mark.parametrize(
    ("sql", "status", "shown"),
    [
        ("DELETE FROM branch", "denied", "Error: not allowed: DELETE"),
        ("SELECT cty FROM branch", "error", "Error: no such column: cty"),
        ("SELECT (", "error", "Error: incomplete input"),
        ("SELECT '\ud800'", "error", "Error: the query contains a character"),
        ("SELECT code FROM branch WHERE staff > 9", "ok", "code\n(no rows)"),
        ("SELECT cast(x'ff41' AS TEXT) AS a", "ok", "a\n?A"),
    ],
)
def test_the_model_is_shown_what_went_wrong(tmp_path: Path, sql: str, status: str, shown: str) -> None:
    session = begin(tmp_path)
    session.start()

    reply = session.step(f"<sql>{sql}</sql>")

    assert reply is not None and reply["content"].startswith(shown)
    outcome = session.episode.actions[0].outcome
    assert outcome is not None and outcome.status == status


def test_database_that_vanished_is_our_failure(tmp_path: Path) -> None:
    environment = shop_environment(tmp_path, EnvironmentSettings())
    session = environment.session(ask("How many?"))
    session.start()
    environment.databases.address("shop").unlink()

    with pytest.raises(DataError, match=r"shop"):
        session.step("<sql>SELECT 1</sql>")


def test_unknown_database(tmp_path: Path) -> None:
    environment = shop_environment(tmp_path, EnvironmentSettings())
    (tmp_path / "databases" / "shop.sql").rename(tmp_path / "databases" / "store.sql")

    with pytest.raises(DataError, match=r"shop\.sql"):
        environment.session(ask("How many?"))


def prompt_of(folder: Path, settings: EnvironmentSettings) -> list[Message]:
    return shop_environment(folder, settings).session(ask("How many?")).start()


def test_prompt(tmp_path: Path) -> None:
    system, user = prompt_of(tmp_path, EnvironmentSettings(max_turns=4))

    assert system["role"] == "system"
    assert "<sql>SELECT ...</sql>" in system["content"] and "You have 4 turns." in system["content"]
    assert user["role"] == "user"
    assert user["content"].startswith("CREATE TABLE branch") and user["content"].endswith("\n\nHow many?")
    assert "LIS-02" not in user["content"]  # a look must be needed


def test_prompt_without_instructions_and_with_compact_schema(tmp_path: Path) -> None:
    (user,) = prompt_of(tmp_path, EnvironmentSettings(instructions=False, schema_text="compact"))

    assert user["content"].startswith("table branch") and "CREATE" not in user["content"]


def test_prompt_with_a_schema_that_shows_examples(tmp_path: Path) -> None:
    (user,) = prompt_of(tmp_path, EnvironmentSettings(instructions=False, schema_text="m_schema"))

    assert user["content"].startswith("【DB_ID】 shop\n【Schema】\n# Table: branch\n")
    assert "LIS-02" in user["content"]


def test_prompt_with_a_schema_of_few_tokens(tmp_path: Path) -> None:
    settings = EnvironmentSettings(schema_text="m_schema", max_schema_tokens=40)
    environment = shop_environment(tmp_path, settings)
    counted = SQLEnvironment(environment.databases, environment.executor, settings, count_tokens=len)

    text = environment.schema_text("shop")
    assert len(text) <= 160 and "Left out to save space: all examples" in text
    with pytest.raises(DataError, match=r"max_tokens must be >= \d+, .*got 40 \(schema of shop\)"):
        counted.schema_text("shop")


def test_prompt_of_the_native_protocol_leaves_tags_out(tmp_path: Path) -> None:
    system, _ = prompt_of(tmp_path, EnvironmentSettings(protocol="native"))

    assert "tool call" in system["content"] and "<sql>" not in system["content"]


def test_sessions_of_one_environment_do_not_share_their_record(tmp_path: Path) -> None:
    environment = shop_environment(tmp_path, EnvironmentSettings())
    first, second = environment.session(ask("How many?")), environment.session(ask("How many?"))
    first.start()
    second.start()

    first.step("<sql>SELECT 1</sql>")

    assert len(second.episode.messages) == 2
    assert second.episode.actions == []


class Parrot:
    """Answers every call with its arguments, until it dies."""

    tools = TOOLS

    def __init__(self, *, calls: int) -> None:
        self._left = calls

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self._left -= 1
        return ToolResult(f"{name} {arguments}" if self._left >= 0 else None)


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_another_backend_runs_the_queries_and_its_death_masks_the_episode(protocol: Protocol) -> None:
    settings = EnvironmentSettings(protocol=protocol, max_turns=4)
    session = SQLSession(ask("How many?"), schema_text="", backend=Parrot(calls=1), settings=settings)
    session.start()

    reply, end = session.step(say(protocol, "run_sql", LOOK)), session.step(say(protocol, "run_sql", LOOK))

    episode = session.episode
    assert reply is not None and reply["content"].startswith(f"run_sql {dict(sql=LOOK)}\n(3 turns left: ")
    assert end is None
    assert [(action.kind, action.sql, action.outcome) for action in episode.actions] == [
        ("run_sql", LOOK, None)
    ] * 2
    assert (episode.stop_reason, episode.is_masked, episode.final_sql) == ("error", True, None)
