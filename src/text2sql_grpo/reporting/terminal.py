"""Console of the commands, for texts of models and databases."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from text2sql_grpo.phrases import printable


class TextConsole(Console):
    """Console that prints any text as it is, but for control characters: it may hold a name or a value.

    Markup and names of emojis are not read, and numbers have no colors.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text of a string; marks of control characters have their place in tables."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of a renderable; rich's own control codes stay."""
        for one in super().render(renderable, options):
            yield one if one.control else one._replace(text=printable(one.text))
