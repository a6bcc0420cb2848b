"""The SFT stage's loss is TRL's, however it is packed or split; batches are drawn by seed and epoch."""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.rounding import assert_same, in_float64
from tests.scripted_policy import ask, shop_environment
from tests.tiny_model import write_model, write_tokenizer
from text2sql_grpo.config import SFTSettings
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import DataError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import Demonstration, demonstrate
from text2sql_grpo.sft.sft_trainer import (
    ForwardPass,
    SFTData,
    SFTStageTrainer,
    forward_pass,
    split,
    stage_arguments,
)
from text2sql_grpo.token_tree.attention import TreePass
from text2sql_grpo.training.arguments import training_arguments

CPU = torch.device("cpu")
COMPACT = EnvironmentSettings(schema_text="compact", instructions=False, max_turns=3)
LOOK = ask(
    "Lisbon?",
    look_sql="SELECT code FROM branch",
    guess_sql="SELECT staff FROM branch WHERE code = 'Lisbon'",
)
CHECK = ask("All?", "SELECT COUNT(*) FROM branch", check_sql="SELECT city FROM branch")


def random_demonstrations(seed: int, *, per_prefix: int = 4) -> list[Demonstration]:
    """Chats of one to three turns behind three shared prefixes, two of them alike to the last token."""
    random_ = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [random_.randrange(1, 300) for _ in range(random_.randint(low, high))]

    made = []
    for prefix in [tokens(5, 30) for _ in range(3)]:
        for _ in range(per_prefix):
            ids = prefix + tokens(0, 4)
            weights = [0.0] * len(ids)
            for _ in range(random_.randint(1, 3)):
                for weight, part in ((1.0, tokens(1, 6)), (0.0, tokens(1, 5))):
                    ids, weights = ids + part, weights + [weight] * len(part)
            made.append(Demonstration(ids, weights))
    made.append(made[0])
    return random_.sample(made, len(made))


