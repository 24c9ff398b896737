"""The checks of `sa1b doctor`: functions that yield findings, each with a remedy unless it is ok."""

import os
import platform
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sa1b.console import counted
from sa1b.engine.model import declared
from sa1b.engine.ranks.parallel import available_memory, wrap
from sa1b.engine.ranks.process_group import start
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.hardware import GPUS, peak_flops
from sa1b.errors import Sa1bError
from sa1b.masks import Runs
from sa1b.programs.doctor import Finding, RankProcess, Report, State, level, named
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.report import first_names, memory_text, size_text
from sa1b.sam.recipe import step_flops
from sa1b.shards.dataset import Dataset, check_images
from sa1b.shards.manifest import DATASET
from sa1b.storage.errors import UnavailableError
from sa1b.stream.batch import Batch, collate
from sa1b.stream.dataset import Stream
from sa1b.stream.sample import SampleMasks
from sa1b.stream.text import Texts
from sa1b.stream.throughput import storage_reads
from sa1b.stream.transform import Frame
from sa1b.version import __version__, code_digest
from sa1b.workers import available_cpus, cpu_quota

Findings = Iterator[Finding]
DRIVER = Path("/proc/driver/nvidia/version")  # of NVIDIA; it may be invisible in a container
NO_ROOT = Finding("skipped", "no ROOT was named", "Name the dataset directory: sa1b doctor ROOT")


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
    error, listed, is_cuda = "", os.environ.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda is not None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as raised:
        error = f": {raised}".splitlines()[0]
    state: State = "failed"
    visible, values = 0 if error else torch.cuda.device_count(), dict[str, Any]()
    if not visible and not DRIVER.exists():
        state = "warning" if is_cuda else "ok"
        figure = f"CPU: no NVIDIA driver is visible; torch is built for {torch.version.cuda or 'CPUs'}"
        remedy = "On a machine with GPUs: docker run --gpus all, or sbatch --gpus-per-node"
    elif is_cuda and listed is not None and visible < len(listed.split(",")):
        figure = f"CUDA_VISIBLE_DEVICES={listed!r}: torch sees {counted(visible, 'GPU')}"
        remedy = "Unset CUDA_VISIBLE_DEVICES, or list GPUs of `nvidia-smi -L`, each once"
    elif not visible:
        figure = f"torch {torch.__version__} sees no GPU, though there is a driver{error}"
        remedy = "Install a CUDA build of torch that this driver supports; look at `nvidia-smi` and `dmesg`"
    elif process.device.type == "cpu":
        figure = f"local rank {process.local_rank} has no GPU: this process sees {visible}"
        remedy = f"Start {visible} ranks on this machine, or ask for more GPUs"
    else:
        gpu: Any = torch.cuda.get_device_properties(process.device)
        numbers = torch.arange(64 * 64, dtype=torch.float64).reshape(64, 64)
        right = torch.equal(
            (numbers.to(process.device) @ numbers.to(process.device)).cpu(), numbers @ numbers
        )
        figure = f"{process.device} {gpu.name}, {memory_text(gpu.total_memory)}, {visible} visible"
        figure += "" if right else ": computes wrong results"
        state = "ok" if right else "failed"
        remedy = "Drain this node, and run the diagnostics of its GPUs (dcgmi diag -r 3)"
        values = {"gpu": gpu.name, "uuid": str(gpu.uuid)}
    yield Finding(state, figure, remedy, values)


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


def split(error: Exception, process: RankProcess) -> tuple[str, str]:
    """Figure and remedy of an error; messages of this package end with the remedy."""
    if isinstance(error, UnavailableError):
        figure = f"{error.url or process.root}: unavailable for {process.timeout / 2:g} s: {error.last_error}"
        return figure, f"Check on {process.host} that the store runs, AWS_ENDPOINT_URL, proxies and firewall"
    what, _, remedy = str(error).replace("\n", " ").partition("; ")
    return what, remedy[:1].upper() + remedy[1:] or "Check the path, its permissions and the network"


def dataset(process: RankProcess) -> Findings:
    if process.root is None:
        yield NO_ROOT
        return
    try:
        with closing((opened := Dataset(process.root, deadline=process.timeout / 2)).reader):
            check_images(opened, "training")
            read = opened[process.rank * 7919 % len(opened)]  # verified, another one on each rank
    except (Sa1bError, OSError, ValueError) as error:
        figure, remedy = split(error, process)
        if process.world_size > 1 and "://" not in process.root and not Path(process.root, DATASET).exists():
            others = f"mount their file system on {process.host}, copy it there (sa1b copy), or name a URL. "
            remedy = f"If none has: {remedy[:1].lower()}{remedy[1:]}"
            remedy = f"If other machines have this dataset: {others}{remedy}"
        yield Finding("failed", figure, remedy)
        return
    digest, lacks = opened.table.digest, bool(opened.failed or opened.pending)
    values = {"images": len(opened), "shards": len(opened.shards), "digest": digest, "bytes": len(read.jpeg)}
    values |= {"failed_sources": sorted(opened.failed), "pending_sources": opened.pending}
    figure = f"{len(opened):,} images in {len(opened.shards):,} shards, digest {digest[:12]}"
    figure += f"; failed sources: {len(opened.failed)}, pending: {len(opened.pending)}" if lacks else ""
    yield Finding("warning" if lacks else "ok", figure, "Run reshard again, or train without them", values)


