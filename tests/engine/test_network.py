"""Network settings of ranks on several machines, chosen from a tree of files like /sys, /proc and /etc."""

import socket
from pathlib import Path

import pytest

from sa1b.engine.ranks.network import NetworkChoice, choose
from sa1b.errors import UsageError

RANKS = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.1.2.3"}
OUT = Path("/shared/run")
RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "/shared/run/collectives-rank-",
}


def route(name: str, network: str, mask: str, metric: int = 0) -> str:
    """A line of /proc/net/route, which has the bytes of an address in the order of the processor."""
    numbers = [socket.inet_aton(text)[::-1].hex().upper() for text in (network, mask)]
    return f"{name}\t{numbers[0]}\t00000000\t0001\t0\t0\t{metric}\t{numbers[1]}\t0\t0\t0\n"


def machine(
    root: Path, *, interfaces: dict[str, int], routes: str = "", ports: dict[str, str] | None = None
) -> Path:
    """A tree of a machine: interface -> speed in Mbit/s, adapter:port -> "state link_layer"."""
    for name, speed in interfaces.items():
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("up\n" if speed else "down\n")
        (folder / "speed").write_text(f"{speed}\n")
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n" + routes
    )
    for name, text in (ports or {}).items():
        adapter, _, port = name.partition(":")
        folder = root / "sys/class/infiniband" / adapter / "ports" / port
        folder.mkdir(parents=True)
        state, layer = text.split()
        (folder / "state").write_text(f"4: {state}\n" if state == "ACTIVE" else f"1: {state}\n")
        (folder / "link_layer").write_text(f"{layer}\n")
    return root


