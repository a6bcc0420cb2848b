"""A policy that says what a test tells it to, and a small shop to ask about."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Continuations

ASSISTANT = "<|im_start|>assistant\n"
SHOP = """
CREATE TABLE branch (code TEXT PRIMARY KEY, city TEXT, staff INTEGER);
INSERT INTO branch VALUES ('LIS-02', 'Lisbon', 7), ('OPO-01', 'Porto', 4), ('FAO-09', NULL, 4);
"""


class ScriptedPolicy:
    """Writes given turns, found by the question in the prompt and the number of turns before.

    A turn is a text, which gets its end-of-turn token, or bare token ids.

    Attributes:
        batches: The prompts of each call, as text.
    """

    def __init__(self, chat: ChatFormat, turns: Mapping[str, Sequence[str | list[int]]]) -> None:
        self._chat = chat
        self._turns = turns
        self.batches: list[list[str]] = []

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        texts = [self._chat.tokenizer.decode(prompt) for prompt in prompts]
        self.batches.append(texts)
        return Continuations([self._reply(text)[:max_new_tokens] for text in texts])

    def _reply(self, prompt: str) -> list[int]:
        (question,) = [question for question in self._turns if question in prompt]
        turn = self._turns[question][prompt.count(ASSISTANT) - 1]
        return self._chat.turn_ids(turn) if isinstance(turn, str) else turn


def shop(folder: Path, **fields: Any) -> Environment:
    """An environment over one database, `shop`, with one table of three branches; without test databases."""
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sql").write_text(SHOP, "utf-8")
    return Environment(folder / "databases", test_databases=0, **fields)


def shop_environment(folder: Path, settings: EnvironmentSettings) -> SQLEnvironment:
    """The sessions of `shop`."""
    return shop(folder, **vars(settings)).sessions


def ask(
    question: str, gold_sql: str = "SELECT staff FROM branch WHERE code = 'LIS-02'", **fields: str
) -> Example:
    """An example about the shop, with its question as its id."""
    return Example(id=question, database="shop", question=question, gold_sql=gold_sql, **fields)
