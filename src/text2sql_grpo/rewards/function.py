"""Type of reward functions, and the query results they may use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.grading.engine_neighbours import EngineNeighbours
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome


@dataclass(eq=False)
class Results:
    """Outcomes of a question's gold and of the submitted query, run on first access.

    Grading ran both, so that they are mostly in the executor's cache.

    Attributes:
        database: Database of the question.
        neighbours: Neighbours that grading asks for; None if it grades without.
    """

    executor: SQLExecutor
    database: Database
    episode: Episode
    neighbours: EngineNeighbours | Neighbours | None = None

    @property
    def neighbours_asked(self) -> int:
        """Number of neighbours that grading asks for."""
        return self.neighbours.max_neighbours if self.neighbours else 0

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

    @cached_property
    def on_neighbours(self) -> tuple[tuple[ExecutionOutcome, ExecutionOutcome], ...]:
        """Outcomes of the first gold and of the submitted query on each neighbour; empty without either."""
        gold_sql, sql = self.episode.example.gold_sql, self.episode.final_sql
        if self.neighbours is None or sql is None:
            return ()
        paths = self.neighbours.of(self.database, gold_sql)
        outcomes = self.executor.execute_many([(path, query) for path in paths for query in (gold_sql, sql)])
        return tuple(zip(outcomes[::2], outcomes[1::2], strict=True))


@dataclass(frozen=True)
class RewardFunction:
    """One named score.

    Attributes:
        name: Its key in the config and in the logs.
        function: Score from an episode, its verdict and the two results.
        range_when_wrong: Lowest and highest value if `verdict.strict` is false.
        range_when_right: The same if it is true.
        pays_wrong: Description of the wrong answers that it pays; empty if none.
    """

    name: str
    function: Callable[[Episode, Verdict, Results], float]
    range_when_wrong: tuple[float, float]
    range_when_right: tuple[float, float]
    pays_wrong: str = ""
