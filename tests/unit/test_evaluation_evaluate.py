import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ScriptedPolicy, ask, shop_environment
from tests.tiny_model import write_tokenizer
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.evaluation.evaluate import Answer, accuracy, answer_questions, summary
from text2sql_grpo.grading import Grader
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets

STAFF = "SELECT staff FROM branch WHERE code = 'LIS-02'"
CODES = "SELECT code FROM branch"
EXAMPLES = [
    ask("looked up?", STAFF, family="lookup", difficulty="hard"),
    ask("guessed?", STAFF, family="lookup", difficulty="easy"),
    ask("official only?", CODES, family="list", difficulty="easy"),
    ask("fails?", CODES, family="list", difficulty="easy"),
    ask("never submits?", CODES, family="list", difficulty="easy"),
    ask("talks too long?", CODES, family="list", difficulty="easy"),
]
TURNS = {
    "looked up?": ["<sql>SELECT code FROM branch</sql>", f"<answer>{STAFF}</answer>"],
    "guessed?": ["<answer>SELECT staff FROM branch WHERE code = 'Lisbon'</answer>"],
    "official only?": ["<answer>SELECT code FROM branch UNION ALL SELECT code FROM branch</answer>"],
    "fails?": ["<answer>SELECT codes FROM branch</answer>"],
    "never submits?": ["<sql>SELECT 1</sql>", "?", "<sql>SELECT 2</sql>"],
    "talks too long?": ["x" * 200],
}


def answer(
    folder: Path, examples: list[Example] = EXAMPLES, turns: Any = TURNS, **options: Any
) -> tuple[list[Answer], ScriptedPolicy]:
    chat = ChatFormat(write_tokenizer(folder / "tokenizer"))
    environment = shop_environment(folder, EnvironmentSettings(max_turns=3))
    policy = ScriptedPolicy(chat, turns)
    grader = Grader(environment.executor)
    budgets = Budgets(100, 1_000, 10_000)
    return answer_questions(examples, policy, chat, environment, grader, budgets, **options), policy


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_every_question_is_answered_and_judged(tmp_path: Path, batch_size: int) -> None:
    counts: list[int] = []

    answers, policy = answer(tmp_path, batch_size=batch_size, on_answers=counts.append)

    assert [one.example for one in answers] == EXAMPLES
    assert [one.verdict.reason for one in answers] == [
        *("equal", "row_count", "row_count", "query_failed", "not_submitted", "not_submitted")
    ]
    assert [one.verdict.official for one in answers] == [True, False, True, False, False, False]
    assert counts == {1: [1] * 6, 4: [4, 2], 64: [6]}[batch_size]
    assert max(map(len, policy.batches)) == min(batch_size, 6)


def test_summary(tmp_path: Path) -> None:
    answers, _ = answer(tmp_path)

    result = summary(answers)

    assert accuracy(answers).correct == 1
    assert result["overall"]["strict"] == accuracy(answers).record()
    assert result["overall"]["official"]["correct"] == 2
    assert result["overall"]["official"]["total"] == 6
    assert {name: both["strict"]["correct"] for name, both in result["by_family"].items()} == {
        "list": 0,
        "lookup": 1,
    }
    assert {name: both["strict"]["total"] for name, both in result["by_difficulty"].items()} == {
        "easy": 5,
        "hard": 1,
    }
    assert result["looks_per_question"] == 0.5
    assert result["stop_reasons"] == {"budget": 1, "max_turns": 1, "submitted": 4}
    assert result["reasons"] == {"equal": 1, "not_submitted": 2, "query_failed": 1, "row_count": 2}
    assert json.loads(json.dumps(result)) == result


def test_forced_first_turns_follow_their_questions_through_batches(tmp_path: Path) -> None:
    first_turns = [f"<sql>SELECT '{example.question}'</sql>" for example in EXAMPLES[:3]]
    turns = {example.question: ["never", f"<answer>{STAFF}</answer>"] for example in EXAMPLES[:3]}

    answers, _ = answer(tmp_path, EXAMPLES[:3], turns, batch_size=2, first_turns=first_turns)

    assert [one.episode.messages[2]["content"] for one in answers] == first_turns
    assert [one.verdict.strict for one in answers] == [True, True, False]
    assert summary(answers)["looks_per_question"] == 1


def test_nothing_asked(tmp_path: Path) -> None:
    answers, _ = answer(tmp_path, [])

    assert answers == []
    assert summary(answers)["overall"]["strict"]["interval"] == [0, 1]
    assert summary(answers)["looks_per_question"] == 0
