import json as json_text
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

from text2sql_grpo.commands.options import Count, NotNegative, Port, writing_to
from text2sql_grpo.config import load_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.phrases import many
from text2sql_grpo.sql import SQLExecutor


def review(
    folder: Path,
    *,
    db: str | None = None,
    file: Path | None = None,
    count: Count = 40,
    seed: int = 0,
    by: str | None = None,
    port: Port = 0,
    browser: bool = True,
    test_databases: NotNegative = 4,
    summary: bool = False,
    evaluation: Path | None = None,
    json: bool = False,
) -> int:
    """Judge questions on a local page, or sum the verdicts up.

    Each key is saved to verified.jsonl in the folder, in the form of Snowflake's verified queries; ids of
    wrong questions go to quarantine.jsonl, for data.quarantine. Example: `text2sql-grpo review shop/`

    Args:
        folder: Holds questions/*.jsonl, and config.yaml unless --db is given.
        db: Database of the questions, as data.databases; default: that of config.yaml.
        file: Questions to draw from; default: questions/train.jsonl.
        count: Number of questions, drawn evenly over templates and tables.
        seed: Random seed of the draw.
        by: Name of the person; default: the login name.
        port: Port on 127.0.0.1; 0 for a free one.
        browser: Open the page.
        test_databases: Test databases of each query; 0 for none.
        summary: Print the shares of right questions and answers, without a page.
        evaluation: For --summary: evaluation.jsonl of a model that answered these questions and others.
        json: For --summary: print JSON.
    """
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}")
    if not summary and (evaluation or json):
        raise ConfigError("--evaluation and --json go with --summary")
    source = file or folder / "questions" / "train.jsonl"
    if not summary and not source.is_file():
        raise DataError(
            f"no questions at {source}: text2sql-grpo data make --databases .. --out {folder}/questions "
            "makes them, or give a file with --file"
        )
    from text2sql_grpo.data.question_files import only_name, read_questions
    from text2sql_grpo.rewards import open_grader
    from text2sql_grpo.serving import verdicts
    from text2sql_grpo.serving.question_review import Review, drawn
    from text2sql_grpo.serving.review_server import ReviewServer

    run = load_config(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    where = db or (run.data.databases if run else None)
    url = run.grading.server_url if run else None
    with writing_to(folder), SQLExecutor() as executor:
        grader = open_grader(executor, test_databases=test_databases, server_url=url)
        if summary:
            known = verdicts.read_verdicts(folder)
            if not known:
                raise DataError(f"nothing was reviewed: no verdicts in {folder / verdicts.VERIFIED}")
            opened = Databases(where) if where is not None else None
            found = verdicts.summary(known, evaluation, databases=opened, grader=grader)
            print(json_text.dumps(found) if json else _report(found))
            return 0
        if where is None:
            raise ConfigError(f"{folder} has no config.yaml that names its database: give --db")
        databases = Databases(where)
        chosen = drawn(read_questions(source, database=only_name(databases)), count, seed=seed)
        name = (verdicts.login_name() if by is None else by).replace(",", " ").strip()
        if not name:
            raise ConfigError("--by must be a name")
        made = Review(folder, chosen, databases, executor, grader.suite, by=name)
        with ReviewServer(made, port=port) as server:
            print(f"{many(len(chosen), 'question')} for {name}: {server.url}", flush=True)
            print("Each key is saved. Ctrl-C ends it.", file=sys.stderr)
            if browser:
                # A browser of the terminal ends only when it is left.
                threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
            with suppress(KeyboardInterrupt):
                server.serve_forever()
        known = verdicts.read_verdicts(folder)
        print(_report(verdicts.summary(known)) if known else "nothing was reviewed")
        if known:
            print(f"verdicts: {folder / verdicts.VERIFIED}")
    return 0


def _report(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in found["verdicts"].items())
    lines = [f"verdicts: {counts}", f"questions right as they were made: {_share(found['questions'])}"]
    if "joined" in found:
        low, high = found["joined"]["interval"]
        lines += [
            f"answers right, by review: {_share(found['reviewed'])}",
            f"answers right, by the automatic verdict, other questions: {_share(found['automatic'])}",
            f"review minus automatic verdict, same questions: {found['rectifier']:+.1%}",
            f"accuracy of the model, both joined: {found['joined']['share']:.1%} "
            f"({low:.1%} to {high:.1%}, 95%)",
        ]
    return "\n".join(lines)


def _share(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['right']} of {one['total']} = {one['share']:.1%} ({low:.1%} to {high:.1%}, 95%)"
