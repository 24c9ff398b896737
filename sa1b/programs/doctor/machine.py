"""The checks of `sa1b doctor` that a rank makes alone: functions that yield findings with their remedies."""

import csv
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sa1b.arguments import was_url
from sa1b.console import counted
from sa1b.engine.ranks.parallel import available_memory
from sa1b.engine.watch.hardware import peak_flops
from sa1b.masks.proved import MASKS
from sa1b.programs.doctor import Finding, Findings, State, level
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.report import memory_text, size_text
from sa1b.sam.kernel_proof import Kind, prove, sizes_of
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig
from sa1b.sam.recipe import step_flops
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.manifest import DATASET
from sa1b.storage.atomic import nearest_existing
from sa1b.storage.errors import UnavailableError
from sa1b.storage.local import OPEN_FILES
from sa1b.stream.dataset import Stream
from sa1b.stream.plan import process_rank
from sa1b.stream.throughput import storage_reads
from sa1b.version import __version__, code_digest
from sa1b.workers import available_cpus, cpu_quota

DRIVER = Path("/proc/driver/nvidia/version")  # of NVIDIA; it may be invisible in a container


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process, its rank, and the settings of the user."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # ranks of this machine
    device: torch.device  # a GPU has an index
    host: str
    root: str | None = None
    out: Path | None = None
    seconds: float = 5.0  # of the measurement of a rate
    timeout: float = 30.0  # seconds that a rank waits for the others; half of them, for storage
    rate: float | None = None  # images per second that a rank trains; None: estimated from its device
    preset: str | None = None

    @classmethod
    def of_this_process(cls, **settings: Any) -> "RankProcess":
        rank, world_size = process_rank()
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
        index = 0 if visible == 1 else local[0]
        device = torch.device("cuda", index) if index < visible else torch.device("cpu")
        return cls(rank, world_size, *local, device, socket.gethostname(), **settings)


def versions(process: RankProcess) -> Findings:
    driver = re.search(r"\d+\.\d+[.\d]*", DRIVER.read_text()) if DRIVER.exists() else None
    nccl = torch.version.cuda and dist.is_nccl_available() and torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    values: dict[str, Any] = {"python": platform.python_version(), "sa1b": __version__}
    values |= {"torch": str(torch.__version__), "cuda": torch.version.cuda, "driver": driver and driver[0]}
    values |= {"nccl": ".".join(map(str, nccl)) if nccl else None, "code": code_digest()}
    figure = "Python {python}, sa1b {sa1b}, torch {torch} (CUDA {cuda}, NCCL {nccl}), NVIDIA driver {driver}"
    yield Finding(
        "ok", figure.format(**{name: value or "none" for name, value in values.items()}), "", values
    )


def device(process: RankProcess) -> Findings:
    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as raised:
        error = f": {raised}".splitlines()[0]
    visible = 0 if error else torch.cuda.device_count()
    if process.device.type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(process.device)
        figure = f"{process.device} {gpu.name}, {memory_text(gpu.total_memory)}, {visible} visible"
        yield Finding("ok", figure, "", {"gpu": gpu.name, "uuid": str(gpu.uuid)})
    elif visible:
        figure = f"local rank {process.local_rank} has no GPU: this process sees {visible}"
        yield Finding("failed", figure, f"Start {visible} ranks on this machine, or ask for more GPUs")
    elif DRIVER.exists():
        figure = f"torch {torch.__version__} sees no GPU, though there is a driver{error}"
        remedy = "Install a CUDA build of torch for this driver; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        yield Finding("failed", figure, remedy)
    else:
        figure = f"CPU: no NVIDIA driver is visible; torch is built for {torch.version.cuda or 'CPUs'}"
        remedy = "On a machine with GPUs: docker run --gpus all, or sbatch --gpus-per-node"
        yield Finding("warning" if torch.version.cuda else "ok", figure, remedy)


def gpu_state(process: RankProcess) -> Findings:
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
    found = []
    for index, uuid, name, errors, used, slowdown in rows:
        problems: tuple[tuple[bool, State, str, str], ...] = (
            (errors.strip("0").isdecimal(), "failed", f"{errors} uncorrected memory errors",
             "Reset or replace this GPU; drain the node"),
            (slowdown == "Active", "warning", "slowed down by hardware",
             "Look at temperature, fans and power: nvidia-smi -q -d PERFORMANCE"),
            # The contexts of the ranks take less.
            (used.isdecimal() and int(used) > 2048, "warning", f"{used} MiB are in use",
             "End the other processes that `nvidia-smi` lists"),
        )  # fmt: skip
        of_gpu = f"GPU {index} ({name}, {uuid})"
        found += [Finding(state, f"{of_gpu}: {what}", way) for is_so, state, what, way in problems if is_so]
    yield from found or [Finding("ok", f"{counted(len(rows), 'GPU')}, no errors, no other users")]


