import json
from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import INTERRUPTED, config_with_files, quiet_console, writing_to


def sft(
    *,
    config: Path,
    questions: Path | None = None,
    chats: Path | None = None,
    out: Path | None = None,
    resume: str | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Fine-tune a model on gold queries or collected chats.

    Example: `text2sql-grpo sft --config my.yaml --questions golds.jsonl --out runs/tuned`

    Args:
        config: YAML of the run.
        questions: Questions whose gold queries are demonstrated; default: sft.questions.
        chats: Chats, as collect --keep writes them; default: sft.chats.
        out: Folder to write; default: the run folder's name with -sft.
        resume: Checkpoint to resume from; auto: the newest of --out.
    """
    from text2sql_grpo.models.sources import check_readable

    given = {"questions": questions, "chats": chats}
    own = [f"--sft.{name}={json.dumps(str(path))}" for name, path in given.items() if path is not None]
    run = config_with_files(config, [*settings, *own])
    check_readable(run.model.source)
    folder = run.run.output_dir
    out = out or folder.with_name(f"{folder.name}-sft")
    with writing_to(out):
        console = quiet_console()
        from text2sql_grpo.run import sft_stage
        from text2sql_grpo.run.pipeline import run_arguments

        merged = sft_stage.sft(run, out, run_arguments(run), console=console, resume=resume)
    return 0 if merged else INTERRUPTED
