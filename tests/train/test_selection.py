"""Which questions a step plays: shares of families, weights by verdicts, others for flat groups."""

import dataclasses
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.scripted_policy import ask
from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.shards import ExamplesOnDisk
from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.training.parts import Batch, Judged, Row, Select, placed
from text2sql_grpo.training.select import open_gate, open_select
from text2sql_grpo.training.select.learnability import learnability
from text2sql_grpo.training.select.rates import Rates

FAMILIES = ["lookup"] * 5 + ["count"] * 8 + ["join"] * 4
HALF = {"lookup": 0.5}
METHODS = ["uniform", "learnability"]
Verdicts = Sequence[bool | None]


def questions(count: int, **columns: Sequence[str]) -> list[Example]:
    """Questions with these fields, repeated in turn; each on its own template unless it is given."""
    given = {"template": [str(i) for i in range(count)]} | columns
    fields = ({name: values[i % len(values)] for name, values in given.items()} for i in range(count))
    return [dataclasses.replace(ask(f"{i}?"), **one) for i, one in enumerate(fields)]


def selection(
    examples: Sequence[Example] | None = None, *, seed: int = 0, shuffle: bool = True, **settings: Any
) -> Select:
    """By default, of questions of the three families; groups have two rollouts."""
    examples = examples or [ask(f"{i}?", family=name) for i, name in enumerate(FAMILIES)]
    return open_select(examples, SelectionConfig(**settings), seed=seed, shuffle=shuffle)


def batches(drawing: Select, count: int, *, size: int = 4) -> list[list[int]]:
    """The first batches of questions."""
    return [drawing.draw(size) for _ in range(count)]


def group(question: int, verdicts: Verdicts) -> list[Judged]:
    """Facts of a group; a rollout without a verdict is masked."""
    return [
        Judged(question, None if verdict is None else {}, 0.0, "submitted", verdict) for verdict in verdicts
    ]


def groups(played: Mapping[int, Verdicts]) -> dict[int, list[Judged]]:
    return {place: group(question, verdicts) for place, (question, verdicts) in enumerate(played.items())}


class Game:
    """What a gate sees of a trainer: it plays questions to scripted verdicts, round by round."""

    def __init__(self, select: Select, *rounds: Sequence[Verdicts]) -> None:
        self.select, self._rounds = select, iter(rounds)

    def played(self, wanted: Mapping[int, int]) -> Batch:
        judged = {
            place: group(question, verdicts)
            for (place, question), verdicts in zip(wanted.items(), next(self._rounds), strict=True)
        }
        self.select.observe(judged)
        rollout = Rollout(prompt_ids=[1], completion_ids=[2], completion_mask=[1])
        return Batch.of([placed(Row(rollout, one), place) for place in judged for one in judged[place]])

    def gated(self, drawn: Sequence[int], *, rounds: int) -> tuple[Batch, Mapping[str, float]]:
        gate = open_gate(SelectionConfig(resample_flat=rounds))
        assert gate is not None
        batch = gate.passed(self.played(dict(enumerate(drawn))), self)  # type: ignore[arg-type]
        return batch, gate.metrics()


def drawn_by(batch: Batch) -> list[int]:
    return [rollouts[0].question for _, rollouts in sorted(batch.groups().items())]


@pytest.mark.parametrize("size", [2, 4, 7])
def test_each_batch_and_each_part_of_it_holds_the_mix(size: int) -> None:
    drawn = batches(selection(strata=HALF), 40, size=size)
    for batch in drawn:
        for start in range(size):
            for end in range(start + 1, size + 1):
                lookups = sum(FAMILIES[number] == "lookup" for number in batch[start:end])
                assert abs(lookups - (end - start) / 2) <= 0.5
        assert len(set(batch)) == size
    others = Counter(FAMILIES[number] for batch in drawn for number in batch)
    assert others["count"] / (others["count"] + others["join"]) == pytest.approx(8 / 12, abs=0.03)


@pytest.mark.parametrize("by", METHODS)
def test_shares_that_no_batch_can_hold_are_met_in_the_long_run(by: str) -> None:
    drawn = batches(selection(strata={"lookup": 0.1, "join": 0.6}, by=by), 100, size=3)
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


