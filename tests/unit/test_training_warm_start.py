import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.scripted_policy import ask
from tests.tiny_model import write_model
from text2sql_grpo.config import TinyPolicyConfig, WarmStartConfig
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.training.tiny_policy import make_model, train_tokenizer
from text2sql_grpo.training.warm_start import Demonstrations, shared_prefix_loss, warm_start

PAD = 0


def episode(random_: random.Random, prefix: list[int], database: str = "shop") -> Episode:
    """Random tokens behind a prefix: own prompt, then one to three turns with replies between."""

    def tokens(low: int, high: int) -> list[int]:
        return [random_.randrange(1, 300) for _ in range(random_.randint(low, high))]

    made = Episode(replace(ask("?"), database=database), prompt_ids=prefix + tokens(1, 6))
    for turn in range(random_.randint(1, 3)):
        for flag, ids in ((0, tokens(1, 5) if turn else []), (1, tokens(1, 6))):
            made.completion_ids += ids
            made.completion_mask += [flag] * len(ids)
    return made


def random_rows(seed: int, *, n_rows: int, per_row: int) -> list[list[Episode]]:
    random_ = random.Random(seed)
    rows = []
    for _ in range(n_rows):
        prefix = [random_.randrange(1, 300) for _ in range(random_.randint(1, 20))]
        rows.append([episode(random_, prefix) for _ in range(per_row)])
    return rows


def plain_loss(model: PreTrainedModel, rows: list[list[Episode]]) -> torch.Tensor:
    """Mean cross-entropy over the sampled tokens, every episode forwarded whole and padded."""
    episodes = [one for row in rows for one in row]
    width = max(len(one.prompt_ids + one.completion_ids) for one in episodes)
    ids, attention, targets = [], [], []
    for one in episodes:
        whole = one.prompt_ids + one.completion_ids
        padding = width - len(whole)
        ids.append(whole + [PAD] * padding)
        attention.append([1] * len(whole) + [0] * padding)
        mask = [0] * len(one.prompt_ids) + one.completion_mask
        targets.append([t if m else -100 for t, m in zip(whole, mask, strict=True)] + [-100] * padding)
    logits = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(attention)).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(targets)[:, 1:].flatten())


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Both have two key-value heads for four heads."""
    folder = write_model(tmp_path_factory.mktemp("model"), architecture=request.param)
    return AutoModelForCausalLM.from_pretrained(folder)


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("seed", "n_rows", "per_row", "chunk_size"),
    [(0, 1, 1, 10), (1, 1, 8, 3), (2, 4, 5, 10), (3, 5, 3, 1), (4, 3, 4, 100), (5, 2, 7, 5)],
)
def test_loss_and_gradients_are_those_of_the_plain_way(
    model: PreTrainedModel, seed: int, n_rows: int, per_row: int, chunk_size: int
) -> None:
    rows = random_rows(seed, n_rows=n_rows, per_row=per_row)

    shared = shared_prefix_loss(model, rows, pad_id=PAD, chunk_size=chunk_size)
    plain = plain_loss(model, rows)

    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
    expected = gradients(model, plain)
    difference = (gradients(model, shared) - expected).norm() / expected.norm()
    assert difference < 1e-5


def test_equal_prompts(model: PreTrainedModel) -> None:
    """The last prompt token stays out of the shared prefix: it predicts the first of the answer."""
    one, other = random_rows(6, n_rows=1, per_row=2)[0]
    other.prompt_ids = list(one.prompt_ids)

    torch.testing.assert_close(
        shared_prefix_loss(model, [[one, other]], pad_id=PAD), plain_loss(model, [[one, other]])
    )


def test_only_sampled_tokens_count(model: PreTrainedModel) -> None:
    rows = random_rows(7, n_rows=1, per_row=2)
    before = shared_prefix_loss(model, rows, pad_id=PAD)
    first = rows[0][0]
    first.completion_ids += [5, 6, 7]
    first.completion_mask += [0, 0, 0]

    torch.testing.assert_close(shared_prefix_loss(model, rows, pad_id=PAD), before)


def train(
    unfinished: Path, *, stop_after: int | None = None, seed: int = 3
) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    """Weights after a warm start of eight steps, or when it is stopped, and the reports."""
    settings = TinyPolicyConfig(hidden_size=16, num_heads=2, num_layers=2, intermediate_size=16)
    tokenizer = train_tokenizer(["SELECT name FROM ward"] * 3, vocab_size=300)
    model = make_model(settings, tokenizer, seed=0)
    model.resize_token_embeddings(300)
    random_ = random.Random(0)
    prefixes = {"a": [1, 2, 3], "b": [4, 5]}
    looking, guessing = ([episode(random_, prefixes[name], name) for name in "abab"] for _ in range(2))
    reports: list[tuple[int, float]] = []

    def on_step(step: int, loss: float) -> None:
        reports.append((step, loss))
        if step == stop_after:
            raise KeyboardInterrupt

    schedule = WarmStartConfig(steps=8, looking_steps=4, rows_per_step=2, demonstrations_per_row=3)
    try:
        warm_start(
            model,
            Demonstrations(looking, guessing),
            schedule,
            seed=seed,
            pad_id=PAD,
            unfinished=unfinished,
            on_step=on_step,
        )
    except KeyboardInterrupt:
        assert stop_after is not None
    else:
        assert not model.training
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}, reports


@pytest.mark.parametrize("stop_after", [1, 5, 8])
def test_interrupted_warm_start_goes_on_as_if_undisturbed(tmp_path: Path, stop_after: int) -> None:
    unfinished = tmp_path / "cache" / "unfinished.pt"
    undisturbed, reports = train(tmp_path / "other.pt")

    _, first_part = train(unfinished, stop_after=stop_after)
    assert unfinished.exists()
    resumed, second_part = train(unfinished)

    assert first_part + second_part == reports
    assert [step for step, _ in reports] == list(range(1, 9))
    assert all(torch.equal(resumed[name], weight) for name, weight in undisturbed.items())
    assert list(unfinished.parent.iterdir()) == []


def test_order_depends_on_the_seed(tmp_path: Path) -> None:
    _, first = train(tmp_path / "unfinished.pt", seed=3)
    _, again = train(tmp_path / "unfinished.pt", seed=3)
    _, other = train(tmp_path / "unfinished.pt", seed=4)

    assert first == again != other


def test_it_learns(tmp_path: Path) -> None:
    _, reports = train(tmp_path / "unfinished.pt")

    assert reports[-1][1] < reports[0][1]
