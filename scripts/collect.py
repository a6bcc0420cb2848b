"""Roll out any model: `python scripts/collect.py --model_path RUN/merged --out episodes.jsonl`."""

import sys

from text2sql_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))
