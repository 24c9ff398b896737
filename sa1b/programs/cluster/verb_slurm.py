"""Print a job script of SLURM that converts sources, checks nodes or trains on them.

Example: sa1b slurm reshard --partition cpu --time 1-00:00:00 --tasks 32
             downloads --out shards --workers 4 > job.sh
         sa1b slurm doctor --partition gpu --nodes 4 --gpus 8 shards --out run > job.sh
         sa1b slurm train --partition gpu --nodes 4 --gpus 8
             --preset vit_b --data.root shards --out run --parallel.mode ddp > job.sh
         sbatch job.sh

Flags that are not listed here are those of `sa1b reshard`, `sa1b doctor` and `sa1b train`. They are checked
now, with the number of ranks of the job, not when the job starts. Exit code 0: printed; 2: a flag is wrong;
130: interrupted.
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b import verbs
from sa1b.arguments import Range
from sa1b.console import command, loading, parse
from sa1b.errors import UsageError
from sa1b.programs.cluster.slurm import MAX_ARRAY, Site, doctor_script, reshard_script, train_script
from sa1b.sources.path_arguments import check_here

TOUR = (130, "Training", "print a job script", "sa1b slurm reshard downloads --out shards > job.sh")

# minutes, minutes:seconds, hours:minutes:seconds; with days: hours, hours:minutes, hours:minutes:seconds
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WORKER, _RANK = 600 << 20, 1 << 30  # bytes that a worker of reshard and a rank need at least
_OF_VERBS = {  # flags that have an effect for some verbs only, with their defaults
    "tasks": (32, "reshard"),
    "max_array": (MAX_ARRAY, "reshard"),
    "accept": ((), "reshard"),
    "nodes": (1, "doctor and train"),
    "gpus": (8, "doctor and train"),
    "grace": (120, "reshard and train"),
    "requeue": (0, "reshard and train"),
}


def main(
    verb: Positional[Literal["reshard", "doctor", "train"]],
    /,
    arguments: tyro.conf.Suppress[tuple[str, ...]] = (),
    partition: str | None = None,
    account: str | None = None,
    time: Annotated[str | None, tyro.conf.arg(metavar="[D-]HH:MM:SS")] = None,
    tasks: Annotated[int, Range(1)] = 32,
    max_array: Annotated[int, Range(1)] = MAX_ARRAY,
    accept: Annotated[UseAppendAction[tuple[int, ...]], tyro.conf.arg(metavar="CODE"), Range(1, 255)] = (),
    nodes: Annotated[int, Range(1)] = 1,
    gpus: Annotated[int, Range(0)] = 8,
    grace: Annotated[int, tyro.conf.arg(metavar="SECONDS"), Range(1, 65535)] = 120,
    requeue: Annotated[int, tyro.conf.arg(metavar="TIMES"), Range(0)] = 0,
    cpus: Annotated[int | None, Range(1)] = None,
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
        time: Time limit of each task: minutes, HH:MM:SS or days-HH:MM:SS. By default the partition's default.
        tasks: For reshard: tasks of the array. Each one converts every N-th source, so there need not be as
            many tasks as sources.
        max_array: For reshard: the largest array of the site: `scontrol show config | grep MaxArraySize`,
            minus 1.
        accept: For reshard: an exit code of a task that SLURM shall count as success, such as 3 (damaged
            pairs were left out). May be repeated.
        nodes: For doctor and train: number of nodes.
        gpus: For doctor and train: GPUs of a node, and ranks on it; 0: one rank on a node, without a GPU.
        grace: Seconds before the time limit at which the job is queued again. For train, a checkpoint is
            requested first: must be longer than a step and a checkpoint.
        requeue: How often a job that failed or whose process was killed is queued again; with at least 1, a
            task of reshard also before its time limit. Without it, SLURM queues a job again only after a
            preemption or the loss of its node.
        cpus: Processors of a task. By default 2 for each worker of reshard, 12 for each rank
            of doctor and train.
        memory: Memory of a node, such as 64G. By default 1 GB for each worker of reshard and 1 GB more.
        name: Name of the job.
        logs: Folder of the log files. It must exist when the job starts.
        setup: Shell command that the script runs first, such as `source venv/bin/activate`. May be repeated.
        sbatch: Further option of sbatch, such as --qos=high. Write it with "=": --sbatch=--qos=high. May be
            repeated.
    """
    values = locals()
    for name_, (default, only) in _OF_VERBS.items():
        if verb not in only and values[name_] != default:
            raise UsageError(f"--{name_.replace('_', '-')}: is for {only}, not {verb}; omit it")
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
    check_here("--logs", Path(logs))
    for option in sbatch:
        if not option.startswith("-"):
            raise UsageError(f"--sbatch={option}: is no option of sbatch; write it as --sbatch=--{option}")
    allowed = _seconds(time)
    if allowed is not None and grace >= allowed and (verb == "train" or requeue):
        raise UsageError(f"--grace {grace}: is not shorter than --time {time}; lower it, or raise --time")
    site = Site(
        *(partition, account, time, cpus, memory, name, logs.rstrip("/") or "/", setup, sbatch),
        grace=grace,
        requeue=requeue,
    )
    ranks = nodes * max(gpus, 1)
    if verb == "reshard":
        workers = _checked_reshard(arguments)
        _check_memory(memory, workers, "worker", _WORKER)
        text = reshard_script(arguments, site, tasks=tasks, workers=workers, accepted=accept)
    elif verb == "doctor":
        with loading():
            doctor = verbs.module_of("doctor")
        parse(doctor.main, arguments, command("doctor"))
        _check_memory(memory, ranks // nodes, "rank", _RANK)
        text = doctor_script(arguments, site, nodes=nodes, gpus=gpus)
    else:
        _check_train(arguments, ranks, gpus)
        _check_memory(memory, ranks // nodes, "rank", _RANK)
        text = train_script(arguments, site, nodes=nodes, gpus=gpus)
    print(text, end="")
    if not Path(logs).is_dir():
        sys.stderr.write(
            f"note: --logs {logs}: no such folder; create it before sbatch: without it SLURM runs no task\n"
        )
    return 0


def _checked_reshard(arguments: tuple[str, ...]) -> int:
    with loading():
        reshard = verbs.module_of("reshard")
    call, _ = parse(reshard.main, arguments, command("reshard"))
    for flag, name in (("--task", "task"), ("--finish", "finish"), ("--drop", "drop")):
        if call.keywords[name]:
            raise UsageError(f"{flag}: is not for an array job; omit it, the script adds --task and --finish")
    if not (call.args[0] or call.keywords["links"] or call.keywords["rename"]):
        raise UsageError("SOURCE or --links: missing; add tars, folders or a list of links")
    return int(call.keywords["workers"] or 1)


def _check_train(arguments: tuple[str, ...], ranks: int, gpus: int) -> None:
    with loading():
        from sa1b.engine import config
        from sa1b.engine.ranks.process_group import replicas_note
        from sa1b.recipes.presets import PRESETS
    run_config = config.parse(arguments, None, PRESETS, command("train"), world_size=ranks)
    if run_config.parallel.device == "cpu" and gpus:
        raise UsageError(
            f"--parallel.device cpu: would not use the {gpus} GPUs of each node; drop it, or pass --gpus 0"
        )
    if not gpus and (run_config.parallel.device == "cuda" or run_config.parallel.offload == "pinned"):
        flag = "offload pinned" if run_config.parallel.offload == "pinned" else "device cuda"
        raise UsageError(f"--parallel.{flag}: needs a GPU, and --gpus 0 requests none; drop one")
    sys.stderr.write(replicas_note(ranks, run_config.parallel.replicas))


def _seconds(time: str | None) -> int | None:
    """The seconds of --time; None: no limit is known."""
    if time is None or time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise UsageError(
            f"--time {time}: must be minutes, such as 90, or HH:MM:SS or days-HH:MM:SS, such as 1-12:00:00"
        )
    days, *numbers = (None if part is None else int(part) for part in match.groups())
    fields = [number for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    elif len(fields) == 3:
        hours, minutes, seconds = fields
    else:
        hours, minutes, seconds = (0, *fields, 0)[:3]
    return 86400 * (days or 0) + 3600 * hours + 60 * minutes + seconds or None  # 0 is no limit


def _check_memory(memory: str | None, count: int, what: str, each: int) -> None:
    """Refuse --memory that sbatch cannot read, or in which the processes of a node would be killed."""
    if memory is None:
        return
    match = re.fullmatch(r"(\d+)([KMGT]?)", memory.upper())
    if match is None:
        raise UsageError(f"--memory {memory}: must be a number with K, M, G or T, such as 64G")
    size = int(match[1]) * _UNITS[match[2] or "M"]
    if 0 < size < count * each:  # 0: all memory of the node
        raise UsageError(
            f"--memory {memory}: is less than {each >> 20} MiB for each {what} of a node, of which there are "
            f"{count}; pass at least {-(-count * each >> 30)}G, or start fewer"
        )
