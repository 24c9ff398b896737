"""The same as `sa1b index`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["index", *sys.argv[1:]])
