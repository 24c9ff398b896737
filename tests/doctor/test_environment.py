"""The judgement of each environment variable, on machines that are folders like /sys and /etc."""

from pathlib import Path

import pytest

from sa1b.engine.ranks.network import choose
from sa1b.programs.doctor.check import RankProcess, of_rank
from sa1b.programs.doctor.environment import KNOWN, environment
from sa1b.programs.doctor.report import Finding, agreement
from tests.engine import test_network

TWO_HOSTS = {"world_size": 4, "local_world_size": 2, "rank": 1, "local_rank": 1, "host": "gpu-07"}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """eth0, docker0, lo and an active InfiniBand port."""
    for name in ("eth0", "docker0", "lo"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    return tmp_path


def judged(machine: Path, *, several: bool = False, **variables: str) -> list[Finding]:
    rendezvous = {"MASTER_ADDR": "gpu-06", "MASTER_PORT": "29500"} if several else {}
    more = TWO_HOSTS if several else {"host": "gpu-07"}
    own = {"HOME": str(machine), **rendezvous, **variables}
    found = list(environment(RankProcess(environment=own, system=machine, **more)))
    assert all(bool(one.remedy) == (one.state != "ok") for one in found)
    return [one for one in found if not one.figure.startswith("MASTER_")]


@pytest.mark.parametrize(
    ("name", "value", "state", "figure", "remedy"),
    [
        ("NCCL_DEBUG", "WARN", "ok", "harmless", ""),
        ("NCCL_DEBUG", "TRACE", "warning", "slow: writes lines for every call", "Set NCCL_DEBUG=WARN"),
        ("NCCL_DEBUG", "DETAIL", "warning", "no level", "Set NCCL_DEBUG=WARN"),
        ("NCCL_P2P_DISABLE", "1", "warning", "slow: GPUs of a machine exchange", "Unset NCCL_P2P_DISABLE"),
        ("NCCL_P2P_DISABLE", "0", "ok", "harmless", ""),
        ("NCCL_ALGO", "Ring", "warning", "slow: forces an algorithm", "Unset NCCL_ALGO"),
        ("NCCL_PROTO", "LL128", "warning", "slow: forces a protocol", "Unset NCCL_PROTO"),
        ("NCCL_IB_DISABLE", "1", "warning", "mlx5_0:1 of gpu-07 is active and not used", "Unset NCCL_IB_DISABLE"),
        ("NCCL_NET", "Socket", "warning", "mlx5_0:1 of gpu-07 is active and not used", "Unset NCCL_NET"),
        ("NCCL_IB_HCA", "=mlx5_0:1", "ok", "good, mlx5_0", ""),
        ("NCCL_IB_HCA", "mlx4", "failed", "no such adapter with an active port on gpu-07, which has mlx5_0", "unset"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok", "good, eth0", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "failed", "no such interface on gpu-07, which has docker0, eth0, lo", "unset"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", "ok", "good, excludes", ""),
        ("GLOO_SOCKET_IFNAME", "ib0", "failed", "no such interface on gpu-07", "unset GLOO_SOCKET_IFNAME"),
        ("NCCL_BUFFSIZE", "8388608", "ok", "harmless, forced", ""),
        ("NCCL_IB_TIMEOUT", "22", "ok", "good, how long a lost link is tolerated", ""),
        ("NCCL_IB_QPS_PER_CONNECTION", "4", "ok", "harmless, a setting of NCCL", ""),
        ("NCCL_IB_TIMOUT", "22", "warning", "no such variable, so it has no effect", "Set NCCL_IB_TIMEOUT"),
        ("NCCL_SOMETHING_ELSE", "1", "ok", "not known to this check", ""),
        ("NCCL_BLOCKING_WAIT", "1", "warning", "old: an old name", "Set TORCH_NCCL_BLOCKING_WAIT instead"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "warning", "slow: the processor waits", "Unset"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning", "risky: a rank that loses", "Unset"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok", "harmless", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "slow: compares the ranks", "set INFO"),
        ("TORCH_FR_BUFFER_SIZE", "2000", "ok", "harmless", ""),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "slow: the processor waits for every kernel", "Unset"),
        ("NUMBA_DISABLE_JIT", "1", "warning", "slow: masks are 10 to 100 times slower", "Unset"),
        ("NCCL_TOPO_FILE", "/nowhere.xml", "failed", "no such file", "Unset NCCL_TOPO_FILE"),
    ],
)  # fmt: skip
def test_a_variable(machine: Path, name: str, value: str, state: str, figure: str, remedy: str) -> None:
    (found,) = judged(machine, **{name: value})
    assert found.state == state
    assert found.figure.startswith(f"{name}={value}: ")
    assert figure in found.figure
    assert remedy in found.remedy


