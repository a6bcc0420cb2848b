"""Whole GRPO steps on prompts of Spider's length: ours beside stock TRL, in one process.

Both sides begin with the same random weights and roll out one script about the same questions of Spider's dev
set: schemas as CREATE TABLE text, a few turns that run other golds of the same database, then a submission,
right or wrong in turn, so that every group has a gradient. Queries are really run and graded, each side by an
executor of its own. Tokens are forced after their logits were computed. Stock is TRL's `GRPOTrainer` with
`environment_factory`, its tool loop and transformers' generation (`integrations.stock_trl`). Its loop would
go on after a submission, so the last call is submitted by a reward function instead, which spares it one
generation. Ours is `SQLGRPOTrainer` with the engine `slots` and shared prompts.

Timed are whole steps of `train()`: rollout (rewards included) and update (loss, gradient, optimizer). What
both sides were asked and sampled, their advantages and the norms of their gradients are compared. Each first
takes a small step. The last line is JSON; `ratio` is TRL's time over ours, `cpu_ratio` the same of processor
time (without the processes that run SQL), which other work on the machine changes less. The same with
`_shared_database` behind them: as many questions of one database, in one micro-batch.

Run: OMP_NUM_THREADS=1 python benchmarks/step.py --quick       (2 prompts x 4, two turns; under a minute)
     OMP_NUM_THREADS=1 python benchmarks/step.py --steps 2     (4 prompts x 8, the best of two steps)

Without Spider (in $TEXT2SQL_GRPO_SHARED_DATA) the project's own questions are asked, with shorter schemas.
"""

import argparse
import dataclasses
import gc
import json
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama_shapes import make_model
from rich.console import Console
from rich.table import Table
from rollout import ForcedSampling, forced, make_tokenizer
from spider import SPIDER
from stopwatch import Stopwatch
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import chunked_logprob
from update import LOGIT_TILE

from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.environment.tool_calls import call_text
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.integrations.stock_trl import SQLTools, stock_trl
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.engine import SlotPolicy
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

REPOSITORY = Path(__file__).parents[1]
VOCAB = 4_000
MAX_QUERY_CHARS = 300
MAX_EPISODE_TOKENS = 4_096
REWARDS = {"execution": 1.0}
# As TRL writes the schemas of Python functions.
STOCK_TOOLS = [tool | {"function": tool["function"] | {"return": {"type": "string"}}} for tool in TOOLS]


@dataclass(frozen=True)
class Case:
    """Questions of a step, databases that they are about (each a micro-batch), episodes, turns, model."""

    prompts: int = 4
    databases: int = 4
    generations: int = 8
    turns: int = 3
    size: str = "2M"
    bf16: bool = False


@dataclass(frozen=True)
class Script:
    """Questions of a step and the tokens of its episodes.

    Attributes:
        turns: Token ids of turn k of episode b at `[b][k]`, the end of the turn included.
    """

    examples: list[Example]
    databases: Databases
    settings: EnvironmentSettings
    tokenizer: PreTrainedTokenizerFast
    turns: list[list[list[int]]]

    def environment(self) -> Environment:
        sources = {name: self.databases.source(name) for name in self.databases.names()}
        return Environment(sources, test_databases=0, **vars(self.settings))

    @property
    def sampled(self) -> int:
        return sum(len(turn) for turns in self.turns for turn in turns)


def read_questions() -> tuple[list[Example], Databases]:
    """Spider's dev set, or else the project's own questions."""
    path, folder, own = SPIDER / "dev.json", SPIDER / "database", REPOSITORY / "data"
    if not path.is_file():
        path, folder = own / "questions" / "train.jsonl", own / "databases"
    databases = Databases(folder)
    with SQLExecutor() as executor:
        return load_examples(path, databases, executor, check_gold=False), databases


