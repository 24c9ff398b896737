"""The installed command: `sa1b <verb>`, one module for each verb.

A verb's module has the function `main`, whose typed arguments are the flags. The docstring of the module is
the first part of the help. Slow imports happen after the command line is parsed.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from sa1b import __version__
from sa1b.console import before_training, command, end, loading, run, run_directly

VERBS = (
    "synthesize",
    "plan",
    "reshard",
    "fetch",
    "verify",
    "gallery",
    "view",
    "locate",
    "query",
    "bench",
    "doctor",
    "train",
    "convert",
    "annotate",
    "slurm",
    "index",
    "export",
    "copy",
)  # in the order of use

# Verbs of two words -> their modules. After the first word, the second one is never a path: for a folder of
# this name, write ./scaling.
SUBVERBS = {"bench scaling": "bench_scaling", "plan train": "plan_train"}

_MODULES = {"copy": "copy_dataset"}  # verbs that are modules of the standard library too

COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")

TOUR = """\
Train on SA-1B from indexed shards.

usage: sa1b VERB [ARGUMENTS]         sa1b VERB --help explains the arguments of a verb

Make shards
  synthesize  make synthetic source tars    sa1b synthesize downloads --long-side 640
  plan        estimate disk and time        sa1b plan downloads --out shards
                of a training run: sa1b plan train --gpu H100 --nodes 2
  reshard     convert source tars           sa1b reshard downloads --out shards --workers 4
  fetch       convert some images only      sa1b fetch downloads --ids ids.txt --out some
  verify      check a dataset directory     sa1b verify shards --deep

See and select
  gallery     show images with masks        sa1b gallery shards
  view        select images and masks       sa1b view shards --held-out 1% --name train
  locate      find images by id             sa1b locate shards 223750
  query       ask in SQL                    sa1b query shards "SELECT count(*) FROM masks"
  bench       measure images per second     sa1b bench shards
                how training scales: sa1b bench scaling --ranks 1,2

Train
  doctor      check machine and ranks       sa1b doctor shards
  train       train a model                 sa1b train --preset tiny --data.root shards --out run
                several GPUs: torchrun --nproc_per_node=8 -m sa1b.train ...
  convert     write weights as one file     sa1b convert run --out sam.safetensors
  annotate    label your own images         sa1b annotate photos --weights run --out labelled

On a cluster
  slurm       print a job script            sa1b slurm reshard downloads --out shards > job.sh

Repair, export and copy
  index       rebuild indexes and tables    sa1b index shards
  export      write other formats           sa1b export shards --to folders --out files
  copy        copy to or from a bucket      sa1b copy shards s3://BUCKET/shards

sa1b --version prints the version. "python -m sa1b" is the same command.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb in the first argument, and exit with its code.

    Args:
        arguments: the arguments of `sa1b`; by default those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        end(2, TOUR, sys.stderr)  # an error, because a script may have passed an empty variable
    first = words[0]
    if (both := " ".join(words[:2])) in SUBVERBS:
        _run(both, words[2:])
    if first in VERBS:
        _run(first, words[1:])
    if first in ("-h", "--help", "help"):
        end(0, TOUR)
    if first == "--version":
        end(0, f"sa1b {__version__}\n")
    if first in COMPLETION:
        from sa1b.cli import completion

        mains = {verb: None if verb == "train" else module_of(verb).main for verb in VERBS}
        run_directly(lambda: completion.main(words, mains))
    near = difflib.get_close_matches(first, VERBS, 1)
    advice = f"did you mean `{command(near[0])}`?" if near else f"`{command('--help')}` lists the verbs"
    end(2, f"error: {first}: no such verb of sa1b; {advice}\n", sys.stderr)


def module_of(verb: str) -> ModuleType:
    """The module of a verb other than train, also of one of two words."""
    return import_module(f"sa1b.cli.{SUBVERBS.get(verb) or _MODULES.get(verb, verb)}")


def _run(verb: str, arguments: list[str]) -> NoReturn:
    if verb == "train":
        before_training()
        from sa1b.engine.failure import exit_at_once
        from sa1b.train import main

        exit_at_once(main(arguments=arguments, prog=command("train")))
    with loading():
        module = module_of(verb)
    forwards = verb in ("slurm", "plan train")
    run(module.main, module.__doc__, arguments=arguments, prog=command(verb), forwards=forwards)
