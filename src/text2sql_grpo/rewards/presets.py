"""Mixes of rewards by name: this package's default, and those of published work.

| preset | formula | source |
| --- | --- | --- |
| `strict` | 1 if the strict verdict holds, on the test databases too, else 0 | this project |
| `skyrl` | -1 if the format is invalid, else 1 if the sets of rows are equal, else 0 | SkyRL-SQL |
| `arctic` | 1 if the results match, 0.1 if the query runs, else 0 | Arctic-Text2SQL-R1 (arXiv:2505.20315) |
| `sql_r1` | format 1 or -1; runs 2 or -2; match 3 or -3; on a match a bonus of up to 1.5 for length | SQL-R1 (arXiv:2504.08600) |
| `reasoning_sql` | 3 match + 1 runs + 1 schema linking + 1 n-grams + 1 format | Reasoning-SQL (arXiv:2503.23157) |
| `qatch` | 0.95 (cell precision + cell recall + tuple cardinality) / 3 + 0.05 format | Think2SQL (arXiv:2504.15077) |

The published ones are kept as they are, faults included, for comparison: they use the official verdict
(BIRD's execution accuracy) or cells, and pay answers that are wrong. Unavoidable differences:

- "format" is this package's: every turn readable by the protocol, and a query submitted.
- In `sql_r1`, execution and match count 0 after a bad format, match 0 for a query that does not run, and
  lengths are in characters. See `sql_r1_length`.
- `reasoning_sql` leaves out the paper's LLM judge (2 points where nothing matches) and counts n-grams as
  pairs of adjacent words.
"""  # noqa: E501 (a table)

from collections.abc import Mapping

OWN_PRESET = "strict"  # the others are kept although they may pay a wrong answer like a right one

PRESETS: Mapping[str, Mapping[str, float]] = {
    OWN_PRESET: {"execution": 1.0},
    "skyrl": {"skyrl": 1.0},
    "arctic": {"official_execution": 0.9, "executes": 0.1},
    "sql_r1": {"sql_r1_format": 1.0, "sql_r1_execution": 1.0, "sql_r1_result": 1.0, "sql_r1_length": 1.0},
    "reasoning_sql": {
        "official_execution": 3.0,
        "executes": 1.0,
        "schema_linking": 1.0,
        "ngrams": 1.0,
        "well_formed": 1.0,
    },
    "qatch": {
        "cell_precision": 0.95 / 3,
        "cell_recall": 0.95 / 3,
        "tuple_cardinality": 0.95 / 3,
        "well_formed": 0.05,
    },
}
