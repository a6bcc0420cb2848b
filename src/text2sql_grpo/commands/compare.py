from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from text2sql_grpo.commands.options import Count, quiet_console, read_config, writing_to
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run_folder import CONFIG, config_around


def compare(
    base: str,
    trained: str,
    *,
    num_samples: Count | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Compare two models on the same questions.

    Models answer greedily; saved answers are used instead where given, new ones are written beside --out.

    Args:
        base: Model folder or Hub id; or answers: .jsonl, an evaluation's .json, or a run folder.
        trained: Another one, as for base.
        num_samples: N of each held-out set.
        config: Default: config.yaml around the trained model or the base.
        sets: Held-out sets; default: all.
        out: Default: comparison.json in the folder around the trained model.
    """
    path = Path(trained)
    folder = path if (path / CONFIG).is_file() else path.parent if path.exists() else Path()
    out = out or folder / "comparison.json"
    with writing_to(out):
        console = quiet_console()
        from rich.text import Text

        from text2sql_grpo.evaluation.answers import judged, write_answers
        from text2sql_grpo.evaluation.bench import open_workbench
        from text2sql_grpo.evaluation.comparison import compare as compared
        from text2sql_grpo.files import write_json
        from text2sql_grpo.models.loaded_policy import load_policy
        from text2sql_grpo.reporting.comparison_tables import saved_answers, shared_questions, show, spread
        from text2sql_grpo.run.evaluate_job import answer_all, check_place, held_out_sets

        check_place(out)
        given = {"base": base, "trained": trained}
        found = {role: saved_answers(name, sets) for role, name in given.items()}
        known = {role: answers for role, answers in found.items() if answers is not None}
        if len(known) == 2 and (config is not None or settings):
            option = "--config" if config is not None else settings[0]
            raise ConfigError(f"{option} has no effect: both sides are saved answers")
        if len(known) < 2:
            bench = open_workbench(read_config(config or config_around(trained, base), settings))
            chosen = shared_questions(bench, sets, num_samples, *known.values())
            examples = {
                name: [example for example in bench.test[name] if (name, example.id) in chosen]
                for name in held_out_sets(bench, sets)
            }
            with closing(bench.environment):
                for role, name in given.items():
                    if role in known:
                        known[role] = [one for one in known[role] if one.key in chosen]
                        continue
                    title = f"Evaluation of {role}"
                    answers = answer_all(load_policy(name), bench, examples, console, title=title)
                    write_answers(out.with_name(f"{out.stem}-{role}.jsonl"), answers)
                    known[role] = judged(answers)
        comparison = compared(known["base"], known["trained"])
        comparison = comparison.only(spread([one.key for one, _ in comparison.pairs], num_samples))
        record = {"base": base, "trained": trained, "num_samples": num_samples, **comparison.record()}
        write_json(out, record)
        show(comparison, console)
        console.print(Text(f"comparison: {out}"), soft_wrap=True)
    return 0
