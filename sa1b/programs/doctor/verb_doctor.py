"""Check that this machine, or all ranks of a job, are set up correctly for training, and say what to change.

Example: sa1b doctor shards --out run
         torchrun --nproc_per_node=8 -m sa1b doctor s3://BUCKET/shards
         sa1b slurm doctor --nodes 4 --gpus 8 shards > job.sh

Writes temporary files only, and the cached sample table of a URL. Exit code 0: no check failed; 1: a check
failed; 2: a flag is wrong; 130: interrupted.
"""

import csv
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range, was_url
from sa1b.console import counted, exit_code_of, loading
from sa1b.errors import Sa1bError, UsageError
from sa1b.limit import Limited, OverdueError
from sa1b.programs.doctor import Finding, RankProcess, Report, differences, level, named
from sa1b.report import memory_text, present
from sa1b.sources.path_arguments import takes_endpoint
from sa1b.storage.atomic import nearest_existing
from sa1b.storage.local import OPEN_FILES

TOUR = (160, "Questions about both", "check machine and ranks", "sa1b doctor shards")
Name = Literal[
    "versions", "device", "gpu-state", "placement", "environment", "cpus", "memory", "shared-memory",
    "open-files", "space", "dataset", "read-rate", "rendezvous", "bandwidth", "gradients",
]  # fmt: skip
Names = Annotated[UseAppendAction[tuple[Name, ...]], tyro.conf.arg(metavar="CHECK")]
FIRST = "Fix that first"
# Of the checks that take seconds: the one that must not have failed, and how many times longer it may take.
NEEDS = {"read rate": ("dataset", 1), "placement": ("device", 10), "bandwidth": ("device", 1)}
NEEDS |= {"gradients": ("device", 10)}
TOGETHER = ("bandwidth", "gradients")  # checks of all ranks


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
        import sa1b.programs.doctor.checks  # noqa: F401
        from sa1b.recipes.presets import PRESETS
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings: dict[str, Any] = {"seconds": seconds, "timeout": timeout, "rate": rate, "preset": preset}
    process = RankProcess.of_this_process(root=root, out=out, **settings)
    title, found, report, code = f"rank {process.rank} on {process.host}", list[Finding](), None, 0
    try:
        if kernels:
            report = Report([*compared_kernels(process)], title)
        else:
            report = examine(process, {*(only or get_args(Name))} - {*skip}, found, quiet=json_output)
    except KeyboardInterrupt as interrupted:
        if not json_output and process.rank == 0:
            print(Report(found, f"{title}, interrupted").table(), flush=True)
        code = exit_code_of(interrupted)
    if report is not None:  # otherwise rank 0 prints the findings of this rank
        present(report, json_output)
        code = report.exit_code()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch that outlive the interpreter may abort it, and a check that hangs has threads too.
    os._exit(code)


def compared_kernels(process: RankProcess) -> Iterator[Finding]:
    """Each Triton kernel compared with torch's operators anew, by the first rank of a machine."""
    from sa1b.masks.proved import MASKS
    from sa1b.sam.kernel_proof import Kind, prove
    from sa1b.sam.model import PRESETS as MODELS

    if process.device.type != "cuda" or process.local_rank > 0:
        why = "no GPU" if process.device.type != "cuda" else "another rank of this machine compares them"
        yield Finding("skipped", why, "Run this on a machine with a GPU", check="kernels")
        return
    model, formats = asdict(MODELS["vit_b"]), {"bf16", "fp16", "fp32"}
    if process.out is not None and (config := process.out / "config.json").is_file():
        settings = json.loads(config.read_bytes())
        model, formats = settings["model"], {settings["parallel"]["precision"], "fp32"}
    sizes = model["channels"], model["pixel_features"], model["image_size"] // model["patch_size"]
    kinds = [Kind(name, sizes, process.device.index) for name in sorted(formats)]
    for kind in (Kind(MASKS, (), process.device.index), *kinds):
        for name, result in kind.found(prove([kind], {})).items():
            parts = [f"{part} {result[part]:.2g}" for part in ("forward", "backward") if part in result]
            facts = f"errors {', '.join(parts)}, {result.get('registers') or 'no'} registers"
            figure = f"{kind.number_format:<5}  {'right' if result['right'] else 'wrong'}  "
            figure += f"{facts if parts else result['why']}  {result.get('seconds', 0.0):g} s"
            remedy = "" if result["right"] else f"Report this table: {result['why']}"
            values = {"kernel": name, **kind._asdict(), **result}
            check = "together" if "+" in name else name
            yield Finding("ok" if result["right"] else "failed", figure, remedy, values, check)


