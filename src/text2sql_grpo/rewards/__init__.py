"""Named scores and one reward of a finished episode."""

from text2sql_grpo.rewards.episode_flags import FLAGS
from text2sql_grpo.rewards.function import Results, RewardFunction, reward
from text2sql_grpo.rewards.judge import Answer, Judge, episode_metrics, open_grader
from text2sql_grpo.rewards.mix import RewardMix, reward_mix

__all__ = [
    "FLAGS",
    "Answer",
    "Judge",
    "Results",
    "RewardFunction",
    "RewardMix",
    "episode_metrics",
    "open_grader",
    "reward",
    "reward_mix",
]
