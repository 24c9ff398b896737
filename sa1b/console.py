"""Shared code of all commands: arguments from a typed function, errors on one line, exit codes.

Exit codes: 2 for an error that the user has to fix (a flag, a file, a folder), 130 after Ctrl-C, 141 if the
reader of the output has closed the pipe (`| head`). Each verb defines the codes 0, 1 and 3.
"""

import difflib
import errno
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
from functools import cache, partial
from inspect import Parameter, cleandoc, signature
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_type_hints

from sa1b.arguments import check_values, flag_types, own_name, plain_words
from sa1b.errors import Sa1bError, UsageError, check_installed, printable

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + 13  # 128 + SIGPIPE; Windows has no such signal

# The two first lines of a box of tyro, which has no lines of box drawing where stdout is not UTF-8.
_BOX = re.compile(r"╭| \S.*\n -{9,} *\n")
_PRINT_DROPPED = sys.unraisablehook
_WAYS_OUT = {errno.ENOENT: "check the path", errno.ENOSPC: "free space on this disk"}


def run(
    main: Callable[..., int],
    description: str | None,
    *,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
    forwards: bool = False,
) -> NoReturn:
    """Call `main` with the arguments of the command line, and exit with the code that it returns.

    An expected error prints one line on stderr and exits with code 2; Ctrl-C exits with 130. With --json, a
    command that fails prints {"error": message, "exit_code": code} on stdout.

    The typed arguments of `main` are the flags, and its docstring is their help, after `description`.
    `forwards`: `main` receives the arguments that are none of its flags as its argument `arguments`.
    """

    def parse_and_call() -> int:
        call, unknown = parse(main, arguments, prog, description, forwards=forwards)
        return call(arguments=unknown) if forwards else call()

    run_directly(parse_and_call)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a text of the program, on stdout by default, as `sa1b.errors.printable`; not for users' data."""
    print(printable(text), file=file, flush=True)


def parse(
    main: Callable[..., int],
    arguments: Sequence[str] | None,
    prog: str | None,
    description: str | None = None,
    *,
    forwards: bool = False,
) -> tuple["partial[int]", tuple[str, ...]]:
    """The call of `main` for a command line, unknown arguments if `forwards`; UsageError: a wrong flag."""
    import tyro

    def parsed(*values: Any, **named: Any) -> "partial[int]":
        return partial(main, *values, **named)

    # Not by functools.wraps, which leads tyro to the docstring of `main`.
    parsed.__doc__ = _unbroken(main.__doc__ or "")
    parsed.__annotations__ = flag_types(main)
    vars(parsed)["__signature__"] = signature(main)
    words = plain_words(sys.argv[1:] if arguments is None else arguments)
    read: Callable[..., Any] = partial(
        tyro.cli,
        parsed,
        prog=prog,
        description=description,
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with usage_errors(prog):
            call, unknown = read(return_unknown_args=True) if forwards else (read(), ())
    except UsageError as error:
        # tyro reports a missing argument first, although the reason may be a misspelled flag, or a flag with
        # several values before it.
        if not forwards:
            _check_flags(main, words, prog)
        argument, is_missing, _ = str(error).partition(": missing; ")
        for flag, *values in zip(words, words[1:], words[2:], strict=False) if is_missing else ():
            kind = str(parsed.__annotations__.get(flag.removeprefix("--").replace("-", "_")))
            if "tuple[" in kind and "Append" not in kind and not any(word[:1] == "-" for word in values):
                way = f"{flag} takes all words up to the next flag: write it after {argument}"
                raise UsageError(f"{argument}: missing; {way}") from None
        raise
    check_values(parsed.__annotations__, signature(main).bind(*call.args, **call.keywords).arguments)
    return call, tuple(unknown)


def _unbroken(docstring: str) -> str:
    """A docstring with one line for each argument, because tyro keeps line breaks in the help."""
    text, heading, arguments = cleandoc(docstring).partition("Args:\n")
    return text + heading + re.sub(r"\n {8,}", " ", arguments)


def run_directly(work: Callable[[], int]) -> NoReturn:
    """Call `work` and exit with the code that it returns; errors are handled as in `run`."""
    sys.unraisablehook = _dropped
    try:
        code = _code(work)
        sys.stdout.flush()
    except BrokenPipeError:
        code = broken_pipe()
    sys.exit(code)


def _dropped(error: "sys.UnraisableHookArgs") -> None:
    if error.exc_type is KeyboardInterrupt:  # Python drops what a finalizer raises, and this function
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        _PRINT_DROPPED(error)


def _code(work: Callable[[], int]) -> int:
    try:
        return work()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, "interrupted")
    except (Sa1bError, OSError) as error:
        text = printable(_of_system(error) if isinstance(error, OSError) else str(error))
        return _failed(text, 2, f"error: {text}")
    except SystemExit as ended:  # tyro exits after --help
        return int(ended.code or 0)
    except Exception as error:
        _print_json(f"{type(error).__name__}: {error}", 1)
        raise


