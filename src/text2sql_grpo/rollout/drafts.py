"""Draft tokens for speculative decoding, by prompt lookup over the episodes of a group.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) proposes the tokens that
followed the last n-gram before. Episodes of a group name the same tables and often repeat each other.
"""

from collections.abc import Iterable, Sequence

_NGRAM = 2  # tokens


class Drafts:
    """N-gram index of a prompt, which texts share, and of these texts."""

    def __init__(self, prompt: Sequence[int]) -> None:
        # N-gram -> a text, and the index of the token that followed it there.
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self.extend([], prompt)

    def extend(self, text: list[int], tokens: Iterable[int]) -> None:
        """Append tokens to a text and index them; a later place of an n-gram replaces an earlier one."""
        for token in tokens:
            self._places[tuple(text[-_NGRAM:])] = text, len(text)
            text.append(token)

    def after(self, text: list[int], limit: int) -> list[int]:
        """Return up to `limit` draft tokens of a text; none if its last n-gram has no place."""
        other, place = self._places.get(tuple(text[-_NGRAM:]), (text, len(text)))
        draft = other[place : place + limit]
        if other is text and draft:  # it repeats itself
            draft = (draft * -(-limit // len(draft)))[:limit]
        return draft
