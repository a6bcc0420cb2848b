"""`init`: a folder to train on a database of one's own."""

import os
from pathlib import Path
from typing import Any

from text2sql_grpo.commands.options import check_models, writing_to
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting.counting import counting
from text2sql_grpo.sql import SQLExecutor


def init(database: str = "", *, out: Path | None = None, model: str = "", seed: int = 0) -> int:
    """Make a folder with all that a run on your database needs.

    Profiles the database and prints the next commands. It writes words.yaml (how tables and columns are
    called), questions split by value and by shape, and config.yaml for this machine. Run it again after you
    edited words.yaml: what was edited stays. Example: `text2sql-grpo init shop.sqlite --out shop/`

    Args:
        database: A file, a folder of rows or a URL; without one, it is asked for.
        out: Folder to write; default: named like the database.
        model: Instruct model to train: a folder, a GGUF file or a Hub id. Default: by the machine; without a
            GPU Qwen2.5-Coder-0.5B-Instruct where 15 GiB and the Hub are there, else SmolLM2-135M.
        seed: Random seed of the questions.
    """
    from rich.table import Table

    from text2sql_grpo.commands.data import show_made
    from text2sql_grpo.reporting.terminal import TextConsole
    from text2sql_grpo.run import new_project
    from text2sql_grpo.synthesis.generator import PERSONAL, make_questions
    from text2sql_grpo.synthesis.profile import Profile
    from text2sql_grpo.synthesis.words import add_words

    console = TextConsole()
    is_asked = not database
    if model:
        check_models(model)
    if is_asked:
        database = _asked("Database (a file, a folder of CSV files, or a URL)", "the database, init DATABASE")
    found = Databases(database)
    if len(found.names()) != 1:
        raise DataError(f"init takes one database, {database} holds {len(found.names())}: name one of them")
    (name,) = found.names()
    asked = _asked(f"Folder to write [{name}]", "--out FOLDER") if is_asked and out is None else ""
    folder = out or Path(asked or name)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with SQLExecutor() as executor:
            profile = Profile(executor, found.address(name), PERSONAL)
            table = Table("table", "rows", "columns", "keys", box=None, pad_edge=False)
            for row in new_project.described(profile):
                table.add_row(*row)
            console.print(table)
            if profile.hidden:
                text = f"hidden from the model as personal data: {', '.join(profile.hidden)} (data.hide)"
                console.print(text, soft_wrap=True)
            words = folder / "words.yaml"
            added = add_words(profile, name, words)
        console.print(f"{words}: {many(added, 'word')} added", soft_wrap=True)
        with counting("Questions", sum(one.count for one in new_project.SETS)) as on_question:
            made = make_questions(
                database if "://" in database else Path(database),
                folder / "questions",
                seed=seed,
                question_sets=new_project.SETS,
                words=words,
                on_question=on_question,
            )
        show_made(made, console)
        # These import torch: a wrong database is refused before.
        from text2sql_grpo.models.hardware import hardware
        from text2sql_grpo.models.sources import CODER_HUB_ID, is_on_hub

        machine, config = hardware(), folder / "config.yaml"
        has_coder = bool(model) or (new_project.can_train_coder(machine) and is_on_hub(CODER_HUB_ID))
        size = new_project.size_for(machine, has_coder=has_coder)
        minutes = new_project.minutes_for(size, os.cpu_count() or 1)
        files = [name for name, count in made.files.items() if count]
        is_new = new_project.write_config(
            config, profile, size, minutes, database=database, files=files, model=model
        )
        first: dict[str, Any] = next(iter(read_jsonl(folder / "questions" / "train.jsonl", "questions")), {})
    time = "doctor measures the time" if minutes is None else f"about {minutes:.0f} minutes"
    shown = f"{config}: as {size.example}, {size.need}, {time}" if is_new else f"{config}: kept as it was"
    console.print(shown, soft_wrap=True)
    question = str(first.get("question", "How many rows are there?"))
    console.print("Next:")
    for line in new_project.next_commands(folder, size, database=database, question=question):
        console.print(f"  {line}", soft_wrap=True)
    return 1 if made.lacks else 0


def _asked(question: str, option: str) -> str:
    """Answer typed at a prompt; a ConfigError names the option to give where stdin has none."""
    try:
        return input(f"{question}: ").strip()
    except (EOFError, RuntimeError) as error:  # RuntimeError: stdin is closed
        raise ConfigError(f"cannot read an answer from stdin: give {option}") from error
