"""Reward functions with a declared range, and the query results they may use."""

import inspect
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from inspect import Parameter
from itertools import takewhile
from typing import Any, SupportsFloat

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ConfigError, RewardError, ServerGoneError
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome

Range = tuple[float, float]  # lowest and highest score

_EPISODE = ("episode", "verdict", "results")
_TRL = ("prompts", "completions", "completion_ids")
_COLUMNS = tuple(column.name for column in fields(Example))


@dataclass(eq=False)
class Results:
    """Outcomes of a question's gold and of the submitted query, run on first access.

    Grading ran both, so that they are mostly in the executor's cache.
    """

    executor: SQLExecutor
    database: Database
    episode: Episode

    @cached_property
    def gold(self) -> ExecutionOutcome:
        """Outcome of the first gold."""
        return self.executor.execute(self.database, self.episode.example.gold_sql)

    @cached_property
    def predicted(self) -> ExecutionOutcome | None:
        """Outcome of the submitted query; None if nothing was submitted."""
        if self.episode.final_sql is None:
            return None
        return self.executor.execute(self.database, self.episode.final_sql)


@dataclass(frozen=True, eq=False)
class RewardFunction:
    """One named score.

    A function takes any of `episode`, `verdict` and `results`, and returns a number.

    Or it has the signature of TRL's reward functions: it takes any of `prompts`, `completions` and
    `completion_ids`, and columns of the questions, which are the fields of `Example`. It is called once for
    each episode, with lists of one, and returns a list of one number. As in TRL, None instead of the number
    leaves the score out of the sum. The score then counts as 0, which must be in its range.

    Attributes:
        name: Its name in the logs, and in the config if it is built in.
        function: Computes the score from what its parameters name.
        range_when_wrong: Lowest and highest score if `verdict.strict` is false.
        range_when_right: The same if it is true.
        pays_wrong: Description of the wrong answers that it pays; empty if none.

    Raises:
        ConfigError: Wrong parameters, an asynchronous function, or a range that is not two finite numbers.
    """

    name: str
    function: Callable[..., Any]
    range_when_wrong: Range = (0, 1)
    range_when_right: Range = (0, 1)
    pays_wrong: str = ""

    def __post_init__(self) -> None:
        for bounds in (self.range_when_wrong, self.range_when_right):
            read_range(bounds, f"the range of {self.name}")
        if any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__))):
            raise ConfigError(f"rewards: {self.name} must not be asynchronous: write def, not async def")
        self._passed  # noqa: B018 (refuses wrong parameters)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function as it was written, without checks."""
        return self.function(*arguments, **named)

    def score(self, episode: Episode, verdict: Verdict, results: Results) -> float | None:
        """Score an episode; None if a function with TRL's signature leaves the score out.

        Raises:
            RewardError: The function raised, or did not return a number in its range.
        """
        low, high = self.range_when_right if verdict.strict else self.range_when_wrong
        where = f"question {episode.example.id}, reason {verdict.reason}"
        try:
            found = self._called(episode, verdict, results)
        except ServerGoneError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f"reward {self.name} raised {type(error).__name__}: {error} "
                f"({line.filename}:{line.lineno}, {where})"
            ) from error
        if self._has_trl_signature:
            has_length = isinstance(found, Iterable) and getattr(found, "ndim", 1) > 0
            scores = list(found) if has_length else []
            if len(scores) != 1:
                raise RewardError(
                    f"reward {self.name} must return a list of 1 score for 1 completion, "
                    f"got {found!r:.100} ({where})"
                )
            [found] = scores
            if found is None and low <= 0 <= high:
                return None
        score = _number(found)
        if score is None:
            raise RewardError(f"reward {self.name} must return a number, got {found!r:.100} ({where})")
        if not low <= score <= high:
            raise RewardError(
                f"reward {self.name} must be from {low} to {high}, got {score} ({where}): correct the "
                "score, or declare its range with @reward(range=(LOW, HIGH))"
            )
        return score

    def _called(self, episode: Episode, verdict: Verdict, results: Results) -> Any:
        given: dict[str, Any] = {"episode": episode, "verdict": verdict, "results": results}
        if self._has_trl_signature:
            prompt = list(takewhile(lambda message: message["role"] != "assistant", episode.messages))
            one = {"prompts": prompt, "completions": episode.messages[len(prompt) :]}
            one |= vars(episode.example) | {"completion_ids": episode.completion_ids}
            given = {name: [value] for name, value in one.items()}
        return self.function(**{name: given[name] for name in self._passed})

    @property
    def _has_trl_signature(self) -> bool:
        return self._passed[0] not in _EPISODE

    @cached_property
    def _passed(self) -> tuple[str, ...]:
        """Names of the arguments that the function gets."""
        try:
            signature = inspect.signature(self.function)
            names = signature.parameters
            kinds = {one.kind for one in names.values()}
            passed = tuple(name for name in _EPISODE if name in names)
            if passed and not names.keys().isdisjoint(_TRL):
                raise TypeError(f"it takes {', '.join(passed)} next to TRL's: one kind or the other")
            takes_all = not passed and Parameter.VAR_KEYWORD in kinds
            if takes_all or not names.keys().isdisjoint(_TRL):
                passed = tuple(name for name in (*_TRL, *_COLUMNS) if takes_all or name in names)
            signature.bind(**dict.fromkeys(passed))
            if not passed or kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:  # a wrapper
                raise TypeError("it takes none of these")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"rewards: {self.name} must take parameters of {', '.join(_EPISODE)}, or of TRL's "
                f"{', '.join(_TRL)} and the columns {', '.join(_COLUMNS)}: {error}"
            ) from error
        return passed


def reward(
    *,
    range: Range = (0, 1),
    when_wrong: Range | None = None,
    when_right: Range | None = None,
    pays_wrong: str = "",
) -> Callable[[Callable[..., Any]], RewardFunction]:
    """Declare the range of a reward function.

    Args:
        range: Lowest and highest score.
        when_wrong: The same for an answer that is wrong by the strict verdict; None for `range`.
        when_right: The same for a right answer; None for `range`.
        pays_wrong: Description of the wrong answers that it pays; empty if none.

    >>> @reward(range=(-1, 0))
    ... def brevity(episode):
    ...     return -min(len(episode.final_sql or "") / 1_000, 1)
    >>> brevity.name, brevity.range_when_wrong
    ('brevity', (-1, 0))
    """

    def declared(function: Callable[..., Any]) -> RewardFunction:
        return RewardFunction(
            function_name(function), function, when_wrong or range, when_right or range, pays_wrong
        )

    return declared


def function_name(function: object) -> str:
    """Name under which a function's score is logged.

    Raises:
        ConfigError: It cannot be called, or is a lambda.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or name == "<lambda>":
        raise ConfigError(
            f"rewards: a reward must be a function with a name, got {function!r:.100}: write def, name it by "
            "RewardFunction(NAME, function), or give it a weight by a pair (function, weight)"
        )
    return str(name)


def read_range(bounds: object, what: str) -> Range:
    """Check a lowest and a highest number; `what` they are opens the error.

    Raises:
        ConfigError: They are not two finite numbers, the lowest first.
    """
    if isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(is_number, bounds)):
        low, high = bounds
        if low <= high:
            return (low, high)
    raise ConfigError(f"rewards: {what} must be two finite numbers, the lowest first, got {bounds!r}")


def is_number(value: object) -> bool:
    """True for a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: object) -> float | None:
    """Float of a number, or of an array or tensor of one; None for anything else."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError):  # of several
        return None
