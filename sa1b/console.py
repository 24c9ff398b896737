"""What all command lines share: arguments from a typed function, errors in one line, exit codes.

Exit codes: 2 for what the caller has to change (a flag, a file, a folder), 130 after Ctrl-C, 141 when the
reader of the output is gone (`| head`); 0, 1 and 3 are the verb's own.
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial, wraps
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TextIO

from sa1b.errors import Sa1bError, UsageError

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + 13  # SIGPIPE, which Windows lacks

_CORNER = "╭"


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

    def parse_and_call() -> int:
        import tyro

        @wraps(main)
        def parsed(*values: Any, **named: Any) -> Callable[[], int]:
            return partial(main, *values, **named)

        only = (tyro.conf.FlagCreatePairsOff,)
        with usage_errors(prog):
            call = tyro.cli(parsed, prog=prog, description=description, args=arguments, config=only)
        return call()

    run_directly(parse_and_call)


def run_directly(work: Callable[[], int]) -> NoReturn:
    """Do the work of a command and exit with the code that it returns, or as `run` says."""
    try:
        code = _code(work)
        sys.stdout.flush()
    except BrokenPipeError:
        code = broken_pipe()
    sys.exit(code)


def _code(work: Callable[[], int]) -> int:
    try:
        return work()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, "interrupted")
    except (Sa1bError, OSError) as error:
        return _failed(str(error), 2, f"error: {error}")
    except SystemExit as ended:  # of help
        return int(ended.code or 0)
    except Exception as error:
        _print_json(f"{type(error).__name__}: {error}", 1)
        raise


@contextmanager
def usage_errors(prog: str | None) -> Iterator[None]:
    """Around a call of tyro: what it refuses of a command line becomes a UsageError of one line."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UsageError(_refusal(box.getvalue(), prog)) from None
    finally:
        if not box.getvalue().startswith(_CORNER):
            sys.stderr.write(box.getvalue())


def _refusal(box: str, prog: str | None) -> str:
    """What a box of tyro says, in one line: a message, a rule, then the help of arguments."""
    rows = [row.removeprefix("│ ").rstrip("│ ") for row in box.splitlines() if row.startswith("│")]
    sections = [list(part) for rule, part in groupby(rows, lambda row: row.startswith("──")) if not rule]
    message, others = sections[0] if sections else [], sections[1:]
    text = " ".join(row.strip() for row in message).removeprefix("Error parsing ").rstrip(".")
    if text.startswith("Missing from"):
        text = f"{', '.join(_named(message))}: missing"
    for near in others:
        if near[0].startswith("Perhaps you meant"):
            text += f"; did you mean {', '.join(name.split()[0] for name in _named(near))}?"
    return f"{text or box.strip()}{'' if text.endswith('?') else ';'} see `{prog or sys.argv[0]} --help`"


def _named(rows: list[str]) -> list[str]:
    return [row.strip() for row in rows if re.match(r" {4}\S", row)]


def end(code: int, text: str, file: TextIO | None = None) -> NoReturn:
    """Print a text, on stdout by default, and exit."""
    try:
        print(text, end="", file=file, flush=True)
    except BrokenPipeError:
        code = broken_pipe()
    sys.exit(code)


def broken_pipe() -> int:
    """The exit code where the reader of the output is gone; nothing more can be printed."""
    # Python flushes stdout once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


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
    """Let Ctrl-C end this process at once and without a traceback; returns the handler before.

    A process that ignores it, as those that a shell starts in the background, still does.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return signal.SIG_IGN
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Several ranks wait for each other where Python does not run.
        return signal.signal(signal.SIGINT, signal.SIG_DFL)
    return signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, b"\ninterrupted: nothing was written\n")
    _print_json("interrupted", INTERRUPTED)
    os._exit(INTERRUPTED)


def _failed(message: str, code: int, line: str) -> int:
    print(line, file=sys.stderr)
    _print_json(message, code)
    return code


def _print_json(message: str, code: int) -> None:
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
