"""Every field of TRL's `GRPOConfig` is honoured or refused, so that none is silently without effect."""

import dataclasses
from pathlib import Path

import pytest
from trl import GRPOConfig

from text2sql_grpo.errors import ConfigError
from text2sql_grpo.training.arguments import (
    _DECIDED_ELSEWHERE,
    REFUSED,
    SQLGRPOConfig,
    training_arguments,
)

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
        scale_rewards multi_objective_aggregation
        save_total_limit metric_for_best_model greater_is_better""",
}
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def test_each_field_is_honoured_or_refused() -> None:
    decided = [name for name in _DECIDED_ELSEWHERE if name in FIELDS]
    honoured = [name for names in HONOURED.values() for name in names.split()]
    assert sorted([*REFUSED, *decided, *honoured]) == sorted(FIELDS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_the_reason(tmp_path: Path, name: str) -> None:
    default = FIELDS[name].default
    other = not default if isinstance(default, bool) else "1"
    with pytest.raises(ValueError, match=f"{name} is not supported") as refused:
        SQLGRPOConfig(output_dir=str(tmp_path), **{name: other})
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize("name", _DECIDED_ELSEWHERE)
def test_a_field_of_another_section_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"grpo.{name} is set by {_DECIDED_ELSEWHERE[name]}"):
        training_arguments({name: 1}, output_dir=str(tmp_path))
