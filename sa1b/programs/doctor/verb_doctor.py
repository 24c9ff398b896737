"""Check that this machine, or all ranks of a job, are set up correctly for training, and say what to change.

Example: sa1b doctor shards --out run
         torchrun --nproc_per_node=8 -m sa1b doctor s3://BUCKET/shards
         sa1b slurm doctor --nodes 4 --gpus 8 shards > job.sh

Writes temporary files only, and the cached sample table of a URL. Exit code 0: no check failed; 1: a check
failed; 2: a flag is wrong; 130: interrupted.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import exit_code_of, loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import takes_endpoint

TOUR = (130, "Train", "check machine and ranks", "sa1b doctor shards")


@takes_endpoint
def main(
    root: Annotated[Positional[str | None], tyro.conf.arg(metavar="ROOT")] = None,
    /,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    only: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CHECK")] = (),
    skip: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CHECK")] = (),
    seconds: Annotated[float, Range(0.1, 600)] = 5.0,
    timeout: Annotated[float, Range(1, 3600)] = 60.0,
    rate: Annotated[float | None, Range(above=0, below=1_000_000)] = None,
    largest_message: Annotated[int, Range(1, 65536, unit=" MiB")] = 256,
    ring: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> NoReturn:
    """Check that this machine, or all ranks of a job, are set up correctly for training.

    Args:
        root: Dataset directory that training reads, or its URL (s3://...). Without it, the checks of storage
            are skipped.
        out: Folder in which a run would write, to check its space.
        only: Run only this check. May be repeated.
        skip: Do not run this check. May be repeated.
        seconds: Duration of each measurement of a rate, 0.1 to 600.
        timeout: Seconds that a rank waits for the others, 1 to 3600.
        rate: Images per second that one rank trains, which storage must deliver. By default those of ViT-B
            at 40 % of the GPU's peak, or 1 on a CPU.
        largest_message: MiB of the largest message of the bandwidth sweep, 1 to 65536. Those that would take
            more than --seconds are left out.
        ring: Also run a ring all-reduce of messages between neighbours, print who sends what in each step,
            and time each link.
        json_output: Print the findings of all ranks as JSON, without progress.
    """
    check(
        root,
        only=only,
        skip=skip,
        seconds=seconds,
        timeout=timeout,
        rate=rate,
        largest_message=largest_message,
    )
    with loading():
        from sa1b.programs.doctor.all_checks import ON_DEMAND, Interrupted, run_checks
        from sa1b.programs.doctor.check import RankProcess
    try:
        process = RankProcess.of_this_process(
            root=root,
            out=out,
            seconds=seconds,
            timeout=timeout,
            rate=rate,
            largest_message=largest_message << 20,
        )
    except ValueError as error:
        raise UsageError(f"{error}") from None
    chosen, left_out = set(map(plain, only)), set(map(plain, skip))

    def runs(name: str) -> bool:
        wanted = plain(name) in chosen if chosen or name in ON_DEMAND else True
        return plain(name) not in left_out and (wanted or (ring and plain(name) == "ring"))

    try:
        report = run_checks(process, runs, quiet=json_output)
    except Interrupted as interrupted:
        if not json_output and process.rank == 0:
            print(interrupted.report.table(), flush=True)
        code = exit_code_of(interrupted)
        sys.stderr.flush()
        os._exit(code)  # as below: threads of the checks still run
    if report is not None:  # otherwise rank 0 prints the findings of this rank
        present(report, json_output)
    sys.stdout.flush()
    # Threads of torch that outlive the interpreter may abort it, and a check that hangs has threads too.
    os._exit(0 if report is None else report.exit_code())


def check(
    root: str | None = None,
    *,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    seconds: float = 5.0,
    timeout: float = 60.0,
    rate: float | None = None,
    largest_message: int = 256,
    **_: object,
) -> None:
    """UsageError names the flag of a wrong argument of `main`."""
    with loading():
        from sa1b.programs.doctor.all_checks import names
    for flag, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if plain(name) not in map(plain, names()):
                raise UsageError(f"{flag} {name}: no such check; they are: {', '.join(names())}")
    if only and not set(map(plain, only)) - set(map(plain, skip)):
        raise UsageError(f"--only {', '.join(only)}: no check is left; omit one of them from --skip")


def plain(name: str) -> str:
    """The name of a check with hyphens for spaces, so that no quotes are needed: "shared-memory"."""
    return name.replace(" ", "-").lower()
