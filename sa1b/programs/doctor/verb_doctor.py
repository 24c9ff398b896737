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
from typing import Annotated, Any, Literal, NoReturn, get_args

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import exit_code_of, loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import takes_endpoint

TOUR = (160, "Questions about both", "check machine and ranks", "sa1b doctor shards")
Name = Literal[
    "versions", "device", "gpu-state", "placement", "environment", "cpus", "memory", "shared-memory",
    "open-files", "space", "dataset", "read-rate", "rendezvous", "bandwidth", "gradients",
]  # fmt: skip
Names = Annotated[UseAppendAction[tuple[Name, ...]], tyro.conf.arg(metavar="CHECK")]


@takes_endpoint
def main(
    root: Annotated[Positional[str | None], tyro.conf.arg(metavar="ROOT")] = None,
    /,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    preset: str | None = None,
    only: Names = (),
    skip: Names = (),
    seconds: Annotated[float, Range(0.1, 600)] = 5.0,
    timeout: Annotated[float, Range(1, 3600)] = 30.0,
    rate: Annotated[float | None, Range(above=0, below=1_000_000)] = None,
    kernels: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> NoReturn:
    """Check that this machine, or all ranks of a job, are set up correctly for training.

    Args:
        root: Dataset directory that training reads, or its URL (s3://...). Without it, the checks of storage
            are skipped.
        out: Folder in which a run would write, to check its space.
        preset: Model whose tensors and gradients are checked, by default tiny, and whose images storage must
            deliver, by default those of vit_b. `sa1b train --help` lists them; distill needs a teacher.
        only: Run only this check. May be repeated.
        skip: Do not run this check. May be repeated.
        seconds: Duration of the measurement of the read rate, 0.1 to 600.
        timeout: Seconds that a rank waits for the others, 1 to 3600.
        rate: Images per second that one rank trains, which storage must deliver. By default those of the
            preset at 40 % of the GPU's peak, or 1 on a CPU.
        kernels: Instead of the checks, compare each Triton kernel with torch's operators on the GPU of each
            machine, for the published models, or for the model of the run in --out. Runs use the result.
        json_output: Print the findings of all ranks as JSON, without progress.
    """
    with loading():
        from sa1b.programs.doctor import Report
        from sa1b.programs.doctor.checks import examine
        from sa1b.programs.doctor.machine import RankProcess, compared_kernels
        from sa1b.recipes.presets import PRESETS
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings: dict[str, Any] = {"seconds": seconds, "timeout": timeout, "rate": rate, "preset": preset}
    process = RankProcess.of_this_process(root=root, out=out, **settings)
    title, found, code = f"rank {process.rank} on {process.host}", list[Any](), 0
    report: Report | None = None
    try:
        if kernels:
            report = Report([*compared_kernels(process)], title)
        else:
            report = examine(process, {*(only or get_args(Name))} - {*skip}, found, quiet=json_output)
    except KeyboardInterrupt as interrupted:
        if not json_output and process.rank == 0:
            print(Report(found, f"{title}, interrupted").table())
        code = exit_code_of(interrupted)
    if report is not None:  # otherwise rank 0 prints the findings of this rank
        present(report, json_output)
        code = report.exit_code()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch that outlive the interpreter may abort it, and a check that hangs has threads too.
    os._exit(code)
