"""The same as `sa1b copy`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["copy", *sys.argv[1:]])
