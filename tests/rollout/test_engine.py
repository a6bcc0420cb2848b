import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ScriptedPolicy, ask, shop_environment
from tests.scripted_slots import scripted_slots
from tests.tiny_model import write_tokenizer
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment, SQLSession
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, run

PLENTY = Budgets(max_turn_tokens=200, max_episode_tokens=2_000, max_context=10_000)
LOOK = "<sql>SELECT code FROM branch WHERE city LIKE 'Lis%'</sql>"
ANSWER = "<answer>SELECT staff FROM branch WHERE code = 'LIS-02'</answer>"


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return ChatFormat(write_tokenizer(tmp_path / "tokenizer", [LOOK, ANSWER], vocab_size=300))


@pytest.fixture
def environment(tmp_path: Path) -> SQLEnvironment:
    return shop_environment(tmp_path, EnvironmentSettings(instructions=False, max_turns=4))


def play(
    environment: SQLEnvironment,
    chat: ChatFormat,
    turns: dict[str, list[str | list[int]]],
    budgets: Budgets = PLENTY,
) -> tuple[list[Episode], ScriptedPolicy]:
    """Plays the script with both engines; the episodes are the same."""
    policy = ScriptedPolicy(chat, turns)
    over: list[Episode] = []
    episodes = run(sessions(environment, turns), policy, chat, budgets, on_end=over.append)
    can_begin = [e.example.id for e in episodes if len(e.prompt_ids) < budgets.max_context]
    slots = scripted_slots(chat, [turns[question] for question in can_begin])
    by_slots = run(sessions(environment, turns), slots, chat, budgets, on_end=over.append)
    assert sorted(map(id, over)) == sorted(map(id, [*episodes, *by_slots]))
    assert all(episode.stop_reason is not None for episode in over)
    assert list(map(record, by_slots)) == list(map(record, episodes))
    for episode in by_slots:
        assert len(episode.log_probs) == len(episode.completion_ids)
    return episodes, policy


def sessions(environment: SQLEnvironment, questions: Iterable[str]) -> list[SQLSession]:
    return [environment.session(ask(question)) for question in questions]


def record(episode: Episode) -> dict[str, Any]:
    """All of an episode but how long its queries took and how likely its tokens were."""
    actions = [(action.kind, action.sql, action.error) for action in episode.actions]
    return vars(episode) | {"actions": actions, "log_probs": None}


def play_one(
    environment: SQLEnvironment, chat: ChatFormat, *turns: str | list[int], budgets: Budgets = PLENTY
) -> Episode:
    (episode,), _ = play(environment, chat, {"Lisbon?": list(turns)}, budgets)
    return episode


def spoken(episode: Episode, chat: ChatFormat, flag: int) -> str:
    """The text of the tokens with this flag in the mask."""
    pairs = zip(episode.completion_ids, episode.completion_mask, strict=True)
    return chat.tokenizer.decode([token for token, sampled in pairs if sampled == flag])


def test_tokens_and_mask_of_a_look_and_an_answer(environment: SQLEnvironment, chat: ChatFormat) -> None:
    episode = play_one(environment, chat, LOOK, ANSWER)

    assert spoken(episode, chat, 1) == f"{LOOK}<|im_end|>{ANSWER}<|im_end|>"
    assert spoken(episode, chat, 0) == "\n<|im_start|>user\ncode\nLIS-02<|im_end|>\n<|im_start|>assistant\n"
    look, answer = len(chat.turn_ids(LOOK)), len(chat.turn_ids(ANSWER))
    environment_tokens = len(episode.completion_ids) - look - answer
    assert episode.completion_mask == [1] * look + [0] * environment_tokens + [1] * answer
    assert (episode.stop_reason, episode.is_masked) == ("submitted", False)


def test_the_episode_s_tokens_are_the_rendered_chat(environment: SQLEnvironment, chat: ChatFormat) -> None:
    episode = play_one(environment, chat, LOOK, "what?", ANSWER)

    whole = chat.tokenizer.apply_chat_template(episode.messages, tokenize=False)
    assert chat.tokenizer.decode(episode.prompt_ids + episode.completion_ids) == whole.removesuffix("\n")


def test_log_probs_of_the_policy_stand_on_the_episode(environment: SQLEnvironment, chat: ChatFormat) -> None:
    class Sure(ScriptedPolicy):
        def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
            written = super().generate(prompts, max_new_tokens=max_new_tokens)
            return Continuations(written.ids, [[-0.5, *[math.nan] * (len(ids) - 1)] for ids in written.ids])

    for policy, is_known in ((Sure, True), (ScriptedPolicy, False)):
        script = policy(chat, {"Lisbon?": [LOOK, ANSWER]})

        (episode,) = run([environment.session(ask("Lisbon?"))], script, chat, PLENTY)

        look, answer = len(chat.turn_ids(LOOK)), len(chat.turn_ids(ANSWER))
        reply = len(episode.completion_ids) - look - answer
        known = [-0.5, *[math.nan] * (look - 1), *[0.0] * reply, -0.5, *[math.nan] * (answer - 1)]
        assert episode.log_probs == pytest.approx(known if is_known else [], nan_ok=True)


