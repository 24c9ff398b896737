"""The same as `sa1b plan`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
