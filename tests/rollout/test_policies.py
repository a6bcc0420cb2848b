import copy
import logging
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.model_families import tiny
from tests.rounding import in_float64
from tests.tiny_model import write_model, write_tokenizer
from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import (
    ModelPolicy,
    SlotPolicy,
    _warn_once,
    attention_of,
    cache_bytes,
    cached_numbers,
    context_length,
    machine_memory,
    model_policy,
    obstacle,
    plays_by_slots,
    trial_obstacle,
)
from text2sql_grpo.rollout.slot_cache import PrefillPass, StepPass

PROMPTS = [[5, 6, 7, 8, 9, 10], [1, 2], [20] * 11, [3], [40, 41, 42]]


@pytest.fixture(params=["llama", "qwen2"])
def model_and_chat(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, ChatFormat]:
    folder = write_model(tmp_path / "model", architecture=request.param, vocab_size=260)
    chat = ChatFormat(AutoTokenizer.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), chat


def sampling(temperature: float) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=temperature, top_k=0)


@torch.no_grad()
def step_by_step(model: PreTrainedModel, prompt: list[int], eos: set[int], n: int) -> list[int]:
    """Greedy continuation, one whole forward pass a token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + n and not (len(ids) > len(prompt) and ids[-1] in eos):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@in_float64()
def test_batch_is_the_same_as_one_at_a_time(model_and_chat: tuple[PreTrainedModel, ChatFormat]) -> None:
    model, chat = model_and_chat
    model.double()
    plain = [step_by_step(model, prompt, set(chat.eos_token_ids), 12) for prompt in PROMPTS]

    assert ModelPolicy(model, chat).generate(PROMPTS, max_new_tokens=12).ids == plain
    assert ModelPolicy(model, chat, batch_size=2).generate(PROMPTS, max_new_tokens=12).ids == plain
    assert ModelPolicy(model, chat).generate(PROMPTS[1:2], max_new_tokens=1).ids == [plain[1][:1]]


@in_float64()
def test_reply_ends_with_the_first_end_of_turn(model_and_chat: tuple[PreTrainedModel, ChatFormat]) -> None:
    model, chat = model_and_chat
    model.double()
    plain = [step_by_step(model, prompt, set(), 12) for prompt in PROMPTS]
    end = plain[0][3]  # make some token that comes up an end of turn
    chat = ChatFormat(chat.tokenizer, eos_token_ids=[end])

    replies = ModelPolicy(model, chat).generate(PROMPTS, max_new_tokens=12).ids

    assert replies == [
        tokens[: tokens.index(end) + 1] if end in tokens else step_by_step(model, prompt, {end}, 12)
        for prompt, tokens in zip(PROMPTS, plain, strict=True)
    ]
    assert len(replies[0]) <= 4


@in_float64()
def test_the_model_s_own_generation_settings_do_not_leak_in(
    model_and_chat: tuple[PreTrainedModel, ChatFormat],
) -> None:
    """Models from the Hub come with a repetition penalty or top-k, and SQL repeats itself."""
    model, chat = model_and_chat
    model.double()
    plain = ModelPolicy(model, chat).generate(PROMPTS, max_new_tokens=12).ids
    own = model.generation_config
    own.update(repetition_penalty=3.0, no_repeat_ngram_size=2, do_sample=True, top_k=3, temperature=0.1)

    assert ModelPolicy(model, chat).generate(PROMPTS, max_new_tokens=12).ids == plain
    assert model.generation_config is own

    torch.manual_seed(0)
    sampled = ModelPolicy(model, chat, sampling=sampling(1.0)).generate([[5, 6]] * 40, max_new_tokens=1).ids
    assert len({token for (token,) in sampled}) > 10


def test_context_length(model_and_chat: tuple[PreTrainedModel, ChatFormat]) -> None:
    without_positions = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))

    assert context_length(model_and_chat[0]) == 128
    assert context_length(without_positions) == 1_000_000


SMALL = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


def test_models_that_slots_cannot_play() -> None:
    for window in (16, 64, None):
        assert reasons(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))) == (None, None)
    layers = ["full_attention", "linear_attention"]
    hybrid = Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, head_dim=4, layer_types=layers))
    assert obstacle(hybrid) == "some of its layers are of other kinds than attention: linear_attention"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic" in str(obstacle(LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))))
    without_interface = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))
    assert "use transformers' attention" in str(reasons(without_interface)[1])


def reasons(model: PreTrainedModel) -> tuple[str | None, str | None]:
    return obstacle(model), trial_obstacle(model)


def test_rounding_in_bfloat16_is_no_other_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": 512, "hidden_size": 64}))
    model.lm_head.weight.data *= 1_000  # large logits, as a trained model has
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 100  # so that positions matter
    assert trial_obstacle(copy.deepcopy(model).bfloat16()) is None

    logits = SlotPolicy.logits

    def misplaced(self: SlotPolicy, ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits(self, ids, positions + isinstance(rest[-1], StepPass), *rest)

    monkeypatch.setattr(SlotPolicy, "logits", misplaced)
    assert "log-probs differ by" in str(trial_obstacle(model.bfloat16()))


@pytest.mark.parametrize("wrong", ["softcap", "sliding_window", "s_aux"])
def test_a_model_whose_attention_is_computed_otherwise_falls_back(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As if the engine did not know one option that layers pass to their attention."""
    attention = ALL_ATTENTION_FUNCTIONS["slots"]

    def ignoring(*args: Any, **options: Any) -> Any:
        return attention(*args, **options | {wrong: None})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "slots", ignoring)
    model = tiny("gpt_oss" if wrong == "s_aux" else "gemma2").train()
    if wrong == "softcap":
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.1
    chat = ChatFormat(write_tokenizer(tmp_path))
    before, state = attention_of(model.config), torch.get_rng_state()

    with caplog.at_level(logging.WARNING):
        assert isinstance(model_policy(model, chat), ModelPolicy)
    assert "log-probs differ by" in caplog.text
    with pytest.raises(ModelError, match=r"the engine slots cannot play this model: its log-probs differ"):
        model_policy(model, chat, engine="slots")
    assert model.training
    assert attention_of(model.config) == before != "slots"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (LoraConfig(r=2, use_dora=True), None),
        (IA3Config(), None),
        (LoraConfig(r=2, task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2]), "aLoRA, begins at a token"),
        (
            PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            "PROMPT_TUNING, puts tokens before",
        ),
        (
            PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            "PREFIX_TUNING, puts tokens before",
        ),
        (
            AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
            "ADAPTION_PROMPT, depends",
        ),
    ],
)
def test_adapters_that_need_the_rows_of_a_batch_apart(adapter: PeftConfig, reason: str | None) -> None:
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), adapter)
    found = obstacle(model)
    assert (found is None) if reason is None else reason in str(found)


