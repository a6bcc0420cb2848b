"""A trainer on the shop whose policy a test may script, and what it writes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_policy import ask, shop
from tests.tiny_model import write_model
from tests.tiny_run import json_lines
from text2sql_grpo.config import LossesConfig, RolloutConfig, SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.selection import open_select
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LOOK, RIGHT, WRONG = (
    "<sql>SELECT code FROM branch</sql>",
    f"<answer>{GOLD}</answer>",
    "<answer>SELECT 8</answer>",
)
FAILS = "<answer>SELECT nothing FROM nowhere</answer>"
WEIGHTS = {"execution": 1.0, "executes": 0.25}
PORTO = ask("Porto?", "SELECT staff FROM branch WHERE code = 'OPO-01'")
LISBON, BROKEN = ask("Lisbon?", GOLD), ask("Broken?", "SELECT nothing FROM branch")


def _with_own_ids(examples: Sequence[Example]) -> list[Example]:
    """The examples, of which one may be given more than once."""
    again = [n if one in examples[:n] else None for n, one in enumerate(examples)]
    return [
        one if n is None else replace(one, id=f"{one.id} {n}") for one, n in zip(examples, again, strict=True)
    ]


class Bench:
    """A trainer whose policy may be replaced by a script of whole episodes."""

    def __init__(
        self,
        folder: Path,
        examples: Sequence[Example] = (LISBON,),
        *,
        protocol: Any = "tags",
        selection: SelectionConfig | None = None,
        losses: LossesConfig | None = None,
        model: Path | None = None,
        adapter: Any = None,
        engine: Any = "generation",
        max_turn_tokens: int = 80,
        **arguments: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        model = model or write_model(folder / "model", max_positions=4096)
        tokenizer = AutoTokenizer.from_pretrained(model)
        if protocol == "native":
            template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
            tokenizer.chat_template = template.read_text("utf-8")
        settings = {"protocol": protocol, "schema_text": "compact", "max_turns": 3, "instructions": False}
        settings |= {"max_turn_tokens": max_turn_tokens, "max_episode_tokens": 1200}
        args = training_arguments(
            {
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "max_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                **arguments,
            },
            output_dir=str(folder / "run"),
        )
        parts: dict[str, Any] = {}
        if selection is not None:
            parts = {"select": open_select(examples, selection, seed=args.seed)}
        environment = shop(folder, **settings)
        self.trainer = SQLGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model),
            environment,
            # Unchecked, as a gold query may fail later.
            train_dataset=environment.examples(_with_own_ids(examples), check_gold=False),
            reward_funcs=RewardMix(WEIGHTS),
            args=args,
            processing_class=tokenizer,
            peft_config=adapter,
            rollout=RolloutConfig(engine=engine),
            losses=losses,
            **parts,
        )

    def say(self, *episodes: Sequence[str]) -> None:
        """The turns of each episode, in the order of the batch; `...` never ends its turn."""
        chat = self.trainer.rollouts.chat

        def policy(model: Any) -> Any:
            left = [list(turns) for turns in episodes]

            def generate(prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
                replies = []
                for turns, _ in zip([turns for turns in left if turns], prompts, strict=True):
                    turn = turns.pop(0)
                    ids = chat.turn_ids(turn)
                    replies.append(ids[:-1] * 40 if turn == "..." else ids)
                return Continuations([reply[:max_new_tokens] for reply in replies])

            return SimpleNamespace(generate=generate)

        self.trainer.rollouts.policy = policy  # type: ignore[method-assign]

    def batch(self, *questions: int) -> dict[str, torch.Tensor]:
        """The generation batch of one group of each of these questions."""
        self.trainer.model.train()
        self.trainer.select.draw = lambda count: list(questions)  # type: ignore[method-assign]
        return self.trainer.generation_batch()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last generation batch."""
        trainer = self.trainer
        parts = [trainer.play, trainer.credit, *trainer.record]
        return {name: value for part in parts for name, value in part.metrics().items()}

    def rollouts(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "run" / "rollouts.jsonl")

    def steps(self) -> list[dict[str, float]]:
        """The log of each optimiser step."""
        return [row for row in self.trainer.state.log_history if "loss" in row]

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])

    def gradient(self, batch: dict[str, Any]) -> torch.Tensor:
        self.trainer.model.zero_grad()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.compute_loss(self.trainer.model, batch).backward()
        return torch.cat([p.grad.flatten() for p in self.trainer.model.parameters() if p.grad is not None])
