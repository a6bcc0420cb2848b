"""Check that a config would run on this machine, before a long run."""

import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from text2sql_grpo.config import Config, SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.doctor import checks
from text2sql_grpo.doctor.checks import Finding, guarded
from text2sql_grpo.doctor.memory import MemoryEstimate, Sharding, UntraceableError, Update, estimate_memory
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ModelError, RunError
from text2sql_grpo.evaluation.bench import Bench, evenly_spaced
from text2sql_grpo.evaluation.sampler import session_chat
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.models.hardware import GIB, device_memory, device_type
from text2sql_grpo.models.loaded_policy import LoadedPolicy, resolved
from text2sql_grpo.models.sources import readable_folder
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting.progress import duration
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import scripted_episode
from text2sql_grpo.run.archive import check_folder
from text2sql_grpo.run.pipeline import grpo_trainer, run_arguments, select_questions
from text2sql_grpo.run.sft_stage import base_policy
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run_folder import ROLLOUTS
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.record import has_zero_variance, no_signal

_MARKS = {"ok": "green", "note": "yellow", "skipped": "dim", "problem": "bold red"}
_EPISODES = 16
_TOO_FULL = 0.95
_PROMPTS_MEASURED = 50
_EPISODES_MEASURED = 24
_SMALL_SCHEMA = 256  # tokens; fewer may not hold the line on what is left out
_SEAMS = 8  # tokens that may be added where a shortened schema meets the text around it


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
    yield checks.versions()
    yield from guarded("device", checks.device())
    check = "settings"
    try:
        sharding = checks.read_launch(launch_file)
        config = replace(config, model=resolved(config.model, device_type()))
        arguments = run_arguments(_by_one_process(config, sharding.processes))
        yield checks.settings(config, arguments, sharding)
        yield checks.tokens(arguments)
        yield checks.trackers(config)
        yield from guarded("databases", checks.databases(config))
        check = "mcp"
        yield from checks.mcp_server(config)
        check = "data"
        check_folder(config.run.output_dir)
        bench = Bench.open(config)
        questions = bench.load(config.data.train, limit=config.data.train_samples)
        select_questions(questions, bench, arguments)
        sets = ", ".join(f"{name} {len(examples)}" for name, examples in bench.test.items())
        text = f"{many(len(questions), 'question')} for training; held out: {sets or 'none'}"
        shared = bench.shared(questions, config.data.train)
        yield Finding("data", "note" if shared else "ok", "; ".join(filter(None, (text, shared))))
        check = "model"
        yield from _with_model(bench, arguments, questions, sharding, dry_run)
    except RunError as error:
        yield Finding(check, "problem", str(error))


def _with_model(
    bench: Bench, arguments: SQLGRPOConfig, questions: Sequence[Example], sharding: Sharding, dry_run: bool
) -> Iterator[Finding]:
    path = bench.config.model.source
    try:
        folder = readable_folder(path)
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, ModelError) as error:
        yield checks.disk(bench.config, None)
        reason = str(error).partition("\n")[0]
        advice = "set model.path to a folder, a GGUF file or a Hub id"
        yield Finding("model", "problem", f"{path} cannot be read: {reason}; {advice}")
        return
    config = replace(bench.config, model=replace(bench.config.model, path=folder, revision=None))
    bench = replace(bench, config=config)
    options = config.grpo.get("chat_template_kwargs")
    try:
        chat = session_chat(tokenizer, None, bench.environment.sessions, template_options=options)
    except ModelError as error:
        yield Finding("chat template", "problem", str(error))
        return
    bench.environment.sessions = bench.environment.sessions.counted_by(chat.count_tokens)
    yield _chat_template(bench, chat, questions)
    steps, episodes_per_step = _size_of_run(arguments, len(questions))
    prompts = _context(bench, chat, questions, model)
    yield prompts
    estimate = partial(memory_of, config, arguments, model, sharding, episodes_per_step)
    prompt, episode = _typical_tokens(bench, chat, questions)
    try:
        typical = estimate(prompt, episode)
        longest = estimate(prompts.facts["longest_prompt"], config.environment.max_episode_tokens)
    except UntraceableError as error:
        fits, disk_needed = Finding("memory", "note", str(error)), None
    else:
        fits = _memory(typical, longest, sharding.processes)
        disk_needed = _disk_needed(longest, arguments)
    yield fits
    yield checks.disk(config, disk_needed)
    reasons = {
        "--no-dry-run was given": not dry_run,
        "the model would not fit": fits.status == "problem",
        "vLLM needs the whole run around it": arguments.use_vllm,
        "its weights are sharded": sharding.stage == 3,
    }
    if obstacles := [reason for reason, holds in reasons.items() if holds]:
        yield Finding("dry run", "skipped", obstacles[0])
        return
    most = f"at most {_EPISODES} episodes"
    yield Finding("dry run", "ok", f"loading the model, rolling out and training on {most} ...")
    try:
        policy = base_policy(config)
    except RunError as error:
        yield Finding("dry run", "problem", f"the weights cannot be loaded: {error}")
        return
    yield from _first_step(bench, arguments, policy, questions, steps, episodes_per_step)


