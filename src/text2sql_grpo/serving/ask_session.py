"""Session of questions on a terminal."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from text2sql_grpo.errors import RunError
from text2sql_grpo.reporting.shown import show_asked, show_query
from text2sql_grpo.serving.agent import Agent, Exchange, Reply, readable

_HELP = r"""Type a question; one that begins with "and", "only" or "of those" follows the one before.
  \sql [QUERY]  the last query, or run a query of your own
  \edit         edit the last query in $EDITOR, and run it
  \right        save question and query as right, to train on
  \wrong        save them as wrong
  \schema       what the model reads of the database
  \history      the questions so far
  \new          forget them
  \quit         or Ctrl-D"""


@dataclass
class AskSession:
    """Questions and commands, one a line.

    Attributes:
        read: Reads a line; raises EOFError at the end.
        folder: Where feedback is written.
    """

    agent: Agent
    console: Console
    read: Callable[[str], str] = input
    folder: Path = field(default_factory=Path)
    history: list[Exchange] = field(default_factory=list)

    def run(self) -> None:
        """Answer until the end of the input; an error is printed, and the session goes on."""
        with suppress(ImportError):
            import readline  # noqa: F401 (the keys of `input`)
        self.console.print(
            f"{self.agent.database}, answered by {self.agent.name}. \\help lists the commands."
        )
        while True:
            try:
                line = readable(self.read("> "))
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            if line in ("\\quit", "\\q", "exit", "quit"):
                return
            try:
                if line.startswith("\\"):
                    self._command(*line[1:].split(maxsplit=1))
                elif line:
                    self._ask(line)
            except KeyboardInterrupt:
                self.console.print("stopped")
            except RunError as error:
                self.console.print(f"error: {error}", style="red", soft_wrap=True)

    def _ask(self, question: str) -> None:
        reply = self.agent.ask(question, self.history)
        read_as = reply.asked.episode.example.question
        if read_as != question:
            self.console.print(f"(follows: {self.history[-1].question})", style="dim")
        show_asked(reply.asked, self.console)
        self._show_confidence(reply)
        self.history.append(Exchange(question, reply.asked.episode.final_sql, read_as))

    def _show_confidence(self, reply: Reply) -> None:
        if reply.confidence is None:
            return
        share = f"{reply.confidence:.0%} of {self.agent.samples} answers agree"
        if reply.is_sure:
            self.console.print(share)
            return
        self.console.print(f"Not sure: {share}.", style="bold yellow")
        if reply.other is not None and reply.other.episode.final_sql:
            self.console.print("Another reading:")
            show_query(reply.other.episode.final_sql, reply.other.result, self.console)

    def _command(self, name: str = "help", rest: str = "") -> None:
        last = self.history[-1] if self.history else None
        if name == "schema":
            text = self.agent.environment.sessions.schema_text(self.agent.database)
            self.console.print(text)
        elif name == "history":
            for number, one in enumerate(self.history, 1):
                self.console.print(f"{number}. {one.question}\n   {one.sql or 'no answer'}")
        elif name == "new":
            self.history.clear()
        elif name == "sql" and rest:
            self._run(rest)
        elif name in ("sql", "edit", "right", "wrong"):
            if last is None or last.sql is None:
                self.console.print("There is no answer yet.")
            elif name == "sql":
                show_query(last.sql, None, self.console)
            elif name == "edit":
                self._run(_edited(last.sql))
            else:
                is_right, asked = name == "right", last.read_as or last.question
                path = self.agent.save_feedback(self.folder, asked, last.sql, is_right=is_right)
                self.console.print(f"saved: {path}")
        else:
            self.console.print(_HELP)

    def _run(self, sql: str) -> None:
        """Run a query of the user, which takes the place of the last answer's."""
        outcome = self.agent.run(sql)
        show_query(sql, outcome, self.console)
        if self.history:
            self.history[-1] = replace(self.history[-1], sql=sql)


def _edited(sql: str) -> str:
    """Text after the user edited it in $VISUAL or $EDITOR."""
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with tempfile.NamedTemporaryFile("w+", suffix=".sql", encoding="utf-8") as file:
        file.write(sql)
        file.flush()
        try:
            subprocess.run([*command, file.name], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RunError(f"the editor failed: {error}; set EDITOR, or write \\sql QUERY") from error
        return Path(file.name).read_text(encoding="utf-8").strip()
