"""What all command lines share: arguments from a typed function, errors in one line, exit codes.

Exit codes: 2 for what the caller has to change (a flag, a file, a folder), 130 after Ctrl-C, 141 when the
reader of the output is gone (`| head`); 0, 1 and 3 are the verb's own.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

from sa1b.errors import Sa1bError

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + 13  # SIGPIPE, which Windows lacks


def run(
    main: Callable[..., int],
    description: str | None,
    *,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> NoReturn:
    """Call `main` with the command line's arguments and exit with what it returns.

    Expected errors end with one line on stderr and code 2; Ctrl-C with 130. With --json, a command that ends
    without its result prints {"error": message, "exit_code": code} on stdout.

    Args:
        main: its typed arguments are the flags, its docstring explains them.
        description: first part of the help.
        arguments: by default those of this process.
        prog: the command, as the help shows it.
    """
    try:
        import tyro

        code = tyro.cli(
            main, prog=prog, description=description, args=arguments, config=(tyro.conf.FlagCreatePairsOff,)
        )
        sys.stdout.flush()
    except BrokenPipeError:
        end_of_pipe()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
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


def end(code: int, text: str, file: TextIO | None = None) -> NoReturn:
    """Print a text, on stdout by default, and exit."""
    try:
        print(text, end="", file=file, flush=True)
    except BrokenPipeError:
        end_of_pipe()
    sys.exit(code)


def end_of_pipe() -> NoReturn:
    """Exit, without a message, because the reader of the output is gone."""
    # Python flushes stdout once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)


@contextmanager
def loading() -> Iterator[None]:
    """Around imports that take long: Ctrl-C within ends the process at once.

    KeyboardInterrupt in the import of a compiled module can come out as another error.
    """
    before = end_at_interrupt()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_at_interrupt() -> "Callable[..., object] | int | None":
    """Let Ctrl-C end this process at once and without a traceback; returns the handler before."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Several ranks wait for each other where Python does not run.
        return signal.signal(signal.SIGINT, signal.SIG_DFL)
    return signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, b"\ninterrupted: nothing was written\n")
    _print_error("interrupted", INTERRUPTED)
    os._exit(INTERRUPTED)


def _print_error(message: str, code: int) -> None:
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": message, "exit_code": code}), flush=True)


def command(verb: str) -> str:
    """How this installation starts a verb: "sa1b verify", or "python -m sa1b verify".

    The script `sa1b` counts if it is the one that PATH finds and belongs to this interpreter.
    """
    return f"{_program(os.environ.get('PATH'))} {verb}"


@cache
def _program(path: str | None) -> str:
    found = shutil.which("sa1b", path=path)
    if found is not None and Path(found).resolve().parent in _script_folders():
        return "sa1b"
    return f"{_interpreter()} -m sa1b"


def _script_folders() -> set[Path]:
    import sysconfig  # here: it takes as long as all other imports of this module

    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    return {Path(sysconfig.get_path("scripts", scheme)).resolve() for scheme in schemes}


def _interpreter() -> str:
    """The word that starts this Python: its name if PATH finds it, else its path."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        # Not resolved: the interpreter of a virtual environment is a link to another environment's.
        if found and Path(found).parent.samefile(Path(sys.executable).parent):
            return name
    return shlex.quote(sys.executable)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number and its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
