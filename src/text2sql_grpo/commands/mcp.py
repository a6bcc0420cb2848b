import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from text2sql_grpo.commands.options import Port, writing_to
from text2sql_grpo.config import load_config, override, parse_config
from text2sql_grpo.data.databases import cache_folder, open_address
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.executor import DEFAULT_WORKERS

TOKEN_VARIABLE = "TEXT2SQL_GRPO_MCP_TOKEN"


def mcp(
    *,
    db: str,
    transport: Literal["stdio", "http"] = "stdio",
    host: str = "127.0.0.1",
    port: Port = 8000,
    token: str | None = None,
    allowed_host: list[str] | None = None,
    audit_log: Path | None = None,
    config: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Serve a database to MCP clients, read-only.

    Example: `text2sql-grpo mcp --db shop.sqlite`

    Args:
        db: SQLite or DuckDB file, .sql text, a folder of CSV or Parquet files, or postgresql://..
        transport: http: streamable HTTP.
        host: Address of http; any other than this machine needs a token.
        port: Port of http; 0 for any free one.
        token: Token that http requests must carry; better in $TEXT2SQL_GRPO_MCP_TOKEN.
        allowed_host: Names under which http is served, next to local ones, such as that of a proxy.
        audit_log: JSONL of every query; default: mcp/ in the cache folder.
        config: YAML whose `data.hide`, `environment.limits` and `environment.observation` are taken; default:
            the defaults, which hide personal data.
    """
    from text2sql_grpo.integrations.mcp.server import AuditLog, make_server, open_http

    if config is not None:
        run = load_config(config, settings)
    else:
        tree: dict[str, Any] = {"model": {"path": "none"}, "data": {"databases": "none", "train": "none"}}
        override(tree, settings)
        run = parse_config(tree, source="command line")
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if token == "":
        raise ConfigError(f"the token is empty (--token or ${TOKEN_VARIABLE})")
    if allowed_host and transport != "http":
        raise ConfigError("--allowed_host needs --transport http")
    workers = max(8, DEFAULT_WORKERS) if transport == "http" else DEFAULT_WORKERS
    log = AuditLog(audit_log or cache_folder("mcp") / "audit.jsonl")
    with writing_to(log.path), SQLExecutor(run.environment.limits, workers=workers) as executor:
        server = make_server(
            db if "://" in db else open_address(db)[1],
            executor,
            log,
            observation=run.environment.observation,
            hide=run.data.hide,
            token=token,
        )
        if transport == "stdio":
            server.run("stdio")
            return 0
        web, listener, url = open_http(server, host, port, token=token, allowed_hosts=allowed_host or ())
        print(f"serving {url}\naudit log: {log.path}", file=sys.stderr, flush=True)
        web.run(sockets=[listener])
    return 0