def run(process: RankProcess, name: str, before: list[Finding], quiet: bool) -> list[Finding]:
    """The findings of a check; an error is one too, and that the check does not end."""
    import torch

    from sa1b.programs.doctor.checks import CHECKS as OF_TORCH
    from sa1b.programs.doctor.checks import split

    needed, times = NEEDS.get(name, ("", 1))
    if any(one.check == needed and one.state == "failed" for one in before):
        return process.own(Finding("skipped", f"the check {needed!r} failed", FIRST), check=name)
    if needed and process.rank == 0 and not quiet:
        print(f"doctor: {name} ...", file=sys.stderr, flush=True)

    def work() -> list[Finding]:
        if process.device.type == "cuda":
            torch.cuda.set_device(process.device)  # of this thread
        return [*(CHECKS | OF_TORCH)[name](process)]

    limit = times * (process.timeout / 2 + 4 * process.seconds)
    try:  # in a thread, because a read of a dead file server or a call of a broken driver may never return
        findings = Limited().call(work, limit)
    except OverdueError:
        remedy = "A file system, a store or a driver does not answer: look at `df`, `mount` and `dmesg`; "
        remedy += "`py-spy dump --pid` shows where a rank waits for others"
        findings = [Finding("failed", f"did not end within {limit:g} s", remedy)]
    except (Sa1bError, OSError) as error:
        findings = [Finding("failed", *split(error, process))]
    except Exception as error:
        figure = f"the check ended by {type(error).__name__}: {error}".splitlines()[0]
        findings = [Finding("failed", figure, "Report this with the output of --json")]
    return process.own(*findings, check=name)


def examine(process: RankProcess, chosen: set[str], found: list[Finding], quiet: bool) -> Report | None:
    """Run the chosen checks, on every rank. Rank 0 returns the findings of all, another rank None, or its
    own if it cannot reach the others. `found` gets the findings of this rank.
    """
    from sa1b.engine.ranks.process_group import fault

    names = [name for name in ORDER if name.replace(" ", "-").lower() in chosen]
    hosts, store = dict[int, str](), None
    unreachable: list[Finding] = []
    if process.world_size > 1:  # first, so that ranks measure at the same time; torch raises several classes
        try:
            store, hosts = Limited().call(partial(meet, process), 4 * process.timeout)
            group = Limited().call(partial(join, process, store, hosts), 3 * process.timeout)
        except Exception as error:
            reason, remedy = fault(error, serves=process.rank == 0)
            if hosts:
                reason = f"the ranks cannot connect to each other: {' '.join(str(error).split())[:200]}"
                remedy = "open all TCP ports between the hosts, or set GLOO_SOCKET_IFNAME and "
                remedy += "NCCL_SOCKET_IFNAME to the interface between them"
            unreachable = [Finding("failed", reason, remedy[:1].upper() + remedy[1:])]
    elif "rendezvous" in chosen:
        remedy = "Start several: torchrun --nproc_per_node=8 -m sa1b doctor ROOT"
        unreachable = [Finding("skipped", "one process; these checks need several ranks", remedy)]
    for name in names:
        if name not in TOGETHER:
            found += run(process, name, found, quiet)
    alone = f"rank {process.rank} on {process.host}, alone"
    if unreachable or process.world_size == 1:
        found += process.own(*unreachable, check="rendezvous")
        return Report(
            found, f"1 process on {process.host}" if process.world_size == 1 else alone, [process.host]
        )
    at = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    missing = tuple(rank for rank in range(process.world_size) if rank not in hosts)
    met = Finding("ok", f"{process.world_size} ranks met at {at}", check="rendezvous")
    if missing:
        figure = f"{len(missing)} of {process.world_size} ranks did not answer at {at}"
        remedy = "Look at the output of these ranks: they did not start, hang, or print why they cannot "
        remedy += f"reach {at}; --timeout waits longer"
        figure += f" within {process.timeout:g} s"
        met = Finding("failed", figure, remedy, check="rendezvous", ranks=missing)
    try:
        findings = gathered(process, found, hosts, group)
        findings += [one for one in (*differences(findings), met) if one.check.replace(" ", "-") in chosen]
        for name in [name for name in names if name in TOGETHER]:
            if missing:
                findings.append(Finding("skipped", f"{named(missing)} did not answer", FIRST, check=name))
            else:
                findings += gathered(process, run(process, name, findings, quiet), hosts, group)
    except (RuntimeError, OverdueError) as error:
        figure = f"a rank hangs, or has ended: {' '.join(str(error).split())[:200]}"
        remedy = "Look at the output of the ranks; `py-spy dump --pid` shows where one hangs"
        found.append(Finding("failed", figure, remedy, check="rendezvous"))
        return Report(found, alone, [process.host])
    title = f"{process.world_size} ranks on {counted(len({*hosts.values()}), 'host')}"
    report = Report(findings, title, [hosts.get(rank, "?") for rank in range(process.world_size)])
    return report if process.rank == 0 else None