def _by_one_process(config: Config, processes: int) -> Config:
    """Config by which one process does the steps of all processes."""
    grpo = {"gradient_accumulation_steps": SQLGRPOConfig.gradient_accumulation_steps, **config.grpo}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if isinstance(grpo.get(name), int):
            grpo[name] *= processes
    return replace(config, grpo=grpo)


def _size_of_run(arguments: SQLGRPOConfig, n_questions: int) -> tuple[int, int]:
    """Number of optimiser steps, and of episodes per step."""
    episodes = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    if arguments.max_steps > 0:
        return arguments.max_steps, episodes
    all_episodes = n_questions * arguments.num_generations * arguments.num_iterations
    return max(1, round(all_episodes * arguments.num_train_epochs / episodes)), episodes


def _disk_needed(estimate: MemoryEstimate, arguments: SQLGRPOConfig) -> int:
    """Bytes of checkpoints and of the merged model; each checkpoint has trained weights and states."""
    states = estimate.optimizer + estimate.gradients + estimate.host
    return states * (arguments.save_total_limit or 10) + 2 * estimate.parameters


def _chat_template(bench: Bench, chat: ChatFormat, questions: Sequence[Example]) -> Finding:
    """Check that the template is prefix-stable; show the trained tokens of one episode."""
    episode, is_stable = _scripted(questions[0], bench, chat), _is_prefix_stable(chat.tokenizer)
    trained = sum(episode.completion_mask)
    facts = {
        "is_prefix_stable": is_stable,
        "prompt_tokens": len(episode.prompt_ids),
        "trained_tokens": trained,
        "observed_tokens": len(episode.completion_ids) - trained,
    }
    text = f"{len(episode.prompt_ids)} prompt tokens, {trained} trained, {facts['observed_tokens']} read"
    if not is_stable:
        text += (
            "; earlier turns change when later ones are rendered, so the model reads its own tokens instead"
        )
    return Finding("chat template", "ok", text, facts, _coloured(episode, chat.tokenizer))


def _scripted(example: Example, bench: Bench, chat: ChatFormat) -> Episode:
    """Play an episode with an exploratory query, which may be the gold query, and the gold query."""
    query = example.look_sql or example.gold_sql
    return scripted_episode(example, query, example.gold_sql, bench.environment.sessions, chat)


def _is_prefix_stable(tokenizer: Any) -> bool:
    """True if a chat with one more turn begins with the text of the chat without it."""

    def rendered(messages: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    question = [{"role": "user", "content": "question"}]
    answered = [*question, {"role": "assistant", "content": "<think>a</think>b"}]
    return rendered([*answered, *question]).startswith(rendered(answered))


def _coloured(episode: Episode, tokenizer: Any) -> Text:
    """Text of an episode, with sampled tokens green and the others dimmed."""
    shown = Text.assemble(("... " + tokenizer.decode(episode.prompt_ids[-40:]), "dim"))
    flagged = zip(episode.completion_ids, episode.completion_mask, strict=True)
    for is_trained, span in itertools.groupby(flagged, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in span])
        shown.append(text, style="bold green" if is_trained else "dim")
    return shown


