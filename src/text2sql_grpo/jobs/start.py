"""Start of GRPO: measured on training questions before the first step, and checked against a band."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from text2sql_grpo.config import SFTSettings, StartConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import RunError
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
from text2sql_grpo.jobs.sft import train_further
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


def settle_start(
    run: Run,
    policy: LoadedPolicy,
    questions: Sequence[Example],
    arguments: SQLGRPOConfig,
    *,
    is_measured: bool,
) -> None:
    """Measure the start and train SFT further, by `adjusted`, until it is in the band; in place.

    No-op without `start` in the config, or if its figures are known: of a resumed run, or of an earlier one.

    Raises:
        RunError: The start is outside of the band, and there is no section `sft` or no round left.
        KeyboardInterrupt: It was stopped.
    """
    path, settings = run.folder / START, run.config.start
    is_known = ranks.is_main() and is_measured and path.exists()
    if settings is None or ranks.any_rank(is_known):
        return
    sft, left = run.config.sft, settings.rounds
    while True:
        figures, advice = measure_start(run, policy, questions, temperature=arguments.temperature)
        if advice is None or advice == "ok":
            return
        if sft is None or not left:
            raise RunError(_refusal(figures, advice, settings, path))
        sft, left = adjusted(sft, advice, settings.round_steps), left - 1
        run.console.print(
            f"{_REMEDIES[advice]}: SFT trains {settings.round_steps} more steps with look_share "
            f"{sft.look_share:.2f}, check_share {sft.check_share:.2f}, choice_weight {sft.choice_weight:g}",
            soft_wrap=True,
        )
        bench = replace(run.bench, config=replace(run.config, sft=sft))
        folder = run.folder / "sft" / f"round-{settings.rounds - left}"
        train_further(bench, policy, folder, arguments, run.console)


def adjusted(sft: SFTSettings, advice: Advice, steps: int) -> SFTSettings:
    """SFT settings of a further round: another share of looks, or more weight on the deciding token.

    >>> more = adjusted(SFTSettings(look_share=0.2, choice_weight=4.0), "more looks", 20)
    >>> round(more.look_share, 3), more.choice_weight, more.max_steps
    (0.3, 4.0, 20)
    """
    factor = {"more looks": 1.5, "fewer looks": 1 / 1.5}.get(advice, 1.0)
    return replace(
        sft,
        look_share=min(1.0, factor * sft.look_share),
        check_share=min(1.0, factor * sft.check_share),
        choice_weight=sft.choice_weight * (2 if advice == "separate more" else 1),
        learning_rate=sft.learning_rate and sft.learning_rate / 3,  # SFT ended far below its peak rate
        max_steps=steps,
        adapter=None,
    )


def _refusal(figures: dict[str, StartFigures], advice: Advice, settings: StartConfig, path: Path) -> str:
    shares = ", ".join(
        f"{name} {figures[name].look_share:.0%}" for name in (LOOKUPS, OTHERS) if name in figures
    )
    low, high = settings.look_share or (0.0, 1.0)
    return (
        f"the start is outside of its band: episodes that look: {shares}; start.look_share requires "
        f"{low:.0%} to {high:.0%} of look-ups, start.margin {settings.margin:.0%} fewer of others: "
        f"{_REMEDIES[advice]} ({path})"
    )
