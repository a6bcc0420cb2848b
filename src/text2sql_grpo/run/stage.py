"""One run of the main job: its parts, its folder, the times of its stages, and its held-out answers."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from text2sql_grpo.config import Config, SFTSettings
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.answers import write_answers
from text2sql_grpo.evaluation.bench import Bench, evenly_spaced
from text2sql_grpo.evaluation.summary import scored_sets
from text2sql_grpo.files import read_jsonl, write_json
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.alerts import Alerts
from text2sql_grpo.reporting.progress import answer_with_bar
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import EVALUATION, answers_file, read_evaluation

_JUDGED_BY = ("set", "example", "database", "question", "gold_sql", "other_golds")  # fields of an answer


def wrong_stages(config: Config, processes: int, *, is_sharded: bool) -> list[str]:
    """List the settings of the stages around GRPO that the number of processes, or sharding, rules out."""
    blend = "evaluation.blend below 1 needs a single process: set it to 1"
    is_blended = config.evaluation.blend < 1 and (processes > 1 or is_sharded)
    trained = config.sft if config.sft and config.sft.adapter is None else None
    reasons = (blend if is_blended else None, wrong_batch_size(trained, processes) if trained else None)
    return [reason for reason in reasons if reason is not None]


def wrong_batch_size(sft: SFTSettings, processes: int) -> str | None:
    """Reason why the processes cannot divide a batch of SFT; None if they can."""
    if sft.batch_size % processes == 0:
        return None
    return f"sft.batch_size must be a multiple of the number of processes ({processes}), got {sft.batch_size}"


@dataclass
class Run:
    """One run of the main job, from an open bench to a merged model.

    Attributes:
        alerts: The alerts, one or none.
        warnings: Warnings of the run so far, each once.
    """

    bench: Bench
    console: Console
    alerts: list[Alerts]
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.bench.config

    @property
    def folder(self) -> Path:
        return self.config.run.output_dir

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the report."""
        self.warnings[text] = None
        self.console.print(Text(f"warning: {text}"), soft_wrap=True)

    @contextmanager
    def keeping_warnings(self) -> Iterator[None]:
        """Keep what this package's loggers warn of inside the context."""
        logger, handler = logging.getLogger("text2sql_grpo"), _Keeper(self.warnings)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; the run prints the times at its end."""
        started, cpu_started = time.monotonic(), time.process_time()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self.cpu_seconds[name] = round(time.process_time() - cpu_started, 1)


class _Keeper(logging.Handler):
    """Handler that keeps the messages of warnings."""

    def __init__(self, kept: dict[str, None]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept[record.getMessage()] = None


def answer_on_all_ranks(
    run: Run, policy: LoadedPolicy, sets: dict[str, list[Example]], title: str, temperature: float
) -> dict[str, list[Answer]]:
    """Answer all questions, split among the ranks that hold the whole model; returned on every rank."""
    holds = ranks.gather(ranks.holds_all_weights(policy.model))
    holders = [rank for rank, has_all in enumerate(holds) if has_all]
    if not holders:
        raise ConfigError(
            "no rank holds the whole model for the evaluation, since ZeRO-3 shards it while it is read: set "
            "evaluation.before_training: false, or accelerate's zero3_init_flag: false"
        )
    own: dict[str, list[Answer]] = {}
    if ranks.rank() in holders:
        first = holders.index(ranks.rank())
        share = {name: examples[first :: len(holders)] for name, examples in sets.items()}
        own = answer_with_bar(
            run.bench,
            share,
            policy,
            run.console,
            title=title,
            temperature=temperature,
            seed=run.config.run.seed + first,  # ranks that share a question's samples draw different ones
        )
    gathered = ranks.gather(own)
    shares = [gathered[rank] for rank in holders]
    return {
        name: [shares[i % len(shares)][name][i // len(shares)] for i in range(len(examples))]
        for name, examples in sets.items()
    }


def accuracy_before(run: Run, policy: LoadedPolicy, *, is_measured: bool) -> dict[str, Any]:
    """Measure held-out accuracy before GRPO.

    A resumed run (`is_measured`) takes the figures of its folder, unless a held-out question has changed.
    """
    known = ranks.from_main(lambda: _known_before(run)) if is_measured else {}
    if known or not run.config.evaluation.before_training or not run.bench.test:
        return known
    with run.stage("evaluation before"):
        record = {"before": {"sets": held_out_accuracy(run, policy, "before")}}
    if ranks.is_main():
        write_json(run.folder / EVALUATION, record)
    return record


def _known_before(run: Run) -> dict[str, Any]:
    """Figures before GRPO in the run folder; empty if there are none, or a held-out question has changed."""
    known, answers = read_evaluation(run.folder), answers_file(run.folder, "before")
    if "before" not in known or not answers.is_file():
        return {}
    rows = read_jsonl(answers, "answers")
    answered = [tuple(row.get(name) for name in _JUDGED_BY) for row in rows]
    asked = [
        (name, one.id, one.database, one.question, one.gold_sql, list(one.other_golds))
        for name, examples in _asked(run).items()
        for one in examples
    ]
    if answered != asked:
        run.warn("held-out questions have changed: accuracy before training is measured again")
        return {}
    return {"before": known["before"]}


def _asked(run: Run) -> dict[str, list[Example]]:
    """Held-out questions of each set, `data.test_samples` of them."""
    count = run.config.data.test_samples
    return {name: evenly_spaced(examples, count) for name, examples in run.bench.test.items()}


def held_out_accuracy(run: Run, policy: LoadedPolicy, when: str) -> dict[str, Any]:
    """Measure accuracy on each held-out set; write the answers into the run folder.

    With `evaluation.samples`, questions are also answered by sampling, and these answers are voted on.
    """
    wanted, sets = run.config.evaluation, _asked(run)
    answers = answer_on_all_ranks(run, policy, sets, f"Evaluation {when}", wanted.temperature)
    sampled: dict[str, list[Answer]] = {}
    if wanted.samples:
        repeated = {
            name: [one for one in named for _ in range(wanted.samples)] for name, named in sets.items()
        }
        sampled = answer_on_all_ranks(run, policy, repeated, f"Samples {when}", wanted.samples_temperature)
    if ranks.is_main():
        write_answers(answers_file(run.folder, when), answers)
    else:
        sampled = {}  # votes need test databases, which one rank makes
    return scored_sets(run.bench.environment, answers, sampled, wanted.samples)