def test_auto_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))
    reason = obstacle(model)

    with caplog.at_level(logging.WARNING):
        assert not plays_by_slots("auto", reason)
        assert not plays_by_slots("auto", reason)
    assert [record.getMessage() for record in caplog.records] == [
        f"Rollouts by the slower engine, generation. slots cannot play this model: {reason}"
    ]

    caplog.clear()
    assert not plays_by_slots("generation", reason)
    assert not plays_by_slots("generation", None)
    assert plays_by_slots("auto", None)
    assert plays_by_slots("slots", None)
    assert caplog.records == []
    with pytest.raises(ModelError, match=r"the engine slots cannot play this model: .*dynamic"):
        plays_by_slots("slots", reason)
    with pytest.raises(ModelError, match="dynamic"):
        SlotPolicy(model)


def test_engine_of_a_model_outside_a_trainer(model_and_chat: tuple[PreTrainedModel, ChatFormat]) -> None:
    model, chat = model_and_chat

    by_slots = model_policy(model, chat, temperature=0.5, batch_size=7)
    assert isinstance(by_slots, SlotPolicy)
    assert (by_slots.sampling.temperature, by_slots.max_slots) == (0.5, 7)
    assert isinstance(model_policy(model, chat, engine="generation"), ModelPolicy)
    other = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))
    assert isinstance(model_policy(other, chat), ModelPolicy)


def test_slots_are_as_many_as_sessions_limit_and_memory_allow(
    model_and_chat: tuple[PreTrainedModel, ChatFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_and_chat

    def slots(sessions: int, tokens: int, max_slots: int | None = None) -> int:
        return len(SlotPolicy(model, max_slots=max_slots).new_cache(sessions, tokens).length)

    assert slots(9, 100) == 9
    assert slots(9, 100, max_slots=4) == 4
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert slots(1_000_000, 1_000) == cache_bytes(model.device) // (1_000 * bytes_per_token)
    assert slots(3, 1 << 40) == 1
    whole = cache_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cache_bytes(torch.device("cpu")) == whole // 2


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/pod/box", {"pod/box/memory.max": "max", "pod/memory.max": "5000"}, 5000),
        ("0::/", {"memory.max": "5000"}, 5000),
        ("4:hugetlb,memory:/docker/a", {"memory/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpu:/a", {"memory/a/memory.limit_in_bytes": "5000"}, None),
    ],
)
def test_the_limit_of_a_container_counts_as_memory(
    tmp_path: Path, line: str, files: dict[str, str], limit: int | None
) -> None:
    whole = machine_memory(root=tmp_path)
    assert whole == psutil.virtual_memory().total
    for name, text in {
        "proc/self/cgroup": line,
        **{f"sys/fs/cgroup/{n}": t for n, t in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert machine_memory(root=tmp_path) == (limit or whole)
    assert limit is None or machine_memory(is_free=True, root=tmp_path) == limit


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "deepseek_v3"])
def test_the_size_of_a_cache_is_known_from_the_config(family: str) -> None:
    model = tiny(family).eval()
    policy = SlotPolicy(model)
    cache = policy.new_cache(1, 8)
    with policy.attending():
        cache.add_prefixes([3])
        places = torch.arange(3)
        policy.logits(places, places, places[:1], PrefillPass(cache, [0]))

    stored = sum(each[0, :, 0].numel() for layer in cache.prefixes.layers.values() for each in layer)
    assert cached_numbers(model.config) == stored


def test_memory_that_torch_holds_and_does_not_use_is_free_for_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second step on, the update's peak is reserved: the number of slots must not depend on it."""
    figures = {"mem_get_info": (4 << 30, 80 << 30), "memory_reserved": 30 << 30, "memory_allocated": 10 << 30}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert cache_bytes(torch.device("cuda")) == (4 + 30 - 10 << 30) // 2
