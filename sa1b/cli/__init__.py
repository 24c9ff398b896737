"""The installed command: `sa1b <verb>`, one module for each verb (`sa1b.verbs`)."""

import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from sa1b import verbs
from sa1b.console import before_training, command, end, loading, run, run_directly
from sa1b.version import __version__

COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")

TOUR = """\
Train on SA-1B from indexed shards.

usage: sa1b VERB [ARGUMENTS]         sa1b VERB --help explains the arguments of a verb

{verbs}
sa1b --version prints the version. "python -m sa1b" is the same command.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb in the first argument, and exit with its code.

    Args:
        arguments: the arguments of `sa1b`; by default those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        end(2, _tour(), sys.stderr)  # an error, because a script may have passed an empty variable
    first = words[0]
    # After the first word of two, the second one is never a path: for a folder of this name, write ./scaling.
    if " " in (both := " ".join(words[:2])) and both in verbs.paths():
        _run(both, words[2:])
    if first in verbs.paths():
        _run(first, words[1:])
    if first in ("-h", "--help", "help"):
        end(0, _tour())
    if first == "--version":
        end(0, f"sa1b {__version__}\n")
    if first in COMPLETION:
        from sa1b.cli import completion

        mains = {
            verb: None if verb == "train" else verbs.module_of(verb).main
            for verb in verbs.in_order()
            if " " not in verb
        }
        run_directly(lambda: completion.main(words, mains))
    near = difflib.get_close_matches(first, verbs.paths(), 1)
    advice = f"did you mean `{command(near[0])}`?" if near else f"`{command('--help')}` lists the verbs"
    end(2, f"error: {first}: no such verb of sa1b; {advice}\n", sys.stderr)


def _tour() -> str:
    return TOUR.format(verbs=verbs.tour())


def _run(verb: str, arguments: list[str]) -> NoReturn:
    if verb == "train":
        before_training()
        from sa1b.engine.watch.failure import exit_at_once
        from sa1b.train import main

        exit_at_once(main(arguments=arguments, prog=command("train")))
    with loading():
        module = verbs.module_of(verb)
    forwards = verb in ("slurm", "plan train")
    run(module.main, module.__doc__, arguments=arguments, prog=command(verb), forwards=forwards)
