"""Parts of messages: counts with their noun, lists that are cut, and text without control characters."""

from collections.abc import Sequence


def many(count: int, noun: str) -> str:
    """Count and noun, the noun in the singular for 1.

    >>> many(1, "process"), many(2, "process"), many(0, "other query")
    ('1 process', '2 processes', '0 other queries')
    """
    if count != 1:
        noun = {"y": f"{noun[:-1]}ies", "s": f"{noun}es"}.get(noun[-1], f"{noun}s")
    return f"{count} {noun}"


def listed(names: Sequence[str], n_shown: int) -> str:
    """First names of a list, and the number of the others.

    >>> listed(["ward", "staff", "visit"], 2)
    'ward, staff and 1 more'
    """
    more = f" and {len(names) - n_shown} more" if len(names) > n_shown else ""
    return ", ".join(names[:n_shown]) + more


def printable(text: str) -> str:
    """Text with a mark in the place of each character that a terminal might obey.

    >>> printable("red \\x1b[31m name")
    'red �[31m name'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
