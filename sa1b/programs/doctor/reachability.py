"""Connections between hosts: names, the port of the rendezvous, every pair of hosts in both ways; clocks.

The difference of clocks is measured by messages through the ranks' store, as in NTP. A host sends a message
at t0, rank 0 receives it at t1 and answers at t2, and the answer arrives at t3, each by its own clock. The
difference is ((t1 - t0) + (t2 - t3)) / 2 if both ways take the same time; in any case its error is at most
half of the time in transit, ((t3 - t0) - (t2 - t1)) / 2. Several messages are sent, and the fastest one
counts.
"""

import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from sa1b.console import counted
from sa1b.engine.ranks.network import choose
from sa1b.programs.doctor.check import RankExchange, RankProcess, connect_reason
from sa1b.programs.doctor.machine import boot_id
from sa1b.programs.doctor.report import Finding, State
from sa1b.report import duration_text, first_names

REACHABILITY = "reachability"
_AT_ONCE = 32
_REMEDIES = {
    "timed out": "Open all TCP ports between these hosts in firewall and security group: the ranks listen on "
    "ports that the system chooses (net.ipv4.ip_local_port_range)",
    "connection refused": "The address leads to another machine or interface, or a firewall rejects: set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between these hosts",
    "no route": "Look at the routes of both hosts (ip route get ADDRESS), and set GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME to the interface between them",
    "name not known": "Add the name to DNS or /etc/hosts (getent hosts NAME)",
}


