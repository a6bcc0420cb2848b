"""Check that a config would run on this machine, before a long run."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.doctor import checks as doctor_checks
from text2sql_grpo.doctor import dry_run as doctor_model
from text2sql_grpo.doctor.checks import Finding, guarded
from text2sql_grpo.doctor.memory import MemoryEstimate, Sharding
from text2sql_grpo.doctor.traced_update import UntraceableError
from text2sql_grpo.errors import ModelError, RunError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.sampler import measured_chat
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.models.loaded_policy import resolved
from text2sql_grpo.models.sources import readable_folder
from text2sql_grpo.run.archive import check_folder
from text2sql_grpo.run.pipeline import run_arguments, select_questions
from text2sql_grpo.run.sft_stage import base_policy
from text2sql_grpo.training.arguments import SQLGRPOConfig

_MARKS = {"ok": "green", "note": "yellow", "skipped": "dim", "problem": "bold red"}


def doctor(
    config: Config,
    *,
    console: Console,
    launch: Path | None = None,
    dry_run: bool = True,
    as_json: bool = False,
) -> int:
    """Check everything that a run needs and print what to mend; exit code 1 if a run would fail, else 0.

    `launch` is the accelerate config that will start the run; None for one process.
    """
    findings = []
    for finding in _findings(config, launch, dry_run):
        findings.append(finding)
        if as_json:
            continue
        mark = (f"{finding.status:>8}", _MARKS[finding.status])
        console.print(Text.assemble(mark, f"  {finding.name}: {finding.text}"), soft_wrap=True)
        if finding.shown is not None:
            console.print(finding.shown, soft_wrap=True)
    fails = any(finding.status == "problem" for finding in findings)
    if as_json:
        record = {f.name: {"status": f.status, "text": f.text, **f.facts} for f in findings}
        print(json.dumps({"would_run": not fails, "findings": record}))
    else:
        console.print("This run would fail: see what is marked as a problem." if fails else "This can run.")
    return int(fails)


def _findings(config: Config, launch_file: Path | None, dry_run: bool) -> Iterator[Finding]:
    """Findings of all checks, up to the first without which the next cannot be made."""
    yield doctor_checks.versions()
    yield from guarded("device", doctor_checks.device())
    check = "settings"
    try:
        sharding = doctor_checks.read_launch(launch_file)
        config = dataclasses.replace(config, model=resolved(config.model, device_type()))
        arguments = run_arguments(config)
        yield doctor_checks.settings(config, arguments, sharding)
        yield doctor_checks.tokens(arguments)
        yield doctor_checks.trackers(config)
        yield from guarded("databases", doctor_checks.databases(config))
        check = "mcp"
        yield from doctor_checks.mcp_server(config)
        check = "data"
        check_folder(config.run.output_dir)
        bench = Bench.open(config)
        questions = bench.load(config.data.train, limit=config.data.train_samples)
        select_questions(questions, bench, arguments)
        sets = ", ".join(f"{name} {len(examples)}" for name, examples in bench.test.items())
        yield Finding("data", "ok", f"{len(questions)} questions for training; held out: {sets or 'none'}")
        check = "model"
        yield from _with_model(bench, arguments, questions, sharding, dry_run)
    except RunError as error:
        yield Finding(check, "problem", str(error))


def _with_model(
    bench: Bench,
    arguments: SQLGRPOConfig,
    questions: Sequence[Example],
    sharding: Sharding,
    dry_run: bool,
) -> Iterator[Finding]:
    path = bench.config.model.source
    try:
        folder = readable_folder(path)
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, ModelError) as error:
        yield doctor_checks.disk(bench.config, None)
        reason = str(error).partition("\n")[0]
        advice = "set model.path to a folder, a GGUF file or a Hub id"
        yield Finding("model", "problem", f"{path} cannot be read: {reason}; {advice}")
        return
    found = dataclasses.replace(bench.config.model, path=folder, revision=None)
    config = dataclasses.replace(bench.config, model=found)
    bench = dataclasses.replace(bench, config=config)
    options = config.grpo.get("chat_template_kwargs")
    try:
        chat = measured_chat(tokenizer, None, bench.environment.sessions, template_options=options)
    except ModelError as error:
        yield Finding("chat template", "problem", str(error))
        return
    yield doctor_model.chat_template(bench, chat, questions)
    steps, episodes_per_step = _size_of_run(arguments, len(questions), sharding.processes)
    context = doctor_model.context(bench, chat, questions, model)
    yield context
    estimate = partial(
        doctor_model.memory_of, config, arguments, model, sharding, episodes_per_step=episodes_per_step
    )
    prompt, episode = doctor_model.typical_tokens(bench, chat, questions)
    try:
        typical = estimate(prompt_tokens=prompt, episode_tokens=episode)
        longest = estimate(prompt_tokens=context.facts["longest_prompt"])
    except UntraceableError as error:
        fits, disk_needed = Finding("memory", "note", str(error)), None
    else:
        fits = doctor_model.memory(typical, longest, sharding.processes)
        disk_needed = _disk_needed(longest, arguments)
    yield fits
    yield doctor_checks.disk(config, disk_needed)
    reasons = {
        "--no-dry-run was given": not dry_run,
        "the model would not fit": fits.status == "problem",
        "vLLM needs the whole run around it": arguments.use_vllm,
        "its weights are sharded": sharding.stage == 3,
    }
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        yield Finding("dry run", "skipped", holding[0])
        return
    most = f"at most {doctor_model.EPISODES} episodes"
    yield Finding("dry run", "ok", f"loading the model, rolling out and training on {most} ...")
    try:
        policy = base_policy(config)
    except RunError as error:
        yield Finding("dry run", "problem", f"the weights cannot be loaded: {error}")
        return
    yield from doctor_model.dry_run(
        bench, arguments, policy, questions, steps=steps, episodes_per_step=episodes_per_step
    )


def _size_of_run(arguments: SQLGRPOConfig, n_questions: int, processes: int) -> tuple[int, int]:
    """Number of optimiser steps, and of episodes per step."""
    episodes = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * processes
    if arguments.max_steps > 0:
        return arguments.max_steps, episodes
    all_episodes = n_questions * arguments.num_generations * arguments.num_iterations
    return max(1, round(all_episodes * arguments.num_train_epochs / episodes)), episodes


def _disk_needed(estimate: MemoryEstimate, arguments: SQLGRPOConfig) -> int:
    """Bytes of checkpoints and of the merged model; each checkpoint has trained weights and states."""
    states = estimate.optimizer + estimate.gradients + estimate.host
    return states * (arguments.save_total_limit or 10) + 2 * estimate.parameters
