"""The same as `sa1b fetch`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["fetch", *sys.argv[1:]])
