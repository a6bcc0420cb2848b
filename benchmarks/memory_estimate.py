"""Memory estimate of `text2sql-grpo doctor` beside the memory that a process takes.

Each case builds a random model of a real architecture and the trainer around it in a process of its own, runs
the update of two optimiser steps (two passes each) on random tokens, and compares with the estimate the peak
after its weights were read, beyond what the process held after its imports. On a CPU, where every byte of a
tensor counts and hardly anything else.

    python benchmarks/memory_estimate.py            (ten minutes)
    python benchmarks/memory_estimate.py --quick    (two cases, under a minute)

The last line is JSON.
"""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST = 0.20  # an estimate that is off by more fails
QUICK = ("full", "LoRA")


@dataclass(frozen=True)
class Case:
    """One model, mode and batch."""

    name: str
    architecture: str = "qwen2"
    shape: dict[str, int] = field(default_factory=dict)
    mode: str = "full"
    is_bf16: bool = False
    checkpointing: bool = False
    shares_prompts: bool = True
    rows: int = 8
    prompt_tokens: int = 600
    completion_tokens: int = 200


WIDE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12}
LARGE_VOCABULARY = {"vocab_size": 65_536, "num_hidden_layers": 2}
CASES = (
    Case("full"),
    Case("full, checkpointing", checkpointing=True, shape={"num_hidden_layers": 8}),
    Case("full, bf16 autocast", is_bf16=True, prompt_tokens=400, completion_tokens=60),
    Case("full, bf16 autocast, checkpointing", is_bf16=True, checkpointing=True, completion_tokens=60),
    Case("full, prompts not shared", shares_prompts=False, rows=4),
    Case("full, most of it weights", shape=WIDE, prompt_tokens=40, completion_tokens=20),
    Case("full, most of it the head", shape=LARGE_VOCABULARY, prompt_tokens=100, completion_tokens=100),
    Case("LoRA", mode="lora", architecture="llama"),
    Case("LoRA, checkpointing", mode="lora", checkpointing=True, shape={"num_hidden_layers": 8}),
    Case("LoRA, bf16 autocast, Gemma", mode="lora", is_bf16=True, architecture="gemma", completion_tokens=60),
    Case("LoRA, prompts not shared, Qwen3", mode="lora", architecture="qwen3", shares_prompts=False, rows=4),
    Case(
        "QLoRA, most of it weights",
        mode="qlora",
        shape=WIDE,
        prompt_tokens=40,
        completion_tokens=20,
    ),
    Case("QLoRA, checkpointing", mode="qlora", checkpointing=True),
)


def main() -> int:
    """0 if every estimate is off by at most `MOST`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run one case in this process and print JSON")
    parser.add_argument("--quick", action="store_true", help=f"the cases {' and '.join(QUICK)} only")
    parser.add_argument("--only", help="run the cases whose name contains this")
    options = parser.parse_args()
    if options.case:
        (case,) = (case for case in CASES if case.name == options.case)
        print(json.dumps(measure(case)))
        return 0
    cases = [case for case in CASES if not options.only or options.only in case.name]
    if options.quick:
        cases = [case for case in CASES if case.name in QUICK]
    off_by = {}
    print("| case | measured MB | estimate MB | off by |\n| --- | ---: | ---: | ---: |")
    for case in cases:
        measured, estimated = run_case(case)
        off_by[case.name] = round(estimated / measured - 1, 3)
        megabytes = f"{measured / 1e6:,.0f} | {estimated / 1e6:,.0f}"
        print(f"| {case.name} | {megabytes} | {off_by[case.name]:+.0%} |", flush=True)
    worst = max(map(abs, off_by.values()))
    print(json.dumps({"benchmark": "memory_estimate", "worst": worst, "off_by": off_by}))
    return int(worst > MOST)


def run_case(case: Case) -> tuple[int, int]:
    """Measured and estimated bytes, from a process of its own."""
    surroundings = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed memory goes back at once
        "DEVICE_TYPE": "cpu",
    }
    command = [sys.executable, __file__, "--case", case.name]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result["measured"], result["estimated"]


def measure(case: Case, device: str = "cpu") -> dict[str, int]:
    """Peak bytes of the update beyond the process's imports, and the estimate.

    On CUDA both are those of tensors; `reserved` is what torch's allocator took for them, and `outside` what
    the device has in use beside that (kernels, workspaces, other processes). `reserve` is the estimate's part
    for the last two.
    """
    import torch
    from transformers import AutoConfig

    from text2sql_grpo.config import LoraSettings, ModelConfig
    from text2sql_grpo.doctor.memory import Update, estimate_memory

    settings = ModelConfig(
        path="random",
        dtype="float32",
        quantization="4bit" if case.mode == "qlora" else "none",
        lora=None if case.mode == "full" else LoraSettings(),
    )
    shape: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    }
    config = AutoConfig.for_model(case.architecture, **shape | case.shape)
    update = Update(
        rows=case.rows,
        num_generations=8,
        prompt_tokens=case.prompt_tokens,
        completion_tokens=case.completion_tokens,
        sampled_tokens=case.completion_tokens,
        shares_prompts=case.shares_prompts,
        gradient_checkpointing=case.checkpointing,
        autocast=torch.bfloat16 if case.is_bf16 else None,
    )
    estimate = estimate_memory(config, settings, update, 0, device=device)
    small = dataclasses.replace(case, shape={"hidden_size": 64, "num_hidden_layers": 1}, prompt_tokens=9)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        # Imports whatever a step needs, and lets libraries take what they keep.
        _update(small, AutoConfig.for_model(case.architecture, **shape | small.shape), settings, Path(first))
        gc.collect()
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            _update(case, config, settings, Path(second))
            peak = torch.cuda.max_memory_allocated() - before
            estimated = estimate.peak - estimate.context
            return {"measured": peak, "estimated": estimated, "reserve": estimate.context} | allocator_bytes()
        before = _status("VmRSS")
        _update(case, config, settings, Path(second))
        peak = _status("VmHWM") - before
    return {"measured": peak, "estimated": estimate.peak}


def allocator_bytes() -> dict[str, int]:
    """Bytes that torch's allocator holds at most, and bytes of the CUDA device in use outside of it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return {"reserved": torch.cuda.max_memory_reserved(), "outside": outside}


