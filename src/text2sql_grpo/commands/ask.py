import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.commands.options import Count, check_models, check_one_of, importing, quiet_console
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.data.databases import open_address
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.run_folder import find_config

if TYPE_CHECKING:
    from text2sql_grpo.evaluation.endpoint import Endpoint


def ask(
    question: str | None = None,
    *,
    db: str,
    model: str | None = None,
    base_url: str | None = None,
    served_model: str | None = None,
    config: Path | None = None,
    samples: Count = 1,
    json: bool = False,
) -> int:
    """Answer a question over one database; without a question, a session of them.

    Prints each exploratory query with its rows, the final SQL and its result; exit code 1 without a result.
    In a session the model is loaded once, and \\help lists the commands. Example: `text2sql-grpo ask "How
    many orders came in May?" --model runs/my/merged --db shop.sqlite`

    Args:
        question: In quotes; left out for a session.
        db: SQLite or DuckDB file, .sql text, a folder of CSV or Parquet files, or a URL; never written.
        model: Model folder, such as RUN/merged, an adapter, a run folder, or Hub id.
        base_url: OpenAI-compatible endpoint of a model, instead of --model; needs --served_model.
        served_model: Name of the model at --base_url.
        config: Default: that of the model's run, or the defaults.
        samples: Answers of each question; of several, their agreement is the confidence.
        json: Print one JSON object.
    """
    source = model_source(model, base_url, served_model)
    if json and question is None:
        raise ConfigError("--json needs a question")
    if question is not None and not question.strip():
        raise DataError("the question is empty")
    run = config_of(model, config)
    console = quiet_console()
    open_address(db)  # fails before anything slow
    with importing():
        from text2sql_grpo.serving.agent import open_agent
    from text2sql_grpo.reporting.shown import asked_record, show_asked

    with open_agent(source, db, run, samples=samples) as agent:
        if question is None:
            from text2sql_grpo.serving.ask_session import AskSession

            AskSession(agent, console).run()
            return 0
        reply = agent.ask(question)
        address = agent.environment.databases.address(agent.database)
    if json:
        record = {"model": model or served_model, "database": str(address), **asked_record(reply.asked)}
        print(json_text.dumps(record | {"confidence": reply.confidence, "is_sure": reply.is_sure}))
    else:
        show_asked(reply.asked, console)
        if reply.confidence is not None:
            console.print(f"{reply.confidence:.0%} of {samples} answers agree")
    return int(bool(reply.asked.failure))


def model_source(model: str | None, base_url: str | None, served_model: str | None) -> "str | Endpoint":
    """Model of `ask` and `serve`, checked as far as nothing slow is needed."""
    from text2sql_grpo.evaluation.endpoint import Endpoint

    check_one_of(model=model, base_url=base_url)
    if (base_url is None) != (served_model is None):
        raise ConfigError("--base_url and --served_model go together: give both")
    check_models(model)
    return Endpoint(base_url, str(served_model)) if base_url else str(model)


def config_of(model: str | None, config: Path | None) -> Config | None:
    """Config that is named, else that of the model's run; None if there is neither."""
    found = config or (find_config(model) if model else None)
    return load_config(found) if found else None
