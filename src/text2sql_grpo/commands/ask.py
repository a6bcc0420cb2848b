from pathlib import Path

from text2sql_grpo.commands.options import quiet_console, read_config


def ask(question: str, *, model: str, db: Path, config: Path | None = None, json: bool = False) -> int:
    """Answer one question over a SQLite database.

    Args:
        question: In quotes.
        model: Model folder, such as RUN/merged, or Hub id.
        db: SQLite file, never written, or .sql text.
        config: Default: that of the model's run, or the defaults.
        json: Print one JSON object.
    """
    run = read_config(config) if config else None
    console = quiet_console(highlight=False)
    from text2sql_grpo.jobs import ask as job

    return job.ask(question, model, db, config=run, console=console, as_json=json)