def test_nothing_is_set(machine: Path) -> None:
    (found,) = judged(machine, PATH="/bin")
    assert (found.state, found.figure) == ("ok", "no variable of NCCL, gloo or torch.distributed is set")


def test_without_infiniband_it_may_be_disabled(tmp_path: Path) -> None:
    (found,) = judged(tmp_path, NCCL_IB_DISABLE="1")
    assert found.state == "ok"


def test_an_interface_that_leads_to_no_other_machine(machine: Path) -> None:
    assert [one.state for one in judged(machine, NCCL_SOCKET_IFNAME="lo")] == ["ok"]  # one machine
    (found,) = judged(machine, several=True, NCCL_SOCKET_IFNAME="lo")
    assert (found.state, "lo leads to no other machine" in found.figure) == ("failed", True)
    (found,) = judged(machine, several=True, NCCL_SOCKET_IFNAME="docker0")
    assert (found.state, "docker0 is of containers" in found.figure) == ("warning", True)


def test_variables_of_configuration_files_count(machine: Path) -> None:
    (machine / "etc").mkdir()
    (machine / "etc/nccl.conf").write_text("NCCL_P2P_DISABLE=1\n")
    (found,) = judged(machine)
    assert found.state == "warning"
    assert "in a configuration file of NCCL" in found.figure


@pytest.mark.parametrize(
    ("address", "port", "problem"),
    [
        ("", "29500", "MASTER_ADDR is not set"),
        ("gpu-06", "", "MASTER_PORT is not set"),
        ("gpu-06", "99999", "MASTER_PORT=99999 is no port"),
        ("localhost", "29500", "MASTER_ADDR=localhost is each machine itself"),
    ],
)
def test_an_address_at_which_the_ranks_cannot_meet(
    tmp_path: Path, address: str, port: str, problem: str
) -> None:
    variables = {"HOME": str(tmp_path), "MASTER_ADDR": address, "MASTER_PORT": port}
    process = RankProcess(environment=variables, system=tmp_path, **TWO_HOSTS)
    found = [one for one in environment(process) if one.state != "ok"]
    assert [one.state for one in found] == ["failed"]
    assert problem in found[0].figure
    assert "torchrun" in found[0].remedy


def test_variables_that_differ_between_ranks_are_named(machine: Path) -> None:
    def of(rank: int, **variables: str) -> list[Finding]:
        process = RankProcess(
            environment=variables, system=machine, rank=rank, world_size=1, host=f"gpu-{rank}"
        )
        found = list(environment(process))
        return of_rank(found, RankProcess(rank=rank, world_size=4, host=f"gpu-{rank}"))

    same = [one for rank in range(4) for one in of(rank, NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME=f"eth{rank}")]
    assert not list(agreement(same))
    found = list(
        agreement([*of(0, NCCL_DEBUG="WARN"), *of(1, NCCL_DEBUG="WARN"), *of(2), *of(3, NCCL_DEBUG="WARN")])
    )
    assert [(one.figure, one.where()) for one in found] == [
        ("NCCL_DEBUG not set, and NCCL_DEBUG=WARN on ranks 0-1, 3", "rank 2 on gpu-2")
    ]
    assert "Set NCCL_DEBUG in the job script" in found[0].remedy


def test_what_a_training_sets_itself_is_good(tmp_path: Path) -> None:
    root = test_network.machine(
        tmp_path, interfaces={"eth0": 100_000}, routes=test_network.route("eth0", "0.0.0.0", "0.0.0.0")
    )
    connection = choose("auto", gpus=True, out=Path("run"), environment=test_network.RANKS, root=root)
    chosen = {one.variable: one.value for one in connection.settings if one.value is not None}
    assert len(chosen) >= 4
    assert {one.state for one in judged(root, several=True, **chosen)} == {"ok"}
    assert {one.variable for one in connection.settings} <= KNOWN