def model_of(folder: Path, *, is_adapter: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    if not is_adapter:
        return model
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def stage_trainer(model: Any, folder: Path, **options: Any) -> SFTStageTrainer:
    settings = SFTSettings(max_steps=1, batch_size=1)
    arguments = training_arguments({"bf16": False, "report_to": "none"}, output_dir=str(folder))
    data: Any = [[]]
    training = stage_arguments(settings, arguments, folder, steps=1, is_adapter=False)
    return SFTStageTrainer(model, training, data, **options)


@pytest.mark.parametrize("is_adapter", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "dynamic"])
@in_float64()
def test_loss_and_gradients_are_those_of_trls_padded_trainer(
    tmp_path: Path, architecture: str, is_adapter: bool
) -> None:
    """Whole, and in parts of a few sequences; rotary positions by the longest one need padding."""
    folder = tmp_path / "model"
    if architecture == "dynamic":
        write_model(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    else:
        window = {"sliding_window": 16} if architecture == "mistral" else {}
        write_model(folder, architecture=architecture, **window)
    made = random_demonstrations(1)
    rows = [
        {"input_ids": m.ids, "labels": [i if w else -100 for i, w in zip(m.ids, m.weights, strict=True)]}
        for m in made
    ]
    stock = SFTTrainer(
        model_of(folder, is_adapter=is_adapter),
        SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=len(rows),
            max_length=None,
            bf16=False,
            use_cpu=True,
            report_to="none",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    stock.current_gradient_accumulation_steps = 1
    expected = stock.training_step(stock.model, next(iter(stock.get_train_dataloader())))
    expected_gradients = gradients(stock.model)

    for max_tokens in (10_000, 60):
        trainer = stage_trainer(model_of(folder, is_adapter=is_adapter), tmp_path, max_tokens=max_tokens)
        assert (trainer.obstacle is None) == (architecture != "dynamic")
        loss = trainer.training_step(trainer.model, made)
        assert_same(loss, expected, layers=trainer.model.config.num_hidden_layers)
        assert_same(
            gradients(trainer.model), expected_gradients, layers=trainer.model.config.num_hidden_layers
        )


@in_float64()
def test_weights_count_over_the_whole_step(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    made = [
        replace(one, weights=[3 * w for w in one.weights]) if i % 3 else one
        for i, one in enumerate(random_demonstrations(2))
    ]
    model = model_of(folder, is_adapter=False)
    total = weight = 0.0
    for one in made:
        log_probs = model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
        total -= sum(w * log_probs[i - 1, one.ids[i]].item() for i, w in enumerate(one.weights) if w)
        weight += sum(one.weights)

    trainer = stage_trainer(model, tmp_path, max_tokens=80)
    loss = trainer.training_step(trainer.model, made)
    assert_same(loss, total / weight, layers=model.config.num_hidden_layers)


def tokens_of(made: ForwardPass) -> int:
    return (
        len(made.inputs.tree.ids) if isinstance(made.inputs, TreePass) else made.inputs["input_ids"].numel()
    )


def test_each_prefix_is_forwarded_once_and_parts_keep_to_their_size() -> None:
    made = random_demonstrations(3, per_prefix=6)
    packed, padded = (forward_pass(made, CPU, shares_prefixes=shares) for shares in (True, False))
    n_scored = sum(w > 0 for one in made for w in one.weights)
    assert len(packed.targets) == len(padded.targets) == n_scored
    assert tokens_of(packed) < 0.7 * sum(len(one.ids) for one in made)
    for shares in (True, False):
        parts = split(made, 120, shares_prefixes=shares)
        assert sorted(map(id, chain(*parts))) == sorted(map(id, made))
        assert len(parts) > 1
        longest = max(len(one.ids) for one in made)
        assert all(
            tokens_of(forward_pass(part, CPU, shares_prefixes=shares)) <= max(120, longest) for part in parts
        )


def shop_data(folder: Path, examples: list[Example], *, longest: int = 999, **fields: Any) -> SFTData:
    size = fields.pop("size", fields.get("batch_size", 16))
    chat = ChatFormat(write_tokenizer(folder))
    environment = shop_environment(folder, COMPACT)
    settings = SFTSettings(**fields)
    return SFTData(
        examples, [], settings, environment=environment, chat=chat, seed=0, batch_size=size, longest=longest
    )


def texts(data: SFTData, *batches: int) -> list[str]:
    tokenizer = data._chat.tokenizer
    return [tokenizer.decode(one.ids) for batch in batches for one in data[batch]]


def test_batches_hold_neighbours_of_one_database_and_each_question_once_an_epoch(tmp_path: Path) -> None:
    examples = [replace(ask(f"{n}?"), database=f"db{n % 3}") for n in range(18)]
    data = shop_data(tmp_path, examples, batch_size=6, group_size=3, epochs=2)
    orders = [data._draw_order(epoch) for epoch in (0, 1)]
    assert len(data) == 6
    assert orders[0] != orders[1] and data._draw_order(0) == orders[0]
    for order in orders:
        assert sorted(order) == list(range(18))
        assert all(len({n % 3 for n in order[i : i + 3]}) == 1 for i in range(0, 18, 3))


def test_processes_share_a_batch(tmp_path: Path) -> None:
    examples = [replace(LOOK, id=f"l{n}", question=f"{n}?") for n in range(20)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "half").mkdir()
    whole = shop_data(tmp_path / "whole", examples, batch_size=20, epochs=2)
    half = shop_data(tmp_path / "half", examples, batch_size=20, size=10, epochs=2)
    assert (len(whole), len(half)) == (2, 4)
    assert texts(whole, 0, 1) == texts(half, 0, 1, 2, 3)


def test_both_habits_are_shown_by_their_shares(tmp_path: Path) -> None:
    """A look-up with and without its look, a question without any query once."""
    examples = [LOOK, CHECK, ask("Plain?")]
    data = shop_data(tmp_path, examples, batch_size=3, look_share=0.3, check_share=0.2, choice_weight=5.0)
    weights = {
        (question, "<sql>" in text): sorted(set(one.weights) - {0.0})
        for one, text in zip(data[0], texts(data, 0), strict=True)
        for question in ("Lisbon?", "All?", "Plain?")
        if question in text
    }
    assert weights == {
        ("Lisbon?", True): [0.3, 1.5],
        ("Lisbon?", False): [0.7, 3.5],
        ("All?", True): [0.2, 1.0],
        ("All?", False): [0.8, 4.0],
        ("Plain?", False): [1.0, 5.0],
    }
    (tmp_path / "looks").mkdir()
    alone = shop_data(tmp_path / "looks", examples, batch_size=3, look_share=1.0)
    assert ["<sql>" in text for text in texts(alone, 0)].count(True) == 1


def test_long_questions_are_left_out_and_named(tmp_path: Path) -> None:
    data = shop_data(tmp_path, [ask("Lisbon?"), ask("L" + "o" * 500 + "ng?")], longest=400, batch_size=2)
    assert len(data[0]) == 1
    assert [name[:3] for name in data.left_out] == ["Loo"]
    data.check_fits()
    (tmp_path / "b").mkdir()
    data = shop_data(tmp_path / "b", [ask("Lisbon?")], longest=10, batch_size=2)
    assert data[0] == []
    with pytest.raises(DataError, match="no demonstration has at most 10 tokens"):
        data.check_fits()


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_gold_is_demonstrated_with_its_query_or_without(tmp_path: Path, protocol: Any) -> None:
    chat = ChatFormat(write_tokenizer(tmp_path))
    environment = shop_environment(tmp_path, replace(COMPACT, protocol=protocol))

    def written(example: Example, looks: bool) -> tuple[str, str]:
        """What the assistant writes, and the rest of what it writes from the weighted token on."""
        made = demonstrate(example, environment, chat, looks=looks, choice_weight=5.0)
        own = [token for token, weight in zip(made.ids, made.weights, strict=True) if weight]
        first = made.weights.index(5.0)
        assert made.weights.count(5.0) == 1
        return chat.tokenizer.decode(own), chat.tokenizer.decode(made.ids[first : first + 6])

    look, submit = ("sql>SEL", "answer"), ("run_sql", "submit")
    one, other = look if protocol == "tags" else submit
    for example, query in ((LOOK, LOOK.look_sql), (CHECK, CHECK.check_sql)):
        text, choice = written(example, True)
        assert str(query) in text and example.gold_sql in text and one.startswith(choice[:6])
        text, choice = written(example, False)
        assert str(query) not in text and (example.guess_sql or example.gold_sql) in text
        assert other.startswith(choice[:6])
    assert "run_sql" not in written(ask("Plain?"), True)[0] and "<sql>" not in written(ask("Plain?"), True)[0]
