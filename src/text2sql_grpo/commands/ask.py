import json as json_text
from pathlib import Path

from text2sql_grpo.commands.options import check_models, importing, quiet_console, read_config
from text2sql_grpo.run_folder import find_config


def ask(question: str, *, model: str, db: str, config: Path | None = None, json: bool = False) -> int:
    """Answer one question over one database.

    Prints each exploratory query with its rows, the final SQL and its result; exit code 1 without a result.

    Args:
        question: In quotes.
        model: Model folder, such as RUN/merged, an adapter, a run folder, or Hub id.
        db: SQLite or DuckDB file, .sql text, a folder of CSV or Parquet files, or a URL; never written.
        config: Default: that of the model's run, or the defaults.
        json: Print one JSON object.
    """
    check_models(model)
    found = config or find_config(model)
    run = read_config(found) if found else None
    console = quiet_console(highlight=False)
    from text2sql_grpo.config import EnvironmentConfig, RolloutConfig
    from text2sql_grpo.data.databases import open_address
    from text2sql_grpo.evaluation.bench import Environment
    from text2sql_grpo.reporting.shown import asked_record, show_asked
    from text2sql_grpo.sql.personal import PERSONAL

    name, address = open_address(db)
    settings = (run.environment if run else EnvironmentConfig()).settings()
    hide = run.data.hide if run else [PERSONAL]
    with Environment({name: address}, test_databases=0, hide=hide, **vars(settings)) as environment:
        environment.sessions.schema_text(name)  # fails before anything slow
        with importing():
            from text2sql_grpo.evaluation import sampler  # noqa: F401 (its imports, torch's among them)
        asked = environment.ask(
            question,
            model,
            rollout=run.rollout if run else RolloutConfig(),
            template_options=run.grpo.get("chat_template_kwargs") if run else None,
        )
    if json:
        print(json_text.dumps({"model": model, "database": str(address), **asked_record(asked)}))
    else:
        show_asked(asked, console)
    return int(bool(asked.failure))
