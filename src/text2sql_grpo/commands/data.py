"""Make questions, compare question files."""

from pathlib import Path

from text2sql_grpo.bundled import located
from text2sql_grpo.commands.options import writing_to


def make(
    *, databases: Path = Path("data/databases"), out: Path = Path("data/questions"), seed: int = 0
) -> int:
    """Make questions with checked golds from databases.

    Args:
        databases: Folder of databases; the default is the package's own where the working folder has none.
        out: Folder to write.
        seed: Random seed.
    """
    from text2sql_grpo.data.generator import make_questions

    databases = located(databases)
    with writing_to(out):
        make_questions(databases, out, seed=seed)
    print(f"wrote the questions for {databases} to {out}")
    return 0


def overlap(*, questions: Path = Path("data/questions")) -> int:
    """Print what each file shares with the training files.

    Args:
        questions: Folder of question files; the default is the package's own where the working folder has
            none.
    """
    from text2sql_grpo.data import overlap as shared

    print(shared.format_overlap(shared.overlap(located(questions))))
    return 0
