"""Named scores of a finished episode, each with its declared range."""

import math
import re
from itertools import chain, pairwise

from sqlglot import exp

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.grading.verdict import Verdict
from text2sql_grpo.rewards.function import Results, RewardFunction, reward
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import read_query

LONG_EPISODE_TOKENS = 2_048
LONG_RESPONSE_CHARS = 2_048
OVERLONG_FROM = 0.8  # of the episode's token limit
NOISE_S = 0.01  # shorter times count as this

_WORD = re.compile(r"'(?:[^']|'')*'|\w+|[^\w\s]")

_ANY_RUNNING = "any query that runs"
_COINCIDENCE = (
    "results that are equal as sets of rows on one database: hard-coded constants, coincidences, wrong "
    "order, duplicates, anything empty for an empty gold"
)
_PARTS = "results with some of the gold's cells: constants, swapped columns, too many or too few rows"
_LIKE_GOLD = "wrong queries worded like the gold"
_READABLE = "any readable turn"


@reward(when_wrong=(0, 0), when_right=(1, 1))
def execution(verdict: Verdict) -> float:
    """1 if the strict verdict holds, else 0."""
    return float(verdict.strict)


@reward(range=(0, 1), pays_wrong=_COINCIDENCE)
def official_execution(verdict: Verdict) -> float:
    """1 if the official verdict holds (BIRD's execution accuracy), else 0."""
    return float(verdict.official)


@reward(when_right=(1, 1), pays_wrong=_ANY_RUNNING)
def executes(verdict: Verdict) -> float:
    """1 if the submitted query runs, else 0 (also if nothing was submitted)."""
    return float(verdict.executes)


@reward(range=(0, 1), pays_wrong=_READABLE)
def format(episode: Episode) -> float:
    """1 if a query was submitted and every turn could be read, 0.5 if some could not, 0 without a submission.

    No share of the turns, which idle queries would raise.
    """
    kinds = {action.kind for action in episode.actions}
    return (0.5 if "malformed" in kinds else 1.0) if "submit_sql" in kinds else 0.0


@reward(range=(0, 1), pays_wrong=_READABLE)
def well_formed(episode: Episode) -> float:
    """1 if every turn could be read and a query was submitted, else 0."""
    is_readable = all(action.kind != "malformed" for action in episode.actions)
    return float(episode.final_sql is not None and is_readable)


@reward(range=(0, 1), pays_wrong=_LIKE_GOLD)
def schema_linking(episode: Episode, results: Results) -> float:
    """Jaccard index of the tables and columns named by the submitted query and by the gold, in [0, 1].

    0 if nothing was submitted, or if either query cannot be parsed or names nothing.
    """
    if episode.final_sql is None:
        return 0.0
    dialect = parse_address(results.database).dialect
    return _jaccard(schema_items(episode.example.gold_sql, dialect), schema_items(episode.final_sql, dialect))


@reward(range=(0, 1), pays_wrong=_LIKE_GOLD)
def ngrams(episode: Episode) -> float:
    """Jaccard index of the pairs of adjacent words of the submitted query and of the gold, in [0, 1].

    Words, numbers, quoted values and punctuation marks count one each, comments too; case matters only
    inside quotes.
    """
    return _jaccard(_word_pairs(episode.example.gold_sql), _word_pairs(episode.final_sql or ""))


@reward(range=(-1, 0))
def turn_cost(episode: Episode) -> float:
    """0 for one turn, falling linearly to -1 at the episode's turn limit; 0 if the limit is one turn."""
    return -max(len(episode.actions) - 1, 0) / max(episode.max_turns - 1, 1)


@reward(range=(-1, 0))
def length_cost(episode: Episode) -> float:
    """0 for no tokens, falling linearly to -1 at 2,048 sampled tokens and beyond."""
    return -min(sum(episode.completion_mask) / LONG_EPISODE_TOKENS, 1.0)


@reward(range=(-1, 0))
def overlong(episode: Episode) -> float:
    """0 up to 80% of the episode's token limit, falling linearly to -1 at the limit, observations included.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476). Episodes cut at the limit are masked,
    or earn -1 with `on_error: penalty`.
    """
    used = len(episode.completion_ids) / (episode.max_tokens or math.inf)
    return -min(max(used - OVERLONG_FROM, 0.0) / (1 - OVERLONG_FROM), 1.0)


@reward(when_wrong=(0, 0))
def efficiency(verdict: Verdict, results: Results) -> float:
    """The gold's time over the prediction's, at most 1; 0 for a wrong answer.

    One run of each, and times below 10 ms count as 10 ms: a coarse measure.
    """
    predicted = results.predicted
    if not verdict.strict or predicted is None or not (predicted.is_ok and results.gold.is_ok):
        return 0.0
    return min(max(results.gold.elapsed_s, NOISE_S) / max(predicted.elapsed_s, NOISE_S), 1.0)


