"""The update that forwards each prompt once beside the plain way: log-probs, entropies, loss, gradients."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from tests.tiny_model import write_model
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.shared_prefix_update import LogProbs, SharedPrefixUpdate

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
PAD = 256


class Sharing(GRPOTrainer):
    """TRL's trainer with the update alone, that may be switched off."""

    def __init__(
        self, folder: Path, *, architecture: str = "llama", lora: bool = False, **fields: Any
    ) -> None:
        model = write_model(folder / architecture, architecture=architecture)
        super().__init__(
            AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=[lambda **_: []],
            args=SQLGRPOConfig(
                output_dir=str(folder / "run"),
                per_device_train_batch_size=4,
                num_generations=4,
                use_cpu=True,
                report_to="none",
                **{"bf16": False, "gradient_checkpointing": False, **fields},
            ),
            train_dataset=Dataset.from_dict({"prompt": ["?"]}),
            processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            if lora
            else None,
        )
        self.update = SharedPrefixUpdate(self, is_wanted=True)
        self.current_gradient_accumulation_steps = 1
        self.model.train()

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with self.update.scoring(inputs) as inputs:
            return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> LogProbs:
        return self.update.log_probs(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def learn(self, batch: dict[str, Any], *, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient."""
        self.update.is_on = shared
        self.model.zero_grad()
        loss = self.compute_loss(self.model, batch)
        loss.backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return loss.detach(), torch.cat([p.grad.flatten() for p in parameters])


def batch_of(random_: random.Random, sizes: list[int], *, longest: int = 30) -> dict[str, Any]:
    """Ragged groups of such sizes in mixed order: prompts padded left, turns and replies padded right."""

    def tokens(low: int, high: int) -> list[int]:
        return [random_.randrange(250) for _ in range(random_.randint(low, high))]

    rows = []
    for size in sizes:
        prompt = tokens(1, longest)
        for _ in range(size):
            flags: list[int] = []
            for is_model in [1, 0] * random_.randint(0, 2) + [1]:
                flags += [is_model] * random_.randint(1, longest // 3)
            if random_.random() < 0.15:
                flags = [0] * len(flags)
            rows.append((prompt, tokens(len(flags), len(flags)), flags))
    random_.shuffle(rows)
    if len(rows) > 2:
        rows[0] = rows[1]
    width, length = max(len(p) for p, _, _ in rows), max(len(c) for _, c, _ in rows)
    left = [[0] * (width - len(p)) + [1] * len(p) for p, _, _ in rows]
    right = [[1] * len(c) + [0] * (length - len(c)) for _, c, _ in rows]
    scored = [flags + [1] * (length - len(flags)) for _, _, flags in rows]
    draw = torch.Generator().manual_seed(random_.randrange(10**6))
    return {
        "prompt_ids": torch.tensor([[PAD] * (width - len(p)) + p for p, _, _ in rows]),
        "prompt_mask": torch.tensor(left),
        "completion_ids": torch.tensor([c + [PAD] * (length - len(c)) for _, c, _ in rows]),
        "completion_mask": torch.tensor(right),
        "tool_mask": torch.tensor(scored),
        "advantages": torch.randn(len(rows), generator=draw),
        "num_items_in_batch": (torch.tensor(right) * torch.tensor(scored)).sum(),
    }


def assert_alike(trainer: Sharing, batch: dict[str, Any]) -> None:
    loss, gradient = trainer.learn(batch, shared=True)
    expected_loss, expected = trainer.learn(batch, shared=False)
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    return Sharing(tmp_path_factory.mktemp("shared"), loss_type="dapo")


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_log_probs_loss_and_gradient_are_those_of_the_plain_way(
    trainer: Sharing, random_: random.Random, sizes: list[int]
) -> None:
    assert_alike(trainer, batch_of(random_, sizes))
