"""Checks of several ranks with their faults, in one group of processes: what each rank finds."""

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.ranks.process_group import stop
from sa1b.programs.doctor import reachability, ring, synchronisation
from sa1b.programs.doctor.bandwidth import bandwidth
from sa1b.programs.doctor.check import CheckTogether, RankExchange, RankProcess
from sa1b.programs.doctor.report import Finding

PATIENCE = 120  # seconds


class Private(RankExchange):
    """The exchange of one case, with keys that no other case uses."""

    def __init__(self, process: RankProcess, case: str) -> None:
        self.case = case
        super().__init__(process)

    def wrap(self, store: Any) -> Any:
        return dist.PrefixStore(self.case, store)


class Watch:
    """A clock of the ring check, which moves by 1 ms with each reading: other processes change no result."""

    now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        self.spend(0.001)
        return self.now


def skips(module: DistributedDataParallel) -> None:
    """On rank 1, the gradient stays that of its own data, though it takes part in the reduction."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        kept = bucket.buffer().clone()
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        mean = future.then(lambda done: done.value()[0] / dist.get_world_size())
        return mean.then(lambda done: kept if dist.get_rank() == 1 else done.value())

    module.register_comm_hook(None, hook)


def sums(module: DistributedDataParallel) -> None:
    """The hook forgets to divide by the number of ranks."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    module.register_comm_hook(None, hook)


def left_on(module: nn.Module) -> None:
    """`no_sync`, or its counterpart of FSDP, that is never turned off."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = False
    else:
        module.set_requires_gradient_sync(False)


def rounds(module: DistributedDataParallel) -> None:
    """The last bits of the gradients change on rank 1."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        factor = (1 + 1e-6 * (dist.get_rank() == 1)) / dist.get_world_size()
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * factor)

    module.register_comm_hook(None, hook)


def wrong_chunk(step: int, chunk: Tensor) -> None:
    """Rank 2 receives one wrong number in the second step."""
    if dist.get_rank() == 2 and step == 1 and len(chunk) > 1:
        chunk[1] += 1


class Closed(Private):
    """The exchange of a host that gives the others a port at which it does not listen."""

    def __init__(self, process: RankProcess, case: str) -> None:
        super().__init__(process, case)
        self.port = socket.socket()
        self.port.bind(("127.0.0.1", 0))

    def send(self, topic: str, value: object) -> None:
        is_address = topic == "reachability/address"
        super().send(topic, ("127.0.0.1", self.port.getsockname()[1]) if is_address else value)


def two_of_three(rank: int, process: RankProcess, exchange: RankExchange) -> Iterable[Finding]:
    """The barrier without rank 1, which keeps its connections until rank 0 has ended."""
    if rank == 1:
        exchange.receive("ended", (0,), PATIENCE)
        return
    yield from synchronisation.process_group(replace(process, timeout=8), exchange)
    exchange.send("ended", True)


def found() -> dict[str, list[Finding]]:
    """The findings of this rank, by case."""
    process = RankProcess.of_this_process(timeout=2 * PATIENCE, seconds=0.3, largest_message=1 << 16)
    rank = process.rank
    ring.time = watch = Watch()
    cases: dict[str, Callable[[RankProcess, RankExchange], Any]] = {
        "group": synchronisation.process_group,
        "sum": synchronisation.rank_sum,
        "wrong sum": lambda *given: synchronisation.rank_sum(*given, contribution=7 if rank == 1 else None),
        "gradients": synchronisation.gradients,
        "skips": lambda *given: synchronisation.gradients(*given, alter=skips, modes=("ddp",)),
        "sums": lambda *given: synchronisation.gradients(*given, alter=sums, modes=("ddp",)),
        "left on": lambda *given: synchronisation.gradients(*given, alter=left_on),
        "rounds": lambda *given: synchronisation.gradients(*given, alter=rounds, modes=("ddp",)),
        "bandwidth": bandwidth,
        "ring": lambda *given: ring.ring(*given, lengths=(1, 2, 3, 4, 5, 7, 1000)),
        "wrong chunk": lambda *given: ring.ring(*given, received=wrong_chunk),
        "slow link": lambda *given: ring.ring(*given, delay=lambda: watch.spend(0.5 if rank == 1 else 0)),
        "clock": reachability.clock_skew,
        "skewed": lambda *given: reachability.clock_skew(
            *given, clock=lambda: time.time() + (0, 5, -1000, 0)[rank]
        ),
        "reachability": lambda *given: reachability.reachability(*given, address="127.0.0.1"),
        "blocked": lambda *given: reachability.reachability(*given, address="127.0.0.1"),
        "loopback": lambda process, exchange: reachability.reachability(
            replace(process, environment={**process.environment, "GLOO_SOCKET_IFNAME": "lo"}), exchange
        ),
        # Last, because a barrier that failed leaves the ranks at different collectives.
        "barrier": partial(two_of_three, rank),
    }  # fmt: skip
    results = {}
    for name, work in cases.items():
        # Different hosts for the checks that compare hosts.
        several = name in ("clock", "skewed", "reachability", "blocked", "loopback", "slow link")
        own = replace(process, host=f"gpu-{rank}") if several else process
        exchange = (Closed if (name, rank) == ("blocked", 2) else Private)(own, name)
        results[name] = CheckTogether(name, work).run(own, exchange)
    stop()
    return results