def meet(process: RankProcess) -> tuple[Any, dict[int, str]]:
    """The store of the ranks, and the host of each rank that reaches MASTER_ADDR:MASTER_PORT in time."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, wait, end = process.rank, timedelta(seconds=process.timeout), time.monotonic() + process.timeout
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not serves:  # torch would print tracebacks until rank 0 has started
        try:
            socket.create_connection(at, 5).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    # As in torch.distributed.rendezvous, but the store does not wait for all ranks: then one can be named.
    tcp = TCPStore(*at, None, serves, timeout=wait, wait_for_workers=False, multi_tenant=True)
    store = PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    keys = [f"host/{number}" for number in range(process.world_size)]
    store.set(keys[rank], process.host)
    if rank == 0:
        end = time.monotonic() + process.timeout
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)
        arrived = [number for number, key in enumerate(keys) if store.check([key])]
        store.set("hosts", json.dumps({number: store.get(keys[number]).decode() for number in arrived}))
    store.set_timeout(2 * wait)  # rank 0 may have come later, and waits for others
    hosts = {int(number): host for number, host in json.loads(store.get("hosts")).items()}
    if rank not in hosts:
        raise TimeoutError("rank 0 no longer waits for this rank")
    return store, hosts


def join(process: RankProcess, store: Any, hosts: dict[int, str]) -> Any:
    """Start the process group of the ranks that have met; a gloo group of them."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _set_pg_timeout

    members, wait = sorted(hosts), timedelta(seconds=process.timeout)
    backend = "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo"
    settings: Any = {"rank": members.index(process.rank), "world_size": len(members), "timeout": wait}
    dist.init_process_group(backend, store=PrefixStore("group", store), **settings)
    group = dist.new_group(backend="gloo", timeout=wait)
    for one in (None, group):  # a check that hangs ends before
        _set_pg_timeout(50 * wait, one)
    return group


def gathered(process: RankProcess, found: list[Finding], hosts: dict[int, str], group: Any) -> list[Finding]:
    """The findings of all ranks; RuntimeError names, on rank 0, those that do not answer in time."""
    import torch.distributed as dist

    limit = 12 * (process.timeout / 2 + 4 * process.seconds)  # longer than any check
    of_all = [found] * len(hosts)

    def work() -> None:
        dist.monitored_barrier(group, timedelta(seconds=limit), wait_all_ranks=True)
        dist.all_gather_object(of_all, found, group=group)

    Limited().call(work, 2 * limit)  # in a thread, for Ctrl-C
    return [finding for part in of_all for finding in part]