# Variables that ruin a run: the value that does (empty: all), why, and the remedy if it is not to unset them.
RUINOUS: dict[str, tuple[str, str, str]] = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine exchange through host memory; for debugging only", ""),
    "NCCL_SHM_DISABLE": ("1", "ranks of a machine exchange through the network; for debugging only", ""),
    "NCCL_IB_DISABLE": ("1", "the active InfiniBand ports are not used", ""),
    "NCCL_NET": ("SOCKET", "the active InfiniBand ports are not used", ""),
    "NCCL_ALGO": ("", "forces an algorithm for all sizes", ""),
    "NCCL_PROTO": ("", "forces a protocol for all sizes, and LL128 may corrupt data", ""),
    "NCCL_DEBUG": ("TRACE", "writes lines for every call; for debugging only", "Set NCCL_DEBUG=WARN"),
    "NCCL_TIMEOUT": ("", "is not read", "Pass --parallel.timeout to the training"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the processor waits for every collective", ""),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that loses another one waits forever", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "compares the ranks at every collective", "Unset it, or set INFO"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the processor waits for every kernel; for debugging only", ""),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("", "allocates memory at every use; for debugging only", ""),
    "NVIDIA_TF32_OVERRIDE": ("0", "no TF32: matrix products take several times as long", ""),
    "NUMBA_DISABLE_JIT": ("1", "masks are 10 to 100 times slower without compiled kernels", ""),
}


def environment(process: RankProcess) -> Findings:
    own = os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf"
    files = [Path(one).read_text() for one in ("/etc/nccl.conf", own) if Path(one).is_file()]
    settings = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*(.*?)\s*$", "\n".join(files))) | os.environ
    names = re.compile(r"(NCCL|GLOO|TORCH_NCCL|TORCH_FR|TORCH_GLOO|TORCH_DISTRIBUTED)_")
    values = {name: settings[name] for name in sorted(settings) if names.match(name) or name in RUINOUS}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    yield Finding("ok", shown or "no variable of NCCL, gloo or torch.distributed is set", "", values)
    interfaces = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    for name, value in values.items():
        ruins, why, remedy = RUINOUS.get(name, ("-", "", ""))
        if ruins in ("", value.upper()) and ("InfiniBand" not in why or has_rdma()):
            yield Finding("warning", f"{name}={value}: {why}", remedy or f"Unset {name}", {name: value})
        if name.endswith("SOCKET_IFNAME") and value[:1] != "^":
            is_exact = value[:1] == "=" or name.startswith("GLOO")
            wanted = tuple(one.partition(":")[0] for one in value.lstrip("=").split(","))
            if not any(one in wanted if is_exact else one.startswith(wanted) for one in interfaces):
                figure = f"{name}={value}: no such interface; {process.host} has {', '.join(interfaces)}"
                yield Finding("failed", figure, f"Name one of them, or unset {name}", {name: value})


def has_rdma() -> bool:
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in port.read_text() for port in ports)


def cpus(process: RankProcess) -> Findings:
    ranks, usable, threads = process.local_world_size, available_cpus(), torch.get_num_threads()
    shared = min(len(os.sched_getaffinity(0)), cpu_quota())
    of_all, problem, remedy = counted(int(shared), "CPU"), "", ""
    if shared < ranks:
        problem = f": {ranks} ranks share {of_all}"
        remedy = "Ask for more CPUs (--cpus-per-task, --cpus), or start fewer ranks on this machine"
    elif threads > usable:
        problem = f": {ranks} x {threads} threads compete for {of_all}"
        remedy = f"Set OMP_NUM_THREADS={usable} for each rank"
    figure = f"{usable} for this rank, {shared:g} of {os.cpu_count()} in the machine"
    figure += f"; torch uses {counted(threads, 'thread')}{problem}"
    yield Finding("warning" if problem else "ok", figure, remedy)


def memory(process: RankProcess) -> Findings:
    each = available_memory() / process.local_world_size
    remedy = "Give the job more memory (--mem, --memory), or start fewer ranks: one needs 4 GiB"
    figure = f"{memory_text(each)} for each rank of this machine"
    yield Finding(level(each, 1 << 30, 4 << 30), figure, remedy)


def shared_memory(process: RankProcess) -> Findings:
    # Through it, NCCL and DataLoader workers exchange data. In Docker's 64 MiB both end with a bus error.
    space = os.statvfs("/dev/shm")
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    remedy = "Make it larger: docker run --shm-size=8g, on a host mount -o remount,size=8G /dev/shm"
    figure = f"{memory_text(free)} free of {memory_text(total)} in /dev/shm, 1 GiB advised"
    yield Finding(level(free, (64 << 20) + 1, 1 << 30), figure, remedy, {"total_bytes": total})


