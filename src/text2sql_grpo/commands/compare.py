from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import Count, quiet_console, writing_to


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

    Args:
        base: Model folder or Hub id; or answers: .jsonl, an evaluation's .json, or a run folder.
        trained: Another one, as for base.
        num_samples: N of each held-out set.
        config: Default: config.yaml around the trained model or the base.
        sets: Held-out sets; default: all.
        out: Default: comparison.json in the folder around the trained model.
    """
    path = Path(trained)
    folder = path if (path / "config.yaml").is_file() else path.parent if path.exists() else Path()
    out = out or folder / "comparison.json"
    with writing_to(out):
        console = quiet_console()
        from text2sql_grpo.jobs.compare import compare_models

        return compare_models(
            base,
            trained,
            config=config,
            settings=settings,
            num_samples=num_samples,
            sets=sets,
            out=out,
            console=console,
        )
