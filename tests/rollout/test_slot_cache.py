"""Ragged passes through the cache against plain forward passes over whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.model_families import tiny
from tests.rounding import assert_same, in_float64
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.slot_cache import PrefillPass, SlotCache, StepPass

VOCABULARY = 40


@pytest.fixture(scope="module", params=[1, 2, 4, "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3"], ids=str)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Llama by its number of key-value heads; windows of 16 with softcaps, with sinks; heads of two sizes."""
    if isinstance(request.param, str):
        return tiny(request.param).eval().double()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=request.param,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().double()


class Shadow:
    """A cache beside the whole sequences that it should hold."""

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        self.policy = SlotPolicy(model)
        self.cache: SlotCache = self.policy.new_cache(max_rows, 100)
        self.prefixes: list[list[int]] = []
        self.rows: list[tuple[int, list[int]]] = []  # number of the prefix, tokens after it
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=self.generator).tolist()

    def add_prefixes(self, lengths: list[int]) -> None:
        numbers = self.cache.add_prefixes(lengths)
        self.prefixes += [self.tokens(length) for length in lengths]
        ids = torch.tensor([token for number in numbers for token in self.prefixes[number]])
        positions = torch.cat([torch.arange(length) for length in lengths])
        self.policy.logits(ids, positions, positions[:1], PrefillPass(self.cache, numbers))

    def add_row(self, prefix: int) -> None:
        assert self.cache.add_row(prefix) == len(self.rows)
        self.rows.append((prefix, []))

    def drop_row(self, row: int) -> None:
        assert self.cache.drop_row(row) == len(self.rows) - 1
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def drop_prefix(self, number: int) -> None:
        last = self.cache.drop_prefix(number)
        assert last == len(self.prefixes) - 1
        self.prefixes[number] = self.prefixes[last]
        self.prefixes.pop()
        self.rows = [(number if prefix == last else prefix, own) for prefix, own in self.rows]

    def plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        model = self.policy.model
        model.set_attn_implementation("eager")
        logits: torch.Tensor = model(ids).logits[0, -1]
        model.set_attn_implementation("slots")
        return logits

    def append(self, counts: list[int], num_short: int = 0) -> None:
        """Appends so many tokens to each row, and compares what follows with plain passes."""
        new = [self.tokens(count) for count in counts]
        singles = [row for row, count in enumerate(counts) if count == 1]
        several = [row for row, count in enumerate(counts) if count > 1]
        order = singles + several
        if not order:
            return
        step = StepPass(
            self.cache,
            torch.tensor(singles, dtype=torch.long),
            several,
            [counts[row] for row in several],
            num_short,
        )
        ids = torch.tensor([token for row in order for token in new[row]])
        prefix_lengths = torch.tensor([len(self.prefixes[self.rows[row][0]]) for row in step.rows.tolist()])
        keep = torch.tensor([counts[row] for row in order]).cumsum(0) - 1
        logits = self.policy.logits(ids, prefix_lengths + step.positions, keep, step)
        for row, tokens in enumerate(new):
            self.rows[row][1].extend(tokens)
            self.cache.length[row] += len(tokens)
        for row, found in zip(order, logits, strict=True):
            prefix, own = self.rows[row]
            whole = torch.tensor([self.prefixes[prefix] + own])
            assert_same(found, self.plain_logits(whole), layers=self.policy.model.config.num_hidden_layers)


def random_lengths(maximum: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, maximum), min_size=1, max_size=3)


@given(data=st.data())
@settings(derandomize=True, max_examples=12, deadline=None)
def test_ragged_passes_are_plain_passes(model: PreTrainedModel, data: st.DataObject) -> None:
    shadow = Shadow(model, max_rows=6)
    with in_float64(), shadow.policy.attending():
        shadow.add_prefixes(data.draw(random_lengths(40)))
        for _ in range(data.draw(st.integers(1, 6))):
            event = data.draw(st.sampled_from(["row", "row", "rows", "drop", "prefix"]))
            if event == "prefix":
                shadow.add_prefixes(data.draw(random_lengths(70)))
            elif event == "drop" and shadow.rows:
                shadow.drop_row(data.draw(st.integers(0, len(shadow.rows) - 1)))
                for number in reversed(range(len(shadow.prefixes))):
                    if len(shadow.prefixes) > 1 and all(prefix != number for prefix, _ in shadow.rows):
                        shadow.drop_prefix(number)
            else:
                for _ in range(1 if event == "row" else 3):
                    if len(shadow.rows) < 6:
                        shadow.add_row(data.draw(st.integers(0, len(shadow.prefixes) - 1)))
            # Of each row: nothing (its tool is at work), one token, or a whole reply, past the capacity.
            counts = [data.draw(st.sampled_from([0, 1, 1, 2, 9, 33])) for _ in shadow.rows]
            num_several = sum(count > 1 for count in counts)
            shadow.append(counts, data.draw(st.integers(0, num_several)))


def test_capacity_follows_what_is_stored(model: PreTrainedModel) -> None:
    shadow = Shadow(model, max_rows=6)
    with in_float64(), shadow.policy.attending():
        shadow.add_prefixes([5, 70])
        for prefix in (0, 1, 1):
            shadow.add_row(prefix)
        shadow.append([1, 80, 1])
        suffixes, prefixes = shadow.cache.suffixes, shadow.cache.prefixes
        assert (suffixes.places, suffixes.tokens) == (3, 96)
        shadow.drop_row(1)
        shadow.append([1, 1])
        assert suffixes.tokens == 32
        assert (prefixes.places, prefixes.tokens) == (2, 96)
        for store in (suffixes, prefixes):
            shapes = {(each.shape[0], each.shape[2]) for layer in store.layers.values() for each in layer}
            assert shapes == {(store.places, store.tokens)}


def test_the_attention_of_the_model_comes_back(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), SlotPolicy(model).attending():
        assert model.config._attn_implementation == "slots"
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == before