def make_script(case: Case) -> Script:
    """Questions about some databases, evenly spaced by the length of their schemas."""
    questions, databases = read_questions()
    by_database = defaultdict(list)
    for example in questions:
        by_database[example.database].append(example)
    names = sorted(by_database)
    settings = EnvironmentSettings(
        protocol="native",
        max_turns=case.turns,
        max_turn_tokens=MAX_EPISODE_TOKENS,
        max_episode_tokens=MAX_EPISODE_TOKENS,
    )
    with SQLExecutor() as executor:
        environment = SQLEnvironment(databases, executor, settings)
        schemas = {name: environment.schema_text(name) for name in names}
    names.sort(key=lambda name: len(schemas[name]))
    chosen = [names[(2 * i + 1) * len(names) // (2 * case.databases)] for i in range(case.databases)]
    chosen = [name for name in chosen for _ in range(case.prompts // case.databases)]
    base = make_tokenizer()
    texts = [str(base.chat_template), json.dumps(TOOLS), *schemas.values()]
    texts += [text for example in questions for text in (example.question, example.gold_sql)]
    tokenizer = base.train_new_from_iterator(texts, VOCAB, show_progress=False)
    tokenizer.chat_template = base.chat_template
    rng = random.Random(0)
    examples, turns = [], []
    for name in chosen:
        example = rng.choice(by_database[name])
        examples.append(example)
        golds = sorted({other.gold_sql for other in by_database[name]} - {example.gold_sql})
        others = [sql for sql in golds if len(sql) <= MAX_QUERY_CHARS]
        for episode in range(case.generations):
            *looks, wrong = rng.sample(others, case.turns)
            final = example.gold_sql if episode % 2 else wrong
            calls = [call_text("run_sql", {"sql": sql}) for sql in looks]
            calls.append(call_text("submit_sql", {"sql": final}))
            said = tokenizer(calls, add_special_tokens=False)["input_ids"]
            turns.append([[*ids, tokenizer.eos_token_id] for ids in said])
    return Script(examples, databases, settings, tokenizer, turns)


class ForcedTurns(LogitsProcessor):
    """The script for TRL's generation, which rolls out all episodes side by side, turn by turn."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._calls = 0
        self._table = torch.empty(0)
        self._start = 0

    def begin(self, input_ids: torch.Tensor) -> None:
        episodes = self._script.turns
        assert len(input_ids) == len(episodes), "an episode ended before its script did"
        turn = self._calls % len(episodes[0])
        self._calls += 1
        said = [turns[turn] for turns in episodes]
        width, end = max(map(len, said)), self._script.tokenizer.eos_token_id
        self._table = torch.tensor([[*ids, *[end] * (width - len(ids))] for ids in said])
        self._table = self._table.to(input_ids.device)
        self._start = input_ids.shape[1]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return forced(scores, self._table[:, input_ids.shape[1] - self._start])  # type: ignore[return-value]


def submit(
    completions: list[list[dict[str, Any]]], environments: Sequence[SQLTools], **_: Any
) -> list[float]:
    """A TRL reward function that adds nothing, but submits what the last turn wanted to."""
    for completion, environment in zip(completions, environments, strict=True):
        (call,) = completion[-1]["tool_calls"]
        assert call["function"]["name"] == "submit_sql"
        environment.submit_sql(**call["function"]["arguments"])
    return [0.0 for _ in completions]


def stock(script: Script, model: LlamaForCausalLM, fields: dict[str, Any]) -> GRPOTrainer:
    """Stock TRL: its trainer, its tool loop, transformers' generation, its update."""
    environment = script.environment()
    spec = stock_trl(script.examples, environment, RewardMix(REWARDS))
    trainer = GRPOTrainer(
        model,
        reward_funcs=[submit, *spec.reward_funcs],
        args=GRPOConfig(
            max_tool_calling_iterations=len(script.turns[0]) - 1,
            max_completion_length=MAX_EPISODE_TOKENS,
            **fields,
        ),
        train_dataset=spec.train_dataset,
        processing_class=script.tokenizer,
        environment_factory=spec.environment_factory,
    )
    turns, generate = ForcedTurns(script), model.generate

    def forced_generate(input_ids: torch.Tensor, **arguments: Any) -> Any:
        turns.begin(input_ids)
        return generate(input_ids, **arguments, logits_processor=[turns])

    model.generate = forced_generate
    return trainer


def ours(script: Script, model: LlamaForCausalLM, fields: dict[str, Any]) -> GRPOTrainer:
    """The engine `slots`, and the update that forwards each prompt once."""
    environment = script.environment()
    environment.sessions.tools = STOCK_TOOLS  # so that prompts are the same
    trainer = SQLGRPOTrainer(
        model,
        environment,
        train_dataset=script.examples,
        reward_funcs=RewardMix(REWARDS),
        args=SQLGRPOConfig(**fields),
        processing_class=script.tokenizer,
        rollout=RolloutConfig(engine="slots"),
    )
    assert trainer.rollouts.plays_by_slots and trainer.update.is_on
    said = tuple(tuple(token for turn in turns for token in turn) for turns in script.turns)
    sampling = ForcedSampling(script=said)
    trainer.rollouts.policy = lambda model: SlotPolicy(model, sampling)  # type: ignore[method-assign]
    return trainer


class StepClock(TrainerCallback):
    """Times the steps of a trainer, and the rollouts in them; keeps the batches."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.steps: list[Stopwatch] = []
        self.rollouts: list[Stopwatch] = []
        self.batches: list[dict[str, Any]] = []
        is_ours = isinstance(trainer, SQLGRPOTrainer)
        name = "generation_batch" if is_ours else "_generate_and_score_completions"
        inner = getattr(trainer, name)

        def timed(*inputs: Any) -> dict[str, Any]:
            with Stopwatch() as watch:
                output: dict[str, Any] = inner(*inputs)
            self.rollouts.append(watch)
            self.batches.append(output)
            return output

        setattr(trainer, name, timed)
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(Stopwatch().__enter__())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps[-1].__exit__()


@dataclass(frozen=True)
class Taken:
    """Times of one side's steps, the best of each part, in seconds; and the first step's outcome.

    Attributes:
        episodes: Prompt, completion, which of its tokens were sampled, and advantage of each.
    """

    seconds: dict[str, float]
    cpu_s: dict[str, float]
    episodes: list[tuple[list[int], list[int], list[int], float]]
    grad_norm: float


def take_steps(name: str, case: Case, script: Script, steps: int) -> Taken:
    """Trains one side for so many steps."""
    chunked_logprob.TOKEN_CHUNK_SIZE = LOGIT_TILE  # ours sets its own, for the whole process
    model = make_model(case.size, len(script.tokenizer)).eval()
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "output_dir": folder,
            "per_device_train_batch_size": case.generations * case.prompts // case.databases,
            "gradient_accumulation_steps": case.databases,
            "num_generations": case.generations,
            "max_steps": steps,
            "shuffle_dataset": False,
            "gradient_checkpointing": False,
            "bf16": case.bf16,
            "use_cpu": not torch.cuda.is_available(),
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        trainer = {"trl": stock, "ours": ours}[name](script, model, fields)
        trainer.remove_callback(PrinterCallback)
        clock = StepClock(trainer)
        gc.collect()
        trainer.train()
    first = trainer.state.log_history[0]
    assert first["frac_reward_zero_std"] == 0, "a group of one reward has no gradient, and ours skips it"
    return Taken(
        {part: min(each) for part, each in parts(clock, "seconds").items()},
        {part: min(each) for part, each in parts(clock, "cpu_s").items()},
        episodes(clock.batches[0]),
        first["grad_norm"],
    )


def parts(clock: StepClock, unit: str) -> dict[str, list[float]]:
    """Times of rollouts, updates and whole steps."""
    rollouts = [getattr(watch, unit) for watch in clock.rollouts]
    wholes = [getattr(watch, unit) for watch in clock.steps]
    updates = [whole - rollout for whole, rollout in zip(wholes, rollouts, strict=True)]
    return {"rollout": rollouts, "update": updates, "step": wholes}


def episodes(batch: dict[str, Any]) -> list[tuple[list[int], list[int], list[int], float]]:
    """The rows of a generation batch without their padding."""
    rows = []
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        is_said = batch["completion_mask"][row].bool()
        completion = batch["completion_ids"][row][is_said].tolist()
        sampled = batch["tool_mask"][row][is_said].tolist()
        rows.append((prompt, completion, sampled, round(batch["advantages"][row].item(), 4)))
    return rows


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Times of both sides and how they compare."""
    script = make_script(case)
    trl, own = (take_steps(name, case, script, steps) for name in ("trl", "ours"))
    assert trl.episodes == own.episodes, "the sides have different episodes"
    assert sum(sum(sampled) for _, _, sampled, _ in own.episodes) == script.sampled
    error = abs(own.grad_norm / trl.grad_norm - 1)
    lengths = [len(prompt) for prompt, *_ in own.episodes]
    result = {
        **dataclasses.asdict(case),
        "prompt_tokens": [min(lengths), max(lengths)],
        "mean_prompt_tokens": round(sum(lengths) / len(lengths)),
        "mean_completion_tokens": round(sum(len(said) for _, said, *_ in own.episodes) / len(own.episodes)),
        "sampled_tokens": script.sampled,
        "gradient_norm_error": float(f"{error:.1e}"),
    }
    for unit in ("seconds", "cpu_s"):
        suffix = {"seconds": "s", "cpu_s": "cpu_s"}[unit]
        for side, taken in (("trl", trl), ("ours", own)):
            result |= {f"{side}_{part}_{suffix}": round(s, 3) for part, s in getattr(taken, unit).items()}
        prefix = unit.removesuffix("seconds").replace("cpu_s", "cpu_")
        for part, s in getattr(trl, unit).items():
            name = f"{prefix}ratio" if part == "step" else f"{part}_{prefix}ratio"
            result[name] = round(s / getattr(own, unit)[part], 2)
    return result


def disagreement(result: dict[str, Any]) -> str | None:
    """Error of a result of `measure` that rounding does not explain; None if there is none."""
    error, bound = result["gradient_norm_error"], 0.2 if result["bf16"] else 1e-3
    return None if error < bound else f"gradient_norm_error {error} >= {bound}"


def table_of(result: dict[str, Any]) -> Table:
    table = Table(
        "", *(f"{part} {unit}" for unit in ("s", "cpu s") for part in ("rollout", "update", "step"))
    )
    for side in ("trl", "ours"):
        units = [(part, unit) for unit in ("s", "cpu_s") for part in ("rollout", "update", "step")]
        table.add_row(side, *(f"{result[f'{side}_{part}_{unit}']:.2f}" for part, unit in units))
    ratios = ["rollout_ratio", "update_ratio", "ratio"]
    ratios += ["rollout_cpu_ratio", "update_cpu_ratio", "cpu_ratio"]
    table.add_row("ratio", *(str(result[ratio]) for ratio in ratios))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two prompts x 4, two turns, one step")
    parser.add_argument("--steps", type=int, default=1, help="timed, of which the best counts")
    for field in dataclasses.fields(Case):
        action = {"action": "store_true"} if field.type is bool else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **action)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    own = Case(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Case)})
    case = Case(prompts=2, databases=2, generations=4, turns=2) if options.quick else own
    small = dataclasses.replace(case, prompts=1, databases=1, generations=2, turns=2)
    for name in ("trl", "ours"):
        take_steps(name, small, make_script(small), 1)
    results = []
    for one in (case, dataclasses.replace(case, databases=1)):
        results.append(measure(one, 1 if options.quick else options.steps))
        assert disagreement(results[-1]) is None, disagreement(results[-1])
        Console(width=110).print(table_of(results[-1]))
    ratios = {f"{name}_shared_database": results[1][name] for name in ("ratio", "cpu_ratio")}
    print(json.dumps({"benchmark": "step", "threads": torch.get_num_threads(), **results[0], **ratios}))


if __name__ == "__main__":
    main()
