import os
import secrets
import socket
from pathlib import Path

from text2sql_grpo.commands.ask import config_of, model_source
from text2sql_grpo.commands.options import Count, Port, importing, quiet_console, writing_to
from text2sql_grpo.errors import ConfigError, needs_extra

TOKEN_VARIABLE = "TEXT2SQL_GRPO_TOKEN"


def serve(
    *,
    db: str,
    model: str | None = None,
    base_url: str | None = None,
    served_model: str | None = None,
    config: Path | None = None,
    samples: Count = 1,
    host: str = "127.0.0.1",
    port: Port = 8000,
    allowed_host: list[str] | None = None,
    per_minute: Count = 120,
    folder: Path = Path(),
) -> int:
    """Serve the agent: an OpenAI-compatible API at /v1, and a page to ask questions on.

    The database is opened read-only. Each request needs the token that is printed, or that of the environment
    variable TEXT2SQL_GRPO_TOKEN, as its API key. Example: `text2sql-grpo serve --model runs/my/merged --db
    shop.sqlite`

    Args:
        db: SQLite or DuckDB file, .sql text, a folder of CSV or Parquet files, or a URL; never written.
        model: Model folder, such as RUN/merged, an adapter, a run folder, or Hub id.
        base_url: OpenAI-compatible endpoint of a model, instead of --model; needs --served_model.
        served_model: Name of the model at --base_url.
        config: Default: that of the model's run, or the defaults.
        samples: Answers of each question; of several, their agreement is the confidence.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        allowed_host: Further names by which clients reach the server, as behind a proxy; needed with --host
            0.0.0.0 or ::.
        per_minute: Requests of one client in a minute.
        folder: Where feedback.jsonl and audit.jsonl are written.
    """
    source = model_source(model, base_url, served_model)
    run = config_of(model, config)
    if not folder.is_dir():
        raise ConfigError(f"--folder must be an existing folder, got {folder}")
    is_everywhere = host in ("", "0.0.0.0", "::")
    if is_everywhere and not allowed_host:
        reason = "the name by which clients reach the server: requests for another host are refused"
        raise ConfigError(f"--host {host} needs --allowed_host NAME, {reason}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not set it here
    except OSError as error:
        hint = "try --port 0, or another --host"
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; {hint}") from error
    with listener:
        quiet_console()
        with needs_extra("serve", "serve"), importing():
            import uvicorn

            from text2sql_grpo.serving.openai_server import AgentServer
        from text2sql_grpo.serving.agent import open_agent

        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        with writing_to(folder), open_agent(source, db, run, samples=samples) as agent:
            server = AgentServer(agent, token, folder, per_minute)
            place = "localhost" if is_everywhere else f"[{host}]" if ":" in host else host
            app = server.app([place, *(allowed_host or ())])
            where = f"http://{place}:{listener.getsockname()[1]}"
            print(f"page     {where}/#token={token}\nAPI      {where}/v1   key {token}", flush=True)
            settings = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=5,
                proxy_headers=bool(allowed_host),  # else any client of this machine could name another
            )
            uvicorn.Server(settings).run(sockets=[listener])
    return 0
