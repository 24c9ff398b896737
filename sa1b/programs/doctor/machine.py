"""This machine: shared memory, open files, locked memory, CPUs, memory, clock, versions, packages."""

import hashlib
import os
import platform
import re
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sa1b
from sa1b.console import counted
from sa1b.engine.ranks.network import active_ports
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, State
from sa1b.report import memory_text
from sa1b.storage.local import OPEN_FILES
from sa1b.storage.protocols import kind_of
from sa1b.version import __version__
from sa1b.workers import available_cpus, cpu_quota, memory_limit

MIB, GIB = 1 << 20, 1 << 30
SHARED = 1 * GIB  # what NVIDIA's documentation of NCCL gives a container: --shm-size=1g
# One prefetched batch of a DataLoader worker, 8 images of 1024 x 1024 pixels, is 25 MB; 64 MiB is the size
# that Docker gives a container, in which NCCL and DataLoader workers end with a bus error.
SHARED_LEAST = 64 * MIB
# The reader keeps OPEN_FILES shards open and has 16 connections; libraries, GPU and torch's store need some.
FILES = 2 * OPEN_FILES
FILES_PER_RANK = 4  # sockets for each other rank, in the groups of a run
CPUS_PER_GPU = 4  # below, decoding and the loader's threads compete with the threads of torch and NCCL
MEMORY_PER_RANK = 4 * GIB  # interpreter, torch, buffers of the loader and a small model
MEMORY_LEAST = 1 * GIB
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")


def shared_memory(process: RankProcess) -> Iterator[Finding]:
    """Size of /dev/shm, through which ranks of a machine (NCCL) and DataLoader workers exchange data."""
    folder = process.system / "dev/shm"
    name = "shared memory"
    grow = (
        "Give the container more: docker run --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of "
        "medium Memory at /dev/shm; on a host: mount -o remount,size=8G /dev/shm"
    )
    try:
        with tempfile.TemporaryFile(dir=folder):
            space = os.statvfs(folder)
    except OSError as error:
        yield Finding(name, "failed", f"{folder}: {error.strerror}", grow)
        return
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    figure = f"{memory_text(free)} free of {memory_text(total)} in {folder}"
    values = {"free_bytes": free, "total_bytes": total}
    if free < SHARED and total >= SHARED:
        remedy = f"Remove files of ended processes from {folder}: ls -l {folder}"
    else:
        remedy = grow
    if free <= SHARED_LEAST:
        need = f"{figure}; NCCL and DataLoader workers need more than {memory_text(SHARED_LEAST)}"
        yield Finding(name, "failed", need, remedy, values=values)
    elif free < SHARED:
        yield Finding(name, "warning", f"{figure}; {memory_text(SHARED)} is advised", remedy, values=values)
    else:
        yield Finding(name, "ok", figure, values=values)


def open_files(process: RankProcess) -> Iterator[Finding]:
    """`ulimit -n`: shards, connections to a store, and sockets to the other ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + FILES_PER_RANK * process.world_size
    values = {"soft": soft, "hard": hard, "needed": need}
    figure = f"limit {_limit(soft)}, {need} needed"
    if soft == resource.RLIM_INFINITY or soft >= need:
        yield Finding("open files", "ok", figure, values=values)
        return
    if hard == resource.RLIM_INFINITY or hard >= need:
        remedy = f"Run `ulimit -n {max(need, 4096) if hard < 0 else min(hard, max(need, 4096))}` first"
    else:
        remedy = (
            f"Raise the hard limit {hard}: LimitNOFILE= of the service (slurmd, docker), nofile in "
            "/etc/security/limits.conf, or docker run --ulimit nofile=65536"
        )
    yield Finding("open files", "failed", figure, remedy, values=values)


def locked_memory(process: RankProcess) -> Iterator[Finding]:
    """`ulimit -l`: InfiniBand adapters read and write memory that is locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ports = sorted(active_ports(process.system))
    values = {"soft_bytes": soft, "rdma_ports": ports}
    figure = f"limit {'unlimited' if soft == resource.RLIM_INFINITY else memory_text(soft)}"
    if soft == resource.RLIM_INFINITY or not ports:
        why = "" if ports else ", no active RDMA port needs more"
        yield Finding("locked memory", "ok", f"{figure}{why}", values=values)
        return
    yield Finding(
        "locked memory",
        "failed",
        f"{figure}, but NCCL registers its buffers with the adapter of {', '.join(ports)}",
        "Make it unlimited: LimitMEMLOCK=infinity of slurmd, docker run --ulimit memlock=-1, or memlock in "
        "/etc/security/limits.conf",
        values=values,
    )


