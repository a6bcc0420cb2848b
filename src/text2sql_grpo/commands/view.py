"""`view`: the page of a run folder."""

import webbrowser
from pathlib import Path

from text2sql_grpo.commands.options import writing_to
from text2sql_grpo.errors import DataError


def view(run: Path, *, browser: bool = True) -> int:
    """Write report.html of a run folder, and open it: result, curve, answers and episodes.

    One file that opens from disk, without network; report.json beside it holds the same data. Training
    writes both at its end.

    Args:
        run: Run folder; one that is still written will do.
        browser: Open the page.
    """
    if not run.is_dir():
        raise DataError(f"no such folder: {run}")
    from text2sql_grpo.reporting.report_page import write_report

    with writing_to(run):
        page = write_report(run)
    print(page)
    if browser:
        webbrowser.open(page.resolve().as_uri())
    return 0
