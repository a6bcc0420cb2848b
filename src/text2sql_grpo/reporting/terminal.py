"""Console of the commands, for texts of models and databases."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from text2sql_grpo.phrases import printable


class TextConsole(Console):
    """Console that reads no markup and prints no control characters: any text may hold a name or a value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of a renderable; rich's own control codes stay."""
        for one in super().render(renderable, options):
            yield one if one.control else one._replace(text=printable(one.text))
