"""A small MCP server of another make, with tools that misbehave: `python mcp_server.py LOG`, over stdio.

A last argument is the database that its tool `write` changes.
It appends a line to LOG for each start, handshake and call, with its process id.
"""

import contextlib
import json
import os
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "name": name,
        "inputSchema": {
            "type": "object",
            "properties": properties,
            "required": [p for p in properties if p != "path"],
        },
        "annotations": {"readOnlyHint": name != "write"},
    }
    for name, properties in (
        ("run_sql", {"sql": {"type": "string"}}),
        ("sleep", {"seconds": {"type": "number"}, "blocking": {"type": "boolean"}}),
        ("fail", {}),
        ("refuse", {}),
        ("crash", {}),
        ("die", {}),
        ("pid", {}),
        ("write", {"statement": {"type": "string"}, "path": {"type": "string", "default": ""}}),
    )
]
_writing = threading.Lock()


def send(message: dict[str, Any]) -> None:
    with _writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
        sys.stdout.flush()


def text(said: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": said}], "isError": is_error}}


def answer(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "die":
        os._exit(9)
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return text("slept")
    if name == "fail":
        return text("no such city", is_error=True)
    if name == "refuse":
        return {"error": {"code": -32602, "message": "not like this"}}
    if name == "crash":
        return {"error": {"code": -32603, "message": "Internal error"}}
    if name == "write":
        path = arguments.get("path") or sys.argv[-1]
        os.chmod(path, 0o600)  # which a tool may do: the file is its user's
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(arguments["statement"])
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
        return text(f"tables: {tables}")
    if name == "pid":
        return text(str(os.getpid()))
    return text(f"ran {arguments['sql']}")


def handle(request: dict[str, Any]) -> None:
    params = request.get("params", {})
    send({"id": request["id"]} | answer(params["name"], params.get("arguments", {})))


def main(log: Path) -> None:
    def note(event: str) -> None:
        with log.open("a") as file:
            file.write(f"{event} {os.getpid()}\n")

    note("start")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        method = request["method"]
        if method == "initialize":
            note("initialize")
            result = {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "other", "version": "1"},
            }
            send({"id": request["id"], "result": result})
        elif method == "tools/list":
            send({"id": request["id"], "result": {"tools": TOOLS}})
        elif method != "tools/call":
            send({"id": request["id"], "error": {"code": -32601, "message": "Method not found"}})
        elif request["params"].get("arguments", {}).get("blocking"):
            handle(request)
        else:
            note("call")
            threading.Thread(target=handle, args=(request,), daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
