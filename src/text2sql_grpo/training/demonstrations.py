"""Demonstrations: questions answered by a script in the real environment.

They are what a log of people would hold: some look a stored value up before they answer, some
answer at once with the words of the question, and are often wrong.
"""

from collections.abc import Sequence

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.training.warm_start import Demonstrations


def looking_turns(example: Example) -> list[str]:
    """Looks the stored value up, then answers; one turn for questions that need no look."""
    answer = f"<answer>{example.gold_sql}</answer>"
    return [f"<sql>{example.look_sql}</sql>", answer] if example.look_sql else [answer]


def guessing_turns(example: Example) -> list[str]:
    """Answers at once, with the value as the question says it."""
    return [f"<answer>{example.guess_sql or example.gold_sql}</answer>"]


def play(example: Example, turns: Sequence[str], environment: SQLEnvironment, chat: ChatFormat) -> Episode:
    """The episode of a script that writes these turns; tokens and mask as in training."""
    session = environment.session(example)
    episode = session.episode
    episode.prompt_ids = chat.prompt_ids(session.start())
    for turn in turns:
        sampled = chat.turn_ids(turn)
        episode.completion_ids += sampled
        episode.completion_mask += [1] * len(sampled)
        reply = session.step(turn)
        if reply is None:
            break
        bridge = chat.bridge_ids(reply, last_token_id=sampled[-1])
        episode.completion_ids += bridge
        episode.completion_mask += [0] * len(bridge)
    return episode


def demonstrate(examples: Sequence[Example], environment: SQLEnvironment, chat: ChatFormat) -> Demonstrations:
    """Both habits' episodes for each question."""
    looking = [play(example, looking_turns(example), environment, chat) for example in examples]
    guessing = [
        play(example, guessing_turns(example), environment, chat) if example.guess_sql else looked
        for example, looked in zip(examples, looking, strict=True)
    ]
    return Demonstrations(looking, guessing)