def _context(
    bench: Bench, chat: ChatFormat, questions: Sequence[Example], model: PreTrainedConfig
) -> Finding:
    """Check that the longest of some evenly spaced prompts fits into the context with its episode."""
    most = int(getattr(model.get_text_config(), "max_position_embeddings", 0) or 0)
    environment, episode = bench.environment.sessions, bench.config.environment.max_episode_tokens
    longest = without_schema = 0
    for example in evenly_spaced(questions, _PROMPTS_MEASURED):
        prompt = len(chat.prompt_ids(environment.session(example).start()))
        schema = chat.count_tokens(environment.schema_text(example.database))
        longest, without_schema = max(longest, prompt), max(without_schema, prompt - schema)
    facts = {"longest_prompt": longest, "context": most}
    limit = most or "any number"
    text = f"longest prompt {longest} tokens, with its episode up to {longest + episode} of {limit}"
    if most and longest >= most:
        room = most - episode - without_schema - _SEAMS
        advice = f"set environment.max_schema_tokens: {room}"
        if room < _SMALL_SCHEMA:
            advice = "lower environment.max_episode_tokens, or take a model with a longer context"
        return Finding("context", "problem", f"{text}: {advice}", facts)
    if most and longest + episode > most:
        text += f": long episodes are cut; set environment.max_episode_tokens: {most - longest}"
        return Finding("context", "note", text, facts)
    return Finding("context", "ok", text, facts)


def memory_of(
    config: Config,
    arguments: SQLGRPOConfig,
    model: PreTrainedConfig,
    sharding: Sharding,
    episodes_per_step: int,
    prompt_tokens: int,
    episode_tokens: int,
) -> MemoryEstimate:
    """Estimate the memory of a run with episodes of one length."""
    kind, environment = device_type(), config.environment
    sessions = engine_bytes = 0
    if not arguments.use_vllm:
        played = episodes_per_step // sharding.processes
        sessions = min(config.rollout.max_slots or played, played)
    elif arguments.vllm_mode == "colocate":
        engine_bytes = round(arguments.vllm_gpu_memory_utilization * device_memory(kind))
    return estimate_memory(
        model,
        config.model,
        Update(
            rows=arguments.per_device_train_batch_size,
            num_generations=arguments.num_generations,
            prompt_tokens=prompt_tokens,
            completion_tokens=episode_tokens,
            sampled_tokens=min(episode_tokens, environment.max_turns * environment.max_turn_tokens),
            shares_prompts=arguments.shared_prefix,
            gradient_checkpointing=arguments.gradient_checkpointing,
            autocast=torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None,
        ),
        sessions,
        device=kind,
        optimizer=str(arguments.optim),
        has_reference=arguments.beta != 0,
        sharding=sharding,
        engine_bytes=engine_bytes,
    )


def _typical_tokens(bench: Bench, chat: ChatFormat, questions: Sequence[Example]) -> tuple[int, int]:
    """Mean number of tokens of a prompt, and of an episode with an exploratory query and the gold query."""
    episodes = [_scripted(one, bench, chat) for one in evenly_spaced(questions, _EPISODES_MEASURED)]
    prompt = statistics.fmean(len(one.prompt_ids) for one in episodes)
    return math.ceil(prompt), math.ceil(statistics.fmean(len(one.completion_ids) for one in episodes))


