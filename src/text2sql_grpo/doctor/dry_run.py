"""Checks of `doctor` with the model: chat template, memory, and a dry run of real episodes."""

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig

from text2sql_grpo.config import Config, SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.doctor.checks import Finding
from text2sql_grpo.doctor.memory import MemoryEstimate, Sharding, estimate_memory
from text2sql_grpo.doctor.traced_update import Update
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import RunError
from text2sql_grpo.evaluation.bench import Bench, evenly_spaced
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.models.hardware import GIB, device_memory, device_type
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reporting.progress import duration
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import action_text, play
from text2sql_grpo.run.pipeline import grpo_trainer, run_arguments
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run_folder import ROLLOUTS
from text2sql_grpo.training.arguments import SQLGRPOConfig

EPISODES = 16
_TOO_FULL = 0.95
_PROMPTS_MEASURED = 50
_EPISODES_MEASURED = 24
_SMALL_SCHEMA = 256  # tokens; fewer may not hold the line on what is left out
_SEAMS = 8  # tokens that may be added where a shortened schema meets the text around it


def chat_template(bench: Bench, chat: ChatFormat, questions: Sequence[Example]) -> Finding:
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
    calls = (("run_sql", example.look_sql or example.gold_sql), ("submit_sql", example.gold_sql))
    wanted = calls[1:] if bench.config.environment.max_turns == 1 else calls
    turns = [action_text(name, sql, bench.config.environment.protocol) for name, sql in wanted]
    return play(example, turns, bench.environment.sessions, chat)


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


