"""The `grpo` section of a config: every field of TRL is honoured or refused, and checked."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from text2sql_grpo.config import load_config
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.training.arguments import (
    REFUSED,
    SQLGRPOConfig,
    device_type,
    training_arguments,
    wrong_combinations,
    wrong_launch,
)


def made(folder: Path, **fields: Any) -> SQLGRPOConfig:
    return training_arguments({"report_to": "none", **fields}, output_dir=str(folder), seed=3)


def test_fields_of_the_config_and_of_other_sections_arrive(tmp_path: Path) -> None:
    arguments = made(tmp_path, max_steps=7, learning_rate=1e-4, bf16=False, lr_scheduler_type="cosine")
    assert (arguments.max_steps, arguments.learning_rate, arguments.seed) == (7, 1e-4, 3)
    assert (arguments.bf16, arguments.lr_scheduler_type, arguments.output_dir) == (
        False,
        "cosine",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"gradient_accumulation_steps": 32}, "gradient_accumulation_steps"),
        (
            {"gradient_accumulation_steps": 1, "generation_batch_size": 32},
            "steps_per_generation (or gen",
        ),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            "per_device_train_batch_size or grpo.gradient_accumulation_steps",
        ),
    ],
)
def test_too_few_questions_name_what_multiplies(tmp_path: Path, fields: dict[str, Any], remedy: str) -> None:
    arguments = made(tmp_path, num_generations=8, **{"per_device_train_batch_size": 1, **fields})
    arguments.check_questions(4)
    with pytest.raises(DataError, match=re.escape(f"got 3 (data.train): lower grpo.{remedy}")):
        arguments.check_questions(3)


@pytest.mark.parametrize(
    ("fields", "processes", "is_sharded", "reason"),
    [
        ({}, 2, True, None),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, 4, False, None),
        (
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
            3,
            False,
            r"vllm_tensor_parallel_size must divide the number of processes \(3\), got 2",
        ),
        ({"sync_ref_model": True, "beta": 0.1}, 2, False, None),
        ({"sync_ref_model": True, "beta": 0.1}, 2, True, "no checkpoint can hold where weights are sharded"),
        ({"use_vllm": True, "vllm_mode": "server"}, 2, False, None),
        ({"use_vllm": True, "vllm_mode": "server"}, 1, False, None),
        ({"use_vllm": True, "vllm_mode": "colocate"}, 2, True, None),
        ({}, 8, False, None),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, fields: dict[str, Any], processes: int, is_sharded: bool, reason: str | None
) -> None:
    arguments = made(tmp_path)  # of one process, which would refuse some of them
    for name, value in fields.items():
        setattr(arguments, name, value)
    reasons = wrong_combinations(arguments, processes, is_sharded=is_sharded)
    assert len(reasons) == (reason is not None)
    assert reason is None or re.search(reason, reasons[0])


WHOLE = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}


ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@pytest.mark.parametrize(
    ("surroundings", "reason"),
    [
        (WHOLE, None),
        (ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}, None),
        (ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, None),
        (ZERO3, "zero3_save_16bit_model must be true"),
        ({"FSDP_VERSION": "1"}, None),  # left over from another launch
        (WHOLE | {"FSDP_VERSION": "1"}, r"fsdp_version must be 2, got 1"),
        (
            WHOLE | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
            r"fsdp_state_dict_type must be FULL_STATE_DICT, got SHARDED_STATE_DICT",
        ),
    ],
)
def test_launches_that_would_leave_nothing(surroundings: dict[str, str], reason: str | None) -> None:
    reasons = wrong_launch(surroundings)
    assert len(reasons) == (reason is not None)
    assert reason is None or re.search(reason, reasons[0])


def test_a_model_that_accelerate_would_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train copies on CPUs, and say nothing."""
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"would silently train copies of it on CPUs"):
        made(tmp_path, use_cpu=True)


def test_the_config_decides_the_precision_and_not_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bf16, precision in ((True, "bf16"), (False, "no")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        assert made(tmp_path, bf16=bf16).mixed_precision == precision


def test_defaults_that_suit_long_episodes(tmp_path: Path) -> None:
    arguments = made(tmp_path)
    assert (arguments.beta, arguments.disable_dropout, arguments.logging_steps) == (0.0, True, 1)
    assert arguments.remove_unused_columns is False
    assert arguments.log_completions is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rte": 1.0}, r"unknown key grpo\.learning_rte: did you mean learning_rate\?"),
        ({"zzz": 1}, r"unknown key grpo\.zzz: see TRL's GRPOConfig"),
        ({"max_steps": "many"}, r"grpo: max_steps must be a valid integer, got 'many'"),
        ({"max_steps": 2.5}, r"grpo: max_steps .*integer.*, got 2\.5"),
        ({"max_steps": True}, r"grpo: max_steps .*integer.*, got True"),
        ({"learning_rate": "fast"}, r"grpo: learning_rate .*number.*, got 'fast'"),
        ({"num_generations": [4]}, r"grpo: num_generations .*integer.*, got \[4\]"),
        ({"seed": 1}, r"grpo\.seed is set by run\.seed: set that instead"),
        ({"reward_weights": [1.0]}, r"set by rewards"),
        (
            {"per_device_train_batch_size": 6, "num_generations": 4},
            r"^grpo: .*\(6\) must be divisible by num_generations \(4\)",
        ),
        ({"num_generations": 1}, r"^grpo: .*at least 2"),
        ({"loss_type": "magic"}, r"^grpo: loss_type must be one of grpo, .*, got 'magic'"),
        ({"scale_rewards": "twice"}, r"^grpo: scale_rewards must be one of .*, got 'twice'"),
        ({"lr_scheduler_type": "wavy"}, r"^grpo: .*wavy"),
        ({"save_strategy": "sometimes"}, r"^grpo: .*sometimes"),
        ({"bf16": True, "fp16": True}, r"^grpo: "),
        ({"sync_ref_model": True}, r"^grpo: sync_ref_model needs beta > 0"),
        ({"gradient_noise_every": 5}, r"^grpo\.gradient_noise_every was removed: no figure of it"),
        ({"turn_credit": "gae"}, r"^grpo\.turn_credit was removed"),
    ],
)
def test_wrong_fields_are_refused_with_their_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **fields)