@contextmanager
def reported(extra: str | None = None) -> Iterator[None]:
    """Context of a script: an expected error prints one line and exits with code 2, Ctrl-C exits with 130.

    Args:
        extra: extra of this package, whose packages are imported in this context: a missing one is expected.
    """
    sys.unraisablehook = _dropped
    try:
        yield
    except ModuleNotFoundError as error:
        if extra is None:
            raise
        text = f"the package {error.name} is missing; install it with: pip install 'sa1b[{extra}]'"
        sys.exit(_failed(text, 2, f"error: {text}"))
    except BrokenPipeError:
        sys.exit(broken_pipe())
    except (KeyboardInterrupt, Sa1bError, OSError) as error:
        sys.exit(exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    """Print the line of an expected error or of Ctrl-C, and return the exit code."""
    return _code(partial(_raise, error))


def _raise(error: BaseException) -> NoReturn:
    raise error


def _of_system(error: OSError) -> str:
    """The message for an error of the operating system, in the form of expected errors."""
    if error.filename is None or error.strerror is None:
        return str(error)
    way_out = _WAYS_OUT.get(error.errno or 0, "check the file and its permissions")
    return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}; {way_out}"


@contextmanager
def usage_errors(prog: str | None, source: str | None = None) -> Iterator[None]:
    """Context of a call of tyro: an error in the command line becomes a UsageError of one line.

    source: flag for the data of a command without positional arguments; the message for one names it.
    """
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UsageError(_refusal(box.getvalue(), prog, source)) from None
    finally:
        if not _BOX.match(box.getvalue()):
            sys.stderr.write(box.getvalue())


def _refusal(box: str, prog: str | None, source: str | None) -> str:
    """The message in a box of tyro, on one line. The box has a message, a rule and help for arguments."""
    lines = box.splitlines()
    inside = [row for row in lines if row.startswith("│")] or lines[2:]
    rows = [row[2:].rstrip("│ ") for row in inside]
    rules = ("──", "-" * 9)
    sections = [list(part) for rule, part in groupby(rows, lambda row: row.startswith(rules)) if not rule]
    message, others = sections[0] if sections else [], sections[1:]
    text = " ".join(row.strip() for row in message).removeprefix("Error parsing ").rstrip(".")
    if text.startswith("Missing from"):
        text = f"{', '.join(_named(message))}: missing"
    elif match := re.match(r"Unrecognized options: ([^ ,]+)", text):
        if source is not None and not match[1].startswith("-"):
            return f"{match[1]}: has no flag before it; pass {source} {match[1]} if it is the data"
        near = [_named(other) for other in others if other[0].startswith("Perhaps you meant")]
        return _unknown(match[1], [name.split()[0] for names in near for name in names], prog)
    for pattern, form in _FORMS:
        text = re.sub(pattern, form, text)
    return f"{text or box.strip()}; {_see_help(prog)}"


# The form of a message of tyro -> the form of the messages of this package.
_FORMS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^[a-z]+: (?=--)", ""),  # a group of flags, before a message that names a flag
    (r"^Missing value for argument '([^']+)'.*", r"\1: its value is missing"),
    (
        r"^invalid choice '(.*)' for argument '(.+)'\. Expected one of \(('.+?'),?\)$",
        r"\2 \1: must be one of \3",
    ),
    (  # None is the default of a flag that is not given; beside it, tyro has a set of the others
        r"(?<=: must be one of )(.*'None'.*)",
        lambda match: ", ".join(sorted({*match[1].split(", ")} - {"'None'"})),
    ),
    (r"^(\S+): invalid literal for int\(\) with base 10: '(.*)'$", r"\1 \2: must be a whole number"),
    (r"^(\S+): could not convert string to float: '(.*)'$", r"\1 \2: must be a number"),
    (
        r"^(\S+): no type matching \{None\}\|INT could be instantiated from \['(.*?)'\].*",
        r"\1 \2: must be a whole number",
    ),
    (
        r"^(\S+): no type matching \{None\}\|FLOAT could be instantiated from \['(.*?)'\].*",
        r"\1 \2: must be a number",
    ),
    (r"^(\S+): no type matching .*\[bold\](.*?)\[/bold\].*", r"\1: must be followed by \2"),
    (r"^(\S+): Could not find valid parse for arguments: \['(.*?)'.*", r"\1 \2: not a valid value"),
)


