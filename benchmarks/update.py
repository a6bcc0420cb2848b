"""The update of GRPO: each distinct prefix forwarded once beside stock TRL, on the same weights and batch.

A batch holds groups of equal size; every prompt and every completion has the same length, so that no padding
helps us. Timed is what lies between a scored batch and its gradient: `compute_loss` and backward of
`GRPOTrainer`, and of `SQLGRPOTrainer`'s base. Both first take a small batch; then they take turns, and the
best round of each counts. Loss and gradient of both are compared. Memory is the growth of resident memory up
to its peak over one update, gradients included, each side in a new process (on CUDA: of allocated memory, in
turn).

The last line is JSON: `ratio` is TRL's time over ours (`cpu_ratio` of processor time), `token_ratio` the
tokens that TRL forwards over ours, `memory_ratio` TRL's memory over ours, at prompt 1,000, completion 100, 8
completions a prompt. Without `--quick`, the last line also has the ratios for 4 such prompts that share a
schema of 970 tokens, as `ratio_shared_database` and `cpu_ratio_shared_database`.

Run: OMP_NUM_THREADS=1 python benchmarks/update.py --quick      (one prompt, one round; under a minute)
     OMP_NUM_THREADS=1 python benchmarks/update.py              (one prompt and four; minutes)
     OMP_NUM_THREADS=1 python benchmarks/update.py --table      (one dimension at a time; minutes)
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llama_shapes import make_model
from rich.console import Console
from rich.table import Table
from rollout import make_tokenizer
from stopwatch import Stopwatch
from trl import GRPOTrainer
from trl.kernels import chunked_logprob

from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.parts import Play, Row
from text2sql_grpo.training.play import Rollouts
from text2sql_grpo.training.trainer import RolloutGRPOTrainer

VOCAB = 4_000
SHARED_DATABASE: dict[str, Any] = {"prompts": 4, "schema": 970}
MOST_FLOAT32 = {"loss_error": 1e-5, "gradient_error": 1e-4}
LOGIT_TILE = chunked_logprob.TOKEN_CHUNK_SIZE  # TRL's, before ours sets its own


@dataclass(frozen=True)
class Case:
    """One point: prompt and completion tokens, completions of each prompt, model, prompts of a batch.

    Attributes:
        schema: Tokens that all prompts begin with.
    """

    prompt: int = 1_000
    completion: int = 100
    generations: int = 8
    size: str = "2M"
    prompts: int = 1
    schema: int = 0
    bf16: bool = False


class NoPlay(Play):
    """Play that is never called: the update alone is measured."""

    def play(self, questions: Sequence[int], rollouts: Rollouts) -> list[Row]:
        raise AssertionError


def make_trainer(case: Case, folder: str, *, is_ours: bool) -> GRPOTrainer:
    model = make_model(case.size, VOCAB, eos_token_id=1)
    arguments = SQLGRPOConfig(
        output_dir=str(Path(folder) / "run"),
        per_device_train_batch_size=case.generations,
        num_generations=case.generations,
        gradient_checkpointing=False,
        bf16=case.bf16,
        use_cpu=not torch.cuda.is_available(),
        loss_type="dapo",
        beta=0.0,
        report_to="none",
    )
    trainer: GRPOTrainer
    if is_ours:
        trainer = RolloutGRPOTrainer(
            model, arguments, num_questions=1, play=NoPlay(), processing_class=make_tokenizer()
        )
    else:
        trainer = GRPOTrainer(
            model,
            reward_funcs=[lambda **_: []],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["?"]}),
            processing_class=make_tokenizer(),
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_batch(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = case.prompts * case.generations
    prompts = torch.randint(2, VOCAB, (case.prompts, case.prompt), generator=generator)
    prompts[:, : case.schema] = prompts[0, : case.schema]
    batch = {
        "prompt_ids": prompts.repeat_interleave(case.generations, 0),
        "prompt_mask": torch.ones(rows, case.prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, VOCAB, (rows, case.completion), generator=generator),
        "completion_mask": torch.ones(rows, case.completion, dtype=torch.long),
        "tool_mask": torch.ones(rows, case.completion, dtype=torch.long),
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": torch.tensor(rows * case.completion),
    }
    return {name: value.to(device) for name, value in batch.items()}


class Side:
    """One update of one side.

    Attributes:
        tokens: Forwarded in the last one.
    """

    def __init__(self, case: Case, folder: str, *, is_ours: bool) -> None:
        self.trainer = make_trainer(case, folder, is_ours=is_ours)
        self.batch = make_batch(case, self.trainer.accelerator.device)
        self.tokens = 0
        self.trainer.model.get_input_embeddings().register_forward_hook(self._count)
        self._logit_tile = chunked_logprob.TOKEN_CHUNK_SIZE if is_ours else LOGIT_TILE

    def _count(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.tokens += output.shape[:-1].numel()

    def update(self) -> tuple[float, float, float]:
        """Seconds, those of the processor, and the loss; gradients are left in the model."""
        chunked_logprob.TOKEN_CHUNK_SIZE = self._logit_tile
        self.tokens = 0
        self.trainer.model.zero_grad(set_to_none=True)
        gc.collect()
        with Stopwatch() as watch:
            loss = self.trainer.compute_loss(self.trainer.model, self.batch)
            self.trainer.accelerator.backward(loss)
        return watch.seconds, watch.cpu_s, loss.item()

    def gradient(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.trainer.model.parameters()])

    def peak_bytes(self) -> int:
        """Growth of memory up to its peak over one update."""
        if torch.cuda.is_available():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.update()
            return torch.cuda.max_memory_allocated() - before
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
        before = _resident("VmRSS")
        self.update()
        return _resident("VmHWM") - before


def peak_bytes_of_new_process(case: Case, folder: str, name: str) -> int:
    """Growth of memory of one side's first update, in a process that has run nothing else.

    Spawned, not forked: torch's threads do not exist in a forked child, which would wait for them for ever.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_peak_bytes, case, folder, name).result()