def test_the_device_is_the_one_asked_for_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_TYPE", "cpu")
    assert device_type() == "cpu"
    assert made(tmp_path).use_cpu is True
    assert made(tmp_path, use_cpu=False, bf16=False).use_cpu is False  # as a launch for GPUs sets it
    monkeypatch.setenv("DEVICE_TYPE", "toaster")
    with pytest.raises(ConfigError, match=r"DEVICE_TYPE must be auto, .*, got 'toaster'"):
        device_type()
    monkeypatch.delenv("DEVICE_TYPE")
    assert (device_type() == "cpu") == (not torch.accelerator.is_available())


# Who honours the other fields. A field that a new version of TRL adds fails the test until it is in a list:
# read how TRL uses it, above all in the methods that this package replaces (see `trl_compat`).
HONOURED = {
    "transformers' loop, optimiser, precision, logs, saves and launch": """
        per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
        learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
        optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        bf16 fp16 tf32 use_cpu full_determinism torch_compile torch_compile_backend torch_compile_mode
        activation_checkpointing activation_checkpointing_kwargs
        gradient_checkpointing gradient_checkpointing_kwargs use_cache
        use_liger_kernel liger_kernel_config torch_empty_cache_steps
        logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node
        log_level log_level_replica disable_tqdm skip_memory_metrics debug
        report_to run_name project hub_private_repo trackio_space_id trackio_bucket_id trackio_static_space_id
        save_strategy save_steps save_only_model save_on_each_node restore_callback_states_from_checkpoint
        accelerator_config parallelism_config dataloader_pin_memory local_rank
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout fsdp fsdp_config deepspeed""",
    "TRL's model, reference, loss and vLLM": """
        trust_remote_code disable_dropout cast_lm_head_to_fp32 router_aux_loss_coef
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        loss_type importance_sampling_level epsilon epsilon_high delta use_bias_correction_kl
        sapo_temperature_neg sapo_temperature_pos
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg top_entropy_quantile
        entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size""",
    "this package's batches, rollouts, log-probs, credit and checkpoints": """
        generation_batch_size steps_per_generation num_generations num_iterations shuffle_dataset
        pad_to_multiple_of
        temperature top_p top_k min_p repetition_penalty generation_kwargs cache_implementation
        chat_template_kwargs use_vllm
        beta off_policy_mask_threshold vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap
        scale_rewards
        save_total_limit metric_for_best_model greater_is_better""",
}
ELSEWHERE = ["output_dir", "seed", "max_completion_length", "eval_steps", "model_init_kwargs"]
ELSEWHERE += ["mask_truncated_completions"]
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def test_each_field_of_trl_is_honoured_or_refused() -> None:
    honoured = [name for names in HONOURED.values() for name in names.split()]
    assert len(honoured) == len({*honoured} - {*REFUSED, *ELSEWHERE})
    assert {*REFUSED, *ELSEWHERE, *honoured} == {*FIELDS}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_the_reason(tmp_path: Path, name: str) -> None:
    default = FIELDS[name].default
    other = not default if isinstance(default, bool) else "1"
    with pytest.raises(ValueError, match=f"{name} is not supported") as refused:
        SQLGRPOConfig(output_dir=str(tmp_path), **{name: other})
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize("kind", [HfArgumentParser, TrlParser])
def test_parsers_of_the_command_line_make_the_arguments(kind: Any, tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --max_steps 3 --report_to none --push_to_hub false"
    (made,) = kind(SQLGRPOConfig).parse_args_into_dataclasses(line.split())
    assert made.max_steps == 3
    assert (
        dataclasses.replace(made, max_steps=4, generation_batch_size=None).max_steps == 4
    )  # checks what the first check completed


@pytest.mark.parametrize("name", [*ELSEWHERE, "max_turn_tokens", "engine", "max_slots"])
def test_a_field_of_another_section_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"grpo.{name} is set by"):
        training_arguments({name: 1}, output_dir=str(tmp_path))


def test_a_config_may_set_what_a_run_presets(repo_root: Path) -> None:
    config = load_config(repo_root / "config" / "quickstart.yaml", ["--grpo.disable_tqdm", "false"])
    assert run_arguments(config).disable_tqdm is False
