"""GRPO on a verifiers taskset by our trainer, then its traces scored again by `vf-replay`.

    python examples/verifiers_taskset.py --taskset PACKAGE --model Qwen/Qwen2.5-0.5B-Instruct --max-steps 100
    vf-replay runs/verifiers_taskset --no-rich

Written for verifiers 0.4; not run on a GPU yet. The taskset's own settings: `--config '{"split": "train"}'`.
"""

import argparse
import json
import sys
from typing import Any

from text2sql_grpo.config import LoraSettings, ModelConfig
from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.verifiers.taskset_trainer import VerifiersGRPOTrainer
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.models.loaded_policy import load_policy, lora_config, resolved
from text2sql_grpo.training.arguments import training_arguments


def main(arguments: list[str] | None = None) -> VerifiersGRPOTrainer:
    parser = argparse.ArgumentParser(description="GRPO on a verifiers taskset")
    parser.add_argument("--taskset", required=True, help="id of an installed plug-in")
    parser.add_argument("--config", type=json.loads, default={}, help="of the taskset, as JSON")
    parser.add_argument("--num-tasks", type=int, help="only the first n")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of all weights")
    parser.add_argument("--output-dir", default="runs/verifiers_taskset")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--max-turn-tokens", type=int, default=512)
    parser.add_argument("--max-episode-tokens", type=int, default=2048)
    parser.add_argument("--grpo", type=json.loads, default={}, help="more fields of GRPOConfig, as JSON")
    options = parser.parse_args(arguments)

    settings = ModelConfig(path=options.model, lora=LoraSettings() if options.lora else None)
    policy = load_policy(options.model, dtype=resolved(settings, device_type()).dtype)
    fields: dict[str, Any] = {"num_generations": 8, "per_device_train_batch_size": 8, "report_to": "none"}
    args = training_arguments(
        fields | options.grpo,
        output_dir=options.output_dir,
        max_steps=options.max_steps,
    )
    trainer = VerifiersGRPOTrainer(
        policy.model,
        args,
        taskset=options.taskset,
        taskset_config=options.config,
        num_tasks=options.num_tasks,
        max_turn_tokens=options.max_turn_tokens,
        max_episode_tokens=options.max_episode_tokens,
        processing_class=policy.tokenizer,
        peft_config=lora_config(settings, policy.model.config),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"error: {error}")