ROUTES = (
    route("eth0", "0.0.0.0", "0.0.0.0", 100)
    + route("eth0", "192.168.0.0", "255.255.255.0")
    + route("ib0", "10.1.0.0", "255.255.0.0")
    + route("docker0", "10.1.2.0", "255.255.255.0")
)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A machine with InfiniBand, whose ports differ, and a bridge of containers."""
    return machine(
        tmp_path,
        interfaces={"lo": -1, "eth0": 25_000, "eth1": 0, "ib0": 400_000, "docker0": 10_000, "veth12": 10_000},
        routes=ROUTES,
        ports={
            "mlx5_0:1": "ACTIVE InfiniBand",
            "mlx5_2:1": "DOWN InfiniBand",
            "mlx5_10:1": "ACTIVE InfiniBand",
            "mlx5_3:1": "ACTIVE Ethernet",
            "mlx5_1:1": "ACTIVE InfiniBand",
        },
    )


def made(connection: NetworkChoice) -> dict[str, str]:
    return {one.variable: one.value for one in connection.settings if one.value is not None}


def reasons(connection: NetworkChoice) -> dict[str, str]:
    return {one.variable: one.reason for one in connection.settings}


def test_infiniband_is_detected(cluster: Path) -> None:
    connection = choose("auto", gpus=True, out=OUT, environment=RANKS, root=cluster)
    assert made(connection) == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_10:1",
        "NCCL_IB_TIMEOUT": "22",
        **RECORDER,
    }
    text = str(connection)
    assert text.startswith("network       infiniband (a port is active)\n")
    assert "the interface to 10.1.2.3" in text
    for left in ("NCCL_NET_GDR_LEVEL", "NCCL_BUFFSIZE", "NCCL_IB_RETRY_CNT"):
        assert f"  {left}  (not set: " in text


def test_ethernet_uses_sockets_even_where_infiniband_is_active(cluster: Path) -> None:
    environment = RANKS | {"MASTER_ADDR": "192.168.0.7"}
    connection = choose("ethernet", gpus=True, out=OUT, environment=environment, root=cluster)
    assert made(connection) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        **RECORDER,
    }


@pytest.mark.parametrize(
    ("speed", "vendor", "sockets"),
    [(10_000, "0x15b3", None), (100_000, "0x15b3", "4"), (200_000, "0x1d0f", None)],
    ids=["slow", "fast", "amazon"],
)
def test_a_fast_ethernet_gets_several_sockets(
    tmp_path: Path, speed: int, vendor: str, sockets: str | None
) -> None:
    routes = route("bond0", "0.0.0.0", "0.0.0.0")
    root = machine(tmp_path, interfaces={"lo": -1, "bond0": speed}, routes=routes)
    (root / "sys/class/net/bond0/device").mkdir()
    (root / "sys/class/net/bond0/device/vendor").write_text(f"{vendor}\n")
    connection = choose("auto", gpus=True, out=OUT, environment=RANKS, root=root)
    found = made(connection)
    assert found["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert (found.get("NCCL_SOCKET_NTHREADS"), found.get("NCCL_NSOCKS_PERTHREAD")) == (sockets, sockets)
    assert "NCCL_IB_DISABLE" not in found  # RDMA over Ethernet is left to NCCL
    assert str(connection).startswith("network       ethernet (no active InfiniBand port)")


def test_rdma_over_ethernet_is_used_if_it_is_demanded(tmp_path: Path) -> None:
    root = machine(tmp_path, interfaces={"eth0": 100_000}, ports={"mlx5_0:1": "ACTIVE Ethernet"})
    assert "NCCL_IB_HCA" not in made(choose("auto", gpus=True, out=OUT, environment=RANKS, root=root))
    found = made(choose("infiniband", gpus=True, out=OUT, environment=RANKS, root=root))
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"  # the only one, without a route


def test_infiniband_without_an_active_port_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, interfaces={"eth0": 1000}, ports={"mlx5_0:1": "DOWN InfiniBand"})
    with pytest.raises(UsageError, match=r"--parallel.network infiniband: .* has no active port"):
        choose("infiniband", gpus=True, out=OUT, environment=RANKS, root=root)


def test_what_is_set_already_is_kept(cluster: Path) -> None:
    (cluster / "etc").mkdir()
    (cluster / "etc/nccl.conf").write_text("# of the site\nNCCL_IB_TIMEOUT=23\n#NCCL_IB_HCA=x\n")
    (cluster / ".nccl.conf").write_text("NCCL_BUFFSIZE=8388608\n")
    own = {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine", "HOME": str(cluster)}
    connection = choose("auto", gpus=True, out=OUT, environment=RANKS | own, root=cluster)
    recorder = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    assert made(connection).keys() == {"GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", *recorder}
    found = reasons(connection)
    assert found["NCCL_SOCKET_IFNAME"] == "kept: 'eth0' is set already"
    assert found["NCCL_IB_TIMEOUT"] == "kept: '23' is set already"
    assert found["NCCL_BUFFSIZE"] == "kept: '8388608' is set already"
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "kept: '/tmp/mine' is set already"
    environment = dict(own)
    connection.apply(environment)
    assert environment == own | made(connection)


@pytest.mark.parametrize(("environment", "gpus"), [({}, True), (RANKS | {"LOCAL_WORLD_SIZE": "16"}, False)])
def test_nothing_is_set_for_one_process_or_without_gpus_on_one_machine(
    cluster: Path, environment: dict[str, str], gpus: bool
) -> None:
    connection = choose("infiniband", gpus=gpus, out=OUT, environment=environment, root=cluster)
    assert str(connection) == "network       one machine: nothing is set"


def test_on_one_machine_nccl_records_its_collectives(cluster: Path) -> None:
    environment = RANKS | {"LOCAL_WORLD_SIZE": "16"}
    connection = choose("auto", gpus=True, out=OUT, environment=environment, root=cluster)
    assert str(connection).startswith("network       one machine\n")
    assert made(connection) == RECORDER
    environment |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    connection = choose("auto", gpus=True, out=OUT, environment=environment, root=cluster)
    assert list(made(connection)) == ["TORCH_FR_DUMP_TEMP_FILE"]


def test_ranks_on_processors_need_the_interface_only(cluster: Path) -> None:
    connection = choose("auto", gpus=False, out=OUT, environment=RANKS, root=cluster)
    assert made(connection) == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("local", ["1", "2"])  # ranks of this machine: gloo needs an interface on one, too
def test_an_interface_of_gloo_that_does_not_exist_is_refused(cluster: Path, local: str) -> None:
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local, "GLOO_SOCKET_IFNAME": "eth0,eth9"}
    with pytest.raises(
        UsageError, match=r"^GLOO_SOCKET_IFNAME=eth0,eth9: no such interface on \S+, which has "
    ):
        choose("auto", gpus=False, out=OUT, environment=environment, root=cluster)
    environment["GLOO_SOCKET_IFNAME"] = "eth0,eth1"
    choose("auto", gpus=False, out=OUT, environment=environment, root=cluster)


def test_the_default_route_decides_if_the_host_is_known_as_itself_only(cluster: Path) -> None:
    environment = RANKS | {"MASTER_ADDR": "127.0.1.1"}
    connection = choose("auto", gpus=False, out=OUT, environment=environment, root=cluster)
    assert made(connection) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_an_interface_that_is_not_clear_is_not_chosen(tmp_path: Path) -> None:
    root = machine(tmp_path, interfaces={"eth0": 1000, "eth1": 1000, "docker0": 1000})
    connection = choose("auto", gpus=True, out=OUT, environment=RANKS, root=root)
    assert "NCCL_SOCKET_IFNAME" not in made(connection)
    assert "no interface of this machine leads to 10.1.2.3" in str(connection)
