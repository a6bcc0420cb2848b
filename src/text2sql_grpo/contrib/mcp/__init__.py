"""MCP: a server over one database, and training against any server's tools."""

from text2sql_grpo.errors import ConfigError

try:
    import mcp  # noqa: F401 (a check for the package)
except ImportError as error:
    raise ConfigError(
        "MCP needs the package mcp, which is not installed: pip install 'text2sql-grpo[mcp]'"
    ) from error
