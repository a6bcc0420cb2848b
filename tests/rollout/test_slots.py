"""The engine `slots` against the engine `generation` and plain forward passes, on tiny random models."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.model_families import FAST, PLAIN, tiny
from tests.rounding import assert_same, in_float64
from tests.scripted_policy import ask, shop_environment
from tests.scripted_slots import scripted_slots
from tests.tiny_model import write_adapter, write_model, write_tokenizer
from text2sql_grpo.environment.episode import Episode, Message
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment, SQLSession
from text2sql_grpo.errors import DataError
from text2sql_grpo.rollout import slots
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, run
from text2sql_grpo.rollout.policy import ModelPolicy, SlotPolicy, obstacle, trial_obstacle
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.rollout.slot_cache import StepPass

LOOK = "<sql>SELECT code FROM branch</sql>"
ANSWER = "<answer>SELECT staff FROM branch WHERE code = 'LIS-02'</answer>"
# Alone, groups of equal prompts, and prompts that begin alike.
QUESTIONS = [
    "Lisbon?",
    "Porto?",
    "Porto?",
    "Porto?",
    "Faro?",
    "Faro?",
    "How many people work in all of them?",
]
BUDGETS = Budgets(max_turn_tokens=14, max_episode_tokens=500, max_context=900)
# A random model seldom ends a turn with one token in particular: let it have every other.
ENDS = range(0, 304, 2)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> SQLEnvironment:
    settings = EnvironmentSettings(instructions=False, schema_text="compact", max_turns=3)
    return shop_environment(tmp_path_factory.mktemp("shop"), settings)


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma", "mistral", "lora", "window"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """All with two query heads to a key-value head; `window` is shorter than prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "lora":
        base = write_model(folder / "base", architecture="qwen2", max_positions=900)
        adapter = write_adapter(folder / "adapter", base)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval().double()
    fields: dict[str, Any] = {}
    if request.param in ("mistral", "window"):
        fields = {"sliding_window": 40 if request.param == "window" else None}
    if request.param in ("gemma", "qwen3"):
        fields = {"head_dim": 16}  # not the width by the number of heads
    architecture = "mistral" if request.param == "window" else request.param
    written = write_model(folder, architecture=architecture, max_positions=900, **fields)
    return AutoModelForCausalLM.from_pretrained(written).eval().double()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), eos_token_ids=ENDS)


def sessions(environment: SQLEnvironment, questions: Sequence[str] = QUESTIONS) -> list[SQLSession]:
    return [environment.session(ask(question)) for question in questions]


def tokens(episodes: Sequence[Episode]) -> list[Any]:
    return [(e.completion_ids, e.completion_mask, e.stop_reason, e.is_masked) for e in episodes]


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, episode: Episode, sampling: Sampling) -> torch.Tensor:
    """Of the completion's tokens, by one forward pass over the whole episode."""
    ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
    logits = model(ids).logits[0, len(episode.prompt_ids) - 1 : -1]
    scores = sampling._warpers(ids, logits) if sampling.temperature else logits
    return scores.log_softmax(-1).gather(1, torch.tensor(episode.completion_ids)[:, None])[:, 0]


