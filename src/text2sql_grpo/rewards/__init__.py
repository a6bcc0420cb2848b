"""Named scores and one reward of a finished episode."""

from text2sql_grpo.rewards.episode_flags import FLAGS, episode_flags
from text2sql_grpo.rewards.function import Results, RewardFunction, reward
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS
from text2sql_grpo.rewards.judge import Answer, Judge, episode_metrics, open_grader
from text2sql_grpo.rewards.mix import RewardMix, reward_mix
from text2sql_grpo.rewards.presets import PRESETS

__all__ = [
    "FLAGS",
    "PRESETS",
    "REWARD_FUNCTIONS",
    "Answer",
    "Judge",
    "Results",
    "RewardFunction",
    "RewardMix",
    "episode_flags",
    "episode_metrics",
    "open_grader",
    "reward",
    "reward_mix",
]
