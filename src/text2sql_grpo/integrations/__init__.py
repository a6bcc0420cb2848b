"""Former name of `contrib`, for importers of the MCP server."""