@in_float64()
def test_greedy_episodes_are_those_of_the_other_engine(
    model: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    plain = run(sessions(environment), ModelPolicy(model, chat), chat, BUDGETS)
    policy = SlotPolicy(model, Sampling(temperature=0))
    episodes = run(sessions(environment), policy, chat, BUDGETS)

    assert tokens(episodes) == tokens(plain)
    assert [e.messages for e in episodes] == [e.messages for e in plain]
    for episode in episodes:
        sampled = torch.tensor(episode.completion_mask).bool()
        recorded = torch.tensor(episode.log_probs)
        assert (recorded[~sampled] == 0).all()
        expected = plain_log_probs(model, episode, policy.sampling)
        assert_same(recorded[sampled], expected[sampled], layers=model.config.num_hidden_layers)
    assert max(len(episode.actions) for episode in episodes) > 1


ADMITTED = [*FAST, "gpt2", "gpt_bigcode", "hunyuan_v1_dense"]
PLAYED_BY_DEFAULT = ("gemma3_text", "gemma4_text", "gpt_oss")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in PLAYED_BY_DEFAULT else pytest.mark.slow)
        for name in sorted(FAST | PLAIN)
    ],
)
def test_a_family_is_played_as_by_its_own_code_or_falls_back(
    environment: SQLEnvironment, chat: ChatFormat, family: str
) -> None:
    model = tiny(family).eval()
    reason = obstacle(model) or trial_obstacle(model)
    assert (reason is None) == (family in ADMITTED), reason
    if reason is None:
        with in_float64():
            assert_rolled_out_as_by_its_own_code(model.double(), environment, chat)


