"""`python -m text2sql_grpo VERB`."""

import sys

from text2sql_grpo.commands import main

if __name__ == "__main__":
    sys.exit(main())
