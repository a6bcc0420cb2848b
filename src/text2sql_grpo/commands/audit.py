"""Find faults of questions or of a reward."""

from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import Count, Seconds, read_config, writing_to


def data(
    file: Path,
    *,
    db: Path,
    against: list[Path] | None = None,
    config: Path | None = None,
    neighbours: int = 4,
    slow_s: Seconds = 1.0,
    max_prompt_tokens: Count = 8192,
    quarantine: Path | None = None,
    keep: list[str] | None = None,
    json: bool = False,
) -> int:
    """Run every gold of a file; find copies, leaks, long prompts.

    Args:
        file: Questions: JSONL, CSV, or the JSON of Spider or BIRD.
        db: Folder of their databases.
        against: Questions of other splits.
        config: YAML whose environment writes the prompts; default: the defaults.
        neighbours: Neighbours to make of each gold, some tenths of a second each at first; 0 for none.
        slow_s: Seconds a gold may take.
        max_prompt_tokens: Tokens a prompt may have.
        quarantine: File to write ids and reasons to, for data.quarantine.
        keep: Reasons that do not quarantine; default: tie_dependent, uncovered.
        json: Print JSON instead of a report.
    """
    from text2sql_grpo.jobs.audit import audit_data

    with writing_to(quarantine or Path()):
        return audit_data(
            file,
            db,
            against=against or (),
            environment=read_config(config).environment if config else None,
            neighbours=neighbours,
            slow_s=slow_s,
            max_prompt_tokens=max_prompt_tokens,
            quarantine=quarantine,
            keep=keep,
            as_json=json,
        )


def reward(
    *, config: Path, golds: Count = 40, seed: int = 0, json: bool = False, settings: Sequence[str] = ()
) -> int:
    """Find wrong answers that a config's reward pays.

    Args:
        config: YAML of the run.
        golds: Number of golds of data.train.
        seed: Random seed.
        json: Print JSON instead of a report.
    """
    from text2sql_grpo.jobs.audit import audit_reward

    return audit_reward(read_config(config, settings), golds=golds, seed=seed, as_json=json)
