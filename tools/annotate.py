"""The same as `sa1b annotate`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["annotate", *sys.argv[1:]])
