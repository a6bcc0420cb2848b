"""Parsing of Google-style docstrings for help texts."""

import inspect
import re


def opening(of: object) -> str:
    """A docstring without its sections, paragraphs kept."""
    return re.split(r"^(?:Args|Attributes|Raises|Returns):$", inspect.getdoc(of) or "", flags=re.M)[0].strip()


def described(of: object, section: str) -> dict[str, str]:
    """Text of each name in a section, such as `Args` or `Attributes`, each on one line."""
    names = (inspect.getdoc(of) or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", names, re.M)
    return {name: " ".join(text.split()) for name, text in texts}
