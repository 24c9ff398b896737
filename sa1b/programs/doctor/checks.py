"""The checks of `sa1b doctor` on all ranks: they meet, run each check, and compare what they have found."""

import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from sa1b.console import counted
from sa1b.engine.model import declared
from sa1b.engine.planner import blank_batch
from sa1b.engine.ranks import process_group
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.hardware import GPUS
from sa1b.errors import Sa1bError
from sa1b.limit import Limited, OverdueError
from sa1b.programs.doctor import Finding, Findings, Report, differences, level, machine, named
from sa1b.programs.doctor.machine import RankProcess
from sa1b.recipes.presets import PRESETS
from sa1b.report import first_names, memory_text
from sa1b.stream.batch import Batch
from sa1b.stream.text import Texts

Given = tuple[nn.Module, Batch]


def sample(process: RankProcess) -> Given:
    """A preset's model, the same on all ranks, and two images of noise with four masks, bands of columns."""
    torch.manual_seed(0)
    config = PRESETS[process.preset or "tiny"]
    model, size, numbers = config.build(), config.image_size, torch.arange(8)
    batch, width = blank_batch(2, 4, size, size // 4), size // 8
    batch.images.random_(0, 256, generator=torch.Generator().manual_seed(process.rank))
    left, columns = numbers % 4 * (size // 5), torch.arange(0, size, 4)
    inside = (columns >= left[:, None]) & (columns < left[:, None] + width)
    words = torch.arange(9)
    texts = Texts(words[:8].int(), words, torch.zeros(8, 0), numbers, "mask_id", config.data.text_tokens)
    return model, replace(
        batch, texts=texts, masks=replace(batch.masks, image=numbers // 4), mask_index=numbers % 4,
        dense=inside[:, None].expand(-1, len(columns), -1).byte(), framed_sizes=batch.framed_sizes + size,
        boxes=torch.stack((left, 0 * left, left + width - 1, 0 * left + size - 1), dim=1).float(),
        points=torch.stack((left + width // 2, 0 * left + size // 2), dim=1).float(),
        positions=torch.arange(2) + 2 * process.rank, valid=~batch.valid,
    )  # fmt: skip


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
    process_group.start(configs[0])
    _, own = backward(process, alone := deepcopy(model).to(process.device), batch)
    means = dict[str, Tensor]()
    for name, parameter in alone.named_parameters():
        if name in own:  # which is None for a parameter that this batch does not use
            own[name] = (torch.zeros_like(parameter) if own[name] is None else own[name]).detach()
            means[name] = own[name].cpu() / ranks
            dist.all_reduce(means[name])
    remedy = "Look for no_sync, a hook that divides by another number, parameters that are not always used"
    for config in configs:
        _, found = backward(process, wrap(deepcopy(model), config, process_group.start(config)), batch)
        faults = {name: what for name in means if (what := fault(found[name], means[name], own[name], ranks))}
        for name, what in [*faults.items()][:1]:
            more = f" and {len(faults) - 1:,} more of {len(means):,}" if len(faults) > 1 else ""
            yield Finding("failed", f"{config.mode}: {name}{more}: {what}", remedy, {"parameters": [*faults]})
        if not faults:
            yield Finding("ok", f"{config.mode}: {len(means)} gradients are those of one process")
        if config.mode == "ddp":
            digest, digests = 0, [None] * ranks
            for one in (gradient for gradient in found.values() if gradient is not None):
                digest = zlib.crc32(one.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest)
            dist.all_gather_object(digests, None if faults else digest)
            most = max(digests, key=digests.count)
            if None not in digests and digest != most:
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
    found = _of_rank(process, "placement", placement(process, (model, batch)))
    of_all = [found] * process.world_size
    if process.world_size > 1:
        found += _of_rank(process, "gradients", gradients(process, (model, batch)))
        dist.all_gather_object(of_all, found)
    findings = [finding for part in of_all for finding in part]
    return Report(findings, counted(process.world_size, "rank"), [part[0].host for part in of_all])


def bandwidth(process: RankProcess) -> Findings:
    ranks, is_gpu = process.world_size, process.device.type == "cuda"
    numbers, hosts = torch.zeros((256 if is_gpu else 16) << 18, device=process.device), [""] * ranks
    dist.all_gather_object(hosts, process.host)
    times = []
    for _ in range(6):  # the first one connects the ranks
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if is_gpu:
            torch.cuda.synchronize(process.device)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(min(times), dtype=torch.float64, device=process.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rate = numbers.nbytes / float(slowest) * 2 * (ranks - 1) / ranks  # of the bus, as nccl-tests defines it
    # 40 Gbit/s by RDMA, 4 by another network, or a quarter of the link between the GPUs of a machine.
    least = (5e9 if machine.has_rdma() else 5e8) if len({*hosts}) > 1 else 0.0
    if is_gpu and not least:
        name = torch.cuda.get_device_name(process.device).removeprefix("NVIDIA ")
        least = next((gpu.link / 4 for gpu in GPUS if name in gpu.reported and "PCI" not in name), 4e9)
    figure = f"all-reduce of {memory_text(numbers.nbytes)}: {rate / 1e9:.2f} GB/s"
    figure += f", {least / 1e9:g} or more expected" if least else ", within the memory of this machine"
    remedy = "Look at the links (nvidia-smi topo -m, ibstat), and with NCCL_DEBUG=INFO at what NCCL uses"
    yield Finding(level(rate, 0, least), figure, remedy, {"bus_bytes_per_second": rate, "expected": least})


CHECKS: dict[str, Callable[[RankProcess], Findings]] = {
    "versions": machine.versions, "device": machine.device, "GPU state": machine.gpu_state,
    "placement": placement, "environment": machine.environment, "CPUs": machine.cpus,
    "memory": machine.memory, "shared memory": machine.shared_memory, "open files": machine.open_files,
    "space": machine.space, "dataset": machine.dataset, "read rate": machine.read_rate,
    "bandwidth": bandwidth, "gradients": gradients,
}  # fmt: skip
FIRST = "Fix that first"
# Of the checks that take seconds: the one that must not have failed, and how many times longer it may take.
NEEDS = {"read rate": ("dataset", 1), "placement": ("device", 10), "bandwidth": ("device", 1)}
NEEDS |= {"gradients": ("device", 10)}
TOGETHER = ("bandwidth", "gradients")  # checks of all ranks


def _of_rank(process: RankProcess, name: str, findings: Iterable[Finding]) -> list[Finding]:
    """The findings of a check on this rank; one that is ok needs no remedy."""
    where: dict[str, Any] = {"check": name}
    where |= {"ranks": (process.rank,), "host": process.host} if process.world_size > 1 else {}
    return [replace(one, remedy=one.remedy if one.state != "ok" else "", **where) for one in findings]


def run(process: RankProcess, name: str, before: list[Finding], quiet: bool) -> list[Finding]:
    """The findings of a check; an error is one too, and that the check does not end."""
    needed, times = NEEDS.get(name, ("", 1))
    if name in ("dataset", "read rate") and process.root is None:
        skipped = Finding("skipped", "no ROOT was named", "Name the dataset directory: sa1b doctor ROOT")
        return _of_rank(process, name, [skipped])
    if any(one.check == needed and one.state == "failed" for one in before):
        return _of_rank(process, name, [Finding("skipped", f"the check {needed!r} failed", FIRST)])
    if needed and process.rank == 0 and not quiet:
        print(f"doctor: {name} ...", file=sys.stderr, flush=True)

    def work() -> list[Finding]:
        if process.device.type == "cuda":
            torch.cuda.set_device(process.device)  # of this thread
        return [*CHECKS[name](process)]

    limit = times * (process.timeout / 2 + 4 * process.seconds)
    try:  # in a thread, because a read of a dead file server or a call of a broken driver may never return
        findings = Limited().call(work, limit)
    except OverdueError:
        remedy = "A file system, a store or a driver does not answer: look at `df`, `mount` and `dmesg`"
        findings = [Finding("failed", f"did not end within {limit:g} s", remedy)]
    except (Sa1bError, OSError) as error:
        findings = [machine.fault_of(error, process, name)]
    except Exception as error:
        figure = f"the check ended by {type(error).__name__}: {error}".splitlines()[0]
        findings = [Finding("failed", figure, "Report this with the output of --json")]
    return _of_rank(process, name, findings)


def examine(process: RankProcess, chosen: set[str], found: list[Finding], quiet: bool) -> Report | None:
    """Run the chosen checks, on every rank. Rank 0 returns the findings of all, another rank None, or its
    own if it cannot reach the others. `found` gets the findings of this rank.
    """
    names, is_single = [name for name in CHECKS if _flag(name) in chosen], process.world_size == 1
    hosts, trouble = list[str](), list[Finding]()
    title = f"1 process on {process.host}" if is_single else f"rank {process.rank} on {process.host}, alone"
    alone = Report(found, title, [process.host])
    if is_single and "rendezvous" in chosen:
        remedy = "Start several: torchrun --nproc_per_node=8 -m sa1b doctor ROOT"
        trouble = [Finding("skipped", "one process; these checks need several ranks", remedy)]
    try:  # first, so that ranks measure at the same time; torch raises several classes
        if not is_single:
            store, hosts = Limited().call(partial(meet, process), 4 * process.timeout)
            group = Limited().call(partial(join, process, store, hosts), 3 * process.timeout)
    except Exception as error:
        reason, remedy = process_group.fault(error, serves=process.rank == 0)
        if hosts:
            reason = f"the ranks cannot connect to each other: {' '.join(str(error).split())[:200]}"
            remedy = "open all TCP ports between the hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        trouble = [Finding("failed", reason, remedy[:1].upper() + remedy[1:])]
    for name in [name for name in names if name not in TOGETHER]:
        found += run(process, name, found, quiet)
    found += _of_rank(process, "rendezvous", trouble)
    if trouble or is_single:
        return alone
    missing = tuple(rank for rank, host in enumerate(hosts) if not host)
    try:
        findings = gathered(process, found, group)
        findings += [one for one in differences(findings) if _flag(one.check) in chosen]
        findings += [met(process, missing)] if "rendezvous" in chosen else []
        for name in [name for name in names if name in TOGETHER]:
            if missing:
                findings.append(Finding("skipped", f"{named(missing)} did not answer", FIRST, check=name))
            else:
                findings += gathered(process, run(process, name, findings, quiet), group)
    except (RuntimeError, OverdueError) as error:
        figure = f"a rank hangs, or has ended: {' '.join(str(error).split())[:200]}"
        remedy = "Look at the output of the ranks; `py-spy dump --pid` shows where one hangs"
        found.append(Finding("failed", figure, remedy, check="rendezvous"))
        return alone
    title = f"{process.world_size} ranks on {counted(len({*filter(None, hosts)}), 'host')}"
    return Report(findings, title, [host or "?" for host in hosts]) if process.rank == 0 else None


def met(process: RankProcess, missing: tuple[int, ...]) -> Finding:
    at, ranks = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ), process.world_size
    if not missing:
        return Finding("ok", f"{ranks} ranks met at {at}", check="rendezvous")
    figure = f"{len(missing)} of {ranks} ranks did not answer at {at} within {process.timeout:g} s"
    remedy = "Look at the output of these ranks: they did not start, or hang; --timeout waits longer"
    return Finding("failed", figure, remedy, check="rendezvous", ranks=missing)


def _flag(check: str) -> str:
    return check.replace(" ", "-").lower()


def meet(process: RankProcess) -> tuple[Any, list[str]]:
    """The store of the ranks, and the host of each, "" if it has not come to MASTER_ADDR in time."""
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
        arrived = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        store.set("hosts", json.dumps(arrived))
    store.set_timeout(2 * wait)  # rank 0 may have come later, and waits for others
    hosts: list[str] = json.loads(store.get("hosts"))
    if not hosts[rank]:
        raise TimeoutError("rank 0 no longer waits for this rank")
    return store, hosts


def join(process: RankProcess, store: Any, hosts: list[str]) -> Any:
    """Start the process group of the ranks that have met; a gloo group of them."""
    members, wait = [rank for rank, host in enumerate(hosts) if host], timedelta(seconds=process.timeout)
    backend = "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo"
    settings: Any = {"rank": members.index(process.rank), "world_size": len(members), "timeout": wait}
    dist.init_process_group(backend, store=PrefixStore("group", store), **settings)
    group = dist.new_group(backend="gloo", timeout=wait)
    for one in (None, group):  # a check that hangs ends before
        _set_pg_timeout(50 * wait, one)
    return group


def gathered(process: RankProcess, found: list[Finding], group: Any) -> list[Finding]:
    """The findings of all ranks; RuntimeError names, on rank 0, those that do not answer in time."""
    limit = 12 * (process.timeout / 2 + 4 * process.seconds)  # longer than any check
    of_all = [found] * dist.get_world_size(group)

    def work() -> None:
        dist.monitored_barrier(group, timedelta(seconds=limit), wait_all_ranks=True)
        dist.all_gather_object(of_all, found, group=group)

    Limited().call(work, 2 * limit)  # in a thread, for Ctrl-C
    return [finding for part in of_all for finding in part]