@reward(range=(0, 1), pays_wrong=_PARTS)
def cell_precision(results: Results) -> float:
    """Share of predicted cells in the gold's result (QATCH), in [0, 1]; 0 without a result."""
    return _share_found(results.predicted, results.gold)


@reward(range=(0, 1), pays_wrong=_PARTS)
def cell_recall(results: Results) -> float:
    """Share of the gold's cells in the predicted result (QATCH), in [0, 1]; 0 without a result."""
    return _share_found(results.gold, results.predicted)


@reward(range=(0, 1), pays_wrong="results with as many rows as the gold")
def tuple_cardinality(results: Results) -> float:
    """Smaller number of rows over the larger one (QATCH), in [0, 1]; 0 without a result."""
    gold, predicted = results.gold, results.predicted
    if predicted is None or not (gold.is_ok and predicted.is_ok):
        return 0.0
    fewer, more = sorted((len(gold.rows), len(predicted.rows)))
    return fewer / more if more else 1.0


@reward(range=(-1, 1), pays_wrong=_COINCIDENCE)
def skyrl(episode: Episode, verdict: Verdict) -> float:
    """-1 for a turn that cannot be read or no submission, else 1 if the official verdict holds, else 0."""
    return float(verdict.official) if well_formed(episode) else -1.0


@reward(range=(-1, 1), pays_wrong=_READABLE)
def sql_r1_format(episode: Episode) -> float:
    """1 if every turn could be read and a query was submitted, else -1."""
    return 1.0 if well_formed(episode) else -1.0


@reward(when_wrong=(-2, 2), when_right=(0, 2), pays_wrong=_ANY_RUNNING)
def sql_r1_execution(episode: Episode, verdict: Verdict) -> float:
    """2 if the query runs, -2 if not; 0 after a bad format."""
    if not well_formed(episode):
        return 0.0
    return 2.0 if verdict.executes else -2.0


@reward(range=(-3, 3), pays_wrong=_COINCIDENCE)
def sql_r1_result(episode: Episode, verdict: Verdict) -> float:
    """3 if the official verdict holds, -3 if not; 0 after a bad format or for a query that does not run."""
    if not (well_formed(episode) and verdict.executes):
        return 0.0
    return 3.0 if verdict.official else -3.0


@reward(range=(0, 1.5), pays_wrong=_COINCIDENCE)
def sql_r1_length(episode: Episode, verdict: Verdict) -> float:
    """Bonus for length in characters if the official verdict holds, else 0.

    Share of the query in the turn that submits it (without its thinking), plus half the share of all turns
    in 2,048.
    """
    if not (well_formed(episode) and verdict.official):
        return 0.0
    turns = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    answer = turns[-1].rpartition("</think>")[2].strip() if turns else ""
    share = min(len(episode.final_sql or "") / max(len(answer), 1), 1.0)
    return share + 0.5 * min(sum(map(len, turns)) / LONG_RESPONSE_CHARS, 1.0)


REWARD_FUNCTIONS = {
    function.name: function for function in [*vars().values()] if isinstance(function, RewardFunction)
}


def schema_items(sql: str, dialect: str = "sqlite") -> set[tuple[str, str]]:
    """Pairs of `table` or `column` and its lower-cased name; empty if the text cannot be parsed.

    Columns go by their bare name. Names that the query makes itself (CTEs, aliases) are left out.

    >>> sorted(schema_items("SELECT count(*) AS n FROM Staff AS s WHERE s.Age > 3 ORDER BY n"))
    [('column', 'age'), ('table', 'staff')]
    """
    query = read_query(sql, dialect).tree
    if query is None:
        return set()
    own = {cte.alias.lower() for cte in query.find_all(exp.CTE)}
    tables = {table.name.lower() for table in query.find_all(exp.Table)} - own
    aliases = {
        alias.alias.lower()
        for alias in query.find_all(exp.Alias)
        if alias.alias.lower() not in {column.name.lower() for column in alias.find_all(exp.Column)}
    }
    columns = {
        column.name.lower() for column in query.find_all(exp.Column) if not isinstance(column.this, exp.Star)
    }
    return {("table", name) for name in tables} | {("column", name) for name in columns - aliases}


def _share_found(cells_of: ExecutionOutcome | None, within: ExecutionOutcome | None) -> float:
    """Share of cells found anywhere in the other result; 1 for two empty results, 0 for one or a failure.

    Cut rows are used as they are.
    """
    if not (cells_of and cells_of.is_ok and within and within.is_ok):
        return 0.0
    cells = list(chain.from_iterable(cells_of.rows))
    known = set(chain.from_iterable(within.rows))
    if not cells or not known:
        return float(not cells and not known)
    return sum(cell in known for cell in cells) / len(cells)


def _word_pairs(sql: str) -> set[tuple[str, str]]:
    words = [word if word.startswith("'") else word.lower() for word in _WORD.findall(sql.rstrip("; \n"))]
    return set(pairwise(words))


def _jaccard(left: set[tuple[str, str]], right: set[tuple[str, str]]) -> float:
    return len(left & right) / max(len(left | right), 1)