def context(bench: Bench, chat: ChatFormat, questions: Sequence[Example], model: PreTrainedConfig) -> Finding:
    """Check that the longest of some evenly spaced prompts fits into the context with its episode."""
    most = int(getattr(model.get_text_config(), "max_position_embeddings", 0) or 0)
    environment, episode = bench.environment.sessions, bench.config.environment.max_episode_tokens
    longest = without_schema = 0
    for example in evenly_spaced(questions, _PROMPTS_MEASURED):
        prompt = len(chat.prompt_ids(environment.session(example).start()))
        schema = chat.count_tokens(environment.schema_text(example.database))
        longest, without_schema = max(longest, prompt), max(without_schema, prompt - schema)
    facts = {"longest_prompt": longest, "context": most}
    text = f"longest prompt {longest} tokens, with its episode up to {longest + episode} of "
    text += str(most or "any number")
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
    *,
    prompt_tokens: int,
    episodes_per_step: int,
    episode_tokens: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a run with episodes of one length; None for the longest."""
    kind, length = device_type(), episode_tokens or config.environment.max_episode_tokens
    sessions = engine_bytes = 0
    if not arguments.use_vllm:
        sessions = episodes_per_step // sharding.processes
        sessions = min(config.rollout.max_slots or sessions, sessions)
    elif arguments.vllm_mode == "colocate":
        engine_bytes = round(arguments.vllm_gpu_memory_utilization * device_memory(kind))
    return estimate_memory(
        model,
        config.model,
        Update(
            rows=arguments.per_device_train_batch_size,
            num_generations=arguments.num_generations,
            prompt_tokens=prompt_tokens,
            completion_tokens=length,
            sampled_tokens=min(length, config.environment.max_turns * config.environment.max_turn_tokens),
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


def typical_tokens(bench: Bench, chat: ChatFormat, questions: Sequence[Example]) -> tuple[int, int]:
    """Mean number of tokens of a prompt, and of an episode with an exploratory query and the gold query."""
    episodes = [_scripted(one, bench, chat) for one in evenly_spaced(questions, _EPISODES_MEASURED)]
    prompts, completions = (
        [len(getattr(one, name)) for one in episodes] for name in ("prompt_ids", "completion_ids")
    )
    return math.ceil(statistics.fmean(prompts)), math.ceil(statistics.fmean(completions))


def memory(typical: MemoryEstimate, longest: MemoryEstimate, processes: int) -> Finding:
    """Check that episodes of a typical length fit into this machine, for each process of the run."""
    kind = device_type()
    total, host = device_memory(kind), device_memory("cpu")
    parts = {
        name: size
        for name, size in dataclasses.asdict(typical).items()
        if name not in ("parameters", "trained_parameters") and size
    }
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    text = (
        f"peak {typical.peak / GIB:.1f} GiB a process with episodes like the gold queries', "
        f"{longest.peak / GIB:.1f} if all are as long as allowed (typical, GiB: {sizes})"
    )
    facts = dataclasses.asdict(typical) | {
        "peak": typical.peak,
        "longest_peak": longest.peak,
        "device_bytes": total,
    }

    def is_too_large(estimate: MemoryEstimate) -> bool:
        on_host = estimate.host * processes + (estimate.peak * processes if kind == "cpu" else 0)
        return (kind != "cpu" and estimate.peak > _TOO_FULL * total) or on_host > _TOO_FULL * host

    have = f"the {'host' if kind == 'cpu' else 'device'} has {(host if kind == 'cpu' else total) / GIB:.0f}"
    if is_too_large(typical):
        return Finding("memory", "problem", f"{text}, but {have}: {_LESS}", facts)
    if is_too_large(longest):
        return Finding("memory", "note", f"{text}, and {have}; to be safe, {_LESS}", facts)
    return Finding("memory", "ok", text, facts)


_LESS = (
    "lower grpo.per_device_train_batch_size (with more gradient_accumulation_steps), rollout.max_slots or "
    "environment.max_episode_tokens, set grpo.gradient_checkpointing, or take model.quantization: 4bit"
)


def dry_run(
    bench: Bench,
    arguments: SQLGRPOConfig,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    *,
    steps: int,
    episodes_per_step: int,
) -> Iterator[Finding]:
    """Run one real step of at most `EPISODES` episodes: zero-variance groups, time, measured memory."""
    group = arguments.num_generations
    most = min(EPISODES, len(questions) * group)
    rows = min(arguments.per_device_train_batch_size, most // group * group or group)
    whole = math.lcm(rows, group)
    episodes = max(whole, most // whole * whole)
    with tempfile.TemporaryDirectory() as folder:
        short = dataclasses.replace(
            bench.config,
            run=dataclasses.replace(bench.config.run, output_dir=Path(folder)),
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
        run = Run(dataclasses.replace(bench, config=short), Console(quiet=True), [])
        trainer = grpo_trainer(run, run_arguments(short), policy, questions, [])
        try:
            trainer.train()
        except (torch.OutOfMemoryError, RunError, ValueError) as error:
            yield Finding("dry run", "problem", f"the first step failed: {error}")
            return
        seconds = time.monotonic() - started
        played = list(read_jsonl(Path(folder) / ROLLOUTS, "episodes"))
    yield _groups(played, group)
    step_s = seconds / episodes * episodes_per_step
    facts: dict[str, Any] = {"episodes": episodes, "seconds": round(seconds, 2), "step_s": round(step_s, 1)}
    facts |= {"steps": steps, "run_s": round(step_s * steps)}
    text = (
        f"{episodes} episodes in {duration(seconds)}; a step of {episodes_per_step} about {duration(step_s)}"
    )
    text += f", {steps} steps about {duration(step_s * steps)}, evaluations not counted"
    if torch.cuda.is_available():
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
        text += f"; measured peak {facts['peak_bytes'] / GIB:.1f} GiB"
    yield Finding("time", "ok", text, facts)


def _groups(played: Sequence[dict[str, Any]], size: int) -> Finding:
    """Count zero-variance groups."""
    rewards: dict[str, list[float | None]] = {}
    for record in played:
        rewards.setdefault(record["example"], []).append(record["reward"])
    groups = [values[i : i + size] for values in rewards.values() for i in range(0, len(values), size)]
    zero_variance = [group for group in groups if len({round(r, 6) for r in group if r is not None}) < 2]
    share = len(zero_variance) / len(groups)
    best = max((r for group in groups for r in group if r is not None), default=None)
    facts = {"groups": len(groups), "zero_variance": len(zero_variance), "share": share, "best_reward": best}
    text = f"{len(zero_variance)} of {len(groups)} groups have zero variance (one reward, so no gradient)"
    if share == 1:
        text += (
            ": easier questions, an sft stage, more grpo.num_generations or a higher temperature would help"
        )
    return Finding("zero-variance groups", "note" if share > 0.5 else "ok", text, facts)
