"""Official and strict verdicts on a query's result."""

from text2sql_grpo.grading.bird import bird_execution_accuracy
from text2sql_grpo.grading.official import OfficialVerdicts, official_verdicts
from text2sql_grpo.grading.strict import compare_strict, has_top_level_order
from text2sql_grpo.grading.verdict import Grader, Verdict

__all__ = [
    "Grader",
    "OfficialVerdicts",
    "Verdict",
    "bird_execution_accuracy",
    "compare_strict",
    "has_top_level_order",
    "official_verdicts",
]
