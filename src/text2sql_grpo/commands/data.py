"""Make questions, compare question files."""

from pathlib import Path

from text2sql_grpo.bundled import located
from text2sql_grpo.commands.options import writing_to


def make(*, databases: str = "data/databases", out: Path = Path("data/questions"), seed: int = 0) -> int:
    """Make questions with checked golds from databases.

    Args:
        databases: Folder of databases, a file, a folder of rows or a URL; the default is the package's own
            where the working folder has none.
        out: Folder to write.
        seed: Random seed.
    """
    from text2sql_grpo.synthesis.generator import make_questions

    where = databases if "://" in databases else located(Path(databases))
    with writing_to(out):
        count = make_questions(where, out, seed=seed)
    print(f"wrote {count} questions for {where} to {out}")
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
