from text2sql_grpo.contrib.mcp.server import http_server, listen, make_server, url_of

__all__ = ["http_server", "listen", "make_server", "url_of"]
