"""``python -m shardstep``: the command line."""

import sys

from shardstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
