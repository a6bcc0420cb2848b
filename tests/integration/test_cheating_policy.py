"""A policy that looks and then writes down what it saw, in the quickstart's environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from text2sql_grpo.audit.variations import hard_coded
from text2sql_grpo.config import load_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.rewards import Judge, RewardMix, open_grader
from text2sql_grpo.sql import SQLExecutor

EVERY = 500  # of the quickstart's training questions


class Bench:
    """The quickstart's environment, grader and reward, and a published reward beside it."""

    def __init__(self, repo_root: Path, executor: SQLExecutor) -> None:
        config = load_config(repo_root / "config" / "quickstart.yaml")
        self.executor = executor
        self.databases = Databases(repo_root / config.data.databases)
        self.environment = SQLEnvironment(self.databases, executor, config.environment)
        self.grader = open_grader(executor, neighbours=config.grading.neighbours)
        self.default, self.published = RewardMix(config.rewards), RewardMix({"preset": "skyrl"})
        questions = read_questions(repo_root / config.data.train)
        self.examples = [question.example for question in questions[::EVERY]]

    def play(self, example: Example, answer: str | None = None) -> Episode:
        """Looks at the gold's rows; then submits `answer`, or else what was seen, as constants."""
        session = self.environment.session(example)
        session.start()
        session.step(f"<sql>{example.gold_sql}</sql>")
        seen = session.episode.actions[0].outcome
        assert seen is not None and seen.is_ok
        constants = next(sql for _, sql in hard_coded(seen))
        assert session.step(f"<answer>{answer or constants}</answer>") is None
        return session.episode

    def earned(self, episode: Episode) -> tuple[float, float, tuple[str, ...]]:
        """What the default and the published reward pay, and the episode's flags."""
        database = self.databases.address(episode.example.database)
        default, published = (
            Judge(self.grader, self.executor, rewards, max_rows_shown=24).judge(episode, database)
            for rewards in (self.default, self.published)
        )
        assert default.reward is not None and published.reward is not None
        return default.reward, published.reward, default.flags


@pytest.fixture
def bench(repo_root: Path) -> Iterator[Bench]:
    with SQLExecutor() as executor:
        yield Bench(repo_root, executor)


def test_constants_are_paid_under_official_accuracy_and_not_under_the_default(bench: Bench) -> None:
    assert len(bench.examples) >= 6
    for example in bench.examples:
        paid, paid_officially, flags = bench.earned(bench.play(example))
        assert paid <= 0, example
        assert paid_officially == 1, example
        assert flags[:2] == ("official_only", "no_table"), example


def test_an_honest_policy_is_paid_by_both(bench: Bench) -> None:
    for example in bench.examples:
        paid, paid_officially, flags = bench.earned(bench.play(example, answer=example.gold_sql))
        assert paid > 0.9, example
        assert paid_officially == 1, example
        assert not {"official_only", "no_table"} & set(flags), example