def gpu_state(process: RankProcess) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        why = "no GPU" if process.device.type == "cpu" else "nvidia-smi is not in PATH"
        yield Finding("skipped", why, "Add the folder of nvidia-smi to PATH if there are GPUs")
    if program is None or process.local_rank > 0:
        return
    query = "--query-gpu=index,uuid,name,ecc.errors.uncorrected.volatile.total,memory.used,{}.hw_slowdown"
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the second one before driver 535
        words = [program, query.format(reasons), "--format=csv,noheader,nounits"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            break
    else:
        text = (done.stderr or done.stdout or f"exit code {done.returncode}").splitlines()[0]
        remedy = "Reboot the node, or drain it: the driver or a GPU does not answer (dmesg | grep -i xid)"
        yield Finding("failed", f"nvidia-smi fails: {text}", remedy)
        return
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    if chosen := tuple(one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one):
        rows = [row for row in rows if row[0] in chosen or row[1].startswith(chosen)]
    good = f"{counted(len(rows), 'GPU')}, no errors, no other users"
    for index, uuid, name, errors, used, slowdown in rows:
        problems = []
        if errors.strip("0").isdecimal():
            what = f"{errors} uncorrected memory errors"
            problems.append(Finding("failed", what, "Reset or replace this GPU; drain the node"))
        if slowdown == "Active":
            remedy = "Look at temperature, fans and power: nvidia-smi -q -d PERFORMANCE"
            problems.append(Finding("warning", "slowed down by hardware", remedy))
        if used.isdecimal() and int(used) > 2048:  # MiB; the contexts of the ranks take less
            remedy = "End the other processes that `nvidia-smi` lists"
            problems.append(Finding("warning", f"{used} MiB are in use", remedy))
        for one in problems:
            good = ""
            yield replace(one, figure=f"GPU {index} ({name}, {uuid}): {one.figure}")
    if good:
        yield Finding("ok", good)


def shared_memory(process: RankProcess) -> Iterator[Finding]:
    # Through it, NCCL and DataLoader workers exchange data. In Docker's 64 MiB both end with a bus error; the
    # documentation of NCCL gives a container 1 GiB.
    space = os.statvfs("/dev/shm")
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    remedy = "Remove what ended processes left there, or make it larger: docker run --shm-size=8g, in "
    remedy += "Kubernetes an emptyDir of medium Memory, on a host mount -o remount,size=8G /dev/shm"
    figure = f"{memory_text(free)} free of {memory_text(total)} in /dev/shm, 1 GiB advised"
    yield Finding(level(free, (64 << 20) + 1, 1 << 30), figure, remedy, {"total_bytes": total})


def open_files(process: RankProcess) -> Iterator[Finding]:
    soft, hard = (limit if limit >= 0 else 1 << 40 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = 2 * OPEN_FILES + 4 * process.world_size  # shards, connections to a store, sockets to ranks
    remedy = f"Run `ulimit -n {max(needed, 4096)}` first; the hard limit, {hard}, is LimitNOFILE= of slurmd, "
    remedy += "nofile in /etc/security/limits.conf, docker run --ulimit nofile=65536"
    yield Finding(level(soft, needed, needed), f"limit {soft}, {needed} needed", remedy)


def space(process: RankProcess) -> Iterator[Finding]:
    # A checkpoint of ViT-H has 7.7 GB, and two are kept while a third is written.
    wanted = [("--out ", process.out, 25e9), ("temporary files in ", Path(tempfile.gettempdir()), 1e9)]
    for what, folder, advised in wanted:
        if folder is None or was_url(folder):
            yield Finding("skipped", "no folder is named", "Name the folder of the run: --out FOLDER")
            continue
        existing = nearest_existing(folder)
        try:
            with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
                file.write(bytes(4096))
        except OSError as error:
            remedy = "Name a folder that this user can write, or free space"
            yield Finding("failed", f"{what}{folder}: cannot be written ({error.strerror})", remedy)
            continue
        stats = os.statvfs(existing)
        free, files = stats.f_frsize * stats.f_bavail, stats.f_favail if stats.f_files else 10**9
        figure = f"{what}{folder}: {memory_text(free)} free, {files:,} more files"
        remedy = f"Free space, {memory_text(advised)} are advised, or name a folder on another disk"
        yield Finding(level(free if files >= 1000 else 0, advised / 25, advised), figure, remedy)


CHECKS = {"GPU state": gpu_state, "shared memory": shared_memory, "open files": open_files, "space": space}
ORDER = (
    "versions", "device", "GPU state", "placement", "environment", "CPUs", "memory", "shared memory",
    "open files", "space", "dataset", "read rate", "bandwidth", "gradients",
)  # fmt: skip
