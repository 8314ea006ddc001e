"""``python -m sparkdl.cli``: the command line."""

import sys

from sparkdl.cli import main

if __name__ == "__main__":
    sys.exit(main())
