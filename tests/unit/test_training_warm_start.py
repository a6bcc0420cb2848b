import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.scripted_policy import ask
from tests.tiny_model import write_model
from text2sql_grpo.config import TinyPolicyConfig, WarmStartConfig
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed
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
    model = AutoModelForCausalLM.from_pretrained(folder)
    attend_to_packed(model)
    return model


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("seed", "n_rows", "per_row"), [(0, 1, 1), (1, 1, 8), (2, 4, 5), (3, 5, 3), (4, 3, 4), (5, 2, 7)]
)
def test_loss_and_gradients_are_those_of_the_plain_way(
    model: PreTrainedModel, seed: int, n_rows: int, per_row: int
) -> None:
    rows = random_rows(seed, n_rows=n_rows, per_row=per_row)

    shared = shared_prefix_loss(model, rows)
    plain = plain_loss(model, rows)

    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
    expected = gradients(model, plain)
    difference = (gradients(model, shared) - expected).norm() / expected.norm()
    assert difference < 1e-5


def test_equal_prompts(model: PreTrainedModel) -> None:
    """The last prompt token stays out of the shared prefix: it predicts the first of the answer."""
    one, other = random_rows(6, n_rows=1, per_row=2)[0]
    other.prompt_ids = list(one.prompt_ids)

    torch.testing.assert_close(shared_prefix_loss(model, [[one, other]]), plain_loss(model, [[one, other]]))


def test_only_sampled_tokens_count(model: PreTrainedModel) -> None:
    rows = random_rows(7, n_rows=1, per_row=2)
    before = shared_prefix_loss(model, rows)
    first = rows[0][0]
    first.completion_ids += [5, 6, 7]
    first.completion_mask += [0, 0, 0]

    torch.testing.assert_close(shared_prefix_loss(model, rows), before)


def demonstrations(databases: str, *, seed: int) -> Demonstrations:
    """One question for each letter, asked about the database of that name."""
    random_ = random.Random(seed)
    looking, guessing = ([episode(random_, [ord(name), 2, 3], name) for name in databases] for _ in range(2))
    return Demonstrations(looking, guessing)


def train(
    unfinished: Path, *, stop_after: int | None = None, seed: int = 3, steps: int = 8
) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    """Weights after a short warm start, or when it is stopped, and the reports."""
    settings = TinyPolicyConfig(hidden_size=16, num_heads=2, num_layers=2, intermediate_size=16)
    tokenizer = train_tokenizer(["SELECT name FROM ward"] * 3, vocab_size=300)
    model = make_model(settings, tokenizer, seed=0)
    model.resize_token_embeddings(300)
    log, copies = demonstrations("abab", seed=0), demonstrations("cdc", seed=1)
    reports: list[tuple[int, float]] = []

    def on_step(step: int, loss: float) -> None:
        reports.append((step, loss))
        if step == stop_after:
            raise KeyboardInterrupt

    schedule = WarmStartConfig(steps=steps, practice_steps=4, rows_per_step=2, demonstrations_per_row=3)
    try:
        warm_start(
            model,
            log,
            copies,
            schedule,
            seed=seed,
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
    states = torch.load(unfinished, weights_only=True)["optimizers"]
    assert [set(state["state"][0]) for state in states] == [
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]
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
    _, reports = train(tmp_path / "unfinished.pt", steps=80)

    losses = [loss for _, loss in reports]
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])


@dataclass
class Drawn:
    """What one step drew: databases of its rows, and which of its episodes look."""

    databases: list[str]
    is_looking: list[bool]


def drawn_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    copies: Demonstrations | None,
    settings: WarmStartConfig,
) -> list[Drawn]:
    """What `warm_start` trains on, step by step; the loss itself is left out."""
    log = demonstrations("aabbb", seed=0)
    looking = {id(one) for source in (log, copies) if source for one in source.looking}
    steps = []

    def loss(model: PreTrainedModel, rows: list[list[Episode]]) -> torch.Tensor:
        for row in rows:
            assert len(row) == settings.demonstrations_per_row
            assert len({one.example.database for one in row}) == 1
        steps.append(
            Drawn(
                [row[0].example.database for row in rows], [id(one) in looking for row in rows for one in row]
            )
        )
        return model.get_input_embeddings().weight.sum()

    monkeypatch.setattr("text2sql_grpo.training.warm_start.shared_prefix_loss", loss)
    folder = write_model(tmp_path / "model", hidden_size=8, num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    warm_start(model, log, copies, settings, seed=0, unfinished=tmp_path / "unfinished.pt")
    assert len(steps) == settings.steps
    return steps


def test_rows_are_drawn_from_copies_too_and_the_log_phase_looks_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WarmStartConfig(
        steps=200,
        practice_steps=150,
        practice_look_share=0.8,
        look_share=0.25,
        copy_share=0.3,
        rows_per_step=4,
        demonstrations_per_row=3,
    )

    steps = drawn_rows(tmp_path, monkeypatch, copies=demonstrations("cccde", seed=1), settings=settings)

    practice, log = steps[:150], steps[150:]
    for part, n_rows in ((practice, 600), (log, 200)):
        rows = Counter(name for step in part for name in step.databases)
        assert rows["c"] + rows["d"] + rows["e"] == pytest.approx(0.3 * n_rows, abs=45)
        for name, share in (("a", 0.35), ("b", 0.35), ("c", 0.1), ("d", 0.1), ("e", 0.1)):
            assert rows[name] == pytest.approx(share * n_rows, abs=45)  # by databases, not by questions
    for part, share in ((practice, 0.8), (log, 0.25)):
        looks = [flag for step in part for flag in step.is_looking]
        assert sum(looks) / len(looks) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("has_copies", [True, False])
def test_practice_without_copies_is_on_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_copies: bool
) -> None:
    settings = WarmStartConfig(steps=30, practice_steps=30, copy_share=0.0 if has_copies else 1.0)
    copies = demonstrations("cc", seed=1) if has_copies else None

    steps = drawn_rows(tmp_path, monkeypatch, copies=copies, settings=settings)

    assert {name for step in steps for name in step.databases} == {"a", "b"}


def test_a_share_of_one_practises_on_copies_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WarmStartConfig(steps=30, practice_steps=20, copy_share=1.0)

    steps = drawn_rows(tmp_path, monkeypatch, copies=demonstrations("cd", seed=1), settings=settings)

    assert {name for step in steps for name in step.databases} == {"c", "d"}
