"""Coverage of 95% intervals of an accuracy on simulated benchmarks whose questions share databases.

    python benchmarks/intervals.py [--quick]

Databases have uneven sizes and difficulties of their own (beta-binomial; the intra-class correlation says
how much). Printed is how often an interval holds the true mean: that of `statistics.interval_by_database`,
a percentile bootstrap over databases that is never narrower than the interval by question, as was used
before, and Wilson's interval by question. The last line is JSON.
"""

import argparse
import json
import time
from collections import defaultdict
from statistics import fmean

import numpy as np

from text2sql_grpo.evaluation.statistics import Accuracy, Interval

DATABASES = (4, 8, 15, 20)
CORRELATIONS = (0.05, 0.1, 0.2)
MEANS = (0.1, 0.3, 0.5, 0.7, 0.9)
SIZES = (5, 60)  # questions of a database
BENCHMARKS = 1_000
DRAWS = 1_000  # of the bootstrap


def bootstrap(sums: np.ndarray, sizes: np.ndarray, naive: Interval, rng: np.random.Generator) -> Interval:
    """Percentile bootstrap over databases, never narrower than the interval by question."""
    n = len(sums)
    draws = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
    low, high = np.quantile((draws @ sums) / (draws @ sizes), [0.025, 0.975])
    return min(naive[0], float(low)), max(naive[1], float(high))


def coverage(databases: int, correlation: float, mean: float, benchmarks: int) -> dict[str, float]:
    """Share of benchmarks whose interval holds the mean, by method."""
    rng = np.random.default_rng([databases, round(correlation * 100), round(mean * 100)])
    held: dict[str, list[bool]] = defaultdict(list)
    spread = 1 / correlation - 1
    for _ in range(benchmarks):
        sizes = rng.integers(*SIZES, size=databases)
        sums = rng.binomial(sizes, rng.beta(mean * spread, (1 - mean) * spread, size=databases))
        counts = {str(i): (int(right), int(n)) for i, (right, n) in enumerate(zip(sums, sizes, strict=True))}
        accuracy = Accuracy(int(sums.sum()), int(sizes.sum()), counts)
        naive = accuracy.naive_interval
        intervals = {"t": accuracy.interval, "bootstrap": bootstrap(sums, sizes, naive, rng), "naive": naive}
        for name, (low, high) in intervals.items():
            held[name].append(low <= mean <= high)
    return {name: fmean(values) for name, values in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 benchmarks of each kind instead of 1,000")
    benchmarks = 100 if parser.parse_args().quick else BENCHMARKS
    started = time.process_time()
    print("| databases | t | lowest | bootstrap | by question |\n| ---: | ---: | ---: | ---: | ---: |")
    found = {}
    for databases in DATABASES:
        cells = [coverage(databases, c, mean, benchmarks) for c in CORRELATIONS for mean in MEANS]
        shares = {name: round(fmean(cell[name] for cell in cells), 4) for name in cells[0]}
        found[databases] = shares | {"t_lowest": min(cell["t"] for cell in cells)}
        shown = [shares["t"], found[databases]["t_lowest"], shares["bootstrap"], shares["naive"]]
        print(f"| {databases} | {' | '.join(f'{share:.1%}' for share in shown)} |", flush=True)
    record = {"benchmark": "intervals", "benchmarks": benchmarks, "coverage": found}
    print(json.dumps(record | {"cpu_s": round(time.process_time() - started, 1)}))


if __name__ == "__main__":
    main()
