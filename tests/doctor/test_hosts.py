"""Three hosts, which are network namespaces of this machine."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.doctor.test_one_process import PATIENCE, command
from tests.processes import REPOSITORY

HOSTS = [f"sa1b-host-{number}" for number in range(3)]


def ip(*words: object) -> int:
    return subprocess.run(["ip", *map(str, words)], check=False, capture_output=True).returncode


@pytest.fixture
def hosts() -> Iterator[None]:
    """Namespaces with the addresses 10.77.0.10, 10.77.0.11 and 10.77.0.12 on one switch."""
    if ip("netns", "add", "sa1b-switch"):
        pytest.skip("no network namespaces can be made here")
    try:
        ip("-n", "sa1b-switch", "link", "add", "br0", "type", "bridge")
        ip("-n", "sa1b-switch", "link", "set", "br0", "up")
        for number, name in enumerate(HOSTS):
            ip("netns", "add", name)
            pair = ("type", "veth", "peer", "name", f"port{number}", "netns", "sa1b-switch")
            if ip("link", "add", "eth0", "netns", name, *pair):
                pytest.skip("no virtual interfaces can be made here")
            ip("-n", "sa1b-switch", "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.1{number}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                ip("-n", name, "link", "set", interface, "up")
        yield
    finally:
        for name in (*HOSTS, "sa1b-switch"):
            ip("netns", "del", name)


def outputs() -> list[str]:
    """What the rank of each host prints."""
    words = command("--timeout", 10, "--seconds", 0.1, "--only", "rendezvous", "--only", "bandwidth")
    ranks = []
    for number, name in enumerate(HOSTS):
        variables = (f"RANK={number}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "WORLD_SIZE=3")
        at = ("MASTER_ADDR=10.77.0.10", "MASTER_PORT=29500", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"gpu-{number}"]
        within = ["ip", "netns", "exec", name, *named, "env", *variables, *at, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        ranks.append(subprocess.Popen(within, cwd=REPOSITORY, **pipes))
    return [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]


@pytest.mark.slow  # 40 s
def test_hosts_that_cannot_reach_each_other_say_so(hosts: None) -> None:
    text, *others = outputs()
    assert text.startswith("3 ranks on 3 hosts\n")
    assert "  ok       rendezvous  3 ranks met at 10.77.0.10:29500\n" in text
    assert others == ["", ""]
    # What host 1 sends to host 2 goes to an address that no interface has: it is lost, as in a firewall.
    lost = ("10.77.0.12", "lladdr", "02:00:00:00:00:77", "dev", "eth0", "nud", "permanent")
    ip("-n", HOSTS[1], "neigh", "replace", *lost)
    for number, text in enumerate(outputs()):
        assert text.startswith(f"rank {number} on gpu-{number}, alone\n")
        assert "  FAILED   rendezvous  the ranks cannot connect to each other: " in text
        assert "GLOO_SOCKET_IFNAME" in text
