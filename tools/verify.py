"""The same as `sa1b verify`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["verify", *sys.argv[1:]])
