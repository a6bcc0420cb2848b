import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text2sql_grpo.environment.protocols import (
    TOOLS,
    MalformedTurn,
    ParsedAction,
    ParsedCall,
    parse_action,
    parse_native,
    parse_tags,
    unmarked_query,
)

LOOK = ParsedAction("run_sql", "SELECT 1")
ANSWER = ParsedAction("submit_sql", "SELECT 1")
CALL = '{"name": "run_sql", "arguments": {"sql": "SELECT 1"}}'


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<sql>SELECT 1</sql>", LOOK),
        ("<answer>SELECT 1</answer>", ANSWER),
        ("<sql>\n  SELECT 1\n</sql>\n", LOOK),
        ("Let me see. <sql>SELECT 1</sql> That was it.", LOOK),
        ("<think>first</think><answer>SELECT 1</answer>", ANSWER),
        ("<think><sql>SELECT 2</sql> or so</think><sql>SELECT 1</sql>", LOOK),
        ("opened in the prompt</think><sql>SELECT 1</sql>", LOOK),
        ("<think>a</think><think>b</think><sql>SELECT 1</sql>", LOOK),
        ("<sql>SELECT\n1</sql>", ParsedAction("run_sql", "SELECT\n1")),
        ("<sql>SELECT '<b>' < 1</sql>", ParsedAction("run_sql", "SELECT '<b>' < 1")),
        ("<sql>SELECT '<answer>'</sql>", ParsedAction("run_sql", "SELECT '<answer>'")),
    ],
)
def test_tags(text: str, action: ParsedAction) -> None:
    assert parse_tags(text) == action


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "got none"),
        ("SELECT 1", "got none"),
        ("<sql>SELECT 1", "got none"),
        ("<sql>SELECT 1</answer>", "got none"),
        ("<SQL>SELECT 1</SQL>", "got none"),
        ("<sql>SELECT 1</sql><sql>SELECT 2</sql>", "got 2"),
        ("<sql>SELECT 1</sql><answer>SELECT 1</answer>", "got 2"),
        ("<sql> \n </sql>", "got an empty <sql>"),
        ("<answer></answer>", "got an empty <answer>"),
        ("<think>unsure", "got thinking that never ends"),
        ("<think>a</think><think><sql>SELECT 1</sql>", "got thinking that never ends"),
        ("<think><sql>SELECT 1</sql></think>", "got none"),
        ("<sql>SELECT '</think>'</sql>", "got none"),
    ],
)
def test_malformed_tags(text: str, got: str) -> None:
    with pytest.raises(MalformedTurn, match=rf"^expected .*{got}$"):
        parse_tags(text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", LOOK),
        (f"Let me look [at it].\n<tool_call>{CALL}</tool_call>", LOOK),
        (f"<think>\nfirst\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", LOOK),  # as Qwen writes it
        (f"[TOOL_CALLS][{CALL}]", LOOK),
        (f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdefghi"}}]', LOOK),
        (CALL.replace("arguments", "parameters"), LOOK),
        ("<|python_tag|>" + CALL.replace("arguments", "parameters"), LOOK),
        (f"<|tool_call|>[{CALL}]<|/tool_call|>", LOOK),
        (f"Here: {CALL} Done.", LOOK),
        (f"<think>{{not this}}</think>{CALL}", LOOK),
        (f"<think><tool_call>{CALL}</tool_call></think><tool_call>{CALL}</tool_call>", LOOK),
        (CALL.replace("run_sql", "submit_sql").replace("SELECT 1", " SELECT 1\\n"), ANSWER),
        ('{"name": "run_sql", "sql": "SELECT 1"}', LOOK),
        (CALL[:-1], LOOK),
        (f"```json\n{CALL[:-2]}\n```", LOOK),
        (CALL.replace("SELECT 1", "SELECT\n1"), ParsedAction("run_sql", "SELECT\n1")),
        (CALL.replace("SELECT 1", "SELECT '}]'"), ParsedAction("run_sql", "SELECT '}]'")),
    ],
)
def test_native(text: str, action: ParsedAction) -> None:
    assert parse_native(text) == action


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "got none"),
        ("SELECT 1", "got none"),
        ("<tool_call></tool_call>", "got none"),
        (f"<tool_call>{CALL}", "got a <tool_call> without its </tool_call>"),
        (f"<tool_call>{CALL}\n{CALL}</tool_call>", "got more than one JSON object between .*"),
        (f"<tool_call>{CALL} Done.</tool_call>", "got more than one JSON object between .*"),
        (f"<tool_call>Here: {CALL}</tool_call>", "got JSON that cannot be read: .*"),
        (f"<tool_call>[{CALL}]</tool_call>", "got list"),
        ("<tool_call>\n<function=run_sql></function>\n</tool_call>", "got JSON that cannot be read: .*"),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "got 2 calls"),
        (f"[TOOL_CALLS][{CALL}, {CALL}]", "got 2 calls"),
        ("[TOOL_CALLS][]", "got 0 calls"),
        ("[TOOL_CALLS][3]", "got int"),
        (f"<think>{CALL}", "got thinking that never ends"),
        (f"<think>{CALL}</think>", "got none"),
        (CALL[:-3], "got JSON that cannot be read: .*"),
        (f"<tool_call>{CALL[:-1]}</tool_call>", "got JSON that cannot be read: .*"),
        ("<tool_call>{'name': 'run_sql'}</tool_call>", "got JSON that cannot be read: .*"),
        ("[" * 100_000, "got JSON that cannot be read: .*"),
        ('{"name": ' + "1" * 5_000 + "}", "got JSON that cannot be read: .*"),
        (CALL.replace("run_sql", "drop_sql"), "got the tool 'drop_sql'"),
        ('{"sql": "SELECT 1"}', "got the tool None"),
        ('{"name": ["run_sql"], "arguments": {"sql": "x"}}', r"got the tool \['run_sql'\]"),
        (json.dumps({"name": "x" * 10_000}), "got the tool 'x{199}"),
        ('{"name": "run_sql"}', "got the arguments null"),
        ('{"name": "run_sql", "arguments": {"query": "x"}}', r'got the arguments \{"query": "x"\}'),
        ('{"name": "run_sql", "arguments": {"sql": 3}}', r'got the arguments \{"sql": 3\}'),
        (CALL.replace("}}", ', "limit": 3}}'), r'got the arguments \{"sql": "SELECT 1", "limit": 3\}'),
        ('{"name": "run_sql", "arguments": {"sql": " "}}', r'got the arguments \{"sql": " "\}'),
        ('{"name": "run_sql", "arguments": "SELECT 1"}', 'got the arguments "SELECT 1"'),
    ],
)
def test_malformed_native(text: str, got: str) -> None:
    with pytest.raises(MalformedTurn, match=rf"^expected .*{got}$"):
        parse_native(text)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("You can run:\n```sql\nSELECT 1;\n```\nIt counts.", "SELECT 1;"),
        ("```\nWITH t AS (SELECT 1) SELECT * FROM t\n```", "WITH t AS (SELECT 1) SELECT * FROM t"),
        ("<think>```sql\nSELECT 2\n```</think>\n select 1 ", "select 1"),
        ("<think>perhaps\n```sql\nSELECT 2\n```\nor", None),
        ("```SQL \nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```", None),
        ("```sql\nDELETE FROM t\n```", None),
        ("```sql\nSELECT 1", None),
        ("The answer: SELECT 1", None),
        ("<sql>SELECT 1\n```sql\nSELECT 2\n```", None),
        ("<tool_call>{}\n```sql\nSELECT 1\n```", None),
        ("Albany", None),
        ("```sql\n" * 50_000, None),
    ],
)
def test_queries_without_an_action_are_found_if_there_is_one(text: str, query: str | None) -> None:
    assert unmarked_query(text) == query


