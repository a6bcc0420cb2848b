"""Rollouts of many turns: the engine `slots` beside stock TRL (`environment_factory`), in one process.

Both sides roll out one script with the same weights: prompts of one length, turns of given random lengths
that differ between episodes, the same tool, which sleeps and then returns the same rows. Tokens are forced
after the logits were computed and before they are sampled, on both sides alike. The last turn submits; stock
TRL's last turn is a plain text of the same length, since its loop would go on after a tool call.

Timed is what lies between messages and finished episodes: on TRL's side `GRPOTrainer._generate`, on ours
`rollout.engine.run`. Each side first rolls out a small case. The last line is JSON; `ratio` is TRL's time
over ours at prompt 1,000, 8 episodes a prompt, 3 turns, tools of 20 ms; `cpu_ratio` is the same of processor
time, which other work on the machine changes less, and in which a tool that sleeps costs nothing.

Run: OMP_NUM_THREADS=1 python benchmarks/rollout.py --quick      (the first point; under a minute)
     OMP_NUM_THREADS=1 python benchmarks/rollout.py --table      (one dimension at a time; many minutes)
     OMP_NUM_THREADS=1 python benchmarks/rollout.py --turns 6    (a point of one's own)
"""

import argparse
import dataclasses
import gc
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from llama_shapes import make_model
from rich.console import Console
from rich.table import Table
from stopwatch import Stopwatch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Policy, SlotPolicy, run
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.sql.hidden import hide
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.schema import Schema

CALL = '<tool_call>\n{"name": "%s_sql", "arguments": {"sql": "'
END = '"}}\n</tool_call>'
# One token each, so that a prompt of 300 tokens has room for the tools.
BOILERPLATE = [
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You may call one or more functions to assist with the user query.",
]
RUN, SUBMIT = CALL % "run", CALL % "submit"
ROWS = ExecutionOutcome(
    "ok", ("code", "city", "staff"), tuple((f"LIS-{i}", f"Lisbon {i}", i) for i in range(6))
)


@dataclass(frozen=True)
class Case:
    """One point: prompt tokens, episodes of each prompt, turns, tool latency, model, prompts side by side."""

    prompt: int = 1_000
    generations: int = 8
    turns: int = 3
    tool_ms: float = 20.0
    size: str = "2M"
    prompts: int = 3
    bf16: bool = False


@dataclass(frozen=True)
class Round:
    """Wall time, processor time and sampled tokens of one round."""

    seconds: float
    cpu_s: float
    sampled: int


