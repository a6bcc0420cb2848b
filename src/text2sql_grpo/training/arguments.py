"""`SQLGRPOConfig`: TRL's `GRPOConfig` with defaults that suit text-to-SQL, checked when it is read."""

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from trl import GRPOConfig

from text2sql_grpo.errors import ConfigError
from text2sql_grpo.models.cpu import has_fast_bf16
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.rollout.policy import Engine

# Set elsewhere in the config; a second place to set them could contradict the first.
_DECIDED_ELSEWHERE = {
    "output_dir": "run.output_dir",
    "seed": "run.seed",
    "max_completion_length": "environment.max_episode_tokens",
    "max_turn_tokens": "environment.max_turn_tokens",
    "engine": "rollout.engine",
    "max_slots": "rollout.max_slots",
    "same_draws": "rollout.same_draws",
    "staleness": "rollout.staleness",
    "reward_weights": "rewards",
}
# TRL checks these in the first step only, minutes after the config is read.
_CHOICES = {
    "engine": ("auto", "slots", "generation"),
    "turn_credit": ("none", "rewards", "tree", "gae"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}


@dataclass
class SQLGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus the budget of one turn and the rollout engine.

    What changes: no KL to a reference (`beta` 0), dropout off (generation runs in train mode), metrics of
    every step, and no TRL table of completions (`rollouts.jsonl` holds them whole).

    Attributes:
        max_turn_tokens: Maximum number of sampled tokens in one turn. `max_completion_length` is the budget
            of the whole episode, observations included.
        engine: Rollout engine: `slots`, `generation` (TRL's own), or `auto` for `slots` where it can run.
        max_slots: Number of concurrent episodes in the engine `slots`; None for as many as memory allows.
        same_draws: See `rollout.policy.SlotPolicy`.
        staleness: Number of generation batches that are played ahead, beside the updates before them, with
            weights that many batches old. The ratio of the loss is then to the log-probs of sampling.
        shared_prefix: Forward each distinct token prefix of a micro-batch once, if the model allows it (the
            first batch shows that). Log-probs, loss and gradient are the same up to rounding; groups and
            prompts that begin alike then stay together when a generation batch is split.
        gradient_noise_every: Optimiser steps between measurements of `grad/half_cosine`, the cosine between
            the gradients of the two halves of a step; 0 for none. None measures every fifth step where a copy
            of the gradient is small (at most 256 M trained weights). A step needs two micro-batches.
        turn_credit: Advantages of single turns. `none`: each token has the episode's. `rewards`: turns have
            rewards of their own (`rewards.turns`). `tree`: samples share first turns, and each part is
            compared with its own siblings. `gae`: a value head on the policy's hidden states.
        tree_first_turns: Number of first turns of a group with `turn_credit: tree`, each continued equally
            often; None for the largest proper divisor of `num_generations`.
        correct_sampling: Weigh tokens by TRL's truncated importance sampling (`vllm_importance_sampling_*`),
            from the log-probs with which the engine `slots` sampled them. Without `same_draws` their last
            digits depend on when replies came, so two runs with one seed are then not equal bit for bit.
    """

    max_turn_tokens: int = 512
    engine: Engine = "auto"
    max_slots: int | None = None
    same_draws: bool = False
    staleness: int = 0
    shared_prefix: bool = True
    gradient_noise_every: int | None = None
    turn_credit: Literal["none", "rewards", "tree", "gae"] = "none"
    tree_first_turns: int | None = None
    correct_sampling: bool = False
    max_completion_length: int | None = 2_048
    beta: float = 0.0
    disable_dropout: bool = True
    remove_unused_columns: bool | None = False
    logging_steps: float = 1
    save_total_limit: int | None = 2
    log_completions: bool = field(default=False)
    # TRL's default, sequence_mask, can drop a long episode whole.
    vllm_importance_sampling_mode: str = "token_truncate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turn_tokens < 1:
            raise ValueError(f"max_turn_tokens must be >= 1, got {self.max_turn_tokens}")
        if self.gradient_noise_every is not None and self.gradient_noise_every < 0:
            raise ValueError(f"gradient_noise_every must be >= 0, got {self.gradient_noise_every}")
        taken = {"tools", "tokenize", "add_generation_prompt", "conversation"} & {
            *(self.chat_template_kwargs or {})
        }
        if taken:
            raise ValueError(f"chat_template_kwargs must not set {min(taken)}, which the engine sets")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        self.subtree_size = _subtree_size(self)
        is_fsdp = _is_fsdp(os.environ)
        stage = self.deepspeed_plugin.zero_stage if self.deepspeed_plugin else 0
        wrong = wrong_combinations(self, self.world_size, is_sharded=is_fsdp or stage == 3)
        for reason in [*wrong_launch(os.environ, is_on_cpu=self.use_cpu), *wrong]:
            raise ValueError(reason)


def _subtree_size(arguments: SQLGRPOConfig) -> int:
    """Rollouts of a group that share their first turn; 1 without `turn_credit: tree`."""
    samples: int = arguments.num_generations
    first_turns = arguments.tree_first_turns
    if arguments.turn_credit != "tree":
        if first_turns is not None:
            raise ValueError("tree_first_turns needs turn_credit: tree")
        return 1
    if first_turns is None:
        first_turns = next((n for n in range(samples // 2, 1, -1) if samples % n == 0), 1)
    if not 1 < first_turns < samples or samples % first_turns:
        raise ValueError(
            f"tree_first_turns must be above 1, below num_generations and a divisor of it ({samples}), "
            f"got {first_turns}"
        )
    size = samples // first_turns
    if arguments.per_device_train_batch_size * arguments.steps_per_generation % size:
        raise ValueError(
            f"turn_credit tree plays {size} rollouts of a first turn in one process: "
            f"per_device_train_batch_size x steps_per_generation must be a multiple of {size}"
        )
    return size


def wrong_combinations(arguments: SQLGRPOConfig, processes: int, *, is_sharded: bool) -> list[str]:
    """List the combinations of settings that would fail, hang or train something else.

    Args:
        processes: Number of ranks.
        is_sharded: True if weights are sharded (FSDP, ZeRO-3).
    """
    reasons = []
    if arguments.use_transformers_continuous_batching and (arguments.bf16 or arguments.fp16):
        reasons.append(
            "use_transformers_continuous_batching needs bf16: false and fp16: false, since TRL casts the "
            "trained weights themselves for it; the engine slots does not"
        )
    shared_by = arguments.vllm_tensor_parallel_size if arguments.vllm_mode == "colocate" else 1
    if arguments.use_vllm and processes % shared_by:
        reasons.append(
            f"vllm_tensor_parallel_size must divide the number of processes ({processes}), got {shared_by}: "
            "it is the number of processes that share one vLLM"
        )
    if arguments.turn_credit == "gae" and is_sharded:
        reasons.append(
            "turn_credit gae reads hidden states of the whole model, which no rank holds where weights are "
            "sharded (FSDP, ZeRO-3): train with DDP or ZeRO-2"
        )
    corrected = "grpo.correct_sampling" if arguments.correct_sampling and not arguments.use_vllm else ""
    corrected = "rollout.staleness" if arguments.staleness else corrected
    if corrected and (arguments.top_p < 1 or arguments.top_k or arguments.min_p is not None):
        reasons.append(
            f"{corrected} compares log-probs of sampling with those of the whole vocabulary: "
            "leave out top_p, top_k and min_p"
        )
    if arguments.staleness and (arguments.use_vllm or arguments.engine == "generation"):
        reasons.append("rollout.staleness needs the engine slots: leave out rollout.engine and use_vllm")
    if arguments.staleness and is_sharded:
        reasons.append(
            "rollout.staleness copies the policy on each rank, which holds no whole one where weights are "
            "sharded (FSDP, ZeRO-3): set it to 0, or train with DDP"
        )
    if arguments.staleness and arguments.cast_lm_head_to_fp32:
        reasons.append(
            "rollout.staleness plays with a head in the model's dtype: set cast_lm_head_to_fp32: false"
        )
    if arguments.sync_ref_model and arguments.beta == 0:
        reasons.append("sync_ref_model needs beta > 0: without a KL term there is no reference")
    if arguments.sync_ref_model and is_sharded:
        reasons.append(
            "sync_ref_model moves a reference that no checkpoint can hold where weights are sharded (FSDP, "
            "ZeRO-3): set it to false, or train with DDP or ZeRO-2"
        )
    return reasons


def wrong_launch(surroundings: Mapping[str, str], *, is_on_cpu: bool = False) -> list[str]:
    """List the settings of accelerate's config that would be ignored, or would leave no trained model.

    Args:
        surroundings: Environment variables, which `accelerate launch` sets.
        is_on_cpu: True for training on CPUs, where accelerate cannot shard.
    """
    reasons = []
    is_deepspeed = surroundings.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if is_on_cpu and (_is_fsdp(surroundings) or is_deepspeed):
        reasons.append(
            "accelerate shards a model only on accelerators (FSDP, DeepSpeed), and would silently train "
            "copies of it on CPUs: use config/accelerate/ddp.yaml there"
        )
    version = surroundings.get("FSDP_VERSION", "1")
    if _is_fsdp(surroundings) and version != "2":
        reasons.append(
            f"accelerate's fsdp_version must be 2, got {version}: version 1 flattens weights, so that no "
            "episode could be played with them"
        )
    kind = surroundings.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    if _is_fsdp(surroundings) and kind != "FULL_STATE_DICT":
        reasons.append(
            f"accelerate's fsdp_state_dict_type must be FULL_STATE_DICT, got {kind}: with sharded weights, "
            "no model would be saved at the end"
        )
    name = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
    is_zero3 = is_deepspeed and surroundings.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    if is_zero3 and surroundings.get(name, "false").lower() != "true":
        reasons.append(
            "accelerate's zero3_save_16bit_model must be true: with sharded weights, no model would be saved "
            "at the end"
        )
    return reasons


def _is_fsdp(surroundings: Mapping[str, str]) -> bool:
    return surroundings.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def training_arguments(fields: dict[str, Any], **decided: Any) -> SQLGRPOConfig:
    """Make the training arguments of a config's `grpo` section; on a CPU, default to bf16 only if it is fast.

    Args:
        fields: Fields from YAML.
        decided: Fields that other sections of the config set.

    Raises:
        ConfigError: An unknown field, a wrong type, or a field that another section sets.
    """
    types = typing.get_type_hints(SQLGRPOConfig)
    known = [f.name for f in dataclasses.fields(SQLGRPOConfig) if f.init]
    for name, value in fields.items():
        if name in _DECIDED_ELSEWHERE:
            raise ConfigError(f"grpo.{name} is set by {_DECIDED_ELSEWHERE[name]}: set that instead")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see TRL's GRPOConfig"
            raise ConfigError(f"unknown key grpo.{name}: {hint}")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=isinstance(value, bool | float))
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(f"grpo.{name}: {message[0].lower()}{message[1:]}, got {value!r}") from error
    try:
        is_on_cpu = device_type() == "cpu"
        defaults: dict[str, Any] = {"use_cpu": is_on_cpu}
        if is_on_cpu and "fp16" not in fields:
            defaults["bf16"] = has_fast_bf16()  # TRL's default emulates it where the processor has none
        return SQLGRPOConfig(**{**defaults, **fields, **decided})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"grpo: {error}") from error
