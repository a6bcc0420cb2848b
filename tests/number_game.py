"""What plays the package `higher_lower`: a tokenizer of its few words, a tiny model, a trainer."""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from text2sql_grpo.training.arguments import SQLGRPOConfig

PACKAGES = Path(__file__).parent / "packages"
_WORDS = ["?", "guess", "higher", "lower", "user", "assistant", *map(str, range(6))]
_OF_TRAINER = ("taskset_config", "num_tasks", "max_turn_tokens", "max_episode_tokens", "rollout")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def find_packages() -> None:
    """Lets verifiers find the packages of the tests, as if they were installed."""
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))


def game_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def game_model(tokenizer: PreTrainedTokenizerBase, *, positions: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=positions,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def game_trainer(
    folder: Path,
    *,
    taskset: Any = "higher-lower",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **arguments: Any,
) -> Any:
    """A `VerifiersGRPOTrainer` of the game, silent.

    Args:
        taskset: Another taskset.
        tokenizer: Its tokenizer; None for the game's.
        arguments: Of `SQLGRPOConfig` or of the trainer.
    """
    from text2sql_grpo.integrations.verifiers.taskset_trainer import VerifiersGRPOTrainer

    find_packages()
    own = {
        "max_turn_tokens": 2,
        "max_episode_tokens": 24,
        **{name: arguments.pop(name) for name in _OF_TRAINER if name in arguments},
    }
    tokenizer = tokenizer or game_tokenizer()
    args = SQLGRPOConfig(
        **{
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 96,
            "num_generations": 16,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "save_strategy": "no",
            **arguments,
        }
    )
    model = game_model(tokenizer, positions=max(64, 4 * own["max_episode_tokens"]))
    return VerifiersGRPOTrainer(model, args, taskset=taskset, processing_class=tokenizer, **own)
