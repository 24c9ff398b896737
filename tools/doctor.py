"""The same as `sa1b doctor`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
