"""Compare two models on the same questions: `python scripts/compare.py BASE RUN/merged`."""

import sys

from text2sql_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