def _memory(typical: MemoryEstimate, longest: MemoryEstimate, processes: int) -> Finding:
    """Check that episodes of a typical length fit into this machine, for each process of the run."""
    kind = device_type()
    total, host = device_memory(kind), device_memory("cpu")
    sizes = ", ".join(
        f"{name} {size / GIB:.2f}"
        for name, size in asdict(typical).items()
        if name not in ("parameters", "trained_parameters") and size
    )
    text = (
        f"peak {typical.peak / GIB:.1f} GiB a process with episodes like the gold queries', "
        f"{longest.peak / GIB:.1f} if all are as long as allowed (typical, GiB: {sizes})"
    )
    facts = asdict(typical) | {"peak": typical.peak, "longest_peak": longest.peak, "device_bytes": total}

    def is_too_large(estimate: MemoryEstimate) -> bool:
        on_device, on_host = estimate.peak, estimate.host * processes
        if kind == "cpu":
            on_device, on_host = 0, on_host + estimate.peak * processes
        return on_device > _TOO_FULL * total or on_host > _TOO_FULL * host

    have = f"the {'host' if kind == 'cpu' else 'device'} has {total / GIB:.0f}"
    if is_too_large(typical):
        return Finding("memory", "problem", f"{text}, but {have}: {_LESS}", facts)
    if is_too_large(longest):
        return Finding("memory", "note", f"{text}, and {have}; to be safe, {_LESS}", facts)
    return Finding("memory", "ok", text, facts)


_LESS = (
    "lower grpo.per_device_train_batch_size (with more gradient_accumulation_steps), rollout.max_slots or "
    "environment.max_episode_tokens, set grpo.gradient_checkpointing, or take model.quantization: 4bit"
)


def _first_step(
    bench: Bench,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    steps: int,
    episodes_per_step: int,
) -> Iterator[Finding]:
    """Run one real step of at most `_EPISODES` episodes: zero-variance groups, time, measured memory."""
    group = arguments.num_generations
    most = min(_EPISODES, len(questions) * group)
    rows = min(arguments.per_device_train_batch_size, most // group * group or group)
    whole = math.lcm(rows, group)
    episodes = max(whole, most // whole * whole)
    with tempfile.TemporaryDirectory() as folder:
        short = replace(
            bench.config,
            run=replace(bench.config.run, output_dir=Path(folder)),
            selection=SelectionConfig(),  # strata may need more than one small batch
            grpo=bench.config.grpo
            | {
                "max_steps": 1,
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": episodes // rows,
                "generation_batch_size": episodes,
                "steps_per_generation": None,
                "save_strategy": "no",
                "report_to": "none",
            },
        )
        started = time.monotonic()
        run = Run(replace(bench, config=short), Console(quiet=True), [])
        trainer = grpo_trainer(run, run_arguments(short), policy, questions, [])
        try:
            trainer.train()
        except (torch.OutOfMemoryError, RunError, ValueError) as error:
            yield Finding("dry run", "problem", f"the first step failed: {error}")
            return
        seconds = time.monotonic() - started
        played = list(read_jsonl(Path(folder) / ROLLOUTS, "episodes"))
    yield _groups(played, group, has_sft=bench.config.sft is not None)
    step_s = seconds / episodes * episodes_per_step
    facts: dict[str, Any] = {"episodes": episodes, "seconds": round(seconds, 2), "step_s": round(step_s, 1)}
    facts |= {"steps": steps, "run_s": round(step_s * steps)}
    text = f"{many(episodes, 'episode')} in {duration(seconds)}"
    text += f"; a step of {episodes_per_step} about {duration(step_s)}"
    text += f", {many(steps, 'step')} about {duration(step_s * steps)}, evaluations not counted"
    if torch.cuda.is_available():
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
        text += f"; measured peak {facts['peak_bytes'] / GIB:.1f} GiB"
    yield Finding("time", "ok", text, facts)


def _groups(played: Sequence[dict[str, Any]], size: int, *, has_sft: bool) -> Finding:
    rewards: dict[str, list[float | None]] = {}
    for record in played:
        rewards.setdefault(record["example"], []).append(record["reward"])
    groups = [values[i : i + size] for values in rewards.values() for i in range(0, len(values), size)]
    zero_variance = sum(map(has_zero_variance, groups))
    share = zero_variance / len(groups)
    best = max((r for group in groups for r in group if r is not None), default=None)
    facts = {"groups": len(groups), "zero_variance": zero_variance, "share": share, "best_reward": best}
    text = f"{zero_variance} of {many(len(groups), 'group')} without variance, so without a gradient"
    ends = [(record["stop_reason"], record["reason"]) for record in played]
    if reason := no_signal(groups, ends, has_sft=has_sft):
        text += f": {reason}"
    return Finding("zero-variance groups", "note" if share > 0.5 else "ok", text, facts)
