"""Hook of mkdocs: links out of docs/ lead to the repository."""

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Replace `](../FILE)` by the file's address in the repository."""
    return re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)
