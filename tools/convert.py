"""The same as `sa1b convert`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
