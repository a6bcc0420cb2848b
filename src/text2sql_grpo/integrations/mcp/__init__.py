"""MCP: a server over one database, and training against any server's tools."""

from text2sql_grpo.errors import needs_extra

with needs_extra("mcp", "MCP"):
    import mcp  # noqa: F401 (a check for the package)
