"""What all command lines share: arguments from a typed function, errors in one line, exit codes."""

import os
import sys
from collections.abc import Callable

import tyro

from sa1b.errors import Sa1bError


def run(main: Callable[..., int], description: str | None) -> None:
    """Call `main` with the command line's arguments and exit with what it returns.

    Expected errors end with one line on stderr and code 2; Ctrl-C with 130.
    """
    try:
        code = tyro.cli(main, description=description, config=(tyro.conf.FlagCreatePairsOff,))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except (Sa1bError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
