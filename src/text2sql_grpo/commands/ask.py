from pathlib import Path

from text2sql_grpo.commands.options import quiet_console, read_config


def ask(question: str, *, model: str, db: str, config: Path | None = None, json: bool = False) -> int:
    """Answer one question over a database.

    Args:
        question: In quotes.
        model: Model folder, such as RUN/merged, or Hub id.
        db: SQLite or DuckDB file, .sql text, a folder of CSV or Parquet files, or a URL; never written.
        config: Default: that of the model's run, or the defaults.
        json: Print one JSON object.
    """
    run = read_config(config) if config else None
    console = quiet_console(highlight=False)
    from text2sql_grpo.run import ask_job as job

    return job.ask(question, model, db, config=run, console=console, as_json=json)
