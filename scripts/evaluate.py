"""Answer held-out questions: `python scripts/evaluate.py --model_path RUN/merged --num_samples 5`."""

import sys

from text2sql_grpo.commands import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
