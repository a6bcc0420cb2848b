"""Writes docs/claims.md: measured claims of the front page, each with its set, its seeds and its command.

    python -m docs.claims

A claim is a text of README.md with fields of stored outputs: of benchmarks/results.json by benchmark, and of
docs/quickstart.json. `tests/unit/test_docs.py` looks for each in the page, and refuses one that does not name
the size of its set and its seeds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.quickstart_figures import first_rows
from text2sql_grpo.files import read_json, write_text

HERE = Path(__file__).parent
PAGE = HERE / "claims.md"
_HEAD = """# Measured claims

Each row is a claim of the front page with what it was measured on. "Stored in" is the file that holds the
figure; a test compares it with the page.

| claim | set | seeds | command | stored in |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Claim:
    """A measured claim.

    Attributes:
        says: Its text in README.md, with fields of `stored`.
        on: What it was measured on.
        size: Field with the size of the set, which the page names.
        seeds: Field with the list of seeds; None where nothing is drawn.
        named: How the page names the seeds.
        command: What measures it again.
        stored: File of the figure.
    """

    says: str
    on: str
    size: str
    seeds: str | None
    named: str
    command: str
    stored: str


_SPIDER = "`train --config config/smollm2_spider.yaml --run.seed S`; the control: more of its `sft` stage"
CLAIMS = (
    Claim(
        "{rows[0]}",
        "look-ups of the quickstart's 240 held-out questions, SmolLM2-135M",
        "seeds[0][look-up][total]",
        "all_seeds",
        "mean of {count} seeds",
        "`make train`, `--run.seed S`, then `docs/quickstart_figures.py`",
        "docs/quickstart.json",
    ),
    Claim(
        "{rows[2]}",
        "the other questions of the same runs",
        "seeds[0][others][total]",
        "all_seeds",
        "mean of {count} seeds",
        "the same",
        "docs/quickstart.json",
    ),
    Claim(
        "from {coder[zero_shot]:.1%} to {coder[grpo]:.1%} of {coder[questions]} Spider dev questions "
        "(one seed)",
        "Spider dev, evenly spaced, Qwen2.5-Coder-0.5B-Instruct",
        "coder[questions]",
        "coder[seeds]",
        "one seed",
        "`train --config config/qwen2.5_coder_0.5b_cpu.yaml`",
        "benchmarks/results.json",
    ),
    Claim(
        "seed 1 goes from {coder_all[zero_shot]:.1%} to {coder_all[grpo]:.1%} of all "
        "{coder_all[questions]:,}",
        "Spider dev, the same model, weights of the last step; validation keeps those from before GRPO",
        "coder_all[questions]",
        "coder_all[seeds]",
        "seed 1",
        "the same with `--run.seed 1 --data.test_samples null`; `evaluate` of checkpoint-24",
        "benchmarks/results.json",
    ),
    Claim(
        "from {coder_own[zero_shot]} to {coder_own[sft]} of {coder_own[questions]} questions (one seed)",
        "questions of `init` and ten by hand on the music store, the same model",
        "coder_own[questions]",
        "coder_own[seeds]",
        "one seed",
        "docs/own_database.md, section 9",
        "benchmarks/results.json",
    ),
    Claim(
        "Of {grading[wrong]:,} mutants known to be wrong, {grading[wrong_accepted]:.2%} are paid",
        "mutants of 300 gold queries of Spider dev",
        "grading[wrong]",
        None,
        "",
        "`benchmarks/grading.py`",
        "benchmarks/results.json",
    ),
    Claim(
        "prompts of {rollout[2][prompt]} to {rollout[0][prompt]:,} tokens: both are {update[2][ratio]} to "
        "{rollout[1][ratio]} times faster than TRL's",
        "random Llamas of 2 and 25 M weights, 8 completions a prompt",
        "rollout[0][prompt]",
        None,
        "",
        "`benchmarks/rollout.py`, `update.py`; sizes in [RESULTS](../benchmarks/RESULTS.md)",
        "benchmarks/results.json",
    ),
    Claim(
        "{spider[questions]:,} dev questions, the quickstart's model with `config/smollm2_spider.yaml` "
        "(seeds 1 to 3) goes from {spider[start]:.1%} to {spider[grpo]:.1%} strictly right by GRPO",
        "Spider dev, SmolLM2-135M",
        "spider[questions]",
        "spider[seeds]",
        "seeds 1 to 3",
        _SPIDER,
        "benchmarks/results.json",
    ),
    Claim(
        "More SFT for the same processor time gives {spider[control]:.1%}",
        "the same, with its control",
        "spider[questions]",
        "spider[seeds]",
        "seeds 1 to 3",
        _SPIDER,
        "benchmarks/results.json",
    ),
    Claim(
        "GRPO and that SFT of seed 1 have a pass@8 of {spider[pass_8][grpo]:.1%} and "
        "{spider[pass_8][control]:.1%} ({spider[pass_8][questions]} questions sampled eight times)",
        "Spider dev, evenly spaced",
        "spider[pass_8][questions]",
        "spider[pass_8][seeds]",
        "seed 1",
        "`evaluate --samples 8 --temperature 0.8` of both",
        "benchmarks/results.json",
    ),
)


def stored() -> dict[str, Any]:
    """Stored outputs by the first name of a field."""
    quickstart = read_json(HERE / "quickstart.json")
    results = read_json(HERE.parent / "benchmarks" / "results.json")
    runs = quickstart["seeds"]
    return results | quickstart | {"all_seeds": [run["seed"] for run in runs], "rows": first_rows(runs)[2:]}


def value(field: str, figures: dict[str, Any]) -> Any:
    """Value of a field such as `spider[pass_8][questions]`."""
    found: Any = figures
    for part in field.replace("]", "").split("["):
        found = found[int(part)] if part.isdigit() else found[part]
    return found


def page() -> str:
    """Text of docs/claims.md."""
    figures = stored()
    rows = []
    for claim in CLAIMS:
        seeds = "" if claim.seeds is None else ", ".join(map(str, value(claim.seeds, figures)))
        says = claim.says.format(**figures).strip("| ").replace(" | ", ", ")
        rows.append(f"| {says} | {claim.on} | {seeds} | {claim.command} | {claim.stored} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    write_text(PAGE, page())