PIECES = st.sampled_from(
    [
        *("<sql>", "</sql>", "<answer>", "</answer>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
        *('{"name": ', '"run_sql"', '"arguments": ', '{"sql": ', '"SELECT 1"', "}", "[", "]", ",", "null"),
        CALL,
    ]
)


@pytest.mark.thorough
@given(st.lists(PIECES | st.text(max_size=20), max_size=12).map("".join))
@example("[" * 100_000)
@example('{"name": -' + "9" * 5_000)
def test_no_text_breaks_the_parsers(text: str) -> None:
    for protocol in ("tags", "native"):
        try:
            action = parse_action(text, protocol)
        except MalformedTurn as malformed:
            assert str(malformed).startswith("expected ")
            assert len(str(malformed)) < 500
        else:
            assert action.sql == action.sql.strip() != ""


def test_tools_are_what_the_parser_reads() -> None:
    for tool in TOOLS:
        call = {"name": tool["function"]["name"], "arguments": {"sql": "SELECT 1"}}
        assert parse_native(json.dumps(call)).kind == tool["function"]["name"]
        assert tool["function"]["parameters"]["required"] == list(call["arguments"])


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema}}


OTHER_TOOLS = [
    tool("weather", properties={"city": {}, "day": {}}, required=["city"]),
    tool("note", properties={"text": {}}, additionalProperties=True),
    tool("free"),
    tool("run_sql", properties={"sql": {}}),
    TOOLS[-1],
]


@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("weather", {"city": "Porto"}, ParsedCall("weather", {"city": "Porto"})),
        ("weather", {"city": 3, "day": None}, ParsedCall("weather", {"city": 3, "day": None})),
        ("note", {"any": 1}, ParsedCall("note", {"any": 1})),
        ("free", {}, ParsedCall("free", {})),
        ("run_sql", {"sql": "SELECT 1"}, LOOK),
        ("submit_sql", {"sql": "SELECT 1"}, ANSWER),
    ],
)
def test_calls_of_other_tools(name: str, arguments: object, action: object) -> None:
    assert parse_native(json.dumps({"name": name, "arguments": arguments}), OTHER_TOOLS) == action


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("weather", {}, r"expected weather with its arguments \(city, day\), got the arguments \{\}"),
        (
            "weather",
            {"city": "", "hour": 1},
            r"expected weather with its arguments \(city, day\), got .*hour.*",
        ),
        ("weather", "Porto", 'expected weather with .*, got the arguments "Porto"'),
        ("free", None, r"expected free with its arguments \(none\), got the arguments null"),
        ("run_sql", {}, r'expected one tool call .*"weather" or .*, got the arguments \{\}'),
        ("drop", {}, r'expected one tool call \{"name": "weather" or "note" .*\.\.\}\}, got the tool .drop.'),
    ],
)
def test_malformed_calls_of_other_tools(name: str, arguments: object, message: str) -> None:
    with pytest.raises(MalformedTurn, match=rf"^{message}$"):
        parse_native(json.dumps({"name": name, "arguments": arguments}), OTHER_TOOLS)
