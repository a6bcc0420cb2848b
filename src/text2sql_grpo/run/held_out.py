"""Held-out answers of a run, before and after training, on all ranks."""

from typing import Any

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.answers import write_answers
from text2sql_grpo.evaluation.bench import evenly_spaced
from text2sql_grpo.evaluation.summary import scored_sets
from text2sql_grpo.files import write_json
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reporting.progress import answer_with_bar
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run_folder import EVALUATION, answers_file, read_evaluation


def answer_on_all_ranks(
    run: Run,
    policy: LoadedPolicy,
    sets: dict[str, list[Example]],
    title: str,
    *,
    temperature: float | None = None,
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
            temperature=run.config.evaluation.temperature if temperature is None else temperature,
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

    A resumed run (`is_measured`) takes the figures of its folder.
    """
    path = run.folder / EVALUATION
    if not run.config.evaluation.before_training or not run.bench.test:
        return {}
    is_known = ranks.is_main() and is_measured and path.exists()
    if ranks.any_rank(is_known):
        return read_evaluation(run.folder) if is_known else {}
    with run.stage("evaluation before"):
        record = {"before": {"sets": held_out_accuracy(run, policy, "before")}}
    if ranks.is_main():
        write_json(path, record)
    return record


def held_out_accuracy(run: Run, policy: LoadedPolicy, when: str) -> dict[str, Any]:
    """Measure accuracy on each held-out set; write the answers into the run folder.

    With `evaluation.samples`, questions are also answered by sampling, and these answers are voted on.
    """
    wanted, count = run.config.evaluation, run.config.data.test_samples
    sets = {name: evenly_spaced(examples, count) for name, examples in run.bench.test.items()}
    answers = answer_on_all_ranks(run, policy, sets, f"Evaluation {when}")
    sampled: dict[str, list[Answer]] = {}
    if wanted.samples:
        sampled = answer_on_all_ranks(
            run,
            policy,
            {name: [one for one in named for _ in range(wanted.samples)] for name, named in sets.items()},
            f"Samples {when}",
            temperature=wanted.samples_temperature,
        )
    if ranks.is_main():
        write_answers(answers_file(run.folder, when), answers)
    else:
        sampled = {}  # votes need test databases, which one rank makes
    return scored_sets(run.bench.environment, answers, sampled, wanted.samples)