class SlowTool:
    """Stands where the executor stands: takes its time, returns the same rows, from any thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def execute(self, *_: Any, **__: Any) -> ExecutionOutcome:
        time.sleep(self.seconds)
        return ROWS


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A small BPE with the markers of Qwen2.5 and its template; the frame of a tool call is one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text("utf-8")
    trainer = trainers.BpeTrainer(
        vocab_size=4_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(
        [template, json.dumps(TOOLS), observation_text(ROWS, ObservationLimits())] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([RUN, SUBMIT, END, *BOILERPLATE])
    tokenizer.chat_template = template
    return tokenizer


class Script:
    """Tokens of every episode: `turns[b][k]`, ids of turn k of episode b, its end included.

    Turns take 20 to 60 tokens. The number of the episode stands in the first of them.
    """

    def __init__(self, case: Case, tokenizer: PreTrainedTokenizerFast) -> None:
        rng = random.Random(0)
        self.tokenizer = tokenizer
        self.size = case.prompts * case.generations
        (word,) = self.ids(" a")
        self.turns: list[list[list[int]]] = []
        self.last_as_text: list[list[int]] = []  # of the same length, for TRL
        for episode in range(self.size):
            said = []
            for turn in range(case.turns):
                frame = SUBMIT if turn == case.turns - 1 else RUN
                start, end = (
                    self.ids(f"{frame}SELECT {episode:04d}"),
                    [*self.ids(END), tokenizer.eos_token_id],
                )
                filler = max(1, rng.randint(20, 60) - len(start) - len(end))
                said.append([*start, *[word] * filler, *end])
            self.turns.append(said)
            last = [*self.ids(f"{episode:04d}"), *[word] * len(said[-1])]
            self.last_as_text.append([*last[: len(said[-1]) - 1], tokenizer.eos_token_id])

    @property
    def tokens(self) -> int:
        return sum(len(turn) for turns in self.turns for turn in turns)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@dataclass(frozen=True)
class ForcedSampling(Sampling):
    """Samples as ever, from logits that leave one token."""

    script: tuple[tuple[int, ...], ...] = ()

    def uniforms(self, num_sessions: int, num_tokens: int) -> torch.Tensor:
        assert num_sessions == len(self.script)
        return torch.tensor([[*said, *[0] * (num_tokens - len(said))] for said in self.script])

    def draw(self, logits: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().draw(forced(logits, marks), torch.rand(len(marks), device=marks.device))


def forced(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class ForcedTurns(LogitsProcessor):
    """The same for TRL's generation: finds each row's episode and turn in its tokens when a call begins."""

    def __init__(self, script: Script) -> None:
        self.script = script
        tokenizer = script.tokenizer
        self.run_token = tokenizer.convert_tokens_to_ids(RUN)
        self.table = torch.empty(0)
        self.start = 0

    def begin(self, input_ids: torch.Tensor) -> None:
        said = []
        for row, ids in enumerate(input_ids.tolist()):
            at = [i for i, token in enumerate(ids) if token == self.run_token]
            turn = len(at)
            # Behind the frame comes the number; its tokens are those of the script.
            number = row if not at else self._episode(ids[at[0] :])
            is_last = turn == len(self.script.turns[number]) - 1
            said.append(self.script.last_as_text[number] if is_last else self.script.turns[number][turn])
        width = max(map(len, said))
        eos = self.script.tokenizer.eos_token_id
        padded = [[*turn, *[eos] * (width - len(turn))] for turn in said]
        self.table = torch.tensor(padded, device=input_ids.device)
        self.start = input_ids.shape[1]

    def _episode(self, ids: list[int]) -> int:
        return next(b for b, turns in enumerate(self.script.turns) if turns[0] == ids[: len(turns[0])])

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return forced(scores, self.table[:, input_ids.shape[1] - self.start])  # type: ignore[return-value]


class StockEnvironment:
    """The tools for TRL's own loop."""

    tool = SlowTool(0.0)

    def reset(self, **_: Any) -> None:
        return None

    def run_sql(self, sql: str) -> str:
        """Run one read-only SQL query on the database and see its rows or its error.

        Args:
            sql: The query to run.
        """
        return observation_text(self.tool.execute(sql), ObservationLimits())

    def submit_sql(self, sql: str) -> str:
        """Submit the final SQL query that answers the question. This ends the conversation.

        Args:
            sql: The final query.
        """
        return "Submitted."


def prompt_texts(case: Case, tokens_of: Any) -> list[str]:
    """One user message per prompt, so long that the rendered prompt has the case's number of tokens."""
    texts = []
    for i in range(case.prompts):
        head = f"question {i}:"
        missing = case.prompt - tokens_of(head)
        assert missing > 0, f"the tools alone take {case.prompt - missing} tokens"
        texts.append(head + " a" * missing)
        assert tokens_of(texts[-1]) == case.prompt
    return texts


