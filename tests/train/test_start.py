"""What is measured before GRPO: looks by family, right answers, and what the start needs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_policy import ask
from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.config import load_config
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.grading import Verdict
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run.start import LOOKUPS, OTHERS, check_start, judge_start, start_figures

RIGHT = Verdict(official=True, strict=True, reason="equal", executes=True)
WRONG = Verdict(official=False, strict=False, reason="different", executes=True)


def answers(question: str, episodes: str, *, family: str = "lookup") -> list[Answer]:
    """Sampled episodes of a question: `l` looks, `r` is right, `b` does both, `-` nothing."""
    made = []
    for kind in episodes:
        actions = [Action("run_sql", sql="SELECT 1")] * (kind in "lb") + [
            Action("submit_sql", sql="SELECT 2")
        ]
        episode = Episode(example=ask(question, family=family), actions=actions)
        made.append(Answer(episode, RIGHT if kind in "rb" else WRONG))
    return made


def test_shares_and_right_answers_by_family() -> None:
    lookups = answers("a", "lb--") + answers("b", "----")
    others = answers("c", "rr--", family="count") + answers("d", "l---", family="join")
    found = start_figures({LOOKUPS: lookups, OTHERS: others})
    assert {name: (each.questions, each.look_share) for name, each in found.items()} == {
        "look-ups": (2, 0.25),
        "others": (2, 0.125),
        "count": (1, 0.0),
        "join": (1, 0.25),
    }
    assert (found[LOOKUPS].pass_1, found[LOOKUPS].pass_k) == (0.125, 0.5)
    assert (found["count"].pass_1, found["count"].pass_k) == (0.5, 1.0)
    assert str(found[LOOKUPS]).startswith("25% of 8 episodes look (")


def test_episodes_of_one_question_are_not_taken_for_independent() -> None:
    alike = [answer for i in range(20) for answer in answers(str(i), "llll" if i < 5 else "----")]
    mixed = [answer for i in range(20) for answer in answers(str(i), "l---")]
    one, other = (start_figures({LOOKUPS: each})[LOOKUPS] for each in (alike, mixed))
    assert one.look_share == other.look_share == 0.25
    assert one.interval == pytest.approx((0.112, 0.469), abs=1e-3)  # Wilson's of 5 in 20
    assert other.interval == pytest.approx((0.168, 0.355), abs=1e-3)  # of 20 in 80


@pytest.mark.parametrize(
    ("lookups", "others", "advice"),
    [
        (0.15, 0.1, "ok"),
        (0.4, 0.35, "ok"),
        (0.4, None, "ok"),
        (0.149, 0.0, "more looks"),
        (0.401, 0.0, "fewer looks"),
        (0.3, 0.26, "separate more"),
        (0.3, 0.5, "separate more"),
    ],
)
def test_what_a_start_needs(lookups: float, others: float | None, advice: str) -> None:
    assert judge_start(lookups, others, band=(0.15, 0.4), margin=0.0499) == advice


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
