"""Three hosts, which are network namespaces of this machine: two of them cannot reach each other."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes import REPOSITORY

HOSTS = 3


def ip(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *map(str, words)], check=False, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Namespaces with the addresses 10.77.0.10, 10.77.0.11 and 10.77.0.12 on one switch."""
    names = [f"sa1b-host-{number}" for number in range(HOSTS)]
    if ip("netns", "add", "sa1b-switch").returncode:
        pytest.skip("no network namespaces can be made here")
    try:
        ip("-n", "sa1b-switch", "link", "add", "br0", "type", "bridge")
        ip("-n", "sa1b-switch", "link", "set", "br0", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            pair = ("type", "veth", "peer", "name", f"port{number}", "netns", "sa1b-switch")
            if ip("link", "add", "eth0", "netns", name, *pair).returncode:
                pytest.skip("no virtual interfaces can be made here")
            ip("-n", "sa1b-switch", "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.1{number}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in (*names, "sa1b-switch"):
            ip("netns", "del", name)


@pytest.mark.slow  # 35 s
def test_two_hosts_that_cannot_reach_each_other_are_named(hosts: list[str]) -> None:
    # What host 1 sends to host 2 goes to an address that no interface has: it is lost, as in a firewall.
    ip(
        "-n",
        hosts[1],
        "neigh",
        "add",
        "10.77.0.12",
        "lladdr",
        "02:00:00:00:00:77",
        "dev",
        "eth0",
        "nud",
        "permanent",
    )
    command = [sys.executable, "-m", "sa1b", "doctor", "--json", "--timeout", "30", "--seconds", "0.1"]
    command += [
        "--only",
        "rendezvous",
        "--only",
        "reachability",
        "--only",
        "clock-skew",
        "--only",
        "process-group",
    ]
    ranks = []
    for number, name in enumerate(hosts):
        variables = (f"RANK={number}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", f"WORLD_SIZE={HOSTS}")
        at = ("MASTER_ADDR=10.77.0.10", "MASTER_PORT=29500", "OMP_NUM_THREADS=1")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"gpu-{number}"]
        within = ["ip", "netns", "exec", name, *named, "env", *variables, *at, *command]
        ranks.append(
            subprocess.Popen(within, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    report = json.loads(outputs[0])
    failed = [one for one in report["findings"] if one["state"] == "failed"]
    pairs = [
        (one["values"]["from"], one["values"]["to"][0].split()[0])
        for one in failed
        if "from" in one["values"]
    ]
    assert sorted(pairs) == [("gpu-1", "gpu-2"), ("gpu-2", "gpu-1")]
    assert all("firewall" in one["remedy"] for one in failed if "from" in one["values"])
    assert "process group" in {one["check"] for one in failed}
    assert [rank.returncode for rank in ranks] == [1, 0, 0]
