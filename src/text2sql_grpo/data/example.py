"""One question with its gold answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One row of a question file.

    Attributes:
        id: Unique within a run.
        database: Name of the database, without folder or ending.
        question: As a person asks it.
        gold_sql: The accepted answer; executed and checked when loaded.
        difficulty: `easy`, `medium` or `hard`.
        split: `demonstrations`, `train`, `dev`, `test_values`, `test_templates`, `test_databases`
            or any other name.
        family: Kind of question (`lookup`, `count`, `join`, ...), for reports.
        template: Name of its template in the generator; None for questions written by hand.
        look_sql: For the look-up family: a query whose rows show the stored form of the value.
        guess_sql: For the look-up family: the gold with the value as in the question.
        check_sql: For other families with a value that is stored as in the question: a query that shows
            the value; None without one.
        gold_is_empty: True if the gold rightly returns no rows.
        other_golds: Further accepted answers, whose results may differ from the gold's.
    """

    id: str
    database: str
    question: str
    gold_sql: str
    difficulty: str = "medium"
    split: str = "train"
    family: str = "other"
    template: str | None = None
    look_sql: str | None = None
    guess_sql: str | None = None
    check_sql: str | None = None
    gold_is_empty: bool = False
    other_golds: tuple[str, ...] = ()


def folded(text: str) -> str:
    """Fold case and blanks of a question or query, to find copies."""
    return " ".join(text.lower().split())
