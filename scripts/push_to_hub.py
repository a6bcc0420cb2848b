"""Push a merged model to the Hugging Face Hub, private unless told otherwise.

`python scripts/push_to_hub.py --folder RUN/merged --repo_id me/model`
"""

import argparse
import logging
import sys
from pathlib import Path

from dotenv import load_dotenv


def main() -> int:
    """Exit code: 0 after the upload, 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Push a merged model, with its model card, to the Hub.")
    parser.add_argument("--folder", type=Path, required=True, help="merged model, inside its run folder")
    parser.add_argument("--repo_id", required=True, help="name/model; without a name: your own account")
    parser.add_argument("--public", action="store_true", help="make it public (default: private)")
    options = parser.parse_args()
    load_dotenv()  # before huggingface_hub, which reads its variables when it is imported
    logging.basicConfig(format="%(message)s")
    logging.getLogger("text2sql_grpo").setLevel(logging.INFO)

    from text2sql_grpo.errors import RunError
    from text2sql_grpo.publishing.hub import push_to_hub

    try:
        print(push_to_hub(options.folder, options.repo_id, private=not options.public))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