def cpus(process: RankProcess) -> Iterator[Finding]:
    """The CPUs of a rank, compared with its threads."""
    ranks = max(process.local_world_size, 1)
    usable_cpus, quota = available_cpus(process.system), cpu_quota(process.system)
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    figure = f"{usable_cpus} for this rank, {bound} bound, {os.cpu_count()} in the machine"
    figure += f", quota {quota:.1f}" if quota < float("inf") else ""
    figure += f"; torch uses {threads} thread{'' if threads == 1 else 's'}"
    values = {
        "available": usable_cpus,
        "bound": bound,
        "quota": quota if quota < float("inf") else None,
        "torch_threads": threads,
        "local_ranks": ranks,
    }
    usable = min(bound, quota)
    problems = []
    if usable < ranks:
        problems.append(
            (
                f"{ranks} ranks share {usable:g} CPU{'' if usable == 1 else 's'}",
                "Ask for more CPUs (--cpus-per-task, --cpus), or start fewer ranks on this machine",
            )
        )
    elif threads > usable_cpus:
        problems.append(
            (
                f"{ranks} x {threads} threads compete for {usable:g} CPU{'' if usable == 1 else 's'}",
                f"Set OMP_NUM_THREADS={usable_cpus} for each rank",
            )
        )
    if process.device.type == "cuda" and usable_cpus < CPUS_PER_GPU:
        problems.append(
            (
                f"{counted(usable_cpus, 'CPU')} for a GPU, {CPUS_PER_GPU} or more are advised",
                "Ask for more CPUs for each GPU (--cpus-per-gpu), or store smaller images: reshard "
                "--image-size 1024",
            )
        )
    if not problems:
        yield Finding("CPUs", "ok", figure, values=values)
    for problem, remedy in problems:
        yield Finding("CPUs", "warning", f"{figure}: {problem}", remedy, values=values)


