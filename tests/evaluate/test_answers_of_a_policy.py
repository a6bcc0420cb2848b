"""Answers of scripted policies: judged, counted, sampled several times."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import SHOP, ScriptedPolicy, ask, shop
from tests.scripted_slots import scripted_slots
from tests.tiny_model import write_tokenizer
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.evaluation.report import Report
from text2sql_grpo.evaluation.sampler import Sampler
from text2sql_grpo.evaluation.summary import accuracy, summary
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import Answer
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import SlotPolicy

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
    policy: Any = ScriptedPolicy(chat, turns)
    if max_slots is not None:
        policy = scripted_slots(chat, [turns[example.question] for example in examples], max_slots=max_slots)
    budgets = {"max_turns": 3, "max_turn_tokens": 100, "max_episode_tokens": 1_000}
    with shop(folder, **budgets) as environment:
        return environment.answer(examples, Sampler(policy, chat, 10_000), **options)


@pytest.mark.parametrize("max_slots", [None, 1, 4])
def test_every_question_is_answered_and_judged(tmp_path: Path, max_slots: int | None) -> None:
    handed: dict[int, Answer] = {}

    answers = answer(tmp_path, max_slots=max_slots, on_answer=handed.__setitem__)

    assert [one.example for one in answers] == EXAMPLES
    assert [one.verdict.reason for one in answers] == [
        *("equal", "row_count", "row_count", "query_failed", "not_submitted", "not_submitted")
    ]
    assert [one.verdict.official for one in answers] == [True, False, True, False, False, False]
    assert [handed[place] for place in range(6)] == answers


def test_a_failure_on_our_side_while_judging_stops_the_evaluation(tmp_path: Path) -> None:
    missing = dataclasses.replace(EXAMPLES[1], other_golds=("SELECT staff FROM nowhere",))
    answers = answer(tmp_path, [missing])
    assert answers[0].verdict.reason == "gold_failed"

    def fails(place: int, one: Answer) -> None:
        raise DataError("the database vanished")

    (tmp_path / "broken").mkdir()
    with pytest.raises(DataError, match="vanished"):
        answer(tmp_path / "broken", on_answer=fails)


def test_a_slow_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Two slots: the long episode, seated first, keeps one of them; all others go through the other."""
    long = ask("0?", STAFF)
    turns = {"0?": ["?" * 90] * 3} | {f"{i}?": [f"<answer>{STAFF}</answer>"] for i in range(1, 5)}
    examples = [long, *(ask(question, STAFF) for question in turns if question != "0?")]
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        logits = SlotPolicy.logits
        patch.setattr(
            SlotPolicy, "logits", lambda self, *args: steps.append(len(args[0])) or logits(self, *args)
        )
        answers = answer(tmp_path, examples, turns, max_slots=2)

    assert [one.verdict.strict for one in answers] == [False, *[True] * 4]
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
    assert result["stop_reasons"] == {"turn_length": 1, "max_turns": 1, "submitted": 4}
    assert result["reasons"] == {"equal": 1, "not_submitted": 2, "query_failed": 1, "row_count": 2}
    assert json.loads(json.dumps(result)) == result


def test_several_samples_stand_next_to_each_other(tmp_path: Path) -> None:
    answers = answer(tmp_path, EXAMPLES[:2], samples=3)

    report = Report(answers, samples=3)
    assert [one.example.id for one in answers] == ["looked up?"] * 3 + ["guessed?"] * 3
    assert report.accuracy == 0.5 and [report.pass_at(k) for k in (1, 3)] == [0.5, 0.5]
    assert report.interval[0] < 0.5 < report.interval[1]
    assert list(report.to_pandas()["strict"]) == [True] * 3 + [False] * 3
    with pytest.raises(ValueError, match="from 1 to 3"):
        report.pass_at(4)


@pytest.mark.parametrize(
    ("right", "k", "chance"),
    [([1], 1, 1 / 4), ([1], 2, 1 / 2), ([2], 2, 5 / 6), ([0, 4], 3, 1 / 2), ([3, 1], 4, 1.0)],
)
def test_pass_at_k_is_the_unbiased_estimator(right: list[int], k: int, chance: float) -> None:
    """Of 4 samples, by counting the draws without replacement."""
    verdicts = [Verdict(False, i < n, "equal", executes=True) for n in right for i in range(4)]
    answers = [Answer(Episode(example=EXAMPLES[0]), verdict) for verdict in verdicts]
    assert Report(answers, samples=4).pass_at(k) == pytest.approx(chance)


def test_nothing_asked(tmp_path: Path) -> None:
    answers = answer(tmp_path, [])

    assert answers == [] and Report(answers).accuracy == Report(answers).pass_at(1) == 0
    assert summary(answers)["overall"]["strict"]["interval"] == [0, 1]
    assert summary(answers)["looks_per_question"] == 0


def test_a_wrong_answer_comes_with_the_rows_that_refute_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat = ChatFormat(write_tokenizer(tmp_path / "tokenizer"))
    turns = {"by chance?": ["<answer>SELECT 7</answer>"], "wrong?": ["<answer>SELECT 8</answer>"]}
    sampler = Sampler(ScriptedPolicy(chat, turns), chat, 10_000)
    (tmp_path / "shop.sql").write_text(SHOP, "utf-8")
    with Environment(tmp_path / "shop.sql", max_turns=3) as environment:
        by_chance, wrong = environment.answer([ask(question, STAFF) for question in turns], sampler)
    assert (by_chance.verdict.reason, by_chance.evidence["on"]) == ("test_database", "test database")
    assert by_chance.evidence["gold"] != by_chance.evidence["answer"] == "7\n7"
    (table,) = by_chance.evidence["tables"]
    assert table.startswith("code | city | staff\n")
    assert wrong.evidence == {"on": "database", "gold": "staff\n7", "answer": "8\n8", "tables": []}


def test_evidence_shows_nothing_hidden(tmp_path: Path) -> None:
    (tmp_path / "shop.sql").write_text(SHOP, "utf-8")
    chat = ChatFormat(write_tokenizer(tmp_path / "tokenizer"))
    turns = {
        "all?": ["<answer>SELECT * FROM branch</answer>"],
        "one?": ["<answer>SELECT code, city FROM branch</answer>"],
    }
    sampler = Sampler(ScriptedPolicy(chat, turns), chat, 10_000)
    with Environment(tmp_path / "shop.sql", max_turns=3, hide=["branch.city"]) as environment:
        answers = environment.answer([ask(question, CODES) for question in turns], sampler)
    for one in answers:
        assert one.verdict.reason == "columns" and "hidden" in one.evidence["answer"]
        assert one.evidence["gold"].startswith("code\n")
        assert "Lisbon" not in json.dumps(one.record(), default=str)
