from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_model
from text2sql_grpo.rollout.merged_layers import is_worth_merging, merged_layers

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def adapted(tmp_path: Path) -> PeftModel:
    """A model with an adapter that changes it."""
    base = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model", vocab_size=260))
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    return model.eval()


@torch.no_grad()
def test_merged_layers_compute_the_same_without_the_adapters_products(adapted: PeftModel) -> None:
    calls = list[str]()
    for name, module in adapted.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda *_: calls.append("adapter"))
    apart = adapted(IDS).logits
    with adapted.disable_adapter():
        base = adapted(IDS).logits
    assert calls
    calls.clear()
    with merged_layers(adapted):
        merged = adapted(IDS).logits
    assert not calls
    assert torch.allclose(merged, apart, atol=1e-5)
    assert not torch.allclose(base, apart, atol=1e-2)


@torch.no_grad()
def test_weights_are_the_same_bits_afterwards_also_after_an_error(adapted: PeftModel) -> None:
    adapted.bfloat16()  # where adding and subtracting the adapter does not give the weights back
    before = {name: weight.clone() for name, weight in adapted.named_parameters()}
    apart = adapted(IDS).logits
    with pytest.raises(KeyboardInterrupt), merged_layers(adapted):
        raise KeyboardInterrupt
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.named_parameters())
    assert torch.equal(adapted(IDS).logits, apart)


def test_training_goes_on_after_it(adapted: PeftModel) -> None:
    with torch.no_grad(), merged_layers(adapted):
        adapted(IDS)
    adapted(IDS).logits.sum().backward()
    grads = {name: weight.grad for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert grads and all(grad is not None for grad in grads.values())


def test_a_cpu_does_not_wait_for_launches(adapted: PeftModel) -> None:
    assert not is_worth_merging(adapted)


@torch.no_grad()
def test_an_adapter_that_is_off_stays_off(adapted: PeftModel) -> None:
    with adapted.disable_adapter():
        base = adapted(IDS).logits
        with merged_layers(adapted):
            assert torch.equal(adapted(IDS).logits, base)
