"""The installed command: `sa1b <verb>`, one module for each verb (`sa1b.verbs`).

`sa1b --tyro-print-completion bash`, zsh or tcsh prints a script with all verbs and flags, so that completion
imports neither this package nor torch.
"""

import difflib
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

from sa1b import verbs
from sa1b.console import before_training, command, end, loading, run, run_directly, usage_errors
from sa1b.errors import UsageError
from sa1b.version import __version__

COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
SHELLS = ("bash", "zsh", "tcsh")

TOUR = """\
Train on SA-1B from indexed shards.

usage: sa1b VERB [ARGUMENTS]         sa1b VERB --help explains the arguments of a verb

{verbs}
sa1b --version prints the version. "python -m sa1b" is the same command.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb in the first of the arguments, by default this process's; exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        end(2, _tour(), sys.stderr)  # an error, because a script may have passed an empty variable
    first = words[0]
    # A verb of two words comes first: `plan train` never reads a folder train, `plan ./train` does.
    if " " in (both := " ".join(words[:2])) and both in verbs.paths():
        _run(both, words[2:])
    if first in verbs.paths():
        _run(first, words[1:])
    if first in ("-h", "--help", "help"):
        end(0, _tour())
    if first == "--version":
        end(0, f"sa1b {__version__}\n")
    if first in COMPLETION:
        run_directly(lambda: _complete(first, words[1:]))
    near = difflib.get_close_matches(first, verbs.paths(), 1)
    advice = f"did you mean `{command(near[0])}`?" if near else f"`{command('--help')}` lists the verbs"
    end(2, f"error: {first}: no such verb of sa1b; {advice}\n", sys.stderr)


def _tour() -> str:
    return TOUR.format(verbs=verbs.tour())


def _run(verb: str, arguments: list[str]) -> NoReturn:
    if verb == "train":
        before_training()
        from sa1b.engine.watch.signals import exit_at_once
        from sa1b.train import main

        exit_at_once(main(arguments=arguments, prog=command("train")))
    with loading():
        module = verbs.module_of(verb)
    forwards = verb in ("slurm", "plan train")
    run(module.main, module.__doc__, arguments=arguments, prog=command(verb), forwards=forwards)


def _complete(flag: str, values: Sequence[str]) -> int:
    """Print or write the completion script, according to tyro's two flags."""
    import tyro

    if not values or values[0] not in SHELLS:
        raise UsageError(f"{flag}: the value must be a shell, one of {', '.join(SHELLS)}")
    writes = flag == COMPLETION[1]
    if writes and len(values) < 2:
        raise UsageError(f"{flag} {values[0]}: the path is missing; add the path of the file to write")
    with loading():
        from sa1b.recipes.presets import PRESETS
    settings = type(next(iter(PRESETS.values())))
    callables = {
        verb: settings if verb == "train" else verbs.module_of(verb).main
        for verb in verbs.in_order()
        if " " not in verb
    }
    only = (tyro.conf.FlagCreatePairsOff,)
    printing = [COMPLETION[0], values[0]]
    script = io.StringIO()
    with suppress(SystemExit), redirect_stdout(script), usage_errors("sa1b"):
        tyro.extras.subcommand_cli_from_dict(callables, prog="sa1b", args=printing, config=only)
    # Bash completes every line of the output as a word, also the second line of a description.
    lines = [
        line.replace("\\n", " ") if line.startswith("COMPLETION_SPEC") else line
        for line in script.getvalue().splitlines()
    ]
    if writes:
        Path(values[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        print("\n".join(lines))
    return 0