def test_log_probs_end_where_the_turn_is_cut(environment: SQLEnvironment, chat: ChatFormat) -> None:
    class Talker(ScriptedPolicy):
        def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
            return Continuations([[5] * 50], [[-1.0] * 50])

    (episode,) = run(
        [environment.session(ask("Lisbon?"))], Talker(chat, {}), chat, Budgets(20, 1_000, 10_000)
    )

    assert (episode.stop_reason, episode.log_probs) == ("turn_length", [-1.0] * 20)


def test_native_protocol(tmp_path: Path) -> None:
    chat = ChatFormat(write_tokenizer(tmp_path / "tokenizer"), tools=TOOLS)
    environment = shop_environment(tmp_path, EnvironmentSettings(protocol="native"))
    call = '{"name": "submit_sql", "arguments": {"sql": "SELECT 1"}}'

    episode = play_one(environment, chat, call.replace("submit", "run"), call)

    assert [action.kind for action in episode.actions] == ["run_sql", "submit_sql"]
    assert spoken(episode, chat, 0).startswith("\n<|im_start|>tool\n1\n1\n(4 turns left: ")


def test_the_policy_continues_exactly_the_tokens_so_far(
    environment: SQLEnvironment, chat: ChatFormat
) -> None:
    seen: list[list[int]] = []

    class Recorder(ScriptedPolicy):
        def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
            seen.extend(prompts)
            return super().generate(prompts, max_new_tokens=max_new_tokens)

    # Bytes that are no character: decoding and encoding them again would give other tokens.
    odd = [200, 130, 200, chat.tokenizer.eos_token_id]
    policy = Recorder(chat, {"Lisbon?": [odd, ANSWER]})

    (episode,) = run([environment.session(ask("Lisbon?"))], policy, chat, PLENTY)

    last = len(chat.turn_ids(ANSWER))
    assert episode.completion_ids[: len(odd)] == odd
    assert seen == [episode.prompt_ids, episode.prompt_ids + episode.completion_ids[:-last]]


def test_sessions_of_different_length_side_by_side(environment: SQLEnvironment, chat: ChatFormat) -> None:
    turns: dict[str, list[str | list[int]]] = {
        "first?": [LOOK, "?", ANSWER],
        "second?": [ANSWER],
        "third?": [LOOK, LOOK, LOOK, LOOK],
        "fourth?": ["?", ANSWER],
    }

    episodes, policy = play(environment, chat, turns)

    assert [episode.example.id for episode in episodes] == list(turns)
    assert [len(episode.actions) for episode in episodes] == [3, 1, 4, 2]
    assert [episode.stop_reason for episode in episodes] == [
        *("submitted", "submitted", "max_turns", "submitted")
    ]
    assert [len(batch) for batch in policy.batches] == [4, 3, 2, 1]
    for question, episode in zip(turns, episodes, strict=True):
        alone, _ = play(environment, chat, {question: turns[question]})
        assert alone[0].prompt_ids == episode.prompt_ids
        assert alone[0].completion_ids == episode.completion_ids
        assert alone[0].completion_mask == episode.completion_mask
    assert not any(episode.is_masked for episode in episodes)


def test_turn_limit_is_no_truncation(environment: SQLEnvironment, chat: ChatFormat) -> None:
    episode = play_one(environment, chat, LOOK, LOOK, LOOK, LOOK)

    assert (episode.stop_reason, episode.is_masked, episode.final_sql) == ("max_turns", False, None)
    assert episode.completion_mask[-1] == 1


def test_turn_budget(environment: SQLEnvironment, chat: ChatFormat) -> None:
    n = len(chat.turn_ids(ANSWER))

    cut = play_one(environment, chat, ANSWER, budgets=Budgets(n - 2, 2_000, 10_000))
    whole = play_one(environment, chat, ANSWER, budgets=Budgets(n, 2_000, 10_000))

    assert (cut.stop_reason, cut.is_masked, cut.final_sql, cut.actions) == ("turn_length", True, None, [])
    assert cut.messages[-1]["content"] == chat.text(cut.completion_ids)
    assert cut.completion_ids == chat.turn_ids(ANSWER)[:-2]
    assert cut.completion_mask == [1] * (n - 2)
    assert (whole.stop_reason, whole.is_masked) == ("submitted", False)


