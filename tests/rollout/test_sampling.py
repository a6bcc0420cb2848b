"""Draws against transformers' own processors and against the probabilities that they leave."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.rounding import assert_same, in_float64
from tests.tiny_model import write_model
from text2sql_grpo.rollout.sampling import Sampling

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_k=4),
    Sampling(top_p=0.7),
    Sampling(min_p=0.1),
    Sampling(temperature=1.7, top_p=0.9, top_k=7, min_p=0.05),
]


def plain_scores(sampling: Sampling, logits: torch.Tensor, folder: Path) -> torch.Tensor:
    """By the processors that `generate` makes of the same settings, which are TRL's."""
    model = AutoModelForCausalLM.from_pretrained(write_model(folder))
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    processors = model._get_logits_processor(config, input_ids_seq_length=1)
    return processors(torch.zeros(len(logits), 1, dtype=torch.long), logits)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@in_float64()
def test_chi_square_against_the_plain_distribution(sampling: Sampling, tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 1.5
    scores = plain_scores(sampling, logits, tmp_path)[0]
    n = 20_000

    tokens, log_probs = sampling.draw(logits.expand(n, -1), sampling.uniforms(1, n)[0])

    assert_same(log_probs, scores.log_softmax(-1)[tokens], layers=1)
    expected = n * scores.softmax(-1)
    counts = tokens.bincount(minlength=12)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5
    plain = torch.multinomial(scores.softmax(-1), n, replacement=True).bincount(minlength=12)
    both = (counts + plain)[kept]
    two_samples = ((counts - plain)[kept] ** 2 / both.clamp(min=1)).sum()
    assert two_samples < degrees + 4 * (2 * degrees) ** 0.5


def test_a_mark_decides_whatever_stands_beside_it() -> None:
    torch.manual_seed(0)
    logits, marks = torch.randn(50, 12), torch.rand(50)
    sampling = Sampling(temperature=0.9, top_p=0.8)

    tokens, log_probs = sampling.draw(logits, marks)

    order = torch.randperm(50)
    again, _ = sampling.draw(logits[order], marks[order])
    assert torch.equal(again, tokens[order])
    alone, of_alone = sampling.draw(logits[7:8], marks[7:8])
    assert (alone[0], of_alone[0]) == (tokens[7], log_probs[7])


@in_float64()
def test_blocks_of_a_large_vocabulary_draw_like_one_cumulative_sum() -> None:
    torch.manual_seed(0)
    logits, marks = torch.randn(400, 3_001) * 3, torch.rand(400)
    logits[:, ::3] = -torch.inf
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    expected = torch.searchsorted(mass, marks.double()[:, None] * mass[:, -1:], right=True)[:, 0]

    tokens, log_probs = Sampling().draw(logits, marks)

    assert torch.equal(tokens, expected)
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert_same(log_probs, exact, layers=1)


def test_tokens_of_probability_0_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for mark, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-24, 3)):
        drawn, log_prob = Sampling().draw(logits, torch.tensor([mark]))
        assert drawn.item() == token
        assert log_prob.item() == pytest.approx(-0.6931, abs=1e-4)


def test_greedy_takes_the_likeliest_and_needs_no_uniforms() -> None:
    sampling = Sampling(temperature=0, top_k=1)
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 2.5]], dtype=torch.bfloat16)

    tokens, log_probs = sampling.draw(logits, sampling.uniforms(2, 100)[:, 0])

    assert tokens.tolist() == [1, 2]
    assert_same(log_probs, logits.double().log_softmax(-1).amax(-1), layers=1, dtype=torch.float32)
    assert log_probs.dtype == torch.float32
