"""Bandwidth of collectives over the size of their message, as nccl-tests defines it.

For a message of S bytes that takes t seconds, the algorithm bandwidth is S / t. The bus bandwidth counts
the bytes that each rank must send at least, so it can be compared with the rate of a link for any number of
ranks N. It is the algorithm bandwidth times 2 (N - 1) / N for all-reduce, and times (N - 1) / N for
all-gather and reduce-scatter, whose S is the size of the complete tensor. See
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

The rate that a kind of link is expected to reach is a range of the bus bandwidth of a large all-reduce, as
part of the link's nominal rate in one direction. The percentages leave room for protocols, headers and the
host's topology; they are not measured.

NVLink: 50 to 110 % of the links of a GPU (`nvidia-smi nvlink --status`; data sheets: A100 300, H100 450,
B200 900 GB/s). Reductions in the switch (NVLS) send less, so the bus bandwidth can exceed the nominal rate.
PCIe: 25 to 95 % of the GPU's lanes (PCI-SIG: 3.0, 4.0 and 5.0 x16 have 15.8, 31.5 and 63.0 GB/s).
InfiniBand: 50 to 100 % of the active ports of a host together (IBTA: HDR 25, NDR 50 GB/s a port).
Ethernet: 40 to 100 % of the interface (100 Gbit/s are 12.5 GB/s).
memory: not checked; processors of one machine exchange by its loopback interface.
"""

import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from sa1b.engine.ranks.network import active_ports
from sa1b.programs.doctor.check import RankExchange, RankProcess
from sa1b.programs.doctor.reachability import gloo_interface
from sa1b.programs.doctor.report import LINES, Finding
from sa1b.programs.doctor.synchronisation import joined

_LINK = re.compile(r"^\s*Link \d+: ([\d.]+) GB/s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RankLink:
    """The link that limits a collective: NVLink, PCIe, InfiniBand, Ethernet or memory."""

    kind: str
    nominal: float  # bytes per second in one direction, 0 if it is not known
    low: float  # least expected fraction of it
    high: float  # largest expected fraction of it
    remedy: str  # for a lower rate

    def expected(self) -> tuple[float, float]:
        """The expected range of the bus bandwidth, bytes per second."""
        return self.low * self.nominal, self.high * self.nominal


def link_of(process: RankProcess, hosts: int, nvlink: str | None = None) -> RankLink:
    """The slowest kind of link between the ranks on `hosts` hosts; `nvlink`: output of nvidia-smi."""
    if hosts > 1:
        ports = active_ports(process.system)
        if ports and process.device.type == "cuda":
            return RankLink(
                "InfiniBand",
                sum(_port_rate(process.system, port) for port in ports),
                0.5,
                1.0,
                "Look at rate and errors of the ports (ibstat, perfquery), at the variables of the check "
                "'environment', and with NCCL_DEBUG=INFO at whether NCCL uses NET/IB with GDRDMA",
            )
        return RankLink(
            "Ethernet",
            _interface_rate(process),
            0.4,
            1.0,
            "Look at the rate that the interface has negotiated (ethtool), and at other traffic; with "
            "InfiniBand ports, look at why they are not active (ibstat)",
        )
    if process.device.type != "cuda":
        return RankLink("memory", 0.0, 0.0, 0.0, "")
    links = sum(float(rate) for rate in _LINK.findall(_status(process) if nvlink is None else nvlink))
    if links:
        return RankLink(
            "NVLink",
            links * 1e9,
            0.5,
            1.1,
            "Look at inactive links (nvidia-smi nvlink --status), at nvidia-smi topo -m, and at "
            "NCCL_P2P_DISABLE; on HGX machines, nvidia-fabricmanager must run",
        )
    return RankLink(
        "PCIe",
        _pcie_rate(process),
        0.25,
        0.95,
        "Look at lanes and generation of the GPU (nvidia-smi -q -d PCI), at nvidia-smi topo -m, and at "
        "access control services (ACS) in the firmware, which send traffic between GPUs through the "
        "processor",
    )


def _status(process: RankProcess) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "nvlink", "--status", "-i", _bus(process)]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    return ""


def _bus(process: RankProcess) -> str:
    properties: Any = torch.cuda.get_device_properties(process.device)  # its stub lacks these attributes
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _pcie_rate(process: RankProcess) -> float:
    """Bytes per second of the lanes: 8 GT/s or more have 128 data bits in 130."""
    folder = process.system / "sys/bus/pci/devices" / _bus(process)
    speed = _first(folder / "max_link_speed")  # GPUs lower the current speed while they are idle
    return speed * 1e9 / 8 * 128 / 130 * _first(folder / "current_link_width")


def _port_rate(system: Path, port: str) -> float:
    adapter, _, number = port.partition(":")
    return _first(system / "sys/class/infiniband" / adapter / "ports" / number / "rate") * 1e9 / 8


def _interface_rate(process: RankProcess) -> float:
    """Bytes per second of the interface that gloo or NCCL is set to use."""
    name = process.environment.get("NCCL_SOCKET_IFNAME", "").lstrip("=").partition(",")[0]
    if not name or "^" in name or process.device.type != "cuda":
        name = gloo_interface(process)
    return max(_first(process.system / "sys/class/net" / name / "speed"), 0.0) * 1e6 / 8 if name else 0.0


def _first(path: Path) -> float:
    """The number at the beginning of a file: "400 Gb/sec (4X NDR)"; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        return float(path.read_text().split()[0])
    return 0.0


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


def bandwidth_finding(measurements: Sequence[Measurement], link: RankLink) -> Finding:
    """The finding about all measurements, which are by collective, ascending in size."""
    ranks = measurements[0].ranks
    best = {
        name: max(measurement.bus for measurement in measurements if measurement.collective == name)
        for name in dict.fromkeys(measurement.collective for measurement in measurements)
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
    low, high = link.expected()
    if link.kind == "memory":
        figure = f"{rates}; informative, processors of one machine"
    elif not link.nominal:
        figure = f"{rates}; not checked, the rate of {link.kind} is not known"
    else:
        figure = f"{rates}; {low / 1e9:.1f} to {high / 1e9:.1f} expected for {link.kind}"
    if not link.nominal or best["all-reduce"] >= low:
        return Finding(BANDWIDTH, "ok", figure, ranks=of_all, values=values)
    if reached < _LEAST_CHECKED:
        figure += f", and messages over {reached:,} bytes did not fit into --seconds"
    return Finding(BANDWIDTH, "warning", figure, link.remedy, ranks=of_all, values=values)


def _table(measurements: Sequence[Measurement]) -> list[str]:
    names = list(dict.fromkeys(measurement.collective for measurement in measurements))
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
