"""The same as `sa1b query`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["query", *sys.argv[1:]])
