"""`SQLGRPOConfig`: TRL's `GRPOConfig` with defaults that suit text-to-SQL, checked when it is read."""

import dataclasses
import functools
import os
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError, create_model
from transformers.utils import is_liger_kernel_available
from trl import GRPOConfig

from text2sql_grpo.checked import (
    AboveZero,
    AboveZeroShare,
    Bounds,
    NotNegative,
    Positive,
    Seed,
    Share,
    problems,
)
from text2sql_grpo.config import check_grpo_keys
from text2sql_grpo.errors import ArgumentError, ConfigError, DataError
from text2sql_grpo.models.hardware import device_type, has_fast_bf16

# TRL uses these fields and methods by the names that transformers 5 deprecates.
warnings.filterwarnings(
    "ignore", r".(is_)?gradient_checkpointing(_\w+)?. is deprecated", FutureWarning, r"transformers\."
)

# Set elsewhere in the config; a second place to set them could contradict the first.
_DECIDED_ELSEWHERE = {
    "output_dir": "run.output_dir",
    "seed": "run.seed",
    "max_completion_length": "environment.max_episode_tokens",
    "max_turn_tokens": "environment.max_turn_tokens",
    "engine": "rollout.engine",
    "max_slots": "rollout.max_slots",
    "eval_steps": "evaluation.every",
    "mask_truncated_completions": "rewards.on_error",
    "model_init_kwargs": "the section model",
}
_REMOVED = {
    "gradient_noise_every": "no figure of it changed a run",
    "tree_first_turns": "trees of rollouts gained nothing",
    "turn_credit": "no credit of single turns gained anything over none (docs/losses.md)",
    "correct_sampling": "the engine slots samples with the weights that are trained",
}
# Fields of TRL and transformers that would have no effect here, or would break a run, by the reason why.
_REASONS = {
    "set evaluation.every and data.dev, from Python eval_steps and eval_dataset, for whole episodes": """
        eval_strategy eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics do_eval do_predict bf16_full_eval fp16_full_eval num_generations_eval""",
    "the section selection draws the questions": """
        dataloader_drop_last dataloader_num_workers dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order data_seed
        remove_unused_columns label_names train_sampling_strategy length_column_name ignore_data_skip""",
    "publish with text2sql-grpo push, which checks what it uploads": """
        push_to_hub hub_token hub_model_id hub_strategy hub_always_push hub_revision""",
    "rollouts.jsonl holds every episode": """
        log_completions log_multimodal num_completions_to_print log_unique_prompts
        log_completions_hub_repo""",
    "the engine slots batches continuously, without casting the trained weights as TRL does": """
        use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged""",
    "lower per_device_train_batch_size and raise gradient_accumulation_steps": "auto_find_batch_size",
    "the loss is normalised over all ranks by loss_type": "average_tokens_across_devices",
    "only example scripts of transformers read it": "do_train",
    "rollouts need whole weights on each rank": "ds3_gather_for_generation",
    "SIGTERM and Ctrl-C already end a run with a checkpoint, on all ranks": "enable_jit_checkpoint",
    "num_tokens counts them": "include_num_input_tokens_seen",
    "the loss has no labels": "label_smoothing_factor",
    "set evaluation.keep: best": "load_best_model_at_end",
    "set environment.max_turns": "max_tool_calling_iterations",
    "set environment.max_episode_tokens and environment.max_turn_tokens": "max_completion_length",
    "the policy that plays would not be the one that is trained": "neftune_noise_alpha",
    "resume with --resume, or trainer.train(resume_from_checkpoint=..)": "resume_from_checkpoint",
    "the weights are set by rewards": "reward_weights",
    "scaled by its group, a small reward would pay a wrong answer more": "multi_objective_aggregation",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
# TRL checks these in the first step only, minutes after the config is read.
_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
}
_NotNegativeFloat = Annotated[float, Bounds(ge=0, allow_inf_nan=False)]
# Types narrower than those that TRL and transformers declare, or wider.
_TYPES: dict[str, Any] = {
    "num_iterations": Positive,
    "per_device_train_batch_size": Positive,
    "gradient_accumulation_steps": Positive,
    "steps_per_generation": Positive | None,
    "generation_batch_size": Positive | None,
    "num_train_epochs": AboveZero,
    "learning_rate": _NotNegativeFloat,
    "temperature": AboveZero,
    "top_p": AboveZeroShare,
    "top_k": NotNegative,
    "min_p": Share | None,
    "repetition_penalty": AboveZero,
    "beta": _NotNegativeFloat,
    "delta": AboveZero | None,
    "top_entropy_quantile": Share,
    "seed": Seed,
    "debug": Any,  # None from HfArgumentParser
    "accelerator_config": Any,  # an object after the first check, which `dataclasses.replace` repeats
}