def stock(case: Case, script: Script, model: LlamaForCausalLM, folder: str) -> "Side":
    """Stock TRL: its trainer, its tool loop, transformers' generation."""
    tokenizer = script.tokenizer
    StockEnvironment.tool = SlowTool(case.tool_ms / 1_000)
    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=script.size,
        num_generations=case.generations,
        max_completion_length=case.turns * 200,
        max_steps=1,
        report_to="none",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        beta=0.0,
        disable_tqdm=True,
    )
    rows = [{"prompt": [{"role": "user", "content": "?"}]}] * case.prompts
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=StockEnvironment,
    )
    tools = trainer._env_tools[None]

    def tokens_of(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        return len(script.ids(rendered))

    texts = [text for text in prompt_texts(case, tokens_of) for _ in range(case.generations)]
    inputs = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    turns, generate = ForcedTurns(script), model.generate

    def forced_generate(input_ids: torch.Tensor, **arguments: Any) -> Any:
        turns.begin(input_ids)
        return generate(input_ids, **arguments, logits_processor=[turns])

    rounds: list[Round] = []
    inner = trainer._generate

    def timed(prompts: Any) -> Any:
        with Stopwatch() as watch:
            output = inner(prompts)
        rounds.append(Round(watch.seconds, watch.cpu_s, sum(sum(mask) for mask in output[2])))
        return output

    trainer._generate = timed

    def roll_out() -> Round:
        model.generate = forced_generate
        try:
            trainer._generate_and_score_completions(inputs)
        finally:
            model.generate = generate
        return rounds[-1]

    return roll_out


def ours(
    case: Case, script: Script, model: LlamaForCausalLM, policy: Policy | SlotPolicy | None = None
) -> "Side":
    """The engine `slots` over real sessions, but for the executor; with a policy, the engine of that."""
    chat = ChatFormat(script.tokenizer, tools=TOOLS)
    settings = EnvironmentSettings(protocol="native", instructions=False, max_turns=case.turns)
    tool: Any = SlowTool(case.tool_ms / 1_000)
    nothing = hide(Schema(()), [])
    backend = ExecutorBackend(tool, Path("?"), settings.limits, settings.observation, nothing)

    def session(text: str) -> SQLSession:
        example = Example(id="?", database="?", question=text, gold_sql="SELECT 1")
        return SQLSession(example, schema_text="", backend=backend, settings=settings)

    texts = prompt_texts(case, lambda text: len(chat.prompt_ids(session(text).start())))
    said = tuple(tuple(token for turn in turns for token in turn) for turns in script.turns)
    policy = policy or SlotPolicy(model, ForcedSampling(script=said))
    budgets = Budgets(200, case.turns * 200, 16_384)

    def roll_out() -> Round:
        sessions = [session(text) for text in texts for _ in range(case.generations)]
        with Stopwatch() as watch:
            episodes = run(sessions, policy, chat, budgets)
        assert all(episode.stop_reason == "submitted" for episode in episodes)
        sampled = sum(sum(episode.completion_mask) for episode in episodes)
        return Round(watch.seconds, watch.cpu_s, sampled)

    return roll_out


Side = Callable[[], Round]


def sides_of(case: Case, folder: str) -> tuple[dict[str, Side], Script]:
    script, model = make_script(case)
    return {"trl": stock(case, script, model, folder), "ours": ours(case, script, model)}, script


def make_script(case: Case) -> tuple[Script, LlamaForCausalLM]:
    """The script of a case, and its model on the device."""
    tokenizer = make_tokenizer()
    model = make_model(case.size, len(tokenizer), eos_token_id=tokenizer.eos_token_id).eval()
    model = model.to(torch.bfloat16 if case.bf16 else torch.float32)
    return Script(case, tokenizer), model.cuda() if torch.cuda.is_available() else model


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Best times of both sides, turn about, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        small = dataclasses.replace(case, prompts=1, generations=2, turns=2, tool_ms=0.0)
        for side in sides_of(small, folder)[0].values():
            side()
        sides, script = sides_of(case, folder)
        rounds: dict[str, list[Round]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                gc.collect()
                rounds[name].append(side())
                sampled = rounds[name][-1].sampled
                assert sampled == script.tokens, (
                    f"{name} sampled {sampled} tokens, the script has {script.tokens}"
                )
    best = {name: min(one.seconds for one in rounds[name]) for name in rounds}
    cpu = {name: min(one.cpu_s for one in rounds[name]) for name in rounds}
    return {
        **dataclasses.asdict(case),
        "sampled_tokens": script.tokens,
        "trl_s": round(best["trl"], 3),
        "ours_s": round(best["ours"], 3),
        "ratio": round(best["trl"] / best["ours"], 2),
        "trl_cpu_s": round(cpu["trl"], 3),
        "ours_cpu_s": round(cpu["ours"], 3),
        "cpu_ratio": round(cpu["trl"] / cpu["ours"], 2),
    }


def table_cases() -> list[Case]:
    first = Case()
    others = [
        *[{"prompt": prompt} for prompt in (300, 3_000)],
        *[{"generations": generations} for generations in (4, 16)],
        *[{"turns": turns} for turns in (1, 6)],
        *[{"tool_ms": tool_ms} for tool_ms in (0.0, 200.0)],
        {"size": "25M"},
    ]
    return [first, *[dataclasses.replace(first, **other) for other in others]]  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first point only")
    parser.add_argument("--table", action="store_true", help="each dimension around the first point")
    parser.add_argument("--repeats", type=int, default=1)
    for field in dataclasses.fields(Case):
        action = {"action": "store_true"} if field.type is bool else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **action)
    options = parser.parse_args(arguments)
    own = Case(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Case)})
    cases = [Case()] if options.quick else table_cases() if options.table else [own]
    warnings.filterwarnings("ignore", category=FutureWarning)
    columns = ["prompt", "G", "turns", "tool ms", "model", "prompts", "bf16", "sampled"]
    columns += ["TRL s", "ours s", "ratio", "TRL cpu s", "ours cpu s", "cpu ratio"]
    table = Table(*columns)
    results = []
    for case in cases:
        results.append(measure(case, options.repeats))
        table.add_row(*(str(value) for value in results[-1].values()))
        print(json.dumps(results[-1]), flush=True)
    Console(width=130).print(table)
    print(json.dumps({"benchmark": "rollout", "threads": torch.get_num_threads(), **results[0]}))


if __name__ == "__main__":
    main()
