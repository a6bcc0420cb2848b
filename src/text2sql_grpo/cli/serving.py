"""Verbs that serve or ask a database."""

import argparse
import os
import sys
from pathlib import Path

from text2sql_grpo.cli.options import (
    Verbs,
    add_verb,
    port,
    quiet_libraries,
    take_settings,
)
from text2sql_grpo.errors import ConfigError

TOKEN_VARIABLE = "TEXT2SQL_GRPO_MCP_TOKEN"


def add_verbs(verbs: Verbs) -> None:
    """Adds them, with their options."""
    add_ask_arguments(add_verb(verbs, "ask", "answer one question over a SQLite database", run_ask))
    add_mcp_arguments(add_verb(verbs, "mcp", "serve a database to MCP clients, read-only", run_mcp))


def add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `ask`."""
    parser.add_argument("question", metavar="QUESTION", help="in quotes")
    parser.add_argument("--model", required=True, help="model folder, such as RUN/merged, or Hub id")
    parser.add_argument(
        "--db", type=Path, required=True, metavar="FILE", help="SQLite file, never written, or .sql text"
    )
    parser.add_argument("--config", type=Path, help="default: that of the model's run, or the defaults")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_ask(options: argparse.Namespace) -> int:
    """Prints the queries of a model and the result of the last one."""
    from text2sql_grpo.config import load_config

    config = load_config(options.config) if options.config else None

    quiet_libraries()
    from rich.console import Console

    from text2sql_grpo.jobs.ask import ask

    return ask(
        options.question,
        options.model,
        options.db,
        config=config,
        console=Console(highlight=False),
        as_json=options.json,
    )


def add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mcp`."""
    parser.add_argument(
        "--db", required=True, metavar="URL", help="a path, duckdb:///FILE or postgresql://.."
    )
    parser.add_argument(
        "--transport",
        choices=["stdio", "http"],
        default="stdio",
        help="http: streamable HTTP (default: stdio)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="of http; any other than this machine needs a token"
    )
    parser.add_argument("--port", type=port, default=8000, help="of http; 0 for any free one (default: 8000)")
    parser.add_argument("--token", help=f"that http requests must carry; better in ${TOKEN_VARIABLE}")
    parser.add_argument(
        "--audit_log", type=Path, help="JSONL of every query; default: mcp/ in the cache folder"
    )
    parser.add_argument("--config", type=Path, help="its environment sets the limits; default: the defaults")
    take_settings(parser)


def run_mcp(options: argparse.Namespace) -> int:
    """Serves one database until standard input ends, or Ctrl-C."""
    from text2sql_grpo.data.databases import cache_folder
    from text2sql_grpo.environment.session import EnvironmentSettings
    from text2sql_grpo.integrations.mcp.audit_log import AuditLog
    from text2sql_grpo.integrations.mcp.server import http_server, listen, make_server, url_of
    from text2sql_grpo.sql import SQLExecutor

    settings = EnvironmentSettings()
    if options.config or options.settings:
        from text2sql_grpo.config import load_config

        if options.config is None:
            raise ConfigError(f"expected --config FILE with settings such as {options.settings[0]}, got none")
        settings = load_config(options.config, options.settings).environment
    options.writes_to = options.audit_log or cache_folder("mcp") / "audit.jsonl"
    token = os.environ.get(TOKEN_VARIABLE) if options.token is None else options.token
    if token == "":
        raise ConfigError(f"expected a token that is not empty (--token or ${TOKEN_VARIABLE})")
    audit_log = AuditLog(options.writes_to)
    with SQLExecutor(settings.limits) as executor:
        server = make_server(options.db, executor, audit_log, observation=settings.observation, token=token)
        if options.transport == "stdio":
            server.run("stdio")
            return 0
        listener = listen(options.host, options.port, token=token)
        print(f"serving {url_of(listener)}\naudit log: {audit_log.path}", file=sys.stderr, flush=True)
        http_server(server, options.host).run(sockets=[listener])
    return 0
