"""Make questions from databases, logs or a teacher model, and compare question files."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.bundled import located
from text2sql_grpo.commands.options import Count, Retries, Seconds, writing_to
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.phrases import many, printable
from text2sql_grpo.reporting.counting import counting
from text2sql_grpo.sql import SQLExecutor

if TYPE_CHECKING:
    from rich.console import Console

    from text2sql_grpo.synthesis.generator import Made

MAX_TABLES_SHOWN = 30


def make(
    *,
    databases: str = "data/databases",
    out: Path = Path("data/questions"),
    words: Path | None = None,
    hide: list[str] | None = None,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Make questions with checked gold queries from databases.

    Prints how many questions each table got, and why one got none. Exits with 1 if a table with rows got
    none, or a file came out empty. Example: `text2sql-grpo data make --databases shop.sqlite --out
    shop/questions`

    Args:
        databases: Folder of databases, a file, a folder of rows or a URL; the default is the package's own
            where the working folder has none.
        out: Folder to write. Files that were edited stay as they are.
        words: YAML with names in plain words, as `data words` writes it, or a folder of them.
        hide: Tables and columns not to be asked about, as `data.hide`; default: personal data.
        seed: Random seed.
        json: Print JSON instead of a report.
    """
    from text2sql_grpo.reporting.terminal import TextConsole
    from text2sql_grpo.synthesis.generator import PERSONAL, QUESTION_SETS, make_questions

    where = databases if "://" in databases else located(Path(databases))
    total = sum(one.count for one in QUESTION_SETS)
    with writing_to(out), counting("Questions", total) as on_question:
        patterns = PERSONAL if hide is None else hide
        made = make_questions(where, out, seed=seed, words=words, hide=patterns, on_question=on_question)
    if json:
        record = {"files": made.files, "tables": [asdict(one) for one in made.tables], "lacks": made.lacks}
        print(json_text.dumps(record, ensure_ascii=False))
        return 1 if made.lacks else 0
    console = TextConsole()
    show_made(made, console)
    console.print(f"wrote {many(made.n_questions, 'question')} for {where} to {out}", soft_wrap=True)
    return 1 if made.lacks else 0


def show_made(made: Made, console: Console) -> None:
    """Print how many questions each table got, the fewest first in a long list, and what is short."""
    from rich.table import Table

    table = Table("table", "rows", "questions that read it", "remark", box=None, pad_edge=False)
    is_one = len({report.database for report in made.tables}) == 1
    is_long = len(made.tables) > MAX_TABLES_SHOWN
    ordered = sorted(made.tables, key=lambda one: one.n_questions) if is_long else made.tables
    for one in ordered[:MAX_TABLES_SHOWN]:
        name = one.table if is_one else f"{one.database}.{one.table}"
        n_rows = "" if one.n_rows is None else str(one.n_rows)
        table.add_row(name, n_rows, str(one.n_questions), one.reason)
    if rest := ordered[MAX_TABLES_SHOWN:]:
        counts = f"{rest[0].n_questions} to {rest[-1].n_questions}"
        table.add_row(f"and {len(rest)} more", "", counts, "")
    console.print(table)
    for name, count in made.files.items():
        if count < made.wanted[name]:
            console.print(f"{name}: wanted {many(made.wanted[name], 'question')}, got {count} different ones")
    if made.lacks:
        reasons = "the remark is the reason, and `data words` writes names that can be edited"
        text = f"without questions: {', '.join(made.lacks)}; {reasons}"
        console.print(text, style="red", soft_wrap=True)


def words(*, databases: str, out: Path = Path("words.yaml")) -> int:
    """Write how tables, columns and values are called in questions, to be edited.

    What the file holds already stays; new tables and columns are added. `data make --words` reads it.
    Example: `text2sql-grpo data words --databases shop.sqlite`

    Args:
        databases: As data.databases; of a folder of several, each gets a file in a folder.
        out: File to write; a folder for several databases.
    """
    from text2sql_grpo.synthesis.generator import PERSONAL
    from text2sql_grpo.synthesis.profile import Profile
    from text2sql_grpo.synthesis.words import add_words

    found = Databases(databases)
    with writing_to(out), SQLExecutor() as executor:
        for name in found.names():
            file = out if len(found.names()) == 1 else out.with_suffix("") / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            added = add_words(Profile(executor, found.address(name), PERSONAL), name, file)
            then = f"edit them, then: data make --databases .. --words {file}"
            print(f"{file}: {many(added, 'word')} added; {then}")
    return 0