def _update(case: Case, config: Any, settings: Any, folder: Path) -> None:
    """Two optimiser steps."""

    from rollout import make_tokenizer

    from text2sql_grpo.data.example import Example
    from text2sql_grpo.evaluation.bench import Environment
    from text2sql_grpo.models.hardware import device_type
    from text2sql_grpo.models.loaded_policy import lora_config
    from text2sql_grpo.training.arguments import training_arguments
    from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

    tokenizer = make_tokenizer()
    (folder / "shop.sql").write_text("CREATE TABLE branch (city TEXT);", encoding="utf-8")
    arguments = training_arguments(
        {
            "per_device_train_batch_size": 8,
            "num_generations": 8,
            "max_steps": 1,
            "report_to": "none",
            "bf16": case.is_bf16,
            "gradient_checkpointing": case.checkpointing,
            "shared_prefix": case.shares_prompts,
        },
        output_dir=str(folder / "run"),
    )
    model = _model(config, settings, folder)
    if device_type() == "cpu":
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    trainer = SQLGRPOTrainer(
        model,
        Environment(folder / "shop.sql", test_databases=0),
        train_dataset=[Example("q", "shop", "Cities?", "SELECT city FROM branch")],
        args=arguments,
        processing_class=tokenizer,
        peft_config=lora_config(settings, config),
    )
    if case.checkpointing:
        trainer.model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    trainer.model.train()
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    for _ in range(2):  # the second has states and gradients beside it
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            inputs = {name: value.to(trainer.accelerator.device) for name, value in _inputs(case).items()}
            trainer.compute_loss(trainer.model, inputs).backward()
        optimizer.step()


def _model(config: Any, settings: Any, folder: Path) -> Any:
    """A random model, written and read where 4-bit weights are made while they are read."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if settings.quantization == "none":
        return AutoModelForCausalLM.from_config(config)
    from text2sql_grpo.models.loaded_policy import load_policy

    code = (
        "import sys; from transformers import AutoConfig, AutoModelForCausalLM as A;"
        "A.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[1])"
    )
    config.save_pretrained(folder)
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    from rollout import make_tokenizer

    make_tokenizer().save_pretrained(folder)
    model = load_policy(str(folder), dtype=settings.dtype, quantization=settings.quantization).model
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:  # else its file stays mapped whole, and counts
            parameter.data = parameter.data.clone()
    return model


def _inputs(case: Case) -> dict[str, Any]:
    import torch

    prompt = torch.randint(300, (1, case.prompt_tokens)).expand(case.rows, -1)
    completion = torch.randint(300, (case.rows, case.completion_tokens))
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "tool_mask": torch.ones_like(completion),
        "advantages": torch.randn(case.rows),
        "num_items_in_batch": torch.tensor(completion.numel()),
    }


def _status(name: str) -> int:
    """Bytes of a line of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