def _peak_bytes(case: Case, folder: str, name: str) -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    return Side(case, folder, is_ours=name == "ours").peak_bytes()


def _resident(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Best times, peaks and tokens of both sides, and how they compare."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side(case, folder, is_ours=name == "ours") for name in ("trl", "ours")}
        if torch.cuda.is_available():
            peak = {name: side.peak_bytes() for name, side in sides.items()}
        else:
            peak = {name: peak_bytes_of_new_process(case, folder, name) for name in sides}
        small = make_batch(
            dataclasses.replace(case, prompt=50, completion=20, schema=0),
            sides["trl"].batch["prompt_ids"].device,
        )
        for side in sides.values():
            side.batch, whole = small, side.batch
            side.update()
            side.batch = whole
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        cpu_s: dict[str, list[float]] = {name: [] for name in sides}
        losses = {}
        for _ in range(repeats):
            for name, side in sides.items():
                taken, cpu_taken, losses[name] = side.update()
                seconds[name].append(taken)
                cpu_s[name].append(cpu_taken)
        expected, found = sides["trl"].gradient(), sides["ours"].gradient()
        error = ((found - expected).norm() / expected.norm()).item()
    best = {name: min(times) for name, times in seconds.items()}
    best_cpu = {name: min(times) for name, times in cpu_s.items()}
    tokens = {name: side.tokens for name, side in sides.items()}
    return {
        **dataclasses.asdict(case),
        "trl_s": round(best["trl"], 3),
        "ours_s": round(best["ours"], 3),
        "ratio": round(best["trl"] / best["ours"], 2),
        "cpu_ratio": round(best_cpu["trl"] / best_cpu["ours"], 2),
        "token_ratio": round(tokens["trl"] / tokens["ours"], 2),
        "trl_mb": round(peak["trl"] / 1e6),
        "ours_mb": round(peak["ours"] / 1e6),
        "memory_ratio": round(peak["trl"] / peak["ours"], 2),
        "loss_error": float(f"{abs(losses['trl'] - losses['ours']):.1e}"),
        "gradient_error": float(f"{error:.1e}"),
    }


def disagreement(result: dict[str, Any]) -> str | None:
    """Errors of a result of `measure` that rounding does not explain; None if there are none."""
    most = {"loss_error": 1e-2, "gradient_error": 0.2} if result["bf16"] else MOST_FLOAT32
    wrong = [f"{name} {result[name]} >= {bound}" for name, bound in most.items() if result[name] >= bound]
    return "; ".join(wrong) or None


def table_cases(own: Case) -> list[Case]:
    others: list[dict[str, Any]] = [
        *[{"prompt": prompt} for prompt in (300, 3_000)],
        *[{"generations": generations} for generations in (4, 16)],
        SHARED_DATABASE,
        {"size": "25M"},
    ]
    return [own, *[dataclasses.replace(own, **other) for other in others]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one prompt, one round")
    parser.add_argument("--table", action="store_true", help="each dimension around the point")
    parser.add_argument("--repeats", type=int, default=2)
    for field in dataclasses.fields(Case):
        action = {"action": "store_true"} if field.type is bool else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **action)
    options = parser.parse_args(arguments)
    own = Case(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Case)})
    shared = dataclasses.replace(own, **SHARED_DATABASE)
    cases = [Case()] if options.quick else table_cases(own) if options.table else [own, shared]
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = []
    table = Table()
    for case in cases:
        results.append(measure(case, 1 if options.quick else options.repeats))
        assert disagreement(results[-1]) is None, disagreement(results[-1])
        print(json.dumps(results[-1]), flush=True)
        if not table.columns:
            for name in results[-1]:
                table.add_column(name)
        table.add_row(*(str(value) for value in results[-1].values()))
    Console(width=160).print(table)
    record = {"benchmark": "update", "threads": torch.get_num_threads(), **results[0]}
    if not options.quick:
        of_shared = results[cases.index(shared)]
        record |= {f"{name}_shared_database": of_shared[name] for name in ("ratio", "cpu_ratio")}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
