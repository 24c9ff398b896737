"""The device and the process group of a rank."""

import os
import secrets
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from sa1b.console import counted
from sa1b.engine.precision import set_float32
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.errors import UsageError
from sa1b.limit import Limited, OverdueError
from sa1b.stream.plan import process_rank

_LATE = 10.0  # seconds after the timeout of the store, which the constructor of TCPStore ignores


def fresh_store(rank: int, world_size: int, wait: timedelta) -> Store:
    """The ranks' store with a new prefix: torchrun keeps one over its restarts, with dead addresses."""
    try:
        return Limited().call(lambda: _store(rank, world_size, wait), wait.total_seconds() + _LATE)
    except (OverdueError, dist.DistNetworkError, ValueError) as error:
        reason, remedy = fault(error, serves=rank == 0)
        raise UsageError(f"MASTER_ADDR and MASTER_PORT (rank {rank}): {reason}; {remedy}") from None


def fault(error: Exception, *, serves: bool) -> tuple[str, str]:
    """Why the store cannot be used, and what to do. `serves`: this rank has it, unless torchrun does."""
    host, port = (os.environ.get(name, "(not set)") for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = f"{host}:{port}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if isinstance(error, OverdueError):
        reason = f"{host}:{port} accepts connections and does not answer ({error})"
    elif serves and "EADDRINUSE" in str(error):
        reason = f"another program listens at port {port} of {socket.gethostname()}"
    return (
        reason,
        f"start the ranks with torchrun, which sets MASTER_ADDR, or see that rank 0 runs on {host}, that no "
        f"firewall blocks the port (nc -zv {host} {port}) and no other program has it "
        f"(ss -ltnp 'sport = :{port}'); else set MASTER_PORT to a free port on every rank",
    )


def _store(rank: int, world_size: int, wait: timedelta) -> Store:
    # Rank 0 answers the random token of each rank with its own, the prefix, until all have confirmed it.
    store: Store = next(rendezvous("env://", rank, world_size, timeout=wait))[0]
    store.set_timeout(wait)
    token = secrets.token_hex(8)
    if rank > 0:
        store.set(f"token/{rank}", token)
        prefix = store.get(f"prefix/{token}").decode()
        store.set(f"confirmed/{prefix}/{rank}", token)
        return PrefixStore(prefix, store)
    missing = set(range(1, world_size))
    end = time.monotonic() + wait.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"token/{other}"]):  # the token may belong to a dead rank
                store.set(f"prefix/{store.get(f'token/{other}').decode()}", token)
        missing -= {other for other in missing if store.check([f"confirmed/{token}/{other}"])}
        if time.monotonic() > end:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not answer in {wait}")
        time.sleep(0.01)
    return PrefixStore(token, store)


def start(config: ParallelConfig) -> RankInfo:
    """Take this process's device and join the other ranks; an existing group, as of Ray, is used."""
    rank, world_size = process_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    device = _device(config, local_rank)
    set_float32(config.precision, device)
    if not config.cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if config.mode == "none":
        return RankInfo(rank, world_size, local_rank, device, None)
    if not dist.is_initialized():
        # Checkpoints are saved from the CPU, so GPUs need gloo too.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=config.timeout_first)
        store = HashStore() if world_size == 1 else fresh_store(rank, world_size, wait)
        bound = device if device.type == "cuda" else None  # on which NCCL connects immediately
        if bound is not None:
            _refuse_shared_gpus(store, rank, world_size, bound)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait, device_id=bound
        )
        _created.append(dist.group.WORLD)
    replicas, mesh = replicas_on(world_size, config.replicas), None
    if config.mode == "fsdp":
        shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    rank_info = RankInfo(rank, world_size, local_rank, device, mesh)
    if rank == 0:  # not to stdout, where --json prints the scores
        sys.stderr.write(replicas_note(world_size, config.replicas))
    set_timeout(rank_info, config.timeout_first)
    return rank_info


def stop() -> None:
    """Destroy the group if `start` created it; not after an error of one rank, which would wait."""
    if dist.is_initialized() and any(group is dist.group.WORLD for group in _created):
        dist.destroy_process_group()


# Groups of `start`, kept after their end. A DDP module that is freed as the last owner of its group ends
# gloo's threads while it holds the interpreter's lock, for which they may wait: a deadlock in 1 of 40 runs.
_created: list[object] = []


def set_timeout(rank_info: RankInfo, seconds: float) -> None:
    """Set the timeout of later collectives."""
    if not dist.is_initialized():
        return
    for group in [None, *(rank_info.mesh.get_all_groups() if rank_info.mesh else [])]:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def _device(config: ParallelConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
    index = 0 if visible == 1 else local_rank
    if index >= visible:
        why = f"no GPU is left for it, this process sees {visible}"
        raise UsageError(f"local rank {local_rank}: {why}; start fewer, or pass --parallel.device cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _refuse_shared_gpus(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """UsageError: two ranks have the same GPU, where NCCL would hang or fail without naming them."""
    gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"gpu/{rank}", gpu)
    for other in range(world_size):
        if other != rank and store.get(f"gpu/{other}").decode() == gpu:
            two = f"ranks {min(rank, other)} and {max(rank, other)}"
            raise UsageError(f"{two}: have the same GPU ({gpu}); start one process for each GPU")


def replicas_on(world_size: int, demanded: int) -> int:
    """Copies of the model: the largest divisor of the world size up to `demanded` with two ranks for each."""
    fitting = range(1, min(demanded, max(world_size - 1, 1)) + 1)
    return max(replicas for replicas in fitting if world_size % replicas == 0)


def replicas_note(world_size: int, demanded: int) -> str:
    """A line that --parallel.replicas does not fit the ranks; empty if it fits."""
    replicas = replicas_on(world_size, demanded)
    if replicas == demanded:
        return ""
    return (
        f"--parallel.replicas {demanded}: does not fit {counted(world_size, 'rank')}, so it is "
        f"{replicas}, with {counted(world_size // replicas, 'rank')} for each copy of the model\n"
    )