def teach(
    *,
    databases: str,
    questions: Path,
    teacher: str,
    model: str,
    out: Path = Path("taught.jsonl"),
    key_variable: str = "OPENAI_API_KEY",
    yes: bool = False,
    real_rows: bool = False,
    seed: int = 0,
    price_per_million: list[float] | None = None,
    parallel: Count = 8,
    retries: Retries = 5,
    timeout_s: Seconds = 120.0,
) -> int:
    """Let a teacher model word questions for gold queries; its SQL for a question must agree.

    Prints first what would leave this machine, and exits with 2 without --yes. Exits with 1 if no question
    was kept. Every request is logged in OUT_log.jsonl; run again, it asks only what was not answered.
    Example: `text2sql-grpo data teach --databases shop.sqlite --questions golds.jsonl --teacher
    https://api.example.com/v1 --model NAME`

    Args:
        databases: As data.databases.
        questions: Gold queries: rows of a question file; in JSONL the question may be empty.
        teacher: URL of an OpenAI-compatible endpoint.
        model: Name of the model there.
        out: JSONL of questions to write.
        key_variable: Environment variable of the endpoint's key.
        yes: Send it.
        real_rows: Show the teacher rows of the database instead of made-up ones.
        seed: Random seed; also the style of the first question.
        price_per_million: Price of a million tokens read, and of a million written.
        parallel: Concurrent gold queries.
        retries: How often a failed request is sent again.
        timeout_s: Seconds for one request.
    """
    from text2sql_grpo.evaluation.endpoint import Endpoint
    from text2sql_grpo.evaluation.teacher import Teacher, read_golds
    from text2sql_grpo.rewards import open_grader

    prices = price_per_million or [0.0, 0.0]
    if len(prices) != 2:
        raise ConfigError(f"--price_per_million needs two prices, got {len(prices)}")
    if not teacher.startswith(("http://", "https://")):
        raise ConfigError(f"--teacher must be a URL, http://.. or https://.., got {teacher!r}")
    found = Databases(databases)
    examples = read_golds(questions, found)
    with writing_to(out), SQLExecutor() as executor:
        endpoint = Endpoint(teacher, model, key_variable, parallel, retries, timeout_s)
        grader = open_grader(executor, test_databases=4)
        asked = Teacher(
            examples, found, executor, grader, endpoint, out, seed=seed, real_rows=real_rows, prices=prices
        )
        read, written = asked.estimate()
        cost = f", about {asked.cost(read, written):.4f} at these prices" if any(prices) else ""
        n = len(examples)
        print(f"to send to {teacher}, model {model}, in at most {2 * n} requests for {many(n, 'gold')}:")
        rows = "real rows of the database" if real_rows else "rows with made-up values"
        print(f"- the schema, each gold, and {rows}; the literals of a gold are real values")
        print("- then each question that the model wrote, with the schema")
        print(f"about {read:,} tokens to read and {written:,} to write{cost}; an example:\n")
        print(printable("\n\n".join(message["content"] for message in asked.prompt(0))), end="\n\n")
        if not yes:
            print("nothing was sent; --yes sends it")
            return 2
        try:
            with counting("Golds", n) as on_gold:
                asked.run(on_gold)
        finally:
            print(printable("\n".join(asked.report())))
    kept = any(one.reason == "kept" for one in asked.wordings.values())
    print(f"questions: {out if kept else 'none'}; prompts, answers and verdicts: {asked.log}")
    return 0 if kept else 1


def log(
    *,
    databases: str,
    log: list[str],
    out: Path = Path("log.jsonl"),
    words: Path | None = None,
    hide: list[str] | None = None,
    seed: int = 0,
) -> int:
    """Make questions of the queries that people ran, from logs.

    Read-only queries that return 1 to 50 rows on the database are kept, each once. Those that rules can word
    go to `out` with a question, the others to `.._to_word.jsonl` for you to word; `.._made.json` holds how
    often each ran. Exits with 1 if none is kept. Example: `text2sql-grpo data log --databases shop.sqlite
    --log reports.sql`

    Args:
        databases: A database: a file, a folder of rows or a URL.
        log: Logs: .sql files; histories of psql, DuckDB or SQLite; PostgreSQL's log; .csv or .json of
            pg_stat_statements with the columns query and calls; `pg_stat_statements` itself for the server of
            a PostgreSQL database; or folders of dbt projects.
        out: JSONL file to write. Files that were edited stay as they are.
        words: YAML with names in plain words, as `data words` writes it.
        hide: Tables and columns that no kept query reads, as `data.hide`; default: personal data.
        seed: Random seed of values for parameters.
    """
    from rich.table import Table

    from text2sql_grpo.reporting.terminal import TextConsole
    from text2sql_grpo.sql.personal import PERSONAL
    from text2sql_grpo.synthesis.log_questions import questions_of_logs

    with writing_to(out):
        patterns = (PERSONAL,) if hide is None else hide
        made = questions_of_logs(databases, log, out, words=words, hide=patterns, seed=seed)
    table = Table("left out", "statements", box=None, pad_edge=False)
    for reason, count in made.reasons.most_common():
        table.add_row(reason, str(count))
    console = TextConsole()
    console.print(f"read {many(made.n_read, 'statement')}, kept {many(made.n_kept, 'different query')}")
    if made.reasons:
        console.print(table)
    for count, file in ((made.n_worded, out), (made.n_to_word, made.to_word)):
        what = many(count, "question") if file == out else f"{many(count, 'query')} without a question"
        console.print(f"wrote {what} to {file}", soft_wrap=True)
    return 0 if made.n_kept else 1


def overlap(*, questions: Path = Path("data/questions"), databases: str | None = None) -> int:
    """Print what each file shares with the training files.

    Example: `text2sql-grpo data overlap --questions shop/questions`

    Args:
        questions: Folder of question files; the default is the package's own where the working folder has
            none.
        databases: Their databases, as data.databases, if some are not SQLite files.
    """
    from text2sql_grpo.data import overlap as shared

    rows = shared.overlap(located(questions), Databases(databases) if databases else None)
    print(printable(shared.format_overlap(rows)))
    return 0
