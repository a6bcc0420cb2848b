from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text2sql_grpo.commands.options import quiet_console, writing_to
from text2sql_grpo.config import load_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.files import read_jsonl, write_jsonl
from text2sql_grpo.run_folder import ROLLOUTS, TRACES, answers_file, config_around

if TYPE_CHECKING:
    from text2sql_grpo.evaluation.bench import Environment

SHOWN = 10


def replay(
    source: Path,
    *,
    episodes: bool = False,
    config: Path | None = None,
    golds: Path | None = None,
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Judge a run's answers once more, without its model: with other gold queries, test databases or rewards.

    Prints what would have been paid, which verdicts change, and the first ten of them. Example:
    `text2sql-grpo replay runs/my --grading.test_databases 0`

    Args:
        source: Run folder; JSONL of an evaluation, of collect, or rollouts.jsonl; or a folder of verifiers'
            traces.
        episodes: The training episodes of a run folder; default: its held-out answers.
        config: Default: config.yaml around the source. Settings change it: --grading.test_databases 0,
            --rewards '{execution: 1.0}'.
        golds: Question file whose gold queries replace those of the questions with the same id, text and
            database.
        out: JSONL to write the new judgements to.
    """
    if not source.exists():
        raise DataError(f"there is no {source}: give a run folder or a file of recorded answers")
    run = load_config(config or config_around(str(source)), settings)
    from rich.progress import track

    from text2sql_grpo.data.question_files import only_name, read_questions
    from text2sql_grpo.evaluation.bench import Environment
    from text2sql_grpo.evaluation.regrading import corrected
    from text2sql_grpo.evaluation.regrading import replay as replayed
    from text2sql_grpo.reporting.comparison_tables import show_replay

    console = quiet_console()
    with writing_to(out or Path()), Environment.of(run) as environment:
        known: dict[str, Example] = {}
        if golds is not None:
            questions = read_questions(golds, database=only_name(environment.databases))
            known = {question.example.id: question.example for question in questions}
        records = list(_records(source, environment, known, is_run=not episodes))
        if golds is not None and not any(corrected(record, known) for record in records):
            raise DataError(f"no question of {golds} has the id, text and database of an answer in {source}")
        judged = replayed(records, environment, golds=known, rewards=run.reward_mix())
        found = list(track(judged, "Judging", total=len(records), console=console, transient=True))
    if out is not None:
        write_jsonl(out, [one.record | one.answer.record() for one in found])
    show_replay(found, console, shown=SHOWN)
    if out is not None:
        console.print(f"every judgement: {out}", soft_wrap=True)
    return 0


def _records(
    source: Path, environment: "Environment", golds: dict[str, Example], *, is_run: bool
) -> Iterable[dict[str, Any]]:
    path = source
    if source.is_dir():
        path = answers_file(source) if is_run else source / ROLLOUTS
        if not path.is_file() and (source / TRACES).is_file():
            if not golds:
                raise ConfigError("traces hold no gold queries: add --golds FILE")
            from text2sql_grpo.integrations.verifiers.traces import episode_records

            return episode_records(source, golds, environment.sessions)
    if not path.is_file():
        raise DataError(f"no answers to judge: {path} is missing (--episodes grades the training episodes)")
    from text2sql_grpo.evaluation.regrading import read_record

    return read_jsonl(path, "answers of a model", convert=read_record)