@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("strata", [HALF, {}], ids=["strata", "whole"])
def test_a_restored_selection_draws_what_an_undisturbed_one_draws(by: str, strata: dict[str, float]) -> None:
    """Bit for bit, in the middle of an epoch too and with questions replaced; another seed draws others."""

    def go_on(drawing: Select, first: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(first, first + 6):
            batch = drawing.draw(4, progress=step / 12)
            drawing.observe(groups({number: [(number + step) % 3 == 0] * 2 for number in batch}))
            others = {place: drawing.another(number, set(batch)) for place, number in enumerate(batch)}
            known = {number: [number % 2 == 0, True] for number in others.values() if number is not None}
            drawing.observe(groups(known))
            seen.append((batch, others))
        return seen

    undisturbed, other_rank, restored = (selection(by=by, strata=strata) for _ in range(3))
    go_on(undisturbed, 0)
    go_on(other_rank, 0)
    torch.save(undisturbed.state_dict(), file := io.BytesIO())
    file.seek(0)
    restored.load_state_dict(torch.load(file))
    expected = go_on(undisturbed, 6)
    assert go_on(restored, 6) == go_on(other_rank, 6) == expected
    others = (go_on(selection(by=by, strata=strata, seed=seed), 0) for seed in (0, 1))
    assert next(others) != next(others)


@pytest.mark.parametrize(
    "other",
    [
        selection(questions(9), by="learnability"),
        selection(by="learnability", level=[]),
        selection(by="learnability", strata=HALF),
        selection(by="uniform"),
    ],
    ids=["questions", "levels", "strata", "method"],
)
def test_a_state_of_another_selection_is_refused(other: Select) -> None:
    drawing = selection(by="learnability")
    other.draw(4)
    with pytest.raises((KeyError, ValueError)):
        drawing.load_state_dict(other.state_dict())


def test_a_question_borrows_from_its_template_within_its_family() -> None:
    levels = [["a", "a", "a", "a", "b", "b"], ["x", "x", "y", "y", "z", "z"]]
    rates = Rates(range(6), levels, prior=4.0, half_life=8.0)
    rates.begin_batch()
    rates.observe({0: group(0, [True] * 6 + [False] * 2 + [None])})
    everything = (6 + 4 * 0.5) / (8 + 4)
    family = (6 + 4 * everything) / (8 + 4)
    template = (6 + 4 * family) / (8 + 4)
    own = (6 + 4 * template) / (8 + 4)
    unseen_family = everything  # an unseen cell borrows all
    expected = [own, template, family, family, unseen_family, unseen_family]
    assert rates.rates().tolist() == pytest.approx(expected)
    rates.begin_batch()  # counts are worth less now: eight batches halve them
    decay = 0.5 ** (1 / 8)
    assert rates.rates()[4] == pytest.approx((6 * decay + 2) / (8 * decay + 4))


def rates_of(right: Sequence[int], *, of: int = 8) -> Rates:
    """Statistics of so many right rollouts of each question, in one batch; almost nothing is borrowed."""
    rates = Rates(range(len(right)), [], prior=0.001, half_life=None)
    rates.begin_batch()
    rates.observe(groups({number: [i < count for i in range(of)] for number, count in enumerate(right)}))
    return rates


def test_weights_by_learnability() -> None:
    assert learnability(rates_of([0, 4, 8])).tolist() == pytest.approx([0.0, 0.25, 0.0], abs=1e-3)


def test_learnable_questions_are_drawn_more_often_and_the_others_still_met() -> None:
    """Ten of 40 questions are answered half the time, the others never."""
    examples = questions(40, family=["fair", "dead", "dead", "dead"])
    counts: Counter[str] = Counter()
    for by in ("uniform", "learnability"):
        drawing, drawn = selection(examples, by=by), Counter[int]()
        for _ in range(60):
            batch = drawing.draw(8)
            drawn.update(batch)
            drawing.observe(groups({number: [False, number % 4 == 0] for number in batch}))
        assert len(drawn) == 40  # explored in shuffled order
        counts[by] = sum(count for number, count in drawn.items() if number % 4 == 0)
    assert counts["uniform"] == 60 * 8 / 4
    assert counts["learnability"] > 2 * counts["uniform"]


def test_groups_of_equal_verdicts_are_replaced_by_others_of_their_stratum() -> None:
    drawing = selection(strata=HALF)
    first = drawing.draw(4)
    game = Game(
        drawing,
        [[True, True], [False, False], [True, False], [None, True]],  # one verdict is no variance
        [[True, False], [False, False], [None, None]],
        [[False, True], [True, False]],
    )
    batch, metrics = game.gated(first, rounds=2)
    kept = drawn_by(batch)
    assert kept[2] == first[2]
    assert not {kept[place] for place in (0, 1, 3)} & set(first)
    for question, replaced in zip(kept, first, strict=True):
        assert (FAMILIES[question] == "lookup") == (FAMILIES[replaced] == "lookup")
    replaced = [row.judged.question for row in batch.replaced]
    assert len(replaced) == 18 - 8
    assert len({*replaced, *kept}) == 4 + 3 + 2  # no question is played twice
    assert [len(one) for one in batch.groups().values()] == [2] * 4
    assert metrics == {
        "accuracy/strict_played": (2 + 0 + 1 + 1 + 1 + 0 + 0 + 1 + 1) / 18,
        "selection/episodes": 18.0,
        "selection/frac_verdict_zero_std": 0.0,
        "selection/frac_verdict_zero_std_played": 5 / 9,
    }


@pytest.mark.parametrize("by", METHODS)
def test_one_question_and_nothing_but_zero_variance(by: str) -> None:
    alone = selection(questions(1), by=by)
    for _ in range(3):
        assert alone.draw(1) == [0]
        batch, _ = Game(alone, [[False, False]]).gated([0], rounds=3)
        assert (drawn_by(batch), list(batch.replaced)) == ([0], [])
    every = selection(questions(6), by=by)
    for _ in range(5):
        drawn = every.draw(4)
        batch, metrics = Game(every, [[True, True]] * 4, [[True, True]] * 2).gated(drawn, rounds=9)
        assert drawn_by(batch) == drawn  # the two others were tried, and are no better
        assert sorted({*drawn, *(row.judged.question for row in batch.replaced)}) == list(range(6))
        assert metrics["selection/frac_verdict_zero_std"] == 1.0


def test_the_epochs_of_an_unshuffled_run_are_in_order() -> None:
    plain = selection(questions(6), shuffle=False)
    assert batches(plain, 4, size=2) == [[0, 1], [2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("settings", "reads"),
    [({}, 0), ({"strata": HALF}, 17), ({"by": "learnability", "strata": HALF}, 17)],
    ids=["uniform", "strata", "learnability"],
)
def test_questions_of_shards_are_read_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], reads: int
) -> None:
    """And not at all where no field of theirs is needed; draws read none."""
    lines = (f'{{"id": "{i}", "family": "{name}", {REST}}}\n' for i, name in enumerate(FAMILIES))
    (tmp_path / "shard.jsonl").write_text("".join(lines))
    shards, read, found = ExamplesOnDisk([tmp_path / "shard.jsonl"]), ExamplesOnDisk.__getitem__, list[Any]()

    def counted(self: ExamplesOnDisk, index: Any) -> Any:
        example = read(self, index)  # not the end of an iteration
        found.append(index)
        return example

    monkeypatch.setattr(ExamplesOnDisk, "__getitem__", counted)
    drawing = selection(shards, **settings)
    for batch in batches(drawing, 3):
        drawing.observe(groups({number: [True, False] for number in batch}))
    assert len(found) == reads


REST = '"database": "shop", "question": "?", "gold_sql": "SELECT 1"'


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"look-up": 0.5}, "family look-up, but no training question is of it: .* are count, join, lookup"),
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
        ({"explore": 1.5}, "explore"),
        ({"resample_flat": -1}, "resample_flat must be >= 0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SelectionConfig(**settings)