def _named(rows: list[str]) -> list[str]:
    names: list[str] = []
    for row in rows:
        if re.match(r" {4}\S", row):
            if names and names[-1].count("{") > names[-1].count("}"):  # choices that tyro broke into rows
                names[-1] += row.strip()
            else:
                names.append(row.strip())
    return names


def _check_flags(main: Callable[..., int], words: Sequence[str], prog: str | None) -> None:
    """Raise UsageError for the first word that looks like a flag and is no flag of `main`."""
    known = {"-h", "--help", *_flags(main)}
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0].replace("_", "-")
        if re.match(r"--?[A-Za-z]", flag) and flag not in known:
            meant = f"--{own_name(flag.lstrip('-').replace('-', '_')).replace('_', '-')}"
            near = [meant] if meant in known else difflib.get_close_matches(flag, known, 1)
            raise UsageError(_unknown(word.partition("=")[0], near, prog))


def _flags(main: Callable[..., int]) -> Iterator[str]:
    """The flags of a function: its arguments, except those that are positional only."""
    hints = get_type_hints(main, include_extras=True)
    for name, parameter in signature(main).parameters.items():
        if parameter.kind is not Parameter.POSITIONAL_ONLY:
            names = [getattr(item, "name", None) for item in getattr(hints[name], "__metadata__", ())]
            chosen = next((text for text in names if isinstance(text, str)), name)
            yield f"--{chosen.replace('_', '-')}"


def _unknown(word: str, near: Sequence[str], prog: str | None) -> str:
    what = "no such flag" if word.startswith("-") else "one argument too many"
    return f"{word}: {what}; " + (f"did you mean {near[0]}? " if near else "") + _see_help(prog)


def _see_help(prog: str | None) -> str:
    return f"see `{prog or sys.argv[0]} --help`"


def end(code: int, text: str, file: TextIO | None = None) -> NoReturn:
    """Print a text, on stdout by default, and exit."""
    try:
        print(printable(text), end="", file=file, flush=True)
    except BrokenPipeError:
        code = broken_pipe()
    sys.exit(code)


def broken_pipe() -> int:
    """The exit code after the reader closed the pipe. Later output, also that at exit, is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


@contextmanager
def loading() -> Iterator[None]:
    """Context of slow imports, in which Ctrl-C ends the process at once."""
    check_installed()
    # Otherwise a KeyboardInterrupt during the import of a compiled module may become another exception.
    before = end_at_interrupt()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_at_interrupt() -> "Callable[..., object] | int | None":
    """Make Ctrl-C end this process at once, without a traceback, and return the previous handler."""
    # A process that ignores the signal, such as a background process of a shell, continues to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return signal.SIG_IGN
    if os.environ.get("WORLD_SIZE", "1") != "1":  # its value is checked later, with a message
        # A rank may wait for the others in native code, where no Python handler runs.
        return signal.signal(signal.SIGINT, signal.SIG_DFL)
    return signal.signal(signal.SIGINT, _end)


def before_training() -> None:
    """Prepare the signals of a process that imports what training needs, until the run handles them."""
    check_installed()
    end_at_interrupt()


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


def command(verb: str, *words: object) -> str:
    """The command of a verb in this installation: "sa1b verify" or "python -m sa1b verify". The words are
    quoted for a shell.
    """
    # The short form is used if the script `sa1b` on the PATH belongs to this interpreter.
    return " ".join([_program(os.environ.get("PATH")), verb, *(shlex.quote(str(word)) for word in words)])


@cache
def _program(path: str | None) -> str:
    program = shutil.which("sa1b", path=path)
    if program is not None and Path(program).resolve().parent in _script_folders():
        return "sa1b"
    return f"{_interpreter()} -m sa1b"


def _script_folders() -> set[Path]:
    import sysconfig  # imported here because it takes as long as all other imports of this module

    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    return {Path(sysconfig.get_path("scripts", scheme)).resolve() for scheme in schemes}


def _interpreter() -> str:
    """The command that starts this interpreter: its name if it is on the PATH, else its path."""
    for name in ("python", "python3"):
        interpreter = shutil.which(name)
        # Links are not resolved, because the interpreter of a virtual environment is a link to another one.
        if interpreter and Path(interpreter).parent.samefile(Path(sys.executable).parent):
            return name
    return shlex.quote(sys.executable)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
