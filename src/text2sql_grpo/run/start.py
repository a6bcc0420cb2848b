"""Start of GRPO: a policy's share of episodes with a tool call and its accuracy, checked against a band.

GRPO reinforces sampled behaviour: a policy that never makes an exploratory query cannot learn it, one that
always does cannot learn where it pays.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Literal

from rich.text import Text

from text2sql_grpo.config import StartConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.bench import evenly_spaced
from text2sql_grpo.evaluation.statistics import interval_of_shares
from text2sql_grpo.files import write_json
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run.held_out import answer_on_all_ranks
from text2sql_grpo.run.stage import Run
from text2sql_grpo.run_folder import START
from text2sql_grpo.training.arguments import SQLGRPOConfig

LOOKUPS, OTHERS = "look-ups", "others"
Advice = Literal["ok", "more looks", "fewer looks", "separate more"]


def judge_start(lookups: float, others: float | None, *, band: tuple[float, float], margin: float) -> Advice:
    """Advice for further SFT before GRPO can learn when a tool call pays.

    Args:
        lookups: Share of sampled episodes on look-up questions with a tool call, in [0, 1].
        others: The same on other questions; None without such questions.

    >>> judge_start(0.25, 0.1, band=(0.15, 0.4), margin=0.05)
    'ok'
    >>> [judge_start(share, 0.24, band=(0.15, 0.4), margin=0.05) for share in (0.1, 0.5, 0.28)]
    ['more looks', 'fewer looks', 'separate more']
    """
    if lookups < band[0]:
        return "more looks"
    if lookups > band[1]:
        return "fewer looks"
    if others is not None and lookups - others < margin:
        return "separate more"
    return "ok"


@dataclass(frozen=True)
class StartFigures:
    """Sampled episodes on the questions of one family.

    Attributes:
        questions: Number of questions.
        samples: Episodes of each question.
        look_share: Share of episodes with a tool call, in [0, 1].
        interval: Its 95% interval; episodes of one question are not assumed independent.
        pass_1: Mean share of right answers, by the strict verdict.
        pass_k: Share of questions with a right answer among their samples.
    """

    questions: int
    samples: int
    look_share: float
    interval: tuple[float, float]
    pass_1: float
    pass_k: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.look_share:.0%} of {self.questions * self.samples} episodes look ({low:.0%}-{high:.0%})"
            f", pass@1 {self.pass_1:.0%}, pass@{self.samples} {self.pass_k:.0%}"
        )

    def record(self) -> dict[str, Any]:
        """Fields in `start.json`."""
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in asdict(self).items()}


def start_figures(answers: Mapping[str, Sequence[Answer]]) -> dict[str, StartFigures]:
    """Figures of look-ups, of others, and of each family of these, each question sampled as often."""
    groups: dict[str, list[Answer]] = {name: list(group) for name, group in answers.items() if group}
    for answer in answers.get(OTHERS, ()):
        groups.setdefault(answer.example.family, []).append(answer)
    return {name: _figures(group) for name, group in groups.items()}


def _figures(answers: Sequence[Answer]) -> StartFigures:
    looked, right = defaultdict(list), defaultdict(list)
    for answer in answers:
        looked[answer.example.id].append(answer.episode.looks > 0)
        right[answer.example.id].append(answer.verdict.strict)
    samples = len(answers) // len(looked)
    shares = [mean(each) for each in looked.values()]
    return StartFigures(
        questions=len(looked),
        samples=samples,
        look_share=mean(shares),
        interval=interval_of_shares(shares, samples),
        pass_1=mean(map(mean, right.values())),
        pass_k=mean(map(any, right.values())),
    )


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
    run.warn(
        f"the start is outside of its band, so GRPO may learn little: look {shares}; "
        f"start.look_share is {low:.0%} to {high:.0%} of look-ups, start.margin {settings.margin:.0%} fewer "
        f"of others: {_REMEDIES[advice]}"
    )
