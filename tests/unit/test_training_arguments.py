"""The `grpo` section of a config: TRL's own fields, checked, and its refusals as messages."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from text2sql_grpo.errors import ConfigError
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
        ({"max_steps": "many"}, r"grpo\.max_steps: input should be a valid integer.*, got 'many'"),
        ({"max_steps": 2.5}, r"grpo\.max_steps: .*integer.*, got 2\.5"),
        ({"max_steps": True}, r"grpo\.max_steps: .*integer.*, got True"),
        ({"learning_rate": "fast"}, r"grpo\.learning_rate: .*number.*, got 'fast'"),
        ({"num_generations": [4]}, r"grpo\.num_generations: .*integer.*, got \[4\]"),
        ({"seed": 1}, r"grpo\.seed is set by run\.seed: set that instead"),
        ({"output_dir": "a"}, r"grpo\.output_dir is set by run\.output_dir"),
        ({"max_completion_length": 9}, r"set by environment\.max_episode_tokens"),
        ({"max_turn_tokens": 9}, r"set by environment\.max_turn_tokens"),
        ({"reward_weights": [1.0]}, r"set by rewards"),
        (
            {"per_device_train_batch_size": 6, "num_generations": 4},
            r"^grpo: .*\(6\) must be divisible by num_generations \(4\)",
        ),
        ({"num_generations": 1}, r"^grpo: .*at least 2"),
        ({"loss_type": "magic"}, r"^grpo: loss_type must be one of grpo, .*, got 'magic'"),
        ({"scale_rewards": "twice"}, r"^grpo: scale_rewards must be one of group, batch, none, got 'twice'"),
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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"eval_strategy": "steps"}, "set evaluation.every and data.dev"),
        ({"data_seed": 3}, "the section selection draws the questions"),
        ({"push_to_hub": True}, "publish with text2sql-grpo push"),
        ({"log_completions": True}, "rollouts.jsonl holds every episode"),
        ({"use_transformers_continuous_batching": True}, "the engine slots batches continuously"),
        ({"auto_find_batch_size": True}, "lower per_device_train_batch_size"),
        ({"resume_from_checkpoint": "x"}, "resume with --resume"),
    ],
)
def test_fields_without_an_effect_are_refused_with_the_reason(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    (name,) = fields
    with pytest.raises(ConfigError, match=rf"^grpo: {name} is not supported: {re.escape(reason)}"):
        made(tmp_path, **fields)


def test_every_refused_field_is_one_of_trl() -> None:
    assert set(REFUSED) <= {field.name for field in dataclasses.fields(SQLGRPOConfig)}


def test_the_device_is_the_one_asked_for_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_TYPE", "cpu")
    assert device_type() == "cpu"
    assert made(tmp_path).use_cpu is True
    monkeypatch.setenv("DEVICE_TYPE", "toaster")
    with pytest.raises(ConfigError, match=r"DEVICE_TYPE must be auto, .*, got 'toaster'"):
        device_type()
    monkeypatch.delenv("DEVICE_TYPE")
    assert (device_type() == "cpu") == (not torch.accelerator.is_available())
