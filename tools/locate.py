"""The same as `sa1b locate`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["locate", *sys.argv[1:]])
