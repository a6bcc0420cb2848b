"""The start of a run is measured on its training questions, and warned of outside the band."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run.start import check_start


@pytest.fixture
def policy(tmp_path: Path) -> LoadedPolicy:
    """A policy of random weights: it never looks."""
    folder = write_model(tmp_path / "model", max_positions=512)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return LoadedPolicy(model, tokenizer, str(folder))


@pytest.mark.parametrize(
    ("band", "advice"),
    [
        ([0.15, 0.4], "too few episodes look"),
        ([0.0, 0.4], "others look nearly as often as look-ups"),
        (None, None),
    ],
)
def test_a_start_outside_of_its_band_is_printed_with_what_to_change(
    tmp_path: Path, policy: LoadedPolicy, band: list[float] | None, advice: str | None
) -> None:
    settings = {"look_share": band, "questions": 1, "samples": 2}
    config = load_config(write_config(tmp_path, start=settings))
    printed = io.StringIO()
    run = Run(Bench.open(config), Console(file=printed, width=400), [])
    run.folder.mkdir()
    questions, arguments = run.bench.load(config.data.train), run_arguments(config)
    check_start(run, policy, questions, arguments, is_measured=False)
    text = printed.getvalue()
    assert "Start of GRPO, look-ups: 0% of 2 episodes look (" in text
    assert ("warning" in text) == (advice is not None)
    assert advice is None or ("look look-ups 0%, others 0%" in text and advice in text)
    record = json.loads((run.folder / "start.json").read_text())
    assert record["families"]["others"]["questions"] == 1
    assert record["families"]["look-ups"]["samples"] == 2
    check_start(run, policy, questions, arguments, is_measured=True)  # a resumed run
    assert printed.getvalue() == text
