"""Supervised training: `python scripts/warm_start.py --config FILE --data CHATS.jsonl --out FOLDER`."""

import sys

from text2sql_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["warm-start", *sys.argv[1:]]))