def read_rate(process: RankProcess) -> Findings:
    if process.root is None:
        yield NO_ROOT
        return
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
    remedy = "Use faster storage, a local copy (sa1b copy) or --data.cache; `sa1b bench` measures the whole "
    remedy += "loader; --rate N sets what a rank trains"
    # With less than twice the rate, the GPUs wait when other jobs use the disk.
    yield Finding(level(rate, needed, 2 * needed), figure, remedy, {"samples_per_second": rate})


def sample(process: RankProcess) -> tuple[nn.Module, Batch]:
    """A preset's model, the same on all ranks, and two images of noise with four masks, bands of columns."""
    torch.manual_seed(0)
    config = PRESETS[process.preset or "tiny"]
    model, size, numbers = config.build(), config.image_size, np.arange(4)
    noise = np.random.default_rng(process.rank).integers(0, 256, (2, size, size, 3), np.uint8)
    left, band, ones = numbers * (size // 5), size // 8, np.ones(4, np.float32)
    runs = np.stack((left * size, ones * band * size, (size - left - band) * size), axis=1).astype(np.uint32)
    boxes = np.stack((left, 0 * left, left + band - 1, 0 * left + size - 1), axis=1).astype(np.float32)
    points = np.stack((left + band // 2, 0 * left + size // 2), axis=1).astype(np.float32)
    scores: dict[str, Any] = {"predicted_iou": ones, "stability_score": ones}
    scores |= {"areas": numbers * 0 + band * size, "mask_ids": numbers, "mask_index": numbers}
    frame, coded = Frame.whole_image(size, size, size), Runs(runs.ravel(), np.arange(0, 13, 3), size, size)
    masks = SampleMasks(image_id=0, frame=frame, runs=coded, boxes=boxes, points=points, **scores)
    positions = 2 * process.rank, 2 * process.rank + 1
    batch = collate(torch.from_numpy(noise), [masks, masks], positions, (True, True), 0)
    words = torch.arange(9)
    texts = Texts(words[:8].int(), words, torch.zeros(8, 0), words[:8], "mask_id", config.data.text_tokens)
    return model, replace(batch, dense=batch.masks.dense(size // 4), texts=texts)


Given = tuple[nn.Module, Batch]  # of the user's, instead of a preset's


def backward(process: RankProcess, module: nn.Module, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sums of a model, and after a backward pass the gradients by name, None for one that it lacks."""
    inputs = declared(module).inputs(batch.to(process.device), 0)
    torch.manual_seed(process.rank)  # of dropout
    sums: dict[str, Tensor] = module(*inputs)
    torch.autograd.backward(sums["loss"])
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return sums, {name.removeprefix("module."): parameter.grad for name, parameter in trained}


def placement(process: RankProcess, given: Given | None = None) -> Findings:
    model, batch = given or sample(process)
    sums, grads = backward(process, module := deepcopy(model).to(process.device), batch)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **sums}
    tensors |= {f"{name}.grad": gradient for name, gradient in grads.items() if gradient is not None}
    wrong = [f"{name} is on {one.device}" for name, one in tensors.items() if one.device != process.device]
    figure = f"{first_names(wrong, 3, '; ')}, not" if wrong else counted(len(tensors), "tensor")
    remedy = "Register it as a parameter or buffer, or create it with device="
    yield Finding("failed" if wrong else "ok", f"{figure} on {process.device}", remedy)


def gradients(process: RankProcess, given: Given | None = None) -> Findings:
    """Gradients of DDP and FSDP, compared with the mean of those that each rank computes alone; collective.

    Equal ones would prove little: a sum that is not divided by the number of ranks is equal everywhere.
    """
    (model, batch), ranks = given or sample(process), process.world_size
    kind: Any = process.device.type
    configs = [ParallelConfig(mode="ddp", device=kind), ParallelConfig(mode="fsdp", device=kind)]
    start(configs[0])
    _, own = backward(process, alone := deepcopy(model).to(process.device), batch)
    means = dict[str, Tensor]()
    for name, parameter in alone.named_parameters():
        if name in own:  # which is None for a parameter that this batch does not use
            own[name] = (torch.zeros_like(parameter) if own[name] is None else own[name]).detach()
            means[name] = own[name].cpu() / ranks
            dist.all_reduce(means[name])
    remedy = "Look for no_sync, for a hook that leaves out the reduction or divides by another number, and "
    remedy += "for a parameter that not every step uses (--parallel.find-unused)"
    for config in configs:
        _, found = backward(process, wrap(deepcopy(model), config, start(config)), batch)
        faults = {name: what for name in means if (what := fault(found[name], means[name], own[name], ranks))}
        for name, what in [*faults.items()][:1]:
            more = f" and {len(faults) - 1:,} more of {len(means):,}" if len(faults) > 1 else ""
            yield Finding("failed", f"{config.mode}: {name}{more}: {what}", remedy, {"parameters": [*faults]})
        if not faults:
            yield Finding("ok", f"{config.mode}: {len(means)} gradients are those of one process")
        if config.mode == "ddp":
            digest, digests = 0, [0] * ranks
            for one in (gradient for gradient in found.values() if gradient is not None):
                digest = zlib.crc32(one.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest)
            dist.all_gather_object(digests, None if faults else digest)
            most = max(digests, key=[one for one in digests if one is not None].count)
            if not faults and digest != most:
                others = named([rank for rank, one in enumerate(digests) if one == most])
                yield Finding("failed", f"ddp: a gradient has other bytes than on {others}", remedy)


def fault(gradient: Tensor | None, mean: Tensor, own: Tensor, ranks: int) -> str:
    """What is wrong with a gradient, nothing if it is the mean; `own`: that of this rank's data alone."""
    if gradient is None:
        return "has no gradient" if mean.any() else ""
    whole = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
    limit = 1e-4 * float(mean.abs().max()) + 1e-7  # the ranks are summed in another order
    known = {"": (mean, limit)}
    known["not synchronised, it is the gradient of the data of this rank alone"] = own.cpu(), limit
    known[f"the mean over the ranks times {ranks}, the sum"] = mean * ranks, limit * ranks
    for what, (expected, distance) in known.items():
        if (whole - expected).abs().max() <= distance:
            return what
    return f"differs from the mean over the ranks by {float((whole - mean).abs().max()):.3g}"


def check(model: nn.Module, batch: Batch) -> Report:
    """Check where the tensors of a model are and, of several ranks, its gradients under DDP and FSDP.

    Call it on every rank of torchrun, with the same model and another batch. A gradient must be the mean over
    the ranks of those that each computes without the others. DisagreementError: the models differ.

    Args:
        model: a module that fulfils `sa1b.engine.model.Model`; it is copied.
        batch: its micro-batch, on any device.

    Returns:
        The findings of all ranks, the same on each rank: `table()`, `document()` and `exit_code()`.
    """
    process = RankProcess.of_this_process()
    found = process.own(*placement(process, (model, batch)), check="placement")
    of_all = [found] * process.world_size
    if process.world_size > 1:
        found += process.own(*gradients(process, (model, batch)), check="gradients")
        dist.all_gather_object(of_all, found)
    findings = [finding for part in of_all for finding in part]
    return Report(findings, counted(process.world_size, "rank"), [part[0].host for part in of_all])


def bandwidth(process: RankProcess) -> Findings:
    ranks, is_gpu = process.world_size, process.device.type == "cuda"
    numbers = torch.full(((256 if is_gpu else 16) << 18,), float(process.rank), device=process.device)
    dist.all_reduce(numbers)
    wrong, times, hosts = numbers[numbers != ranks * (ranks - 1) // 2], list[float](), [process.host] * ranks
    if len(wrong):
        figure = f"{len(wrong):,} numbers are wrong: {wrong[0]:g}, expected {ranks * (ranks - 1) // 2}"
        remedy = "Run the diagnostics of the GPUs (dcgmi diag -r 3); see whether NCCL_P2P_DISABLE=1 helps"
        yield Finding("failed", figure, remedy)
    dist.all_gather_object(hosts, process.host)
    for _ in range(5):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if is_gpu:
            torch.cuda.synchronize(process.device)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(min(times), dtype=torch.float64, device=process.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rate = numbers.nbytes / float(slowest) * 2 * (ranks - 1) / ranks  # of the bus, as nccl-tests defines it
    # 40 Gbit/s by RDMA, 4 by another network, or a quarter of the link between the GPUs of a machine.
    least = (5e9 if has_rdma() else 5e8) if len({*hosts}) > 1 else 0.0
    if is_gpu and not least:
        name = torch.cuda.get_device_name(process.device).removeprefix("NVIDIA ")
        least = next((gpu.link / 4 for gpu in GPUS if name in gpu.reported and "PCI" not in name), 4e9)
    figure = f"all-reduce of {memory_text(numbers.nbytes)}: {rate / 1e9:.2f} GB/s"
    figure += f", {least / 1e9:g} or more expected" if least else ", within the memory of this machine"
    remedy = "Look at the links (nvidia-smi topo -m, nvidia-smi nvlink --status, ibstat, ethtool), at the "
    remedy += "check 'environment', and with NCCL_DEBUG=INFO at what NCCL uses"
    yield Finding(level(rate, 0, least), figure, remedy, {"bus_bytes_per_second": rate, "expected": least})


CHECKS: dict[str, Callable[[RankProcess], Findings]] = {
    "versions": versions, "device": device, "placement": placement, "environment": environment,
    "CPUs": cpus, "memory": memory, "dataset": dataset, "read rate": read_rate, "bandwidth": bandwidth,
    "gradients": gradients,
}  # fmt: skip
