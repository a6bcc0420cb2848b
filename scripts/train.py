"""Train, evaluate and merge a model: `python scripts/train.py [--config FILE] [--section.key VALUE ...]`."""

import sys

from text2sql_grpo.commands import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
