"""Print a job script of SLURM that converts sources, checks nodes or trains on them.

Example: sa1b slurm reshard --partition cpu --time 1-00:00:00 --tasks 32
             downloads --out shards --workers 4 > job.sh
         sa1b slurm doctor --partition gpu --nodes 4 --gpus 8 shards --out run > job.sh
         sa1b slurm train --partition gpu --nodes 4 --gpus 8
             --preset vit_b --data.root shards --out run > job.sh
         sbatch job.sh

Flags that are not listed here are those of `sa1b reshard`, `sa1b doctor` and `sa1b train`. They are checked
now, not when the job starts. Exit code 0: printed; 2: a flag is wrong; 130: interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.cluster.slurm import MAX_ARRAY, Site, doctor_script, reshard_script, train_script
from sa1b.console import command, loading, parse
from sa1b.errors import UsageError


def main(
    verb: Positional[Literal["reshard", "doctor", "train"]],
    /,
    arguments: tyro.conf.Suppress[tuple[str, ...]] = (),
    partition: str | None = None,
    account: str | None = None,
    time: Annotated[str | None, tyro.conf.arg(metavar="[D-]HH:MM:SS")] = None,
    tasks: int = 32,
    max_array: int = MAX_ARRAY,
    nodes: int = 1,
    gpus: int = 8,
    grace: Annotated[int, tyro.conf.arg(metavar="SECONDS")] = 120,
    cpus: int | None = None,
    memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None,
    name: str | None = None,
    logs: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ".",
    setup: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="COMMAND")] = (),
    sbatch: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION")] = (),
) -> int:
    """Print a job script of SLURM that converts sources, checks nodes or trains on them.

    Args:
        verb: The work of the job.
        arguments: The arguments of the verb.
        partition: Partition of the job. By default the site's default.
        account: Account that is charged. By default the site's default.
        time: Time limit of each task. By default the partition's default.
        tasks: For reshard: tasks of the array. Each one converts every N-th source, so there need not be as
            many tasks as sources.
        max_array: For reshard: the largest array of the site: `scontrol show config | grep MaxArraySize`,
            minus 1.
        nodes: For doctor and train: number of nodes.
        gpus: For doctor and train: GPUs of a node, and ranks on it; 0: one rank on a node, without a GPU.
        grace: For train: seconds before the time limit at which a checkpoint is requested and the job is
            queued again. Must be longer than a step and a checkpoint.
        cpus: Processors of a task. By default 2 for each worker of reshard, 12 for each rank
            of doctor and train.
        memory: Memory of a node, such as 64G. By default 1 GB for each worker of reshard and 1 GB more.
        name: Name of the job.
        logs: Folder of the log files. It must exist when the job starts.
        setup: Shell command that the script runs first, such as `source venv/bin/activate`. May be repeated.
        sbatch: Further option of sbatch, such as --qos=high. Write it with "=": --sbatch=--qos=high. May be
            repeated.
    """
    for flag, number, least in (
        ("--tasks", tasks, 1),
        ("--max-array", max_array, 1),
        ("--nodes", nodes, 1),
        ("--gpus", gpus, 0),
        ("--grace", grace, 1),
        ("--cpus", 1 if cpus is None else cpus, 1),
    ):
        if number < least:
            raise UsageError(f"{flag} {number}: must be at least {least}")
    if tasks > max_array:
        raise UsageError(
            f"--tasks {tasks}: must be at most {max_array}, the largest array of most sites; a task converts "
            "several sources. Raise --max-array if this site allows more"
        )
    for flag, value in (
        ("--partition", partition),
        ("--account", account),
        ("--time", time),
        ("--memory", memory),
        ("--name", name),
        ("--logs", logs),
        *[("--sbatch", option) for option in sbatch],
    ):
        if value is not None and (
            not value or not value.isprintable() or any(sign in value for sign in '"\\')
        ):
            raise UsageError(f'{flag} {value!r}: cannot be an option of sbatch; use no line breaks, " and \\')
    for option in sbatch:
        if not option.startswith("-"):
            raise UsageError(f"--sbatch={option}: is no option of sbatch; write it as --sbatch=--{option}")
    site = Site(partition, account, time, cpus, memory, name, logs.rstrip("/") or "/", setup, sbatch)
    if verb == "reshard":
        text = reshard_script(arguments, site, tasks=tasks, workers=_checked_reshard(arguments))
    elif verb == "doctor":
        _check_doctor(arguments)
        text = doctor_script(arguments, site, nodes=nodes, gpus=gpus)
    else:
        _check_train(arguments)
        text = train_script(arguments, site, nodes=nodes, gpus=gpus, grace=grace)
    print(text, end="")
    if not Path(logs).is_dir():
        sys.stderr.write(
            f"note: --logs {logs}: no such folder; create it before sbatch: without it SLURM runs no task\n"
        )
    return 0


def _checked_reshard(arguments: tuple[str, ...]) -> int:
    """Check the arguments of `sa1b reshard`; return its number of workers."""
    with loading():
        from sa1b.cli import reshard
    call, _ = parse(reshard.main, arguments, command("reshard"))
    for flag, name in (("--task", "task"), ("--finish", "finish"), ("--drop", "drop")):
        if call.keywords[name]:
            raise UsageError(f"{flag}: is not for an array job; omit it, the script adds --task and --finish")
    if not (call.args[0] or call.keywords["links"] or call.keywords["rename"]):
        raise UsageError("SOURCE or --links: missing; add tars, folders or a list of links")
    return int(call.keywords["workers"] or 1)


def _check_doctor(arguments: tuple[str, ...]) -> None:
    with loading():
        from sa1b.cli import doctor
    call, _ = parse(doctor.main, arguments, command("doctor"))
    doctor.check(*call.args, **call.keywords)


def _check_train(arguments: tuple[str, ...]) -> None:
    with loading():
        from sa1b.engine import config
        from sa1b.engine.presets import PRESETS
    config.parse(arguments, None, PRESETS, command("train"))
