"""Push to the Hub, private: `python scripts/push_to_hub.py --folder RUN/merged --repo_id me/model`."""

import sys

from text2sql_grpo.commands import main

if __name__ == "__main__":
    sys.exit(main(["push", *sys.argv[1:]]))
