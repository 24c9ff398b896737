"""What all command lines share: arguments from a typed function, errors in one line, exit codes."""

import json
import os
import sys
from collections.abc import Callable

import tyro

from sa1b.errors import Sa1bError


def run(main: Callable[..., int], description: str | None) -> None:
    """Call `main` with the command line's arguments and exit with what it returns.

    Expected errors end with one line on stderr and code 2; Ctrl-C with 130. With --json, a command that ends
    without its result prints {"error": message, "exit_code": code} on stdout.
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
        _print_error("interrupted", code)
    except (Sa1bError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
        _print_error(str(error), code)
    except SystemExit as error:  # of the parser, which has printed why
        if error.code:
            _print_error("the command line cannot be used; stderr says why", 2)
        raise
    except Exception as error:
        _print_error(f"{type(error).__name__}: {error}", 1)
        raise
    sys.exit(code)


def _print_error(message: str, code: int) -> None:
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": message, "exit_code": code}), flush=True)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number and its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