def reachability(
    process: RankProcess, exchange: RankExchange, address: str | None = None
) -> Iterator[Finding]:
    """Connect each host to every other host, from the address that gloo would use.

    One rank of each host takes part. It listens at `address` on a port that the system chooses, as gloo and
    NCCL do; by default at the address of gloo's interface.
    """
    listening = own_address(process) if address is None else address
    exchange.send("reachability/host", (process.host, boot_id(process)))  # two machines may have one name
    machines = exchange.receive("reachability/host")
    hosts = {rank: host for rank, (host, _) in machines.items()}
    first = {machine: rank for rank, machine in sorted(machines.items(), reverse=True)}
    if len(first) < 2:
        if process.rank == 0:
            yield Finding(REACHABILITY, "ok", "one host", ranks=tuple(hosts))
        return
    if first[machines[process.rank]] != process.rank:
        return
    members = sorted(first.values())
    if listening.startswith("127.") and address is None:
        yield Finding(
            REACHABILITY,
            "failed",
            f"{process.host}: its own name leads to {listening}, which no other host reaches",
            "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface to the other machines, or "
            "correct /etc/hosts",
        )
    with socket.create_server((listening, 0), backlog=len(members)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        exchange.send("reachability/address", (listening, server.getsockname()[1]))
        addresses = exchange.receive("reachability/address", members)
        targets = {rank: at for rank, at in addresses.items() if rank != process.rank}
        targets[-1] = _rendezvous(process)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            reasons = dict(zip(targets, pool.map(_reason, targets.values()), strict=True))
        # Others may still connect to this server.
        exchange.send("reachability/done", True)
        exchange.receive("reachability/done", members)
    yield from connection_findings(process.host, hosts, targets, reasons)


def connection_findings(
    host: str, hosts: Mapping[int, str], targets: Mapping[int, tuple[str, int]], reasons: Mapping[int, str]
) -> Iterator[Finding]:
    """The findings of a host: one for each reason why it cannot reach some of the others.

    `targets`: rank -> address and port, where rank -1 is the rendezvous; `reasons`: rank -> why the
    connection failed, empty if it did not.
    """
    groups: dict[str, list[str]] = {}
    for rank, reason in reasons.items():
        if reason:
            name = "rendezvous" if rank < 0 else hosts[rank]
            groups.setdefault(reason, []).append(f"{name} ({targets[rank][0]}:{targets[rank][1]})")
    for reason, names in groups.items():
        yield Finding(
            REACHABILITY,
            "failed",
            f"{host} -> {first_names(names, 4)}: {reason}",
            _REMEDIES.get(reason, "Look at interfaces and routes of both hosts"),
            values={"from": host, "to": names, "reason": reason},
        )
    if not groups:
        others = counted(len(targets) - 1, "other host")
        yield Finding(REACHABILITY, "ok", f"{others} and the rendezvous answer")


def _reason(target: tuple[str, int]) -> str:
    return connect_reason(*target)


def _rendezvous(process: RankProcess) -> tuple[str, int]:
    return process.environment["MASTER_ADDR"], int(process.environment["MASTER_PORT"])


def _accept(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def own_address(process: RankProcess) -> str:
    """The IPv4 address that gloo would give the other ranks.

    It is the address of the interface in GLOO_SOCKET_IFNAME, which training sets if it finds the interface to
    the first machine; otherwise it is the address of the host name. If the name is not known, gloo takes the
    loopback address.
    """
    name = gloo_interface(process)
    if name and (address := _address_of_interface(name)):
        return address
    try:
        return socket.gethostbyname(process.host)
    except OSError:
        return "127.0.0.1"


def gloo_interface(process: RankProcess) -> str:
    """The interface in GLOO_SOCKET_IFNAME, as it is set or as training would set it; empty: none."""
    environment = {**process.environment}
    out = process.out or process.system
    choose("auto", gpus=False, out=out, environment=environment, root=process.system).apply(environment)
    return environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def _address_of_interface(name: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except (ImportError, OSError):
        return None


SKEW = "clock skew"
_MESSAGES = 8
# Claims of sources and --deadline compare times of several hosts, as do readers of logs.
WARNED = 1.0  # seconds
FAILED = 900.0  # seconds; S3 rejects a request whose time is 15 minutes off (RequestTimeTooSkewed)


def clock_skew(
    process: RankProcess, exchange: RankExchange, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Compare the clock of each host, in seconds since 1970, with that of rank 0."""
    exchange.send("skew/host", process.host)
    hosts = exchange.receive("skew/host")
    first: dict[str, int] = {}
    for rank, host in sorted(hosts.items()):
        first.setdefault(host, rank)
    others = [rank for host, rank in first.items() if rank > 0 and host != hosts.get(0)]
    store = exchange.store
    if process.rank == 0:
        for rank in others:
            for number in range(_MESSAGES):
                key = f"doctor/skew/{rank}/{number}"
                store.get(f"{key}/sent")  # waits for the message
                received = clock()
                store.set(f"{key}/answer", pickle.dumps((received, clock())))
        if not others:
            yield Finding(SKEW, "ok", "one host has one clock", ranks=tuple(hosts))
    elif process.rank in others:
        measured = []
        for number in range(_MESSAGES):
            key = f"doctor/skew/{process.rank}/{number}"
            sent_at = clock()
            store.set(f"{key}/sent", b"")
            received, answered = pickle.loads(store.get(f"{key}/answer"))
            arrived = clock()
            on_the_way = (arrived - sent_at) - (answered - received)
            measured.append((on_the_way / 2, ((sent_at - received) + (arrived - answered)) / 2))
        bound, offset = min(measured)
        yield skew_finding(offset, bound, process.host, hosts[0])


def skew_finding(offset: float, bound: float, host: str, reference: str) -> Finding:
    """The finding about a clock `offset` seconds ahead of rank 0's, with an error of at most `bound`."""
    state: State = "failed" if abs(offset) > FAILED else "warning" if abs(offset) > WARNED + bound else "ok"
    direction = "ahead of" if offset >= 0 else "behind"
    text = duration_text(abs(offset))
    values = {"offset_seconds": offset, "error_seconds": bound}
    known = f"known to {duration_text(bound)}"
    if state == "ok":
        return Finding(SKEW, "ok", f"{text} from rank 0, {known}", values=values)
    figure = (
        f"the clock of {host} is {text} {direction} that of {reference} (known to {duration_text(bound)})"
    )
    figure += "; S3 rejects requests 15 minutes off" if state == "failed" else ""
    remedy = f"Run a time service on {host} and {reference}: chronyc tracking, timedatectl set-ntp true"
    return Finding(SKEW, state, figure, remedy, values=values)
