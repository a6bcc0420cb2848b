"""Drafts of the next tokens: what followed the same tokens before, in the prompt or in the group.

As prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over all episodes of
a group: they name the same tables and often say the same. A pass checks the tokens of a draft together.
"""

from collections.abc import Iterable, Sequence

_KEY = 2  # tokens that a draft follows


class Drafts:
    """Texts of one prompt and its episodes, searched by their last tokens.

    Args:
        prompt: Token ids that the episodes share.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self.extend([], prompt)

    def extend(self, text: list[int], tokens: Iterable[int]) -> None:
        """Append tokens to a text, and remember what follows what."""
        for token in tokens:
            self._places[tuple(text[-_KEY:])] = text, len(text)
            text.append(token)

    def after(self, text: list[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow a text; empty if its last tokens were not seen before."""
        other, place = self._places.get(tuple(text[-_KEY:]), (text, len(text)))
        followed = other[place : place + limit]
        if other is text and followed:  # as if it repeated itself
            followed = (followed * -(-limit // len(followed)))[:limit]
        return followed
