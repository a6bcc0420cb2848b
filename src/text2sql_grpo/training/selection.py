"""Selection of the questions of each generation batch, from what their earlier episodes showed."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError

logger = logging.getLogger(__name__)

_FIELDS = ("family", "template", "database", "difficulty")
_LEVELS = (("easy", "simple"), ("medium", "moderate"), ("hard", "challenging"), ("extra", "extra hard"))
_EASE = {name: place for place, names in enumerate(_LEVELS) for name in names}
_EASY_SHARE = 0.25  # of the questions, in the first batch of `easy_to_hard`
_STALENESS = 0.1  # share of the draw by `regret` that goes by staleness, as in PLR
_ROUNDING = 1e-9


@dataclass
class _Stratum:
    """Questions of one or more families.

    Attributes:
        share: Share of all draws, in (0, 1].
        debt: Draws by which the stratum lags behind its share; negative if it is ahead.
        explore_debt: The same for its draws in shuffled order.
        left: Questions still to be drawn in shuffled order before any repeats, the next one last.
        order: All questions as drawn by weight, the first one first; empty until it is drawn.
    """

    questions: list[int]
    share: float
    debt: float = 0.0
    explore_debt: float = 0.0
    left: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


def strata(families: Sequence[str], shares: Mapping[str, float]) -> list[_Stratum]:
    """Make one stratum for each named family, and one with the rest for the questions of all others.

    Args:
        families: Family of each question.
        shares: Share of each named family in a step, in (0, 1]; their sum is at most 1.

    Raises:
        DataError: No question is of a named family, or the shares leave a rest but no question does.
    """
    numbers: dict[str | None, list[int]] = {name: [] for name in sorted(shares)}
    for number, family in enumerate(families):
        numbers.setdefault(family if family in shares else None, []).append(number)
    for name in shares:
        if not numbers[name]:
            known = ", ".join(sorted(set(families)))
            raise DataError(
                f"selection.strata names the family {name}, but no training question is of it: "
                f"the families are {known}"
            )
    rest = 1.0 - sum(shares.values())
    found = [_Stratum(numbers[name], shares[name]) for name in sorted(shares)]
    if rest > _ROUNDING:
        if None not in numbers:
            raise DataError(
                f"selection.strata adds up to {1 - rest:g}, but no training question is of another family: "
                "let the shares add up to 1"
            )
        found.append(_Stratum(numbers[None], rest))
    return found


class Selection:
    """Draws the questions of generation batches, and other questions in place of zero-variance groups.

    A group has zero variance here if its verdicts are equal, since costs of turns give every group a variance
    of rewards. Ranks that make the same calls draw the same questions; what a call does depends on `state`.

    Args:
        examples: The training questions, by whose index they are drawn.
        settings: The section `selection`.
        batch_size: Questions of a generation batch of all ranks.
        num_generations: Episodes of a group.
        seed: Random seed; equal on all ranks.
        shuffle: True for random epochs; False for the order of the questions.

    Attributes:
        batch: Question of each group of the current batch.

    Raises:
        DataError: See `strata`; or `easy_by: difficulty` meets an unknown difficulty.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        settings: SelectionConfig,
        *,
        batch_size: int,
        num_generations: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self.settings, self.batch = settings, list[int]()
        self._batch_size, self._group_size, self._is_random = batch_size, num_generations, shuffle
        self._random = torch.Generator().manual_seed(seed)
        codes: dict[str, dict[str | None, int]] = {name: {} for name in _FIELDS}
        rows = [
            [codes[name].setdefault(getattr(example, name), len(codes[name])) for name in _FIELDS]
            for example in examples
        ]
        columns = dict(zip(_FIELDS, torch.tensor(rows).T, strict=True))
        names = [str(name) for name in codes["family"]]
        self._strata = strata([names[code] for code in columns["family"].tolist()], settings.strata)
        self._stratum_of = {one: stratum for stratum in self._strata for one in stratum.questions}
        self._database, self._template = columns["database"].tolist(), columns["template"].tolist()
        self._no_template = codes["template"].get(None)
        self._cells = _cells([columns[name] for name in settings.level], len(rows))
        self._counts = [torch.zeros(int(cell.max()) + 1, 2, dtype=torch.double) for cell in self._cells]
        self._met = torch.zeros(len(rows), dtype=torch.long)
        self._quarantined: set[int] = set()
        self._hardness: torch.Tensor | None = None
        if settings.by == "easy_to_hard":
            self._ties = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
            if settings.easy_by == "difficulty":
                self._hardness = _hardness(list(codes["difficulty"]))[columns["difficulty"]]
        self._batches = self._rounds = 0
        self._progress = 0.0
        self._seen: set[int] = set()
        self._is_flat: list[bool] = []
        self._played: list[tuple[bool, int, int]] = []
        self._has_warned = False

    def draw(self, *, progress: float = 0.0) -> list[int]:
        """Draw the questions of the next generation batch.

        Args:
            progress: Share of the run's steps that are done, in [0, 1].
        """
        self._batches, self._rounds, self._progress = self._batches + 1, 0, progress
        self.batch, self._seen, self._played = [], set(), []
        self._forget_orders()
        if self.settings.half_life is not None:
            for counts in self._counts:
                counts *= 0.5 ** (1 / self.settings.half_life)
        for _ in range(self._batch_size):
            for stratum in self._strata:
                stratum.debt += stratum.share
            # Rounded, so that sums of shares such as 0.1 do not decide between equals.
            most = max(self._strata, key=lambda each: round(each.debt, 6))
            most.debt -= 1
            question = self._take(most, self.batch)
            if question is None:  # the stratum has fewer questions than its share of a batch
                self._seen -= set(most.questions)
                question = self._take(most, self.batch)
            assert question is not None  # a quarantine leaves every stratum questions
            self.batch.append(question)
        if self.settings.databases_per_batch is not None and len(self._strata) == 1:
            self.batch.sort(key=lambda number: self._database[number])
        self._is_flat = [True] * self._batch_size
        return self.batch

    def observe(self, verdicts: Sequence[bool | None], replaced: Mapping[int, int] | None = None) -> set[int]:
        """Note the verdicts on a batch, or on the groups played in place of others.

        Args:
            verdicts: Verdict on each episode, None if masked; groups are contiguous, in order of places.
            replaced: See `replacements`; None for the whole batch.

        Returns:
            Places in the batch whose group is now another one.
        """
        places = dict(enumerate(self.batch)) if replaced is None else replaced
        changed = set()
        for start, (place, question) in enumerate(sorted(places.items())):
            group = verdicts[start * self._group_size : (start + 1) * self._group_size]
            judged = [float(verdict) for verdict in group if verdict is not None]
            is_flat = len(set(judged)) < 2
            seen = torch.tensor([float(len(judged)), sum(judged)], dtype=torch.double)
            for cells, counts in zip(self._cells, self._counts, strict=True):
                counts[cells[question]] += seen
            self._met[question] = self._batches
            self._played.append((is_flat, int(sum(judged)), len(group)))
            if replaced is not None and not is_flat:
                self.batch[place] = question
                changed.add(place)
            self._is_flat[place] &= is_flat
        return changed

    def replacements(self) -> dict[int, int]:
        """Draw questions to play in place of the zero-variance groups of the batch, by place.

        Empty after `resample_flat` rounds, and where no question is left that the batch has not tried.
        """
        if self._rounds == self.settings.resample_flat:
            return {}
        self._rounds += 1
        self._forget_orders()
        found: dict[int, int] = {}
        kept = [question for place, question in enumerate(self.batch) if not self._is_flat[place]]
        for place in [place for place, is_flat in enumerate(self._is_flat) if is_flat]:
            question = self._take(self._stratum_of[self.batch[place]], [*kept, *found.values()])
            if question is not None:
                found[place] = question
        return found

    def quarantine(self, questions: Iterable[int]) -> list[int]:
        """Take questions out of the draw, as long as their stratum keeps more than a batch of others."""
        added = []
        for question in questions:
            stratum = self._stratum_of[question]
            others = set(stratum.questions) - self._quarantined - {question}
            if question not in self._quarantined and len(others) > self._batch_size:
                self._quarantined.add(question)
                stratum.left = [one for one in stratum.left if one != question]
                added.append(question)
        return added

    def metrics(self) -> dict[str, float]:
        """Metrics of the current batch, those of all played episodes beside those of the kept ones."""
        flat, right, episodes = (list(column) for column in zip(*self._played, strict=True))
        return {
            "accuracy/strict_played": sum(right) / sum(episodes),
            "selection/episodes": float(sum(episodes)),
            "selection/frac_verdict_zero_std": sum(self._is_flat) / len(self._is_flat),
            "selection/frac_verdict_zero_std_played": sum(flat) / len(flat),
            "selection/quarantined": float(len(self._quarantined)),
        }

    def rates(self) -> torch.Tensor:
        """Estimated share of right episodes of each question; double, shape (questions,).

        A question borrows from its cell of the finest level, that from its cell of the next coarser one, and
        so on to all questions, and these from one half: each with the weight of `prior` episodes.
        """
        rates = torch.full(self._met.shape, 0.5, dtype=torch.double)
        prior = self.settings.prior
        for cells, counts in zip(self._cells, self._counts, strict=True):
            episodes, right = counts[cells].T
            rates = (right + prior * rates) / (episodes + prior)
        return rates

    def weights(self, questions: Sequence[int]) -> torch.Tensor:
        """Weight of each of these questions in a draw by the method; double, shape (questions,)."""
        rows = torch.tensor(questions)
        rates = self.rates()[rows]
        if self.settings.by == "learnability":
            return rates * (1 - rates)
        if self.settings.by == "regret":
            regret = 1 - (1 - rates) ** self._group_size - rates  # expected best less mean of a group
            stale = (self._batches - self._met[rows]).double()
            regret, stale = (part / part.sum().clamp(min=_ROUNDING) for part in (regret, stale))
            return (1 - _STALENESS) * regret + _STALENESS * stale
        share = _EASY_SHARE + (1 - _EASY_SHARE) * min(1.0, self._progress / self.settings.all_after)
        hardness = -rates if self._hardness is None else self._hardness[rows]
        ties = self._ties[rows].argsort()
        easiest = ties[hardness[ties].argsort(stable=True)][: max(1, math.ceil(share * len(questions)))]
        return torch.zeros_like(rates).index_fill(0, easiest, 1.0)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, of tensors, numbers and lists alone."""
        return {
            "shape": self._shape(),
            "random": self._random.get_state(),
            "strata": [[one.debt, one.explore_debt, list(one.left)] for one in self._strata],
            "counts": [counts.clone() for counts in self._counts],
            "met": self._met.clone(),
            "batches": self._batches,
            "quarantined": sorted(self._quarantined),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state; begin anew, with a warning, where it is absent or of other questions or levels."""
        if state is None or state["shape"] != self._shape():
            reason = "has no state of it" if state is None else "is of other questions, levels or strata"
            logger.warning("selection begins without statistics: the checkpoint %s", reason)
            return
        self._random.set_state(state["random"].cpu())
        for stratum, saved in zip(self._strata, state["strata"], strict=True):
            stratum.debt, stratum.explore_debt, stratum.left = saved
        self._counts = [counts.cpu() for counts in state["counts"]]
        self._met, self._batches = state["met"].cpu(), state["batches"]
        self._quarantined = set(state["quarantined"])

    def _shape(self) -> list[int]:
        strata = [len(stratum.questions) for stratum in self._strata]
        return [len(self._met), *map(len, self._counts), *strata]

    def _take(self, stratum: _Stratum, batch: Sequence[int]) -> int | None:
        """Draw one question that the batch has not tried; None if there is none.

        Limits of the batch that no question meets are dropped, the number of databases first.
        """
        stratum.explore_debt += 1.0 if self.settings.by == "uniform" else self.settings.explore
        explores = round(stratum.explore_debt, 6) >= 1
        stratum.explore_debt -= explores
        for number, fits in enumerate(self._limits(batch)):
            if explores:
                found = self._next_shuffled(stratum, fits)
            else:
                stratum.order = stratum.order or self._order_by_weight(stratum)
                found = next(filter(fits, stratum.order), None)
            if found is not None:
                self._seen.add(found)
                if number and not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "selection.max_share or databases_per_batch cannot be met in batch %d: a question is "
                        "drawn beyond them (logged once)",
                        self._batches,
                    )
                return found
        return None

    def _limits(self, batch: Sequence[int]) -> list[Callable[[int], bool]]:
        """Conditions on the next question of a batch, the strictest first."""
        databases = Counter(self._database[question] for question in batch)
        templates = Counter(self._template[question] for question in batch)
        templates.pop(self._no_template, None)
        most = self.settings.databases_per_batch or self._batch_size
        cap = max(1, int(self.settings.max_share * self._batch_size + _ROUNDING))

        def is_free(question: int) -> bool:
            return question not in self._seen and question not in self._quarantined

        def is_rare(question: int) -> bool:
            return (
                is_free(question)
                and databases[self._database[question]] < cap
                and templates[self._template[question]] < cap
            )

        def is_near(question: int) -> bool:
            return len(databases) < most or self._database[question] in databases

        return [lambda question: is_near(question) and is_rare(question), is_rare, is_free]

    def _next_shuffled(self, stratum: _Stratum, fits: Callable[[int], bool]) -> int | None:
        """Take the next question in shuffled order that fits; the others keep their turn."""
        for _ in range(2):
            for place in range(len(stratum.left) - 1, -1, -1):
                if fits(stratum.left[place]):
                    return stratum.left.pop(place)
            known = [one for one in stratum.questions if one not in self._quarantined]
            if set(known) <= set(stratum.left) or len(stratum.left) >= 2 * len(known):
                break
            if self._is_random:
                known = [
                    known[place] for place in torch.randperm(len(known), generator=self._random).tolist()
                ]
            stratum.left = known[::-1] + stratum.left
        return None

    def _forget_orders(self) -> None:
        for stratum in self._strata:
            stratum.order = []

    def _order_by_weight(self, stratum: _Stratum) -> list[int]:
        """Order a stratum's questions as a draw by weight without replacement would (Gumbel keys)."""
        weights = self.weights(stratum.questions).clamp(min=_ROUNDING)
        uniforms = torch.rand(len(weights), generator=self._random, dtype=torch.double)
        keys = weights.log() - (-uniforms.clamp(min=1e-300).log()).log()
        return [stratum.questions[place] for place in keys.argsort(descending=True).tolist()]


def _cells(columns: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Cell of each question on each level: all questions, each named level within the one before, itself."""
    cells = [torch.zeros(count, dtype=torch.long)]
    for column in columns:
        joint = cells[-1] * (int(column.max()) + 1) + column
        cells.append(joint.unique(return_inverse=True)[1])
    return [*cells, torch.arange(count)]


def _hardness(names: Sequence[str | None]) -> torch.Tensor:
    unknown = sorted(str(name) for name in names if name not in _EASE)
    if unknown:
        raise DataError(
            f"selection.easy_by: difficulty knows {', '.join(_EASE)}, but training questions are "
            f"{', '.join(unknown)}: correct them, or set easy_by: measured"
        )
    return torch.tensor([_EASE[str(name)] for name in names])
