"""GRPO by TRL's own trainer on this environment; a model whose chat template has tool calls.

    python examples/stock_trl.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --max-steps 100

Written for TRL 1.16; not run on a GPU yet. `scripts/train.py` does the same by our own trainer.
"""

import argparse
import sys
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

from text2sql_grpo.config import load_config
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.integrations.stock_trl import stock_trl


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description="GRPO by TRL's own trainer")
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=Path, default=Path("config/qwen2.5_coder_1.5b_lora.yaml"))
    parser.add_argument("--output-dir", default="runs/stock_trl")
    parser.add_argument("--max-steps", type=int, default=100)
    options = parser.parse_args(arguments)

    config = load_config(options.config)  # data, environment, rewards and grading; not its model and grpo
    bench = Bench.open(config)
    examples = bench.load(config.data.train, limit=config.data.train_samples)
    spec = stock_trl(examples, bench.environment, config.rewards)
    args = GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=config.environment.max_episode_tokens,
        max_tool_calling_iterations=config.environment.max_turns,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_steps=1,
    )
    try:
        trainer = GRPOTrainer(options.model, args=args, **vars(spec))
    except (OSError, ValueError) as error:  # no such model, or a chat template without tool calls
        raise ConfigError(f"TRL cannot train {options.model}: {error}") from error
    trainer.train()
    return trainer


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"error: {error}")
