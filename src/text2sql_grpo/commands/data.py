"""Make questions, write words to edit, compare question files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.bundled import located
from text2sql_grpo.commands.options import writing_to

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from text2sql_grpo.synthesis.generator import Made, TableReport

MAX_TABLES_SHOWN = 30


def make(
    *,
    databases: str = "data/databases",
    out: Path = Path("data/questions"),
    words: Path | None = None,
    hide: list[str] | None = None,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Make questions with checked golds from databases.

    Prints how many questions each table got, and why one got none. Exits with 1 if a table with rows got
    none, or a file came out empty.

    Args:
        databases: Folder of databases, a file, a folder of rows or a URL; the default is the package's own
            where the working folder has none.
        out: Folder to write. Files that were edited stay as they are.
        words: YAML with names in plain words, as `data words` writes it, or a folder of them.
        hide: Tables and columns not to be asked about, as `data.hide`; default: personal data.
        seed: Random seed.
        json: Print JSON instead of a report.
    """
    import json as json_text
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import Progress

    from text2sql_grpo.synthesis.generator import PERSONAL, QUESTION_SETS, make_questions

    where = databases if "://" in databases else located(Path(databases))
    with writing_to(out), Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Questions", total=sum(one.count for one in QUESTION_SETS))
        patterns = PERSONAL if hide is None else hide
        made = make_questions(
            where, out, seed=seed, words=words, hide=patterns, on_question=lambda: bar.advance(task)
        )
    if json:
        record = {"files": made.files, "tables": [asdict(one) for one in made.tables], "lacks": made.lacks}
        print(json_text.dumps(record, ensure_ascii=False))
        return 1 if made.lacks else 0
    console = Console()
    show_made(made, console)
    console.print(f"wrote {made.n_questions} questions for {where} to {out}", soft_wrap=True, markup=False)
    return 1 if made.lacks else 0


def show_made(made: Made, console: Console) -> None:
    """Print how many questions each table got, and what is short."""
    console.print(_tables(made.tables))
    for name, count in made.files.items():
        if count < made.wanted[name]:
            console.print(f"{name}: wanted {made.wanted[name]} questions, got {count} different ones")
    if made.lacks:
        text = f"without questions: {', '.join(made.lacks)}; `data words` writes names that can be edited"
        console.print(text, style="red", soft_wrap=True, markup=False)


def _tables(reports: Sequence[TableReport]) -> Table:
    """Table of the reports, those without questions first, if they are many."""
    from rich.table import Table
    from rich.text import Text

    table = Table("table", "rows", "questions", "remark", box=None, pad_edge=False)
    is_one = len({report.database for report in reports}) == 1
    ordered = sorted(reports, key=lambda one: one.n_questions) if len(reports) > MAX_TABLES_SHOWN else reports
    for one in ordered[:MAX_TABLES_SHOWN]:
        name = one.table if is_one else f"{one.database}.{one.table}"
        table.add_row(Text(name), str(one.n_rows), str(one.n_questions), one.reason)
    rest = ordered[MAX_TABLES_SHOWN:]
    if rest:
        counts = f"{rest[0].n_questions} to {rest[-1].n_questions}"
        table.add_row(f"and {len(rest)} more", "", counts, "")
    return table


def words(*, databases: str, out: Path = Path("words.yaml")) -> int:
    """Write how tables, columns and values are called in questions, to be edited.

    What the file holds already stays; new tables and columns are added. `data make --words` reads it.

    Args:
        databases: As data.databases; of a folder of several, each gets a file in a folder.
        out: File to write; a folder for several databases.
    """
    from text2sql_grpo.data.databases import Databases
    from text2sql_grpo.sql import SQLExecutor
    from text2sql_grpo.synthesis.generator import PERSONAL
    from text2sql_grpo.synthesis.profile import Profile
    from text2sql_grpo.synthesis.words import read_words, with_words, write_words

    found = Databases(databases)
    with writing_to(out), SQLExecutor() as executor:
        for name in found.names():
            file = out if len(found.names()) == 1 else out.with_suffix("") / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            known = read_words(file) if file.exists() else {}
            opened = with_words(Profile(executor, found.address(name), PERSONAL), name, known, place=file)
            added = write_words(opened, file)
            print(f"{file}: {added} words added; edit them, then: data make --databases .. --words {file}")
    return 0


def overlap(*, questions: Path = Path("data/questions"), databases: str | None = None) -> int:
    """Print what each file shares with the training files.

    Args:
        questions: Folder of question files; the default is the package's own where the working folder has
            none.
        databases: Their databases, as data.databases, if some are no SQLite files.
    """
    from text2sql_grpo.data import overlap as shared
    from text2sql_grpo.data.databases import Databases

    rows = shared.overlap(located(questions), Databases(databases) if databases else None)
    print(shared.format_overlap(rows))
    return 0