def assert_rolled_out_as_by_its_own_code(
    model: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    budgets = Budgets(14, 200, 512)

    greedy = SlotPolicy(model, Sampling(temperature=0))
    plain = run(sessions(environment), ModelPolicy(model, chat), chat, budgets)
    assert tokens(run(sessions(environment), greedy, chat, budgets)) == tokens(plain)

    torch.manual_seed(1)
    episodes = run(sessions(environment), SlotPolicy(model), chat, budgets)
    for episode in episodes:
        sampled = torch.tensor(episode.completion_mask).bool()
        expected = plain_log_probs(model, episode, Sampling())[sampled]
        recorded = torch.tensor(episode.log_probs)[sampled]
        assert_same(recorded, expected, layers=model.config.num_hidden_layers)
    assert max(len(episode.actions) for episode in episodes) > 1


@in_float64()
def test_recorded_log_probs_are_those_of_a_plain_pass(
    model: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    torch.manual_seed(1)
    sampling = Sampling(temperature=0.8, top_k=100, top_p=0.95, min_p=0.005)

    episodes = run(sessions(environment), SlotPolicy(model, sampling), chat, BUDGETS)

    for episode in episodes:
        sampled = torch.tensor(episode.completion_mask).bool()
        expected = plain_log_probs(model, episode, sampling)
        recorded = torch.tensor(episode.log_probs)
        assert_same(recorded[sampled], expected[sampled], layers=model.config.num_hidden_layers)
        assert expected[sampled].min() > -torch.inf  # nothing that the filters take out
    assert len({tuple(e.completion_ids) for e in episodes[1:4]}) == 3  # siblings go their own ways


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = write_model(tmp_path_factory.mktemp("llama"), max_positions=900)
    return AutoModelForCausalLM.from_pretrained(folder).eval().double()


@in_float64()
def test_what_is_sampled_depends_on_the_seed_and_not_on_the_slots(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    played = []
    for max_slots in (None, 3, 1):
        torch.manual_seed(2)
        played.append(
            tokens(run(sessions(environment), SlotPolicy(llama, max_slots=max_slots), chat, BUDGETS))
        )

    assert played[0] == played[1] == played[2]
    torch.manual_seed(3)
    assert tokens(run(sessions(environment), SlotPolicy(llama), chat, BUDGETS)) != played[0]


def test_free_slots_are_given_to_those_that_wait(
    environment: SQLEnvironment, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatFormat(chat.tokenizer)
    rows: list[int] = []
    logits = SlotPolicy.logits

    def counted(self: SlotPolicy, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if isinstance(args[-1], StepPass):
            rows.append(len(args[1]))
        return logits(self, ids, *args)

    monkeypatch.setattr(SlotPolicy, "logits", counted)
    monkeypatch.setattr(slots, "_FREE_TOKENS", 1)  # no drafts

    questions = ["one?", "two?", "three?", "four?", "five?"]
    policy = scripted_slots(chat, [[ANSWER], ["?" * 80] * 3, *[[ANSWER]] * 3], max_slots=2)

    episodes = run(sessions(environment, questions), policy, chat, Budgets(100, 1_000, 10_000))

    assert [e.stop_reason for e in episodes] == ["submitted", "max_turns", *["submitted"] * 3]
    assert max(rows) == 2
    # The long episode has the others beside it, one after another.
    assert len(rows) < 0.75 * sum(rows)


def test_the_cache_is_as_large_as_the_rows_that_are_left(
    environment: SQLEnvironment, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    made, logits = SlotPolicy.new_cache, SlotPolicy.logits
    caches: list[Any] = []

    def noted(self: SlotPolicy, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append(caches[0].suffixes.tokens)
        return logits(self, ids, *args)

    monkeypatch.setattr(
        SlotPolicy, "new_cache", lambda self, *args: caches.append(made(self, *args)) or caches[0]
    )
    monkeypatch.setattr(SlotPolicy, "logits", noted)
    policy = scripted_slots(ChatFormat(chat.tokenizer), [["?" * 80] * 3, *[[ANSWER]] * 9], max_slots=2)

    questions = [f"{number}?" for number in range(10)]
    run(sessions(environment, questions), policy, ChatFormat(chat.tokenizer), Budgets(100, 1_000, 10_000))

    assert max(sizes) > 240 and sizes[-1] <= 96


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device: numbers and shapes read from tensors."""

    WAITING = ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        by_repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        self.count += name in self.WAITING or by_mask or by_repeats
        return func(*args, **(kwargs or {}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(0.8, top_p=0.9, top_k=50, min_p=0.01)], ids=["greedy", "sampled"]
)
@in_float64()
def test_a_token_makes_the_host_wait_once_for_all_rows(
    model: PreTrainedModel,
    environment: SQLEnvironment,
    chat: ChatFormat,
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling,
) -> None:
    """To see which turns are over. More is asked only where turns begin and end, and for drafts."""
    monkeypatch.setattr(slots, "_FREE_TOKENS", 1)  # no drafts
    waits: list[int] = []
    step = slots.Scheduler._step

    def decoding(table: slots.Scheduler) -> list[int]:
        return [id(row) for row in table._rows if row.is_decoding]

    def counted(table: slots.Scheduler) -> None:
        before, is_new = decoding(table), table._cache._longest is None
        with HostReads() as reads:
            step(table)
        if before == decoding(table) and not is_new:
            waits.append(reads.count)

    monkeypatch.setattr(slots.Scheduler, "_step", counted)
    chat = ChatFormat(chat.tokenizer)  # turns seldom end before their 26 tokens are written

    run(
        sessions(environment, ["Porto?"] * 5 + ["Faro?"]),
        SlotPolicy(model, sampling),
        chat,
        Budgets(26, 70, 900),
    )

    assert len(waits) > 20
    assert set(waits) == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.05])
@in_float64()
def test_drafts_change_no_token(
    model: PreTrainedModel,
    environment: SQLEnvironment,
    chat: ChatFormat,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    """A random model that is nearly greedy repeats itself, and so do the members of a group."""
    chat = ChatFormat(chat.tokenizer)
    played = []
    for free in (1, slots._FREE_TOKENS):
        monkeypatch.setattr(slots, "_FREE_TOKENS", free)
        torch.manual_seed(1)
        policy = SlotPolicy(model, Sampling(temperature))
        questions = ["Porto?"] * 4 + ["Faro?"]
        episodes = run(sessions(environment, questions), policy, chat, Budgets(40, 150, 900))
        played.append((tokens(episodes), [e.log_probs for e in episodes]))

    (plain, plain_log_probs), (drafted, drafted_log_probs) = played
    assert drafted == plain
    for one, other in zip(plain_log_probs, drafted_log_probs, strict=True):
        assert_same(other, one, layers=model.config.num_hidden_layers, scale=1 / (temperature or 1.0))


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each forward pass of the engine."""
    counts: list[int] = []
    logits = SlotPolicy.logits

    def counted(self: SlotPolicy, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        counts.append(len(ids))
        return logits(self, ids, *args)

    monkeypatch.setattr(SlotPolicy, "logits", counted)
    return counts


def test_drafts_spare_passes(environment: SQLEnvironment, chat: ChatFormat, forwarded: list[int]) -> None:
    chat = ChatFormat(chat.tokenizer)
    sql = "SELECT staff FROM branch WHERE code = 'LIS-02'"
    look = f"<sql>{sql}</sql>"
    policy = scripted_slots(chat, [[look, look, ANSWER]])

    (episode,) = run(sessions(environment, ["Lisbon?"]), policy, chat, Budgets(100, 1_000, 10_000))

    assert [action.sql for action in episode.actions][:2] == [
        "SELECT staff FROM branch WHERE code = 'LIS-02'"
    ] * 2
    assert len(forwarded) < 0.5 * sum(episode.completion_mask)


@in_float64()
def test_an_equal_prompt_is_read_once(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat, forwarded: list[int]
) -> None:
    (episode, *_) = run(
        sessions(environment, ["Porto?"] * 5), SlotPolicy(llama), chat, Budgets(1, 100, 1_000)
    )

    # All but the last token for all together, then the last by each.
    assert forwarded == [len(episode.prompt_ids) - 1, 5]


@in_float64()
def test_prompts_that_begin_alike_share_their_beginning(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat, forwarded: list[int]
) -> None:
    one, two = run(
        sessions(environment, ["Porto?", "Lisbon?"]), SlotPolicy(llama), chat, Budgets(1, 100, 1_000)
    )

    common = next(i for i, (a, b) in enumerate(zip(one.prompt_ids, two.prompt_ids, strict=False)) if a != b)
    assert common > 30
    assert forwarded == [common, len(one.prompt_ids) + len(two.prompt_ids) - 2 * common]


class Slow(SQLSession):
    """A session whose replies wait for something."""

    before: Any = None

    def step(self, assistant_text: str) -> Message | None:
        self.before(self, len(self.episode.actions))
        return super().step(assistant_text)


def slow(environment: SQLEnvironment, questions: Sequence[str], before: Any) -> list[SQLSession]:
    made = sessions(environment, questions)
    for session in made:
        session.__class__ = Slow
        session.before = before  # type: ignore[attr-defined]
    return made


def test_tools_run_side_by_side_and_beside_decoding(environment: SQLEnvironment, chat: ChatFormat) -> None:
    chat = ChatFormat(chat.tokenizer)
    others_are_done = threading.Barrier(3)
    both_look = threading.Barrier(2)

    def before(session: SQLSession, turn: int) -> None:
        name = session.episode.example.id
        if name == "one?" or turn == 1:  # the first reply to "one?" comes after the others' last turns
            others_are_done.wait(timeout=20)
        else:
            both_look.wait(timeout=20)

    questions = ["one?", "two?", "three?"]
    policy = scripted_slots(chat, [[ANSWER], [LOOK, ANSWER], [LOOK, ANSWER]])

    episodes = run(slow(environment, questions, before), policy, chat, Budgets(90, 1_000, 10_000))

    assert [e.stop_reason for e in episodes] == ["submitted"] * 3
    assert [len(e.actions) for e in episodes] == [1, 2, 2]


@in_float64()
def test_the_time_of_tools_changes_no_pass(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[int]] = []
    logits = SlotPolicy.logits

    def noted(policy: SlotPolicy, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes[-1].append(len(ids))
        return logits(policy, ids, *rest)

    monkeypatch.setattr(SlotPolicy, "logits", noted)
    played = []
    for late in (0, 1, 2):
        passes.append([])
        waits = [0.0, 0.0, 0.0]
        waits[late] = 0.03
        begun = iter(range(1_000))
        torch.manual_seed(2)
        episodes = run(
            slow(environment, QUESTIONS, lambda *_: time.sleep(waits[next(begun) % 3])),  # noqa: B023
            SlotPolicy(llama),
            chat,
            BUDGETS,
        )
        played.append([episode.log_probs for episode in episodes])

    assert max(len(sizes) for sizes in passes) > 10
    assert passes[0] == passes[1] == passes[2]
    assert played[0] == played[1] == played[2]


def test_a_failure_on_our_side_stops_the_run_and_leaves_the_model_as_it_was(
    environment: SQLEnvironment, chat: ChatFormat
) -> None:
    chat = ChatFormat(chat.tokenizer)
    policy = scripted_slots(chat, [[LOOK, ANSWER]] * 3)
    attention = policy.model.config._attn_implementation

    def before(session: SQLSession, turn: int) -> None:
        if session.episode.example.id == "two?" and turn == 1:
            raise DataError("expected a database, got none")

    with pytest.raises(DataError, match="expected a database, got none"):
        run(slow(environment, ["one?", "two?", "three?"], before), policy, chat, Budgets(90, 1_000, 10_000))

    assert policy.model.config._attn_implementation == attention != "slots"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tool")]
    ids = torch.tensor([[1, 2, 3]])
    assert policy.model(ids).logits.requires_grad


def test_bfloat16_is_sampled_as_it_is_trained(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    """Weights in bfloat16, and float32 weights under autocast."""
    half, whole = (
        AutoModelForCausalLM.from_pretrained(llama.name_or_path, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    for model, autocast in ((half, False), (whole, True)):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            episodes = run(sessions(environment), SlotPolicy(model), chat, BUDGETS)
            expected = torch.cat([plain_log_probs(model, e, Sampling()).float() for e in episodes])
        sampled = torch.tensor([flag for e in episodes for flag in e.completion_mask]).bool()
        recorded = torch.tensor([value for e in episodes for value in e.log_probs])
        differences = (recorded - expected)[sampled].abs()
        assert differences.mean() < 0.02
        assert differences.max() < 0.2


@in_float64()
def test_prompt_of_one_token(llama: PreTrainedModel, environment: SQLEnvironment) -> None:
    class Short(ChatFormat):
        def prompt_ids(self, messages: list[Message]) -> list[int]:
            return [7]

    chat = Short(AutoTokenizer.from_pretrained(llama.name_or_path), eos_token_ids=ENDS)

    plain = run(sessions(environment), ModelPolicy(llama, chat), chat, BUDGETS)
    episodes = run(sessions(environment), SlotPolicy(llama, Sampling(0)), chat, BUDGETS)

    assert tokens(episodes) == tokens(plain)


@pytest.mark.thorough
@in_float64()
def test_sampled_tokens_follow_the_plain_distribution(
    llama: PreTrainedModel, environment: SQLEnvironment, chat: ChatFormat
) -> None:
    """Chi-square of 3,000 first tokens over the eight that top-k leaves."""
    torch.manual_seed(0)
    sampling = Sampling(temperature=1.5, top_k=8)
    episodes = run(
        sessions(environment, ["Porto?"] * 3_000), SlotPolicy(llama, sampling), chat, Budgets(1, 2, 1_000)
    )
    counts = torch.tensor([episode.completion_ids[0] for episode in episodes]).bincount(minlength=304)

    with torch.no_grad():
        logits = llama(torch.tensor([episodes[0].prompt_ids])).logits[0, -1] / 1.5
    kept = logits.topk(8)
    expected = 3_000 * kept.values.softmax(-1)

    assert counts.sum() == counts[kept.indices].sum()
    chi_square = ((counts[kept.indices] - expected) ** 2 / expected).sum()
    assert 0.9 < chi_square < 20.3  # 99% of runs, 7 degrees of freedom
