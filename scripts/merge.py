"""Merge a LoRA adapter into its base, checked: `python scripts/merge.py --adapter RUN/adapter`."""

import sys

from text2sql_grpo.commands import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