def test_a_turn_cut_behind_a_whole_action_counts(environment: SQLEnvironment, chat: ChatFormat) -> None:
    talk = chat.turn_ids(f"{LOOK} lists the codes, and so on and on and on and on and on and on")
    block = chat.turn_ids(
        "Look:\n```sql\nSELECT city FROM branch\n```\nThis lists the cities, and so on and on"
    )
    n = min(len(talk), len(block)) - 5
    turns: list[list[int] | str] = [talk[:n], block[:n], ANSWER]

    episode = play_one(environment, chat, *turns, budgets=Budgets(n, 2_000, 10_000))
    half = play_one(environment, chat, block, budgets=Budgets(20, 2_000, 10_000))
    bare = play_one(environment, chat, "SELECT city FROM branch", budgets=Budgets(4, 2_000, 10_000))
    no_room = play_one(environment, chat, talk, budgets=Budgets(n, n, 10_000))

    assert [action.kind for action in episode.actions] == ["run_sql", "run_sql", "submit_sql"]
    assert (episode.stop_reason, episode.is_masked) == ("submitted", False)
    text = chat.tokenizer.apply_chat_template(episode.messages, tokenize=False)
    ids = episode.prompt_ids + episode.completion_ids
    assert chat.tokenizer.decode(ids) == text.removesuffix("\n")
    assert [(each.stop_reason, each.actions) for each in (half, bare)] == [("turn_length", [])] * 2
    assert (no_room.stop_reason, no_room.actions) == ("budget", [])


@pytest.mark.parametrize("of_context", [True, False])
def test_whole_episode_budget_and_context(
    environment: SQLEnvironment, chat: ChatFormat, of_context: bool
) -> None:
    plenty = play_one(environment, chat, LOOK, ANSWER)
    n_prompt, n_all, n_answer = (
        len(plenty.prompt_ids),
        len(plenty.completion_ids),
        len(chat.turn_ids(ANSWER)),
    )
    n_look = len(chat.turn_ids(LOOK))

    def limited(tokens: int) -> Episode:
        budgets = Budgets(200, 2_000, n_prompt + tokens) if of_context else Budgets(200, tokens, 10_000)
        return play_one(environment, chat, LOOK, ANSWER, budgets=budgets)

    reason = "context" if of_context else "budget"
    assert limited(n_all).stop_reason == "submitted"
    for tokens, kept in [
        (n_all - 1, n_all - 1),  # the answer is cut
        (n_all - n_answer + 1, n_all - n_answer + 1),  # one token of an answer
        (n_all - n_answer, n_look),  # no room after the observation, which is then left out
        (n_look + 1, n_look),
        (n_look, n_look),
        (n_look - 1, n_look - 1),  # the look is cut
        (1, 1),
    ]:
        episode = limited(tokens)
        assert (episode.stop_reason, episode.is_masked, episode.final_sql) == (reason, True, None)
        assert episode.completion_ids == plenty.completion_ids[:kept]
        assert episode.completion_mask == plenty.completion_mask[:kept]


def test_prompt_that_fills_the_context_is_not_asked(environment: SQLEnvironment, chat: ChatFormat) -> None:
    n_short = len(chat.prompt_ids(environment.session(ask("short?")).start()))
    n_long = len(chat.prompt_ids(environment.session(ask("a longer one?")).start()))
    turns: dict[str, list[str | list[int]]] = {"a longer one?": [ANSWER], "short?": [ANSWER]}

    (long, short), policy = play(environment, chat, turns, Budgets(200, 2_000, n_long))

    assert (long.stop_reason, long.is_masked, long.completion_ids) == ("context", True, [])
    assert len(long.prompt_ids) == n_long
    assert len(short.completion_ids) == n_long - n_short
    assert [len(batch) for batch in policy.batches] == [1]


def test_longer_budgets_of_others_do_not_help(environment: SQLEnvironment, chat: ChatFormat) -> None:
    """One `generate` serves all sessions; each still stops at its own limit."""
    n_answer = len(chat.turn_ids(ANSWER))
    n_short = len(chat.prompt_ids(environment.session(ask("short?")).start()))
    budgets = Budgets(200, 2_000, n_short + n_answer)

    (short, long), _ = play(environment, chat, {"short?": [ANSWER], "a longer one?": [ANSWER]}, budgets)

    assert short.stop_reason == "submitted"
    assert (long.stop_reason, long.is_masked) == ("context", True)
    assert len(long.prompt_ids) + len(long.completion_ids) == budgets.max_context


def test_no_sessions(chat: ChatFormat) -> None:
    assert run([], ScriptedPolicy(chat, {}), chat, PLENTY) == []
