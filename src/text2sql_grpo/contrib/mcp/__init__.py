"""MCP: our databases behind a server, and training against any server's tools."""

from text2sql_grpo.errors import ConfigError

try:
    import mcp  # noqa: F401 (only whether it is there)
except ImportError as error:
    raise ConfigError(
        "MCP needs the package mcp, which is not installed: pip install 'text2sql-grpo[mcp]'"
    ) from error
