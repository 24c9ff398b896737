"""Bandwidth of collectives over the size of their message, as nccl-tests defines it.

For a message of S bytes that takes t seconds, the algorithm bandwidth is S / t. The bus bandwidth counts the
bytes that each rank must send at least, so it can be compared with the rate of a link for any number of ranks
N. It is the algorithm bandwidth times 2 (N - 1) / N for all-reduce, and times (N - 1) / N for all-gather and
reduce-scatter, whose S is the size of the complete tensor. See
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.exchange import RankExchange
from sa1b.programs.doctor.group import joined
from sa1b.programs.doctor.links import Link, link_of
from sa1b.programs.doctor.report import LINES, Finding

BANDWIDTH = "bandwidth"
Collective = Literal["all-reduce", "all-gather", "reduce-scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "all-gather", "reduce-scatter")
_SMALLEST, _GROWTH = 4096, 4
_MOST = 50  # calls for one size
_LEAST_CHECKED = 16 << 20  # bytes; smaller messages are limited by latency


@dataclass(frozen=True, slots=True)
class Measurement:
    """One collective of one size: bytes of the complete tensor, and mean seconds on the slowest rank."""

    collective: Collective
    size: int
    seconds: float
    ranks: int

    @property
    def algorithm(self) -> float:
        """Algorithm bandwidth, bytes per second."""
        return self.size / self.seconds

    @property
    def bus(self) -> float:
        """Bus bandwidth, bytes per second."""
        return self.algorithm * (2 if self.collective == "all-reduce" else 1) * (self.ranks - 1) / self.ranks


def bandwidth(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
    """Measure all sizes up to the largest that fits the time, and compare them with the rate of the link."""
    rank_info = joined(process)
    measurements = [
        measurement
        for collective in COLLECTIVES
        for measurement in sweep(
            collective, rank_info.device, process.world_size, process.largest_message, process.seconds
        )
    ]
    exchange.send("bandwidth/host", process.host)
    if process.rank == 0:
        hosts = len({*exchange.receive("bandwidth/host").values()})
        yield bandwidth_finding(measurements, link_of(process, hosts))


def sweep(
    collective: Collective, device: torch.device, ranks: int, largest: int, seconds: float
) -> list[Measurement]:
    """Measure a collective for sizes of 4 kB, 16 kB, ... Collective.

    A size is skipped if, by the time of the size before, all sizes together would take more than `seconds`.
    """
    measurements: list[Measurement] = []
    size, end = _SMALLEST, time.monotonic() + seconds
    while size <= largest:
        # A multiple of the number of ranks and of the bytes of an element.
        exact = -(-size // (4 * ranks)) * 4 * ranks
        expected = measurements[-1].seconds * _GROWTH if measurements else 0.0
        excess = _largest_of_ranks(expected - (end - time.monotonic()), device)  # the same on all ranks
        if excess > 0 and measurements:
            break
        call = _call(collective, exact // 4, ranks, device)
        first = _timed(call, 1, device)
        share = min(-excess, seconds) / 4
        count = max(1, min(_MOST, int(share / max(first, 1e-6))))
        measurements.append(Measurement(collective, exact, _timed(call, count, device), ranks))
        size *= _GROWTH
    return measurements


def _call(collective: Collective, length: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """A call of the collective with a tensor of this length in float32."""
    whole = torch.zeros(length, device=device)
    if collective == "all-reduce":
        return lambda: dist.all_reduce(whole)
    part = torch.zeros(length // ranks, device=device)
    if collective == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    return lambda: dist.reduce_scatter_tensor(part, whole)


def _timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean seconds of a call on the slowest rank. Collective."""
    dist.barrier()
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # The new names of these functions are missing before torch 2.13.
        warnings.simplefilter("ignore", FutureWarning)
        for _ in range(count):
            call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _largest_of_ranks((time.perf_counter() - begin) / count, device)


def _largest_of_ranks(number: float, device: torch.device) -> float:
    of_all = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return float(of_all)


def bandwidth_finding(measurements: Sequence[Measurement], link: Link) -> Finding:
    """The finding about all measurements, which are by collective, ascending in size."""
    ranks = measurements[0].ranks
    best = {
        name: max(measurement.bus for measurement in measurements if measurement.collective == name)
        for name in COLLECTIVES
        if any(measurement.collective == name for measurement in measurements)
    }
    rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in best.items())
    values = {
        "measurements": [
            {
                "collective": measurement.collective,
                "size_bytes": measurement.size,
                "seconds": measurement.seconds,
                "algorithm_bytes_per_second": measurement.algorithm,
                "bus_bytes_per_second": measurement.bus,
            }
            for measurement in measurements
        ],
        "link": link.kind,
        "nominal_bytes_per_second": link.nominal or None,
        LINES: _table(measurements),
    }
    of_all = tuple(range(ranks))
    reached = max(measurement.size for measurement in measurements)
    if link.kind == "memory":
        figure = f"{rates}; informative, processors of one machine"
        return Finding(BANDWIDTH, "ok", figure, "", of_all, "", values)
    if not link.nominal:
        figure = f"{rates}; not checked, the rate of {link.kind} is not known"
        return Finding(BANDWIDTH, "ok", figure, "", of_all, "", values)
    low, high = link.expected()
    figure = f"{rates}; {low / 1e9:.1f} to {high / 1e9:.1f} expected for {link.kind}"
    if best["all-reduce"] >= low:
        return Finding(BANDWIDTH, "ok", figure, "", of_all, "", values)
    if reached < _LEAST_CHECKED:
        figure += f", and messages over {reached:,} bytes did not fit into --seconds"
    return Finding(BANDWIDTH, "warning", figure, link.remedy, of_all, "", values)


def _table(measurements: Sequence[Measurement]) -> list[str]:
    """One line for each size: time, algorithm and bus bandwidth of each collective."""
    names = [
        name for name in COLLECTIVES if any(measurement.collective == name for measurement in measurements)
    ]
    by_size: dict[int, dict[str, Measurement]] = {}
    for measurement in measurements:
        by_size.setdefault(measurement.size, {})[measurement.collective] = measurement
    lines = [
        f"{'':>11}" + "".join(f"   {name:^29}" for name in names),
        f"{'bytes':>11}" + f"   {'ms':>9} {'alg GB/s':>9} {'bus GB/s':>9}" * len(names),
    ]
    for size, of_size in sorted(by_size.items()):
        line = f"{size:>11,}"
        for name in names:
            if name in of_size:
                measurement = of_size[name]
                rates = f"{measurement.algorithm / 1e9:>9.3f} {measurement.bus / 1e9:>9.3f}"
                line += f"   {measurement.seconds * 1000:>9.3f} {rates}"
            else:
                line += f"   {'-':>9} {'-':>9} {'-':>9}"
        lines.append(line)
    return lines
