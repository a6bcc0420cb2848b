"""Accuracy cap on look-up questions of a policy without exploratory queries; computed, not trained.

A blind policy has the question's words but not the stored form of the value. Each strategy here is one
predicate in place of the gold's; a blind policy may use any, but must pick without an exploratory query.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlglot import ParseError, exp, parse_one

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.grading import Grader

# Patterns of a predicate that ignores case, SQLite's LIKE or ILIKE, from the words of the question.
_PATTERNS: dict[str, Callable[[str], str]] = {
    "as said": lambda said: said,
    "begins as said": lambda said: f"{said}%",
    "contains what is said": lambda said: f"%{said}%",
    "contains the last word": lambda said: f"%{said.split()[-1]}%",
    "begins with 3 letters": lambda said: f"{said[:3]}%",
    "contains 3 letters": lambda said: f"%{said[:3]}%",
    "begins with 1 letter": lambda said: f"{said[:1]}%",
    "contains 1 letter": lambda said: f"%{said[:1]}%",
    "begins with the initials": lambda said: "".join(word[0] for word in said.split()) + "%",
}


@dataclass(frozen=True)
class BlindCap:
    """Accuracy of blind strategies on look-up questions.

    Attributes:
        by_strategy: Accuracy of each strategy on all questions.
        best: Best of them: the cap of a policy with one strategy.
        any: Questions that at least one strategy answers: the cap with the best strategy per question.
    """

    by_strategy: dict[str, Accuracy]
    best: Accuracy
    any: Accuracy


def blind_cap(examples: Sequence[Example], databases: Databases, grader: Grader) -> BlindCap:
    """Compute the cap over the examples with a `guess_sql`.

    Raises:
        DataError: A `guess_sql` that is not the gold with other values.
    """
    asked = [example for example in examples if example.guess_sql]
    right: dict[str, list[bool]] = {name: [] for name in _PATTERNS}
    for example in asked:
        database, dialect = databases.address(example.database), databases.dialect(example.database)
        for name, sql in _guesses(example, dialect).items():
            verdict = grader.grade(database, example.gold_sql, sql, other_golds=example.other_golds)
            right[name].append(verdict.strict)
    by_strategy = {name: _accuracy(asked, flags) for name, flags in right.items()}
    return BlindCap(
        by_strategy=by_strategy,
        best=max(by_strategy.values(), key=lambda accuracy: accuracy.correct),
        any=_accuracy(asked, [any(flags) for flags in zip(*right.values(), strict=True)]),
    )


def _accuracy(asked: Sequence[Example], flags: Sequence[bool]) -> Accuracy:
    return Accuracy.of(zip([example.database for example in asked], flags, strict=True))


def _guesses(example: Example, dialect: str) -> dict[str, str]:
    try:
        gold = parse_one(example.gold_sql, dialect=dialect)
        guess = parse_one(example.guess_sql or "", dialect=dialect)
        pairs = zip(gold.find_all(exp.Literal), guess.find_all(exp.Literal), strict=True)
        changed = {stored.this: said.this for stored, said in pairs if stored != said}
        if not changed:
            raise ValueError("nothing changed")
    except (ParseError, ValueError) as error:
        raise DataError(
            "a guess_sql must be the gold with other values, "
            f"got {example.guess_sql!r} for {example.gold_sql!r} (question {example.id})"
        ) from error
    return {
        name: _with_patterns(gold, {stored: pattern(said) for stored, said in changed.items()}, dialect)
        for name, pattern in _PATTERNS.items()
    }


def _with_patterns(gold: exp.Expr, patterns: dict[str, str], dialect: str) -> str:
    """The gold with each `column = stored` replaced by a predicate that ignores case."""
    like = exp.Like if dialect == "sqlite" else exp.ILike

    def replace(node: exp.Expr) -> exp.Expr:
        value = node.expression if isinstance(node, exp.EQ) else None
        if isinstance(value, exp.Literal) and value.this in patterns:
            return like(this=node.this, expression=exp.Literal.string(patterns[value.this]))
        return node

    return gold.copy().transform(replace).sql(dialect=dialect)
