"""Reward functions by what a user hands in: a function, or a name of a built-in or an own one."""

import difflib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from text2sql_grpo.errors import ConfigError
from text2sql_grpo.rewards.function import RewardFunction, function_name
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS

Reward = str | RewardFunction | Callable[..., Any]

SETTINGS = ("preset", "clip", "on_error")  # names in the section `rewards` that are no rewards


def reward_function(given: Reward) -> RewardFunction:
    """Make a `RewardFunction` of a function, a built-in name, or `module:function`.

    A module is imported from the Python path or the working folder. A function without a declared range must
    return scores in [0, 1].

    Raises:
        ConfigError: An unknown name, a module or function that cannot be imported, or see `RewardFunction`.
    """
    if isinstance(given, str):
        given = REWARD_FUNCTIONS.get(given) or _imported(given)
    return given if isinstance(given, RewardFunction) else RewardFunction(function_name(given), given)


def _imported(path: str) -> Any:
    module, colon, attribute = path.partition(":")
    if not colon:
        known = [*REWARD_FUNCTIONS, *SETTINGS]
        close = difflib.get_close_matches(path, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}, or module:function"
        raise ConfigError(f"rewards: unknown name {path!r}: {hint}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return attrgetter(attribute)(import_module(module))
    except Exception as error:  # of the user's module
        raise ConfigError(
            f"rewards: cannot import {path}: {type(error).__name__}: {error} (modules are found in the "
            "folder of the config file, in the working folder and by PYTHONPATH)"
        ) from error
