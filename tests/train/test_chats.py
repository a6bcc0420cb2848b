"""Episodes on disk: each once, whole, filtered; and the tokens of a chat with their weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ScriptedPolicy, ask, shop_environment
from tests.tiny_model import write_tokenizer
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError, DataError, RunError
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import chat_demonstration
from text2sql_grpo.rollout.engine import Budgets, run
from text2sql_grpo.sft.trajectories import EpisodeFile, select_chats


def episode(example: str, sample: int, *turns: str, **fields: Any) -> dict[str, Any]:
    """An episode of these turns that is right, unless `fields` say otherwise."""
    messages = [{"role": "user", "content": example}]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "rows"}]
    return {
        "example": example,
        "sample": sample,
        "database": "shop",
        "messages": messages[:-1],
        "stop_reason": "submitted",
        "is_masked": False,
        "strict": True,
        "reward": 1.0,
    } | fields


def test_a_file_takes_up_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "episodes.jsonl"
    wanted = [("a", 0), ("b", 0), ("a", 1)]
    first = EpisodeFile(path, {"model": "m"})
    assert first.missing(wanted) == wanted
    first.add(episode("b", 0, "\ud800é"))
    with path.open("ab") as file:
        file.write(b'{"example": "a", "sam')  # a kill in the middle of a line
    again = EpisodeFile(path, {"model": "m"})
    assert again.missing(wanted) == [("a", 0), ("a", 1)]
    again.add(episode("a", 0))
    assert [record["example"] for record in read_jsonl(path, "episodes")] == ["b", "a"]
    assert path.read_bytes().count(b"\n") == 2
    path.write_bytes(path.read_bytes() * 2)  # of an earlier version, by two calls at once
    assert [*EpisodeFile(path, {"model": "m"}).records] == [("b", 0), ("a", 0)]


def test_episodes_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    EpisodeFile(path, {"model": "m", "temperature": 1.0})
    EpisodeFile(path, {"model": "n", "temperature": 1.0}).add(episode("a", 0))  # nothing was in it
    with pytest.raises(ConfigError, match="collected with other settings: model, seed"):
        EpisodeFile(path, {"model": "o", "temperature": 1.0, "seed": 1})
    stranger = tmp_path / "notes.jsonl"
    stranger.write_text("{}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"not a file of collected episodes: .*notes\.jsonl"):
        EpisodeFile(stranger, {})
    assert stranger.read_text("utf-8") == "{}\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="the file of episodes cannot be written"):
        EpisodeFile(tmp_path / "file" / "episodes.jsonl", {})


RECORDS = [
    episode("b", 1, "look", "answer", reward=0.9),
    episode("b", 0, "answer", strict=False, reward=0.0),
    episode("b", 2, "answer at length", reward=0.8),
    episode("b", 3, "look", "answer", reward=0.9),
    episode("a", 0, "wrong", strict=False, reward=0.1),
    episode("a", 1, "worse", strict=False, reward=0.0),
    episode("c", 0, "late", stop_reason="max_turns"),
    episode("d", 0, "cut", is_masked=True),
]


@pytest.mark.parametrize(
    ("keep", "chosen"),
    [
        ("correct", [("b", 1), ("b", 2)]),
        ("best_of_n", [("a", 0), ("b", 1)]),
        ("shortest_correct", [("b", 1)]),
    ],
)
def test_filters(keep: Any, chosen: list[tuple[str, int]]) -> None:
    chats = select_chats(RECORDS, keep)
    assert [(chat["example"], chat["sample"]) for chat in chats] == chosen
    assert chats == select_chats(reversed(RECORDS), keep)
    assert chats[-1].keys() == {"example", "sample", "database", "messages"}


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_tokens_are_those_of_a_rollout_and_the_loss_is_on_the_policys_own(
    tmp_path: Path, protocol: Any
) -> None:
    settings = EnvironmentSettings(protocol=protocol, schema_text="compact")
    environment = shop_environment(tmp_path, settings)
    tools = environment.tools if protocol == "native" else None
    chat = ChatFormat(write_tokenizer(tmp_path), tools=tools)
    turns = ["<sql>SELECT city FROM branch</sql>", "no action", "<answer>SELECT 4</answer>"]
    if protocol == "native":
        calls = [("run_sql", "SELECT city FROM branch"), ("submit_sql", "SELECT 4")]
        turns = [
            f"<tool_call>{json.dumps({'name': n, 'arguments': {'sql': s}})}</tool_call>" for n, s in calls
        ]
    policy = ScriptedPolicy(chat, {"Lisbon?": turns})
    (played,) = run([environment.session(ask("Lisbon?"))], policy, chat, Budgets(200, 2_000, 9_000))
    made = chat_demonstration({"messages": played.messages}, chat)
    assert made.ids == played.prompt_ids + played.completion_ids
    assert made.weights == [0.0] * len(played.prompt_ids) + [float(flag) for flag in played.completion_mask]


@pytest.mark.parametrize("roles", ["user", "user assistant user", "assistant", "user assistant assistant"])
def test_chats_that_nobody_could_have_had_are_refused(tmp_path: Path, roles: str) -> None:
    messages = [{"role": role, "content": "hm"} for role in roles.split()]
    with pytest.raises(DataError, match="got the roles"):
        chat_demonstration({"messages": messages}, ChatFormat(write_tokenizer(tmp_path)))
