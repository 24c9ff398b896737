"""The links between the ranks, and the rates that each kind of link is expected to reach.

The expected range is of the bus bandwidth of a large all-reduce, as part of the link's nominal rate in one
direction. The percentages leave room for protocols, headers and the host's topology; they are not measured.

NVLink: 50 to 110 % of the links of a GPU (`nvidia-smi nvlink --status`; data sheets: A100 300, H100 450, B200
900 GB/s). Reductions in the switch (NVLS) send less, so the bus bandwidth can exceed the nominal rate.
PCIe: 25 to 95 % of the GPU's lanes (PCI-SIG: 3.0, 4.0 and 5.0 x16 have 15.8, 31.5 and 63.0 GB/s).
InfiniBand: 50 to 100 % of the active ports of a host together (IBTA: HDR 25, NDR 50 GB/s a port).
Ethernet: 40 to 100 % of the interface (100 Gbit/s are 12.5 GB/s).
memory: not checked; processors of one machine exchange by its loopback interface.
"""

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sa1b.engine.ranks.network import active_ports
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.reachability import gloo_interface

_LINK = re.compile(r"^\s*Link \d+: ([\d.]+) GB/s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Link:
    """The link that limits a collective: NVLink, PCIe, InfiniBand, Ethernet or memory.

    `nominal` is in bytes per second in one direction, 0 if it is not known; `low` and `high` are the expected
    range as fractions of it. The remedy is for a lower rate.
    """

    kind: str
    nominal: float
    low: float
    high: float
    remedy: str

    def expected(self) -> tuple[float, float]:
        """The expected range of the bus bandwidth, bytes per second."""
        return self.low * self.nominal, self.high * self.nominal


def link_of(process: RankProcess, hosts: int, nvlink: str | None = None) -> Link:
    """The slowest kind of link between the ranks, which are on `hosts` hosts.

    `nvlink`: output of `nvidia-smi nvlink --status` for the GPU of this rank; by default, it is called.
    """
    if hosts > 1:
        ports = active_ports(process.system)
        if ports and process.device.type == "cuda":
            return Link(
                "InfiniBand",
                sum(_port_rate(process.system, port) for port in ports),
                0.5,
                1.0,
                "Look at rate and errors of the ports (ibstat, perfquery), at the variables of the check "
                "'environment', and with NCCL_DEBUG=INFO at whether NCCL uses NET/IB with GDRDMA",
            )
        return Link(
            "Ethernet",
            _interface_rate(process),
            0.4,
            1.0,
            "Look at the rate that the interface has negotiated (ethtool), and at other traffic; with "
            "InfiniBand ports, look at why they are not active (ibstat)",
        )
    if process.device.type != "cuda":
        return Link("memory", 0.0, 0.0, 0.0, "")
    links = sum(float(rate) for rate in _LINK.findall(_status(process) if nvlink is None else nvlink))
    if links:
        return Link(
            "NVLink",
            links * 1e9,
            0.5,
            1.1,
            "Look at inactive links (nvidia-smi nvlink --status), at nvidia-smi topo -m, and at "
            "NCCL_P2P_DISABLE; on HGX machines, nvidia-fabricmanager must run",
        )
    return Link(
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
