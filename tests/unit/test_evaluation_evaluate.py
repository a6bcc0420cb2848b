import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import ScriptedPolicy, ask, shop_environment
from tests.scripted_slots import scripted_slots
from tests.tiny_model import write_tokenizer
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.summary import accuracy, answer_questions, summary
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.rewards import Answer
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, SlotPolicy

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
    folder: Path,
    examples: list[Example] = EXAMPLES,
    turns: Any = TURNS,
    *,
    max_slots: int | None = None,
    **options: Any,
) -> list[Answer]:
    """Answers by the script: by slots where their number is given."""
    chat = ChatFormat(write_tokenizer(folder / "tokenizer"))
    environment = shop_environment(folder, EnvironmentSettings(max_turns=3))
    policy: Any = ScriptedPolicy(chat, turns)
    if max_slots is not None:
        policy = scripted_slots(chat, [turns[example.question] for example in examples], max_slots=max_slots)
    grader = Grader(environment.executor)
    budgets = Budgets(100, 1_000, 10_000)
    return answer_questions(examples, policy, chat, environment, grader, budgets, **options)


@pytest.mark.parametrize("max_slots", [None, 1, 4])
def test_every_question_is_answered_and_judged(tmp_path: Path, max_slots: int | None) -> None:
    count: list[None] = []

    answers = answer(tmp_path, max_slots=max_slots, on_answer=lambda: count.append(None))

    assert [one.example for one in answers] == EXAMPLES
    assert [one.verdict.reason for one in answers] == [
        *("equal", "row_count", "row_count", "query_failed", "not_submitted", "not_submitted")
    ]
    assert [one.verdict.official for one in answers] == [True, False, True, False, False, False]
    assert len(count) == 6


def test_a_failure_on_our_side_while_judging_stops_the_evaluation(tmp_path: Path) -> None:
    missing = dataclasses.replace(EXAMPLES[1], other_golds=("SELECT staff FROM nowhere",))
    answers = answer(tmp_path, [missing])
    assert answers[0].verdict.reason == "gold_failed"

    class Broken(Grader):
        def grade(self, *_: Any, **__: Any) -> Verdict:
            raise DataError("expected a database, got none")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="expected a database"):
        patch.setattr(f"{__name__}.Grader", Broken)
        (tmp_path / "broken").mkdir()
        answer(tmp_path / "broken")


def test_a_slow_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Two slots: the long episode, seated first, keeps one of them; all others go through the other."""
    long = ask("0?", STAFF)
    turns = {"0?": ["?" * 90] * 3} | {f"{i}?": [f"<answer>{STAFF}</answer>"] for i in range(1, 5)}
    examples = [long, *(ask(question, STAFF) for question in turns if question != "0?")]
    ended: list[str] = []

    def on_answer() -> None:
        ended.append(threading.current_thread().name)

    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        logits = SlotPolicy.logits
        patch.setattr(
            SlotPolicy, "logits", lambda self, *args: steps.append(len(args[0])) or logits(self, *args)
        )
        answers = answer(tmp_path, examples, turns, max_slots=2, on_answer=on_answer)

    assert [one.verdict.strict for one in answers] == [False, *[True] * 4]
    assert set(ended) == {"MainThread"}
    spoken = [sum(one.episode.completion_mask) for one in answers]
    # In pairs that wait for each other the passes would be the longest of each pair together.
    assert sum(map(max, spoken[::2], [*spoken[1::2], 0])) > 1.2 * sum(size <= 2 for size in steps)


def test_summary(tmp_path: Path) -> None:
    answers = answer(tmp_path)

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


@pytest.mark.parametrize("max_slots", [None, 2])
def test_forced_first_turns_go_to_their_questions(tmp_path: Path, max_slots: int | None) -> None:
    first_turns = [f"<sql>SELECT '{example.question}'</sql>" for example in EXAMPLES[:3]]
    said = [f"<answer>{STAFF}</answer>"]
    turns = {example.question: said if max_slots else ["never", *said] for example in EXAMPLES[:3]}

    answers = answer(tmp_path, EXAMPLES[:3], turns, max_slots=max_slots, first_turns=first_turns)

    assert [one.episode.messages[2]["content"] for one in answers] == first_turns
    assert [one.verdict.strict for one in answers] == [True, True, False]
    assert summary(answers)["looks_per_question"] == 1


def test_nothing_asked(tmp_path: Path) -> None:
    answers = answer(tmp_path, [])

    assert answers == []
    assert summary(answers)["overall"]["strict"]["interval"] == [0, 1]
    assert summary(answers)["looks_per_question"] == 0
