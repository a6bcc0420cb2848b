"""Where the benchmarks find Spider's files."""

import argparse
import os
from pathlib import Path

_DATA = os.environ.get("TEXT2SQL_GRPO_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
SPIDER = Path(_DATA) / "spider"


def check_spider(parser: argparse.ArgumentParser, folder: Path) -> None:
    """End with a message if the folder does not hold Spider as it is published."""
    for name in ("dev.json", "train_spider.json", "database"):
        if not (folder / name).exists():
            parser.error(f"no {name} in {folder}: name the folder of Spider's published files by --data")
