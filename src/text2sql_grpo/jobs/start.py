"""Start of GRPO: measured on training questions before the first step, and checked against a band."""

from collections.abc import Sequence

from rich.text import Text

from text2sql_grpo.config import StartConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.start import (
    LOOKUPS,
    OTHERS,
    Advice,
    StartFigures,
    judge_start,
    start_figures,
)
from text2sql_grpo.files import write_json
from text2sql_grpo.jobs.held_out import answer_on_all_ranks
from text2sql_grpo.jobs.setup import Run, evenly_spaced
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.run_folder import START
from text2sql_grpo.training.arguments import SQLGRPOConfig

_REMEDIES: dict[Advice, str] = {
    "more looks": "too few episodes look; raise sft.look_share, or train SFT longer",
    "fewer looks": "too many episodes look; lower sft.look_share",
    "separate more": "others look nearly as often as look-ups; train SFT longer, or raise sft.choice_weight",
}


def measure_start(
    run: Run, policy: LoadedPolicy, questions: Sequence[Example], *, temperature: float
) -> tuple[dict[str, StartFigures], Advice | None]:
    """Sample episodes on a fixed sample of training questions; print the figures and write `start.json`.

    Args:
        questions: Training questions; evenly spaced look-ups and others are played.

    Returns:
        Figures of look-ups, of others and of each of their families; and the advice, None without a band or
        without look-ups.
    """
    settings = run.config.start or StartConfig()
    sets: dict[str, list[Example]] = {}
    for name in (LOOKUPS, OTHERS):
        group = [question for question in questions if (question.family == "lookup") == (name == LOOKUPS)]
        if group:
            chosen = evenly_spaced(group, settings.questions)
            sets[name] = [question for question in chosen for _ in range(settings.samples)]
    with run.stage("start"):
        answers = answer_on_all_ranks(run, policy, sets, "Start of GRPO", temperature=temperature)
    figures = start_figures(answers)
    lookups, others = figures.get(LOOKUPS), figures.get(OTHERS)
    advice = None
    if settings.look_share is not None and lookups is not None:
        advice = judge_start(
            lookups.look_share,
            others.look_share if others else None,
            band=settings.look_share,
            margin=settings.margin,
        )
    for name in sets:
        run.console.print(Text(f"Start of GRPO, {name}: {figures[name]}"), soft_wrap=True)
    if ranks.is_main():
        families = {name: each.record() for name, each in figures.items()}
        record = {"temperature": temperature, "advice": advice, "families": families}
        write_json(run.folder / START, record)
    ranks.barrier()
    return figures, advice


def check_start(
    run: Run,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    arguments: SQLGRPOConfig,
    *,
    is_measured: bool,
) -> None:
    """Measure the start, and warn of one outside of the band, with what to change.

    No-op without `start` in the config, or if its figures are known: of a resumed run.
    """
    settings = run.config.start
    is_known = ranks.is_main() and is_measured and (run.folder / START).exists()
    if settings is None or ranks.any_rank(is_known):
        return
    figures, advice = measure_start(run, policy, questions, temperature=arguments.temperature)
    if advice is None or advice == "ok":
        return
    shares = ", ".join(
        f"{name} {figures[name].look_share:.0%}" for name in (LOOKUPS, OTHERS) if name in figures
    )
    low, high = settings.look_share or (0.0, 1.0)
    warning = (
        f"warning: the start is outside of its band, so GRPO may learn little: look {shares}; "
        f"start.look_share is {low:.0%} to {high:.0%} of look-ups, start.margin {settings.margin:.0%} fewer "
        f"of others: {_REMEDIES[advice]}"
    )
    run.console.print(Text(warning), soft_wrap=True)
