"""A finished episode becomes named scores and one reward."""

from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS, RewardFunction
from text2sql_grpo.rewards.mix import RewardMix

__all__ = ["REWARD_FUNCTIONS", "RewardFunction", "RewardMix"]
