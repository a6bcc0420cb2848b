"""Question files of logs."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sqlglot import exp

from text2sql_grpo.data.databases import open_address
from text2sql_grpo.files import read_json, refuse_edited, sha256, write_json, write_jsonl
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.personal import PERSONAL
from text2sql_grpo.synthesis.log_files import read_log
from text2sql_grpo.synthesis.log_queries import log_queries
from text2sql_grpo.synthesis.profile import Profile
from text2sql_grpo.synthesis.wording import question_of
from text2sql_grpo.synthesis.words import with_words
from text2sql_grpo.synthesis.words_file import read_words

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeOfLogs:
    """Counts of the queries and of the statements left out.

    Attributes:
        n_worded: Number of queries with a question.
        n_to_word: Number of the other queries.
        to_word: Their file.
        reasons: Number of statements left out, by reason.
    """

    n_worded: int
    n_to_word: int
    to_word: Path
    reasons: Counter[str]

    @property
    def n_kept(self) -> int:
        return self.n_worded + self.n_to_word

    @property
    def n_read(self) -> int:
        """Number of statements in the logs."""
        return self.n_kept + self.reasons.total()


def questions_of_logs(
    databases: Database,
    logs: Sequence[str],
    out: Path,
    *,
    words: Path | None = None,
    hide: Sequence[str] = (PERSONAL,),
    seed: int = 0,
) -> MadeOfLogs:
    """Write questions for the queries of logs, the most frequent first.

    Next to `out` are `.._to_word.jsonl`, of queries whose question is left to people, and `.._made.json` with
    the number of calls by id and a fingerprint of each file.

    Args:
        databases: One database: a file, a folder of rows or a URL.
        logs: See `read_log`.
        hide: Tables and columns, as `data.hide`; queries that read them are left out.
        seed: Random seed of values for parameters.

    Raises:
        DataError: A log, the words or the database cannot be read, or a file to write was edited.
    """
    to_word, manifest = (out.with_name(f"{out.stem}_{name}") for name in ("to_word.jsonl", "made.json"))
    refuse_edited((out, to_word), read_json(manifest).get("files", {}) if manifest.exists() else {})
    name, address = open_address(databases)
    files: dict[Path, list[dict[str, Any]]] = {out: [], to_word: []}
    calls, asked = dict[str, int](), set[str]()
    with SQLExecutor() as executor:
        statements = chain.from_iterable([read_log(source, address) for source in logs])
        profile = Profile(executor, address, hide)
        for pattern in profile.unmatched:
            _log.warning("--hide: no table or column of %s is named %s", name, pattern)
        database = with_words(profile, name, read_words(words), place=words)
        queries, reasons = log_queries(statements, profile, seed=seed)
    for number, query in enumerate(queries):
        question = question_of(query.tree, database) or ""
        question = "" if question in asked else question
        asked.add(question)
        row = {
            "id": f"{out.stem}-{number:05}",
            "database": name,
            "question": question,
            "gold_sql": query.sql,
            "difficulty": _difficulty(query.tree),
            "family": "log",
        }
        files[out if question else to_word].append(row)
        calls[row["id"]] = query.calls
    if calls:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, rows in files.items():
            write_jsonl(path, rows)
        write_json(manifest, {"files": {path.name: sha256(path) for path in files}, "calls": calls})
    return MadeOfLogs(len(files[out]), len(files[to_word]), to_word, reasons)


def _difficulty(tree: exp.Query) -> str:
    if tree.find(exp.Join, exp.CTE, exp.SetOperation) or len(list(tree.find_all(exp.Select))) > 1:
        return "hard"
    return "medium" if tree.args.get("group") or tree.args.get("limit") else "easy"
