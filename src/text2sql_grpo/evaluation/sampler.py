"""Episodes of a local model, by the engine of training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.models.hardware import inference_autocast
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Policy, SlotPolicy, run
from text2sql_grpo.rollout.policy import Engine, context_length, model_policy

_SESSIONS_AT_ONCE = 1_000  # queued for the engine; they hold their prompts


@dataclass(frozen=True)
class Sampler:
    """A policy that continues token ids, with the chat format of its model.

    Attributes:
        context_tokens: Maximum length of a sequence of the model.
        model: The model, evaluated in bfloat16 where `bf16` asks for it; None for any other policy.
        bf16: See `EvaluationConfig`.
    """

    policy: Policy | SlotPolicy
    chat: ChatFormat
    context_tokens: int = 1_000_000
    model: Any = None
    bf16: bool | None = None


def session_chat(
    tokenizer: Any, model: Any, sessions: SQLEnvironment, *, template_options: dict[str, Any] | None
) -> ChatFormat:
    """Make the chat format of a model for these sessions.

    Args:
        model: None for the tokenizer's end-of-turn tokens alone.
    """
    eos = None if model is None else model.generation_config.eos_token_id
    return ChatFormat(
        tokenizer,
        tools=sessions.tools if sessions.settings.protocol == "native" else None,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else eos,
        template_options=template_options,
    )


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore the mode of a model, None for none, and torch's random state at the end of the context."""
    was_training = model is not None and model.training
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if was_training:
            model.train()


def open_sampler(
    policy: LoadedPolicy,
    sessions: SQLEnvironment,
    *,
    temperature: float,
    engine: Engine,
    batch_size: int,
    bf16: bool | None,
    template_options: dict[str, Any] | None,
) -> Sampler:
    """Make the sampler of a model, on the device of the run and in evaluation mode.

    Args:
        template_options: None for those of the policy.
    """
    model = policy.ready()
    options = policy.template_options if template_options is None else template_options
    chat = session_chat(policy.tokenizer, model, sessions, template_options=options)
    sampled = model_policy(model, chat, temperature=temperature, batch_size=batch_size, engine=engine)
    return Sampler(sampled, chat, context_length(model), model, bf16)


def local_episodes(
    examples: Sequence[Example],
    sessions: SQLEnvironment,
    sampler: Sampler,
    *,
    seed: int | None,
    on_end: Callable[[int, Episode], None],
) -> None:
    """Roll out each example, and hand over each episode with its index as soon as it is over.

    Args:
        seed: Seed of sampling; None to draw nothing.
    """
    sessions, settings = sessions.counted_by(sampler.chat.count_tokens), sessions.settings
    budgets = Budgets(settings.max_turn_tokens, settings.max_episode_tokens, sampler.context_tokens)
    if seed is not None:
        torch.manual_seed(seed)
    model = sampler.model
    with nullcontext() if model is None else inference_autocast(model, bf16=sampler.bf16):
        for start in range(0, len(examples), _SESSIONS_AT_ONCE):
            part = slice(start, start + _SESSIONS_AT_ONCE)
            opened = [sessions.session(example) for example in examples[part]]
            places = {id(session.episode): start + i for i, session in enumerate(opened)}

            def over(episode: Episode, places: dict[int, int] = places) -> None:
                on_end(places[id(episode)], episode)

            run(opened, sampler.policy, sampler.chat, budgets, on_end=over)
