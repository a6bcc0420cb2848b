"""Which questions a step plays: shares of families, weights by verdicts, limits, others for dead groups."""

import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from text2sql_grpo.training.selection import Selection

from tests.scripted_policy import ask
from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError

FAMILIES = ["lookup"] * 5 + ["count"] * 8 + ["join"] * 4
HALF = {"lookup": 0.5}


def questions(count: int, **columns: Sequence[str]) -> list[Example]:
    """Questions with these fields, repeated in turn; each on its own template unless it is given."""
    given = {"template": [str(i) for i in range(count)]} | columns
    fields = ({name: values[i % len(values)] for name, values in given.items()} for i in range(count))
    return [dataclasses.replace(ask(f"{i}?"), **one) for i, one in enumerate(fields)]


def selection(
    examples: Sequence[Example] | None = None, *, batch_size: int = 4, seed: int = 0, **settings: Any
) -> Selection:
    """By default, of questions of the three families; groups have two episodes."""
    examples = examples or [ask(f"{i}?", family=name) for i, name in enumerate(FAMILIES)]
    return Selection(
        examples, SelectionConfig(**settings), batch_size=batch_size, num_generations=2, seed=seed
    )


def batches(drawing: Selection, count: int) -> list[list[int]]:
    """The first batches of questions."""
    return [list(drawing.draw()) for _ in range(count)]


def teach(drawing: Selection, right: dict[int, int], *, of: int = 8) -> None:
    """Note so many right episodes of each of these questions, in one batch."""
    drawing.draw()
    for question, count in right.items():
        for i in range(0, of, 2):
            drawing.observe([i < count, i + 1 < count], {0: question})


@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_each_batch_and_each_part_of_it_holds_the_mix(batch_size: int) -> None:
    drawn = batches(selection(strata=HALF, batch_size=batch_size), 40)
    for batch in drawn:
        for start in range(batch_size):
            for end in range(start + 1, batch_size + 1):
                lookups = sum(FAMILIES[number] == "lookup" for number in batch[start:end])
                assert abs(lookups - (end - start) / 2) <= 0.5
        assert len(set(batch)) == batch_size
    others = Counter(FAMILIES[number] for batch in drawn for number in batch)
    assert others["count"] / (others["count"] + others["join"]) == pytest.approx(8 / 12, abs=0.03)


@pytest.mark.parametrize("by", ["uniform", "learnability", "regret", "easy_to_hard"])
def test_shares_that_no_batch_can_hold_are_met_in_the_long_run(by: str) -> None:
    drawn = batches(selection(strata={"lookup": 0.1, "join": 0.6}, batch_size=3, by=by), 100)
    counts = Counter(FAMILIES[number] for batch in drawn for number in batch)
    assert counts == {"lookup": 30, "join": 180, "count": 90}
    assert {sum(FAMILIES[number] == "join" for number in batch) for batch in drawn} == {1, 2}


def test_every_question_is_met_before_one_repeats_in_its_stratum() -> None:
    drawn = [number for batch in batches(selection(strata=HALF), 30) for number in batch]
    for members in (range(5), range(5, 17)):
        own = [number for number in drawn if number in members]
        rounds = [own[i : i + len(members)] for i in range(0, len(own) - len(members), len(members))]
        assert len(rounds) > 3
        assert all(sorted(one) == list(members) for one in rounds)
        assert len({tuple(one) for one in rounds}) > 3  # in orders of their own


