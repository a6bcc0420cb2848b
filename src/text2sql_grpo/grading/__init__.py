"""Official and strict verdicts on a query's result."""

from text2sql_grpo.grading.strict import bird_execution_accuracy, compare_strict, has_top_level_order
from text2sql_grpo.grading.verdict import Grader, Verdict

__all__ = [
    "Grader",
    "Verdict",
    "bird_execution_accuracy",
    "compare_strict",
    "has_top_level_order",
]
