"""Links between ranks, on machines that are folders like /sys, and the judgement of measured rates."""

from pathlib import Path

import pytest
import torch

from sa1b.programs.doctor.bandwidth import COLLECTIVES, Measurement, RankLink, bandwidth_finding, link_of
from sa1b.programs.doctor.check import RankProcess

GPU = torch.device("cuda", 0)
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)\n" + "".join(
    f"\t Link {number}: 26.562 GB/s\n" for number in range(18)
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two InfiniBand ports of 400 Gbit/s, one of which is active, and an interface of 100 Gbit/s."""
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/speed").write_text("100000\n")
    return tmp_path


def test_the_link_between_the_ranks(machine: Path) -> None:
    gpus = RankProcess(device=GPU, system=machine, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert (link_of(gpus, 2).kind, link_of(gpus, 2).nominal) == ("InfiniBand", 50e9)
    nvlink = link_of(gpus, 1, NVLINK)
    assert (nvlink.kind, nvlink.nominal) == ("NVLink", pytest.approx(478.116e9))
    processors = RankProcess(system=machine, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert (link_of(processors, 2).kind, link_of(processors, 2).nominal) == ("Ethernet", 12.5e9)
    assert link_of(RankProcess(system=machine / "nothing", environment={}), 2).nominal == 0
    assert link_of(processors, 1).kind == "memory"


def measured(rate: float) -> list[Measurement]:
    """Large messages of 8 ranks with this bus bandwidth of all-reduce, bytes per second."""
    size = 256 << 20
    return [Measurement(name, size, size / (rate / 2 / 7 * 8), 8) for name in COLLECTIVES]


@pytest.mark.parametrize(
    ("kind", "rate", "state"),
    [("NVLink", 230e9, "warning"), ("NVLink", 400e9, "ok"), ("PCIe", 4e9, "warning"), ("PCIe", 20e9, "ok")],
)
def test_a_rate_is_compared_with_that_of_the_link(kind: str, rate: float, state: str) -> None:
    links = {
        "NVLink": RankLink("NVLink", 478e9, 0.5, 1.1, "Look at links"),
        "PCIe": RankLink("PCIe", 31.5e9, 0.25, 0.95, "Look at lanes"),
    }
    found = bandwidth_finding(measured(rate), links[kind])
    assert found.state == state
    assert found.figure.startswith(f"all-reduce {rate / 1e9:.2f} GB/s, all-gather {rate / 2e9:.2f} GB/s")
    assert f"expected for {kind}" in found.figure
    assert found.remedy == ("" if state == "ok" else links[kind].remedy)


def test_a_link_of_unknown_rate_is_not_checked() -> None:
    found = bandwidth_finding(measured(1e9), RankLink("Ethernet", 0, 0.4, 1, "Look"))
    assert (found.state, "not checked, the rate of Ethernet is not known" in found.figure) == ("ok", True)