@pytest.mark.parametrize("by", ["uniform", "learnability", "regret", "easy_to_hard"])
def test_a_restored_selection_draws_what_an_undisturbed_one_draws(by: str) -> None:
    """Bit for bit, also in the middle of an epoch; another seed draws others."""
    settings: dict[str, Any] = {"by": by, "strata": HALF, "resample_flat": 1, "seed": 0}

    def go_on(drawing: Selection, first: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(first, first + 6):
            batch = list(drawing.draw(progress=step / 12))
            drawing.observe([(number + step) % 3 == 0 for number in batch for _ in range(2)])
            replaced = drawing.replacements()
            drawing.observe([number % 2 == i for number in replaced.values() for i in range(2)], replaced)
            seen.append((batch, replaced, list(drawing.batch), drawing.rates().tolist()))
        return seen

    undisturbed = selection(**settings)
    go_on(undisturbed, 0)
    undisturbed.quarantine([3])
    other_rank, restored = selection(**settings), selection(**settings)
    go_on(other_rank, 0)
    other_rank.quarantine([3])
    torch.save(undisturbed.state(), file := io.BytesIO())
    file.seek(0)
    restored.restore(torch.load(file))
    expected = go_on(undisturbed, 6)
    assert go_on(restored, 6) == go_on(other_rank, 6) == expected
    assert go_on(selection(**settings | {"seed": 1}), 0) != go_on(selection(**settings), 0)


def test_a_state_of_other_questions_is_not_restored(caplog: pytest.LogCaptureFixture) -> None:
    drawing = selection(by="learnability")
    drawing.restore(selection(questions(9)).state())
    assert "is of other questions" in caplog.text
    drawing.restore(None)
    assert "has no state of it" in caplog.text
    assert drawing.draw() == selection(by="learnability").draw()


def test_a_question_borrows_from_its_template_within_its_family() -> None:
    examples = questions(6, family=["a", "a", "a", "a", "b", "b"], template=["x", "x", "y", "y", "z", "z"])
    drawing = selection(examples, batch_size=1, level=["family", "template"], prior=4.0)
    teach(drawing, {0: 6})
    everything = (6 + 4 * 0.5) / (8 + 4)
    family = (6 + 4 * everything) / (8 + 4)
    template = (6 + 4 * family) / (8 + 4)
    own = (6 + 4 * template) / (8 + 4)
    unseen_family = everything  # an unseen cell borrows all
    expected = [own, template, family, family, unseen_family, unseen_family]
    assert drawing.rates().tolist() == pytest.approx(expected)
    drawing.draw()  # counts are worth less now: eight batches halve them
    decay = 0.5 ** (1 / 8)
    assert drawing.rates()[4] == pytest.approx((6 * decay + 2) / (8 * decay + 4))


def test_weights_of_each_method() -> None:
    examples = questions(3, database=["a", "b", "c"])
    rates = {}
    for by in ("learnability", "regret"):
        drawing = selection(examples, by=by, batch_size=1, prior=0.001, half_life=None)
        teach(drawing, {0: 0, 1: 4, 2: 8})
        rates[by] = drawing.weights([0, 1, 2]).tolist()
    assert rates["learnability"] == pytest.approx([0.0, 0.25, 0.0], abs=1e-3)
    # Of two episodes at one half, the best is right in three of four: 0.75 less a mean of 0.5. None is stale.
    assert rates["regret"] == pytest.approx([0.0, 0.9, 0.0], abs=1e-2)


def test_regret_prefers_what_was_not_played_for_long() -> None:
    drawing = selection(questions(3), by="regret", batch_size=1, prior=0.001, half_life=None)
    teach(drawing, {0: 4, 1: 4, 2: 4})
    for _ in range(3):
        drawing.draw()
        drawing.observe([True, False], {0: 1})
    weights = drawing.weights([0, 1, 2]).tolist()
    assert weights[0] == weights[2] == pytest.approx(0.3 + 0.05)
    assert weights[1] == pytest.approx(0.3)


def test_learnable_questions_are_drawn_more_often_and_the_others_still_met() -> None:
    """Ten of 40 questions are answered half the time, the others never."""
    examples = questions(40, family=["fair", "dead", "dead", "dead"])
    counts: Counter[int] = Counter()
    for by in ("uniform", "learnability"):
        drawing, drawn = selection(examples, by=by, batch_size=8), Counter[int]()
        for _ in range(60):
            batch = drawing.draw()
            drawn.update(batch)
            drawing.observe([number % 4 == 0 and bool(i) for number in batch for i in range(2)])
        assert len(drawn) == 40  # explored in shuffled order
        counts[by] = sum(count for number, count in drawn.items() if number % 4 == 0)
    assert counts["uniform"] == 60 * 8 / 4
    assert counts["learnability"] > 2 * counts["uniform"]


@pytest.mark.parametrize("easy_by", ["difficulty", "measured"])
def test_easy_questions_come_first(easy_by: str) -> None:
    names = ["hard", "easy", "extra", "medium"]
    examples = questions(16, difficulty=names, family=names)
    drawing = selection(examples, by="easy_to_hard", easy_by=easy_by, explore=0.0, prior=0.1)
    rights = {"easy": 8, "medium": 6, "hard": 3, "extra": 0}
    teach(drawing, {number: rights[name] for number, name in enumerate(names)})

    def drawn(progress: float) -> set[str]:
        found = [examples[one].difficulty for _ in range(10) for one in drawing.draw(progress=progress)]
        return set(found)

    assert drawn(0.0) == {"easy"}
    assert drawn(0.16) == {"easy", "medium"}  # half of the questions a third of the way to `all_after`
    assert drawn(0.5) == drawn(1.0) == set(names)


def test_an_unknown_difficulty_is_refused() -> None:
    with pytest.raises(DataError, match="training questions are tricky: correct them"):
        selection(questions(2, difficulty=["easy", "tricky"]), by="easy_to_hard", easy_by="difficulty")


@pytest.mark.parametrize("by", ["uniform", "learnability"])
def test_a_batch_holds_few_databases_and_no_more_than_a_share_of_each(by: str) -> None:
    examples = questions(60, database=["a", "b", "c", "d", "e", "f"])
    drawing = selection(examples, by=by, batch_size=8, databases_per_batch=3, max_share=0.5)
    drawn = batches(drawing, 30)
    for batch in drawn:
        databases = [examples[number].database for number in batch]
        assert len(set(databases)) <= 3
        assert max(Counter(databases).values()) <= 4
        assert databases == sorted(databases, key=databases.index)  # questions of one are neighbours
    assert len({number for batch in drawn for number in batch}) == 60 or by == "learnability"


def test_limits_that_cannot_be_met_give_way(caplog: pytest.LogCaptureFixture) -> None:
    one_database = selection(questions(9), batch_size=4, max_share=0.25)
    assert len(set(one_database.draw())) == 4
    assert caplog.text.count("cannot be met in batch 1") == 1
    caplog.clear()
    one_template = questions(9, template=["x"], database=list("abcdefghi"))
    assert len(set(selection(one_template, batch_size=4, max_share=0.25).draw())) == 4
    assert caplog.text.count("cannot be met") == 1
    caplog.clear()
    fewer = selection(questions(9, database=["a", "b"]), batch_size=4, databases_per_batch=4)
    assert len(set(fewer.draw())) == 4  # two databases are no more than four
    small = selection(questions(4, database=list("abcd")), batch_size=4, databases_per_batch=2)
    assert sorted(small.draw()) == [0, 1, 2, 3]
    assert caplog.text.count("cannot be met") == 1
    hand_written = selection([ask(f"{i}?", template=None) for i in range(4)], batch_size=2, max_share=0.5)
    hand_written.draw()  # without templates, which then share nothing


def test_groups_of_equal_verdicts_are_replaced_by_others_of_their_stratum() -> None:
    drawing = selection(strata=HALF, resample_flat=2)
    first = list(drawing.draw())
    drawing.observe([True, True, False, False, True, False, None, True])
    replaced = drawing.replacements()
    assert sorted(replaced) == [0, 1, 3]  # a masked episode leaves one verdict, which is no variance
    assert not set(replaced.values()) & set(first)
    for place, question in replaced.items():
        assert (FAMILIES[question] == "lookup") == (FAMILIES[first[place]] == "lookup")
    assert drawing.observe([True, False, False, False, None, None], replaced) == {0}
    assert drawing.batch == [replaced[0], *first[1:]]
    again = drawing.replacements()
    assert sorted(again) == [1, 3]
    assert not set(again.values()) & {*first, *replaced.values()}
    drawing.observe([False, True, True, False], again)
    assert drawing.replacements() == {}  # two rounds, and nothing is flat
    assert drawing.metrics() == {
        "accuracy/strict_played": (2 + 0 + 1 + 1 + 1 + 0 + 0 + 1 + 1) / 18,
        "selection/episodes": 18.0,
        "selection/frac_verdict_zero_std": 0.0,
        "selection/frac_verdict_zero_std_played": 5 / 9,
        "selection/quarantined": 0.0,
    }


@pytest.mark.parametrize("by", ["uniform", "learnability", "regret", "easy_to_hard"])
def test_one_question_and_nothing_but_zero_variance(by: str) -> None:
    alone = selection(questions(1), batch_size=1, by=by, resample_flat=3)
    for _ in range(3):
        assert alone.draw() == [0]
        alone.observe([False, False])
        assert alone.replacements() == {}
    every = selection(questions(6), by=by, resample_flat=9)
    for _ in range(5):
        batch = list(every.draw())
        every.observe([True] * 8)
        replaced = every.replacements()
        assert sorted([*batch, *replaced.values()]) == list(range(6))
        assert every.observe([True] * 2 * len(replaced), replaced) == set()
        assert every.replacements() == {}  # the batch has tried them all
        assert every.batch == batch


@pytest.mark.parametrize("by", ["uniform", "learnability"])
def test_a_quarantined_question_is_drawn_no_more(by: str) -> None:
    drawing = selection(questions(8), by=by, batch_size=2, resample_flat=1)
    assert drawing.quarantine([3, 5, 3]) == [3, 5]
    drawn = set()
    for batch in batches(drawing, 60):
        drawn |= set(batch)
        drawing.observe([False] * 4)
        drawn |= set(drawing.replacements().values())
    assert drawn == {0, 1, 2, 4, 6, 7}
    assert drawing.quarantine([0, 1, 2, 4]) == [0, 1, 2]  # a batch needs others
    assert drawing.metrics()["selection/quarantined"] == 5


def test_the_epochs_of_an_unshuffled_run_are_in_order() -> None:
    plain = Selection(questions(6), SelectionConfig(), batch_size=2, num_generations=2, seed=0, shuffle=False)
    assert batches(plain, 4) == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_the_first_epoch_is_that_of_torch() -> None:
    """The same seed draws the questions that earlier versions drew."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()
    assert [one for batch in batches(selection(questions(12), seed=3), 3) for one in batch] == order


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            {"look-up": 0.5},
            "names the family look-up, but no training question is of it: .* are count, join, lookup",
        ),
        ({"lookup": 0.5, "count": 0.2, "join": 0.2}, "adds up to 0.9, but no .* let the shares add up to 1"),
    ],
)
def test_shares_that_cannot_be_met(shares: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        selection(strata=shares)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"half_life": 0.0}, "half_life must be > 0"),
        ({"explore": 1.5}, r"explore must be in \[0, 1\]"),
        ({"resample_flat": -1}, "resample_flat must be >= 0"),
        ({"max_share": 0.25, "databases_per_batch": 3}, "max_share 0.25 needs more than 3 databases"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectionConfig(**settings)
