"""Which questions a step plays: shuffled epochs, shares of families."""

import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.scripted_policy import ask
from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.shards import ExamplesOnDisk
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.training.parts import Select
from text2sql_grpo.training.selection import open_select

FAMILIES = ["lookup"] * 5 + ["count"] * 8 + ["join"] * 4
HALF = {"lookup": 0.5}


def questions(count: int, **columns: Sequence[str]) -> list[Example]:
    """Questions with these fields, repeated in turn; each on its own template unless it is given."""
    given = {"template": [str(i) for i in range(count)]} | columns
    fields = ({name: values[i % len(values)] for name, values in given.items()} for i in range(count))
    return [dataclasses.replace(ask(f"{i}?"), **one) for i, one in enumerate(fields)]


def selection(
    examples: Sequence[Example] | None = None, *, seed: int = 0, shuffle: bool = True, **settings: Any
) -> Select:
    """By default, of questions of the three families."""
    examples = examples or [ask(f"{i}?", family=name) for i, name in enumerate(FAMILIES)]
    return open_select(examples, SelectionConfig(**settings), seed=seed, shuffle=shuffle)


def batches(drawing: Select, count: int, *, size: int = 4) -> list[list[int]]:
    """The first batches of questions."""
    return [drawing.draw(size) for _ in range(count)]


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


def test_shares_that_no_batch_can_hold_are_met_in_the_long_run() -> None:
    drawn = batches(selection(strata={"lookup": 0.1, "join": 0.6}), 100, size=3)
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


@pytest.mark.parametrize("strata", [HALF, {}], ids=["strata", "whole"])
def test_a_restored_selection_draws_what_an_undisturbed_one_draws(strata: dict[str, float]) -> None:
    """Bit for bit, in the middle of an epoch too; another seed draws others."""
    undisturbed, other_rank, restored = (selection(strata=strata) for _ in range(3))
    assert batches(undisturbed, 6) == batches(other_rank, 6)
    torch.save(undisturbed.state_dict(), file := io.BytesIO())
    file.seek(0)
    restored.load_state_dict(torch.load(file))
    expected = batches(undisturbed, 6)
    assert batches(restored, 6) == batches(other_rank, 6) == expected
    one, other = (batches(selection(strata=strata, seed=seed), 6) for seed in (0, 1))
    assert one != other


@pytest.mark.parametrize(
    "other", [selection(questions(9)), selection(strata=HALF)], ids=["questions", "strata"]
)
def test_a_state_of_another_selection_is_refused(other: Select) -> None:
    drawing = selection()
    other.draw(4)
    with pytest.raises((KeyError, ValueError)):
        drawing.load_state_dict(other.state_dict())


def test_a_batch_of_more_questions_than_there_are() -> None:
    assert Counter(selection(questions(2)).draw(5)) in ({0: 3, 1: 2}, {0: 2, 1: 3})
    assert selection(questions(1)).draw(3) == [0, 0, 0]


def test_the_epochs_of_an_unshuffled_run_are_in_order() -> None:
    plain = selection(questions(6), shuffle=False)
    assert batches(plain, 4, size=2) == [[0, 1], [2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize(("settings", "reads"), [({}, 0), ({"strata": HALF}, 17)], ids=["whole", "strata"])
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
    batches(drawing, 3)
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


def test_settings_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strata must add up to 1 at most, got 1\.2"):
        SelectionConfig(strata={"lookup": 0.6, "join": 0.6})
