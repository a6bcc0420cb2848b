"""The cache of warm-started policies: what makes a new one, and practice on copies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.config import (
    Config,
    LoraSettings,
    ModelConfig,
    TinyPolicyConfig,
    WarmStartConfig,
    load_config,
)
from text2sql_grpo.data.databases import CACHE_VARIABLE, Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import ModelError
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.policy import (
    LoadedPolicy,
    load_policy,
    lora_config,
    made_tiny_policy,
    resolved,
    tiny_policy,
)

WARM_START = WarmStartConfig(
    steps=2, practice_steps=1, renamed_copies=0, copy_questions=20, rows_per_step=1, demonstrations_per_row=2
)
BUNDLED = Path(__file__).parents[2] / "data" / "databases"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return replace(load_config(write_config(tmp_path)), warm_start=WARM_START)


def make(config: Config, **environment: Any) -> tuple[LoadedPolicy, int]:
    """The policy of a config, and the steps of warm start that it took.

    Args:
        environment: Fields of the environment's settings that differ.
    """
    settings = replace(config.environment, **environment)
    bench = SQLEnvironment(Databases(config.data.databases), SQLExecutor(), settings)
    assert config.data.demonstrations is not None
    examples = load_examples(config.data.demonstrations, bench.databases, bench.executor)
    steps: list[int] = []
    policy = tiny_policy(config, examples, bench, on_step=lambda step, loss: steps.append(step))
    return policy, len(steps)


def test_runs_that_differ_in_turns_alone_share_a_warm_start(config: Config) -> None:
    three, steps = make(config, max_turns=3)
    one, steps_of_one = make(config, max_turns=1)

    assert (steps, steps_of_one) == (2, 0)
    assert one.folder == three.folder
    assert torch.equal(one.model.get_input_embeddings().weight, three.model.get_input_embeddings().weight)


def test_what_makes_another_policy(config: Config) -> None:
    assert config.model.tiny is not None
    others = [
        config,
        replace(config, run=replace(config.run, seed=1)),
        replace(config, warm_start=replace(WARM_START, practice_look_share=0.5)),
        replace(config, warm_start=replace(WARM_START, matrix_learning_rate=1e-4)),
        replace(config, model=replace(config.model, tiny=replace(config.model.tiny, hidden_size=16))),
        replace(config, environment=replace(config.environment, schema_text="ddl")),
    ]

    made = [make(other) for other in others]

    assert len({policy.folder for policy, _ in made}) == len(others)
    assert [steps for _, steps in made] == [2] * len(others)


def test_whether_a_policy_is_already_made(config: Config) -> None:
    bench = SQLEnvironment(Databases(config.data.databases), SQLExecutor(), config.environment)

    def load(path: Path) -> list[Example]:
        return load_examples(path, bench.databases, bench.executor)

    assert made_tiny_policy(config, load, bench) is None
    policy, _ = make(config)
    assert made_tiny_policy(config, load, bench) == policy.folder


def test_a_warm_start_leaves_only_the_policy(config: Config, cache: Path) -> None:
    policy, _ = make(config)

    assert [str(path) for path in (cache / "warm_starts").iterdir()] == [policy.folder]


def bundled_example(number: int) -> Example:
    return Example(
        id=f"q{number}",
        database="clinic",
        question=f"How many nurses earn over {number}?",
        gold_sql=f"SELECT COUNT(*) FROM nurse WHERE nurse_id > {number}",
    )


def test_practice_on_copies_of_the_databases_of_the_demonstrations(
    config: Config, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of practice is about the bundled database itself, and no other database is copied."""
    assert config.warm_start is not None
    settings = replace(config.environment, max_episode_tokens=600, max_turn_tokens=200)
    bench = SQLEnvironment(Databases(BUNDLED), SQLExecutor(), settings)
    warm_start = replace(config.warm_start, renamed_copies=2, copy_share=1.0)
    asked: list[tuple[set[str], set[str]]] = []

    def spy(model: Any, log: Any, copies: Any, *_: Any, **__: Any) -> None:
        asked.append((set(log.by_database), set(copies.by_database)))

    monkeypatch.setattr("text2sql_grpo.training.policy.warm_start", spy)
    policy = tiny_policy(
        replace(config, warm_start=warm_start), [bundled_example(number) for number in range(3)], bench
    )

    assert asked == [({"clinic"}, {"clinic_0", "clinic_1"})]
    assert {path.name for path in (cache / "warm_starts").iterdir()} == {Path(policy.folder).name}


def test_databases_too_small_to_ask_about(config: Config) -> None:
    """A table of three rows gives hardly a question about its copies: then practice is on the log."""
    _, steps = make(replace(config, warm_start=replace(WARM_START, renamed_copies=1)))

    assert steps == 2


def test_only_a_config_with_a_tiny_policy(config: Config) -> None:
    with pytest.raises(ModelError, match=r"expected model\.tiny and warm_start"):
        make(replace(config, warm_start=None))


LORA = LoraSettings()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ModelConfig(path="m"), ("float32", "none")),
        (ModelConfig(path="m", lora=LORA), ("float32", "none")),
        (ModelConfig(path="m", lora=LORA, dtype="float16"), ("float16", "none")),
        (ModelConfig(path="m", lora=LORA, quantization="4bit"), ("float32", "4bit")),
        (ModelConfig(path="m", lora=LORA, quantization="auto"), ("float32", "4bit")),
        (ModelConfig(tiny=TinyPolicyConfig()), ("auto", "none")),
    ],
)
def test_what_auto_means_on_a_cpu(settings: ModelConfig, expected: tuple[str, str]) -> None:
    pytest.importorskip("bitsandbytes")
    decided = resolved(settings, "cpu")
    assert (decided.dtype, decided.quantization) == expected
    assert resolved(decided, "cpu") == decided


def test_auto_trains_lora_where_weights_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISABLE_BITSANDBYTES", "1")
    settings = ModelConfig(path="m", lora=LORA, quantization="auto")
    assert resolved(settings, "cpu").quantization == "none"
    assert "LoRA on float32 weights, not on 4-bit ones: DISABLE_BITSANDBYTES=1 is set" in caplog.text


def test_adapters_by_family() -> None:
    settings = ModelConfig(path="m", lora=LORA)
    narrow, wide = Qwen2Config(hidden_size=896), Qwen2Config(hidden_size=3584)
    experts = Qwen3MoeConfig(hidden_size=2048)

    assert lora_config(ModelConfig(path="m"), narrow) is None
    made = [lora_config(settings, config) for config in (narrow, wide, experts)]
    assert [(one.r, one.lora_alpha, one.target_modules) for one in made if one] == [
        (32, 64, "all-linear"),
        (16, 32, "all-linear"),
        (16, 32, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ]
    own = lora_config(replace(settings, lora=LoraSettings(r=4, target_modules=["q_proj"])), wide)
    assert own is not None and (own.r, own.lora_alpha, own.target_modules) == (4, 8, {"q_proj"})


@pytest.mark.parametrize("kept_bytes", [0, 100, 10_000])
def test_torn_weights_are_said_in_one_line(tmp_path: Path, kept_bytes: int) -> None:
    folder = write_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"^expected a model folder or Hub id, got [^\n]+$") as error:
        load_policy(str(folder))
    assert str(folder) in str(error.value)