@dataclass
class SQLGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus the shared prefix.

    What changes: no KL to a reference (`beta` 0), dropout off (generation runs in train mode), metrics of
    every step, and no TRL table of completions (`rollouts.jsonl` holds them whole).

    Attributes:
        bf16: As TRL's; on a CPU, None is for a processor that multiplies it in hardware.
        use_cpu: As TRL's; None for the device that `$DEVICE_TYPE` or the machine decides.
        shared_prefix: Forward each distinct token prefix of a micro-batch once, if the model allows it (the
            first batch shows that). Log-probs, loss and gradient are the same up to rounding; groups and
            prompts that begin alike then stay together when a generation batch is split.
    """

    bf16: bool | None = None
    use_cpu: bool | None = None
    shared_prefix: bool = True
    beta: float = 0.0
    disable_dropout: bool = True
    remove_unused_columns: bool | None = False
    logging_steps: float = 1
    save_total_limit: int | None = 2
    log_completions: bool = field(default=False)
    # TRL's default, sequence_mask, can drop a long episode whole.
    vllm_importance_sampling_mode: str = "token_truncate"

    def __post_init__(self) -> None:
        try:
            self._complete()
        except ValueError as error:  # also TRL's and transformers' own
            raise ArgumentError(str(error)) from error

    def _complete(self) -> None:
        """Refuse wrong values, and set the fields that depend on others."""
        given = {}
        for f in dataclasses.fields(self):  # before TRL changes some of them
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            value = getattr(self, f.name)
            if value != default:
                given[f.name] = str(value) if isinstance(value, Path) else value
            are_off = all(not one or one == "no" for one in (value, default))
            if f.name in REFUSED and value != default and not are_off:
                raise ValueError(f"{f.name} is not supported: {REFUSED[f.name]}")
        try:
            typed = _typed()(**given)
        except ValidationError as error:
            raise ValueError(problems(error, SQLGRPOConfig)) from error
        for name in given:
            if isinstance(number := getattr(typed, name), float):
                setattr(self, name, number)  # a checkpoint's JSON cannot hold NumPy's numbers
        is_integer = self.eval_steps is None or self.eval_steps == int(self.eval_steps)
        for name, is_right, range_ in (
            ("max_steps", self.max_steps > 0 or self.max_steps == -1, ">= 1, or -1 for num_train_epochs"),
            ("eval_steps", is_integer and (self.eval_steps or 1) >= 1, "an int >= 1 or None"),
        ):
            if not is_right:
                raise ArgumentError(f"{name} must be {range_}, got {getattr(self, name)!r}")
        is_on_cpu = device_type() == "cpu"
        if self.use_cpu is None:
            self.use_cpu = is_on_cpu
        if is_on_cpu and self.bf16 is None and not self.fp16:
            self.bf16 = has_fast_bf16()  # TRL's default emulates it where the processor has none
        if self.bf16 is False and not self.fp16:
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # else the launcher's precision would win
        super().__post_init__()
        taken = {"tools", "tokenize", "add_generation_prompt", "conversation"} & {
            *(self.chat_template_kwargs or {})
        }
        if taken:
            raise ValueError(f"chat_template_kwargs must not set {min(taken)}, which the engine sets")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        is_fsdp = _is_fsdp(os.environ)
        stage = self.deepspeed_plugin.zero_stage if self.deepspeed_plugin else 0
        wrong = wrong_combinations(self, self.world_size, is_sharded=is_fsdp or stage == 3)
        for reason in [*wrong_launch(os.environ, is_on_cpu=self.use_cpu), *wrong]:
            raise ValueError(reason)

    def check_questions(self, count: int) -> None:
        """Refuse fewer questions than one generation batch has groups: training would end before a step.

        Raises:
            DataError: There are fewer.
        """
        needed = self.generation_batch_size // self.num_generations
        if count < needed:
            steps = "steps_per_generation (or generation_batch_size)"
            if self.steps_per_generation == self.gradient_accumulation_steps:
                steps = "gradient_accumulation_steps"
            factors = {
                "grpo.per_device_train_batch_size": self.per_device_train_batch_size,
                f"grpo.{steps}": self.steps_per_generation,
                "the number of processes": self.world_size,
            }
            raise DataError(
                f"one batch needs at least {needed} questions (grpo: {self.generation_batch_size} episodes, "
                f"{self.num_generations} of each), got {count} (data.train): lower "
                f"{' or '.join(name for name, factor in factors.items() if factor > 1)}"
            )


@functools.cache
def _typed() -> type[BaseModel]:
    """Model of pydantic with the fields of `SQLGRPOConfig`, all optional, which converts none but floats."""
    types = typing.get_type_hints(SQLGRPOConfig) | _TYPES
    settings: Any = {"strict": True, "arbitrary_types_allowed": True, "protected_namespaces": ()}
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    return create_model("Fields", __config__=settings, **fields)


def wrong_combinations(arguments: SQLGRPOConfig, processes: int, *, is_sharded: bool) -> list[str]:
    """List the combinations of settings that would fail, hang or train something else.

    Weights are sharded by FSDP and ZeRO-3.
    """
    shared_by = arguments.vllm_tensor_parallel_size if arguments.vllm_mode == "colocate" else 1
    moves_reference = arguments.sync_ref_model
    reasons = {
        f"vllm_tensor_parallel_size must divide the number of processes ({processes}), got {shared_by}: "
        "it is the number of processes that share one vLLM": arguments.use_vllm and processes % shared_by,
        "use_liger_kernel needs the package liger-kernel: pip install liger-kernel": (
            arguments.use_liger_kernel and not is_liger_kernel_available()
        ),
        "save_strategy must not be best, which evaluates: set evaluation.keep: best": (
            arguments.save_strategy == "best"
        ),
        "sync_ref_model needs beta > 0: without a KL term there is no reference": (
            moves_reference and arguments.beta == 0
        ),
        "sync_ref_model moves a reference that no checkpoint can hold where weights are sharded (FSDP, "
        "ZeRO-3): set it to false, or train with DDP or ZeRO-2": moves_reference and is_sharded,
    }
    return [reason for reason, is_wrong in reasons.items() if is_wrong]


def wrong_launch(surroundings: Mapping[str, str], *, is_on_cpu: bool = False) -> list[str]:
    """List the settings of accelerate's config that would be ignored, or would leave no trained model.

    Args:
        surroundings: Environment variables, which `accelerate launch` sets.
        is_on_cpu: True for training on CPUs, where accelerate cannot shard.
    """
    is_fsdp = _is_fsdp(surroundings)
    version = surroundings.get("FSDP_VERSION", "1")
    kind = surroundings.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    is_deepspeed = surroundings.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    is_zero3 = is_deepspeed and surroundings.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    saves_whole = surroundings.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "").lower() == "true"
    reasons = {
        "accelerate shards a model only on accelerators (FSDP, DeepSpeed), and would silently train "
        "copies of it on CPUs: use config/accelerate/ddp.yaml there": is_on_cpu and (is_fsdp or is_deepspeed),
        f"accelerate's fsdp_version must be 2, got {version}: version 1 flattens weights, so that no "
        "episode could be played with them": is_fsdp and version != "2",
        f"accelerate's fsdp_state_dict_type must be FULL_STATE_DICT, got {kind}: with sharded weights, "
        "no model would be saved at the end": is_fsdp and kind != "FULL_STATE_DICT",
        "accelerate's zero3_save_16bit_model must be true: with sharded weights, no model would be saved "
        "at the end": is_zero3 and not saves_whole,
    }
    return [reason for reason, is_wrong in reasons.items() if is_wrong]


def _is_fsdp(surroundings: Mapping[str, str]) -> bool:
    return surroundings.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def training_arguments(fields: dict[str, Any], **decided: Any) -> SQLGRPOConfig:
    """Make the training arguments of a config's `grpo` section.

    Args:
        fields: Fields from YAML.
        decided: Fields that other sections of the config set.

    Raises:
        ConfigError: An unknown field, a wrong type, or a field that another section sets.
    """
    known = [f.name for f in dataclasses.fields(SQLGRPOConfig) if f.init]
    for name in fields:
        if name in _DECIDED_ELSEWHERE:
            raise ConfigError(f"grpo.{name} is set by {_DECIDED_ELSEWHERE[name]}: set that instead")
        if name in _REMOVED:
            raise ConfigError(f"grpo.{name} was removed: {_REMOVED[name]}")
        check_grpo_keys([name], known)
    try:
        return SQLGRPOConfig(**fields, **decided)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"grpo: {error}") from error