def memory(process: RankProcess) -> Iterator[Finding]:
    """Free memory of the machine and the limit of the cgroup, for each rank of this machine."""
    meminfo = {}
    with suppress(OSError, ValueError):
        for line in (process.system / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            meminfo[name] = int(rest.split()[0]) * 1024
    limit = memory_limit(process.system)
    if "MemAvailable" not in meminfo:
        yield Finding(
            "memory", "skipped", "/proc/meminfo has no MemAvailable", "Ignore this outside of Linux"
        )
        return
    available = min(meminfo["MemAvailable"], limit)
    each = available / max(process.local_world_size, 1)
    figure = (
        f"{memory_text(each)} for each rank of this machine: {memory_text(meminfo['MemAvailable'])} available"
    )
    figure += f", limit of the cgroup {memory_text(limit)}" if limit < float("inf") else ""
    values = {
        "available_bytes": meminfo["MemAvailable"],
        "limit_bytes": limit if limit < float("inf") else None,
        "per_rank_bytes": each,
    }
    state: State = "failed" if each < MEMORY_LEAST else "warning" if each < MEMORY_PER_RANK else "ok"
    needed = memory_text(MEMORY_PER_RANK)
    remedy = f"Give the job more memory (--mem, --memory), or start fewer ranks: one needs {needed}"
    yield Finding("memory", state, figure, "" if state == "ok" else remedy, values=values)


def clock(process: RankProcess, now: float | None = None) -> Iterator[Finding]:
    """The date and the source of the clock; `now`: seconds since 1970, by default of this machine."""
    now = time.time() if now is None else now
    source = ""
    with suppress(OSError):
        source = (
            (process.system / "sys/devices/system/clocksource/clocksource0/current_clocksource")
            .read_text()
            .strip()
        )
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    figure = date + (f", clock source {source}" if source else "")
    values = {"unix_seconds": now, "source": source}
    installed = Path(sa1b.__file__).stat().st_mtime
    if now < installed - 86_400:
        yield Finding(
            "clock",
            "failed",
            f"{figure}: before the installation of sa1b",
            "Set the clock and run a time service: chronyc tracking, timedatectl status",
            values=values,
        )
    elif source in SLOW_CLOCKS:
        yield Finding(
            "clock",
            "warning",
            f"{figure}: reading it takes microseconds",
            "Boot with clocksource=tsc, or kvm-clock in a virtual machine; dmesg shows why tsc was rejected",
            values=values,
        )
    else:
        yield Finding("clock", "ok", figure, values=values)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


OPTIONAL = ("gcs", "azure", "text", "ray", "tensorboard", "onnx", "kernels")  # extras for users
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?(?:>=([\d.]+))?.*?(?:extra == ['\"]([\w-]+)['\"])?$")


def versions(process: RankProcess) -> Iterator[Finding]:
    """Versions and builds; the ranks compare them."""
    values = {
        "python": platform.python_version(),
        "sa1b": __version__,
        "code": _code(),
        "machine": boot_id(process),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "driver": driver(process),
    }
    builds = [
        f"CUDA {values['cuda'] or 'none'}",
        f"NCCL {values['nccl'] or 'none'}",
        "gloo" if values["gloo"] else "no gloo",
    ]
    figure = (
        f"Python {values['python']}, sa1b {__version__}, torch {values['torch']} ({', '.join(builds)}), "
        f"NVIDIA driver {values['driver'] or 'none'}"
    )
    remedy = lacking(values)
    yield Finding("versions", "failed" if remedy else "ok", figure, remedy, values=values)


def lacking(build: dict[str, Any]) -> str:
    """The remedy for a part that the build of torch lacks; empty if it lacks none."""
    if not build["gloo"]:
        return "Install a torch with gloo: checkpoints and figures of several ranks need it"
    if build["cuda"] and not build["nccl"]:
        return "Install a CUDA build of torch with NCCL: several GPUs need it"
    return ""


def _code() -> str:
    """A digest of the package's files: machines may have different code of one version."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def boot_id(process: RankProcess) -> str:
    """A random value of the running kernel, which two machines of one name do not share; empty: unknown."""
    try:
        return (process.system / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _nccl() -> str | None:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def driver(process: RankProcess) -> str | None:
    """The version of NVIDIA's kernel driver; None: it is not loaded or not visible in this container."""
    try:
        text = (process.system / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def packages(
    process: RankProcess,
    requirements: Sequence[str] | None = None,
    version_of: Callable[[str], str] = metadata.version,
) -> Iterator[Finding]:
    """The packages that sa1b requires, and those that ROOT requires. Requirements have the form of the
    metadata of a package; `version_of` raises PackageNotFoundError.
    """
    if requirements is None:
        try:
            requirements = metadata.requires("sa1b") or ()
        except metadata.PackageNotFoundError:
            yield Finding(
                "packages",
                "skipped",
                "sa1b runs from a folder and is not installed, so its requirements are unknown",
                "Install it: pip install --editable .",
            )
            return
    extra_of_root = kind_of(process.root or "").extra
    wrong: list[str] = []
    good: dict[str, str] = {}
    absent: dict[str, str] = {}
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is None or match[1].lower() == "sa1b":
            continue
        name, least, extra = match.groups()
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            if extra in (None, extra_of_root):
                wrong.append(f"{name} is missing" + (f" ({process.root} needs it)" if extra else ""))
            else:
                absent[name] = extra
            continue
        if least is not None and _release(version) < _release(least):
            if extra in (None, extra_of_root):
                wrong.append(f"{name} {version} is older than {least}")
            continue
        if extra in (None, extra_of_root):
            good[name] = version
    values = {"installed": good, "not_installed": sorted(absent)}
    if wrong:
        what = f"sa1b[{extra_of_root}]" if extra_of_root else "sa1b"
        remedy = f"pip install --upgrade '{what}'"
        yield Finding("packages", "failed", "; ".join(wrong), remedy, values=values)
    else:
        optional = [f"{name} ({extra})" for name, extra in sorted(absent.items()) if extra in OPTIONAL]
        figure = f"{len(good)} required packages are installed"
        figure += f"; not installed, and optional: {', '.join(optional)}" if optional else ""
        yield Finding("packages", "ok", figure, values=values)
    yield from _slow_parts()


def _slow_parts() -> Iterator[Finding]:
    """Packages that work without their compiled part, only slowly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import google_crc32c
    if google_crc32c.implementation != "c":
        yield Finding(
            "packages",
            "warning",
            "google-crc32c has no compiled part here: every read is verified by Python code",
            "pip install --force-reinstall google-crc32c, or a Python version with a wheel of it",
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
