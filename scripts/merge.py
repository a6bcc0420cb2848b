"""Merge a LoRA adapter into its base, checked: `python scripts/merge.py --adapter RUN/adapter`."""

import argparse
import sys
from pathlib import Path

from dotenv import load_dotenv


def main() -> int:
    """Exit code: 0 after a checked merge, 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Merge a LoRA adapter into its base and check the result.")
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter or full model")
    parser.add_argument("--out", type=Path, help="folder to write; default: 'merged' beside the adapter")
    parser.add_argument("--base", help="folder or Hub id of the base; default: the one the adapter names")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    options = parser.parse_args()
    load_dotenv()  # before huggingface_hub, which reads its variables when it is imported

    from text2sql_grpo.errors import RunError
    from text2sql_grpo.publishing.merge import merge_adapter

    out = options.out or options.adapter.parent / "merged"
    try:
        print(merge_adapter(options.adapter, out, base=options.base, dtype=options.dtype))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
