"""`view`: the page of a run folder."""

import webbrowser
from pathlib import Path

from text2sql_grpo.commands.options import Port, writing_to
from text2sql_grpo.errors import DataError, needs_extra


def view(run: Path, more: list[Path] | None = None, *, port: Port | None = None, browser: bool = True) -> int:
    """Open the page of a run: result, curve, answers and episodes.

    One file, report.html, that opens from disk, without network; report.json next to it holds the same data.
    Training writes both at its end. With --port, or with several runs, a server on 127.0.0.1 shows the page
    instead, and it goes on while the runs do. Example: `text2sql-grpo view runs/my`

    Args:
        run: Run folder, also of a run that goes on; or the .json of an evaluation.
        more: Further run folders, shown side by side.
        port: Port of the server; 0 for a free one.
        browser: Open the page.
    """
    runs = [run, *(more or ())]
    for one in runs:
        if not one.exists():
            raise DataError(f"no such folder: {one}")
    from text2sql_grpo.reporting.report_page import evaluation_report, run_report, write_page, write_report

    if port is None and len(runs) == 1:
        with writing_to(run):
            is_file = run.is_file()
            page = (
                write_page(run.with_suffix(".html"), evaluation_report(run)) if is_file else write_report(run)
            )
        print(page)
        if browser:
            webbrowser.open(page.resolve().as_uri())
        return 0
    for one in runs:
        run_report(one)  # fails before a server starts
    with needs_extra("serve", "view --port"):
        from text2sql_grpo.reporting.live_view import open_live
    server, listener, address = open_live(runs, port or 0)
    print(f"{address} (Ctrl-C stops it)", flush=True)
    if browser:
        webbrowser.open(address)
    server.run(sockets=[listener])
    return 0
