"""The same as `sa1b bench`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
