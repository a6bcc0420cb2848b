"""Held-out questions that occur in files which a model may have been trained on."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError

N_WORDS = 8
FEWEST_WORDS = 4  # of a question or gold query that counts as a whole
_WORD = re.compile(r"\w+")


def seen_questions(examples: Iterable[Example], corpora: Sequence[Path]) -> set[str]:
    """Ids of the questions of which eight words in a row, or all of four to seven, occur in a file.

    The gold query counts as well as the question. Files of any kind are read as text, line by line.

    Raises:
        DataError: A file cannot be read.
    """
    known: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for example in examples:
        for text in (example.question, example.gold_sql):
            words = _words(text)
            for at in range(max(len(words) - N_WORDS, 0) + 1):
                n_gram = tuple(words[at : at + N_WORDS])
                if len(n_gram) >= FEWEST_WORDS:
                    known[n_gram].add(example.id)
    lengths = {len(n_gram) for n_gram in known}
    seen: set[str] = set()
    for path in corpora:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    words = _words(line)
                    for length in lengths:
                        for at in range(len(words) - length + 1):
                            seen |= known.get(tuple(words[at : at + length]), set())
        except OSError as error:
            raise DataError(f"cannot read a file to look for questions in: {error}") from error
    return seen


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
