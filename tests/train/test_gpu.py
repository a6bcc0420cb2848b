"""What differs on a CUDA device; run by `pytest -m gpu` and `benchmarks/gpu.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.scripted_policy import ask
from tests.scripted_trainer import LOOK, RIGHT, WRONG, Bench
from tests.tiny_model import write_model
from text2sql_grpo.rollout.policy import cache_bytes, trial_obstacle
from text2sql_grpo.rollout.slots import Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_find_the_model_s_own_log_probs(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_model(tmp_path / "model", architecture="qwen2", max_positions=512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").eval()
    assert trial_obstacle(model) is None


def test_what_torch_has_reserved_and_does_not_use_is_free_for_the_cache() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = cache_bytes(device)
    block = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    held = cache_bytes(device)
    del block
    assert torch.cuda.memory_reserved(device) >= 256 << 20
    assert held < before - (100 << 20)
    assert cache_bytes(device) == pytest.approx(before, abs=32 << 20)


def test_slots_read_no_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass makes the host wait once, for the turns that ended."""
    found: list[dict[int, list[int]]] = []
    drafts = Scheduler._drafts
    monkeypatch.setattr(Scheduler, "_drafts", lambda self: found.append(drafts(self)) or found[-1])
    bench = Bench(tmp_path, [ask("Lisbon?")], engine="slots", max_turn_tokens=8, use_cpu=False)
    bench.trainer.rollouts.run([bench.trainer.environment.sessions.session(ask("Lisbon?")) for _ in range(4)])
    assert found
    assert not any(found)


@pytest.mark.parametrize("fields", [{"bf16": False}, {"bf16": True}, {"bf16": False, "beta": 0.1}])
def test_both_updates_learn_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    norms = []
    for shares in (True, False):
        folder = tmp_path / str(shares)
        folder.mkdir()
        bench = Bench(folder, [ask("Lisbon?")], use_cpu=False, shared_prefix=shares, **fields)
        bench.say([RIGHT], [WRONG], [LOOK, RIGHT], [WRONG])
        bench.trainer.train()
        assert bench.trainer.model.device.type == "cuda"
        assert bench.trainer.update.is_on == shares
        norms.append(bench.trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.05 if fields["bf16"] else 1e-4)
