"""The start of a run is measured on its training questions, and refused outside the band."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import RunError
from text2sql_grpo.jobs.setup import Run, open_workbench
from text2sql_grpo.jobs.start import settle_start
from text2sql_grpo.jobs.train import run_arguments
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.run_folder import read_metrics


@pytest.fixture
def policy(tmp_path: Path) -> LoadedPolicy:
    """A policy of random weights: it never looks."""
    folder = write_model(tmp_path / "model", max_positions=512)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return LoadedPolicy(model, tokenizer, str(folder))


def test_a_start_that_never_looks_is_refused_and_printed(tmp_path: Path, policy: LoadedPolicy) -> None:
    for band, is_refused in (([0.15, 0.4], True), ([0.0, 0.4], True), (None, False)):
        folder = tmp_path / str(band)
        folder.mkdir()
        settings = {"look_share": band, "questions": 1, "samples": 2, "rounds": 0}
        config = load_config(write_config(folder, start=settings))
        printed = io.StringIO()
        run = Run(open_workbench(config), Console(file=printed, width=200), [])
        run.folder.mkdir()
        questions, arguments = run.bench.load(config.data.train), run_arguments(config)

        def check(run: Run = run, questions: Any = questions, arguments: Any = arguments) -> None:
            settle_start(run, policy, questions, arguments, is_measured=False)

        if is_refused:
            advice = (
                "too few episodes look" if band == [0.15, 0.4] else "others look nearly as often as look-ups"
            )
            with pytest.raises(RunError, match=f"episodes that look: look-ups 0%, others 0%.*{advice}"):
                check()
        else:
            check()
        assert "Start of GRPO, look-ups: 0% of 2 episodes look (" in printed.getvalue()
        record = json.loads((run.folder / "start.json").read_text())
        assert record["families"]["others"]["questions"] == 1
        assert record["families"]["look-ups"]["samples"] == 2
        # A resumed run has passed.
        settle_start(run, policy, questions, arguments, is_measured=True)


def test_sft_goes_on_with_another_mix_until_no_round_is_left(tmp_path: Path, policy: LoadedPolicy) -> None:
    sft = {"look_share": 0.4, "batch_size": 4, "learning_rate": 1e-3}
    start = {"look_share": [0.2, 0.9], "questions": 1, "samples": 2, "rounds": 2, "round_steps": 1}
    config = load_config(write_config(tmp_path, start=start, sft=sft, model={"path": policy.folder}))
    printed = io.StringIO()
    run = Run(open_workbench(config), Console(file=printed, width=200), [])
    run.folder.mkdir()
    before = policy.model.get_input_embeddings().weight.clone()
    attention = policy.model.config._attn_implementation

    with pytest.raises(RunError, match=r"too few episodes look; raise sft\.look_share"):
        settle_start(run, policy, run.bench.load(config.data.train), run_arguments(config), is_measured=False)

    assert printed.getvalue().count("Start of GRPO, look-ups") == 3
    assert "look_share 0.60, check_share 0.00" in printed.getvalue()
    assert "look_share 0.90, check_share 0.00" in printed.getvalue()
    assert not torch.equal(policy.model.get_input_embeddings().weight, before)
    assert policy.model.config._attn_implementation == attention
    assert [len(read_metrics(run.folder / "sft" / f"round-{n}")) for n in (1, 2)] == [1, 1]