def open_files(process: RankProcess) -> Findings:
    soft, hard = (limit if limit >= 0 else 1 << 40 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = 2 * OPEN_FILES + 4 * process.world_size  # shards, connections to a store, sockets to ranks
    remedy = f"Run `ulimit -n {max(needed, 4096)}` first, or have the hard limit, {hard}, raised"
    yield Finding(level(soft, needed, needed), f"limit {soft}, {needed} needed", remedy)


def space(process: RankProcess) -> Findings:
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


def dataset(process: RankProcess) -> Findings:
    assert process.root is not None
    with closing((opened := Dataset(process.root, deadline=process.timeout / 2)).reader):
        check_images(opened, "training")
        read = opened[process.rank * 7919 % len(opened)]  # verified, another one on each rank
    digest, lacks = opened.table.digest, bool(opened.failed or opened.pending)
    values = {"images": len(opened), "shards": len(opened.shards), "digest": digest, "bytes": len(read.jpeg)}
    values |= {"failed_sources": sorted(opened.failed), "pending_sources": opened.pending}
    figure = f"{len(opened):,} images in {len(opened.shards):,} shards, digest {digest[:12]}"
    figure += f"; failed sources: {len(opened.failed)}, pending: {len(opened.pending)}" if lacks else ""
    yield Finding("warning" if lacks else "ok", figure, "Run reshard again, or train without them", values)


def fault_of(error: Exception, process: RankProcess, check: str) -> Finding:
    """The finding of a check that ended with an expected error, whose message ends with the remedy."""
    if isinstance(error, UnavailableError):
        figure = f"{error.url or process.root}: unavailable for {process.timeout / 2:g} s: {error.last_error}"
        remedy = f"Check on {process.host} that the store runs, AWS_ENDPOINT_URL, proxies and firewall"
    else:
        figure, _, remedy = str(error).replace("\n", " ").partition("; ")
        remedy = remedy[:1].upper() + remedy[1:] or "Check the path, its permissions and the network"
    is_folder = check == "dataset" and "://" not in (root := process.root or "")
    if is_folder and process.world_size > 1 and not Path(root, DATASET).exists():
        others = f"mount their file system on {process.host}, copy it there (sa1b copy), or name a URL"
        remedy = (
            f"If other machines have this dataset: {others}. If none has: {remedy[:1].lower()}{remedy[1:]}"
        )
    return Finding("failed", figure, remedy)


def read_rate(process: RankProcess) -> Findings:
    assert process.root is not None
    opened = Dataset(process.root, deadline=process.timeout / 2)
    threads, sizes, samples, passed = available_cpus(), list[int](), 0, 0.0
    with closing(opened.reader), ThreadPoolExecutor(threads) as pool:
        batch: Any = {"global_batch": min(8, len(opened)), "epochs": None, "rank": 0, "world_size": 1}
        stream = Stream(opened, **batch, seed=process.rank, damage_log=os.devnull)
        reads = storage_reads(stream, pool, threads, sizes)
        next(reads)  # loads compiled kernels and opens connections
        began = time.perf_counter()
        while passed < process.seconds:
            samples += next(reads)
            passed = time.perf_counter() - began
    rate, size, needed = samples / passed, sum(sizes) / max(len(sizes), 1), process.rate or 1.0  # on a CPU
    if process.rate is None and process.device.type == "cuda":  # 40 % of the peak is a good training
        config, peak, needed = PRESETS[process.preset or "vit_b"], peak_flops(process.device, "bf16"), 100.0
        if peak is not None and isinstance(config, SamConfig):
            needed = 0.4 * peak / step_flops(config.model, config.recipe, 1, 64)
    figure = f"{rate:,.0f} random samples/s ({size_text(rate * size)}/s); a rank trains "
    figure += f"{counted(round(needed), 'sample')}/s ({size_text(needed * size)}/s)"
    remedy = "Use faster storage, a local copy (sa1b copy) or --data.cache; see also `sa1b bench`"
    # With less than twice the rate, the GPUs wait when other jobs use the disk.
    yield Finding(level(rate, needed, 2 * needed), figure, remedy, {"samples_per_second": rate})


def compared_kernels(process: RankProcess) -> Findings:
    """Each Triton kernel compared with torch's operators anew, by the first rank of a machine."""
    if process.device.type != "cuda" or process.local_rank > 0:
        why = "no GPU" if process.device.type != "cuda" else "another rank of this machine compares them"
        yield Finding("skipped", why, "Run this on a machine with a GPU", check="kernels")
        return
    model, formats, index = MODELS["vit_b"], {"bf16", "fp16", "fp32"}, process.device.index
    if process.out is not None and (config := process.out / "config.json").is_file():
        settings = json.loads(config.read_bytes())
        model, formats = ModelConfig.saved(settings["model"]), {settings["parallel"]["precision"], "fp32"}
    kinds = [Kind(name, sizes_of(model), index) for name in sorted(formats)]
    for kind in (Kind(MASKS, (), index), *kinds):
        for name, result in kind.found(prove([kind], {})).items():
            parts = [f"{part} {result[part]:.2g}" for part in ("forward", "backward") if part in result]
            facts = f"errors {', '.join(parts)}, {result.get('registers') or 'no'} registers"
            figure = f"{kind.number_format:<5}  {'right' if result['right'] else 'wrong'}  "
            figure += f"{facts if parts else result['why']}  {result.get('seconds', 0.0):g} s"
            remedy = "" if result["right"] else f"Report this table: {result['why']}"
            values = {"kernel": name, **kind._asdict(), **result}
            check = "together" if "+" in name else name
            yield Finding("ok" if result["right"] else "failed", figure, remedy, values, check)
