"""Difference of the clocks of hosts, by messages through the ranks' store as in NTP.

A host sends a message at t0, rank 0 receives it at t1 and answers at t2, and the answer arrives at t3, each
by its own clock. The difference is ((t1 - t0) + (t2 - t3)) / 2 if both ways take the same time; in any case
its error is at most half of the time in transit, ((t3 - t0) - (t2 - t1)) / 2. Several messages are sent, and
the fastest one counts.
"""

import pickle
import time
from collections.abc import Callable, Iterator

from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.exchange import RankExchange
from sa1b.programs.doctor.report import Finding, State
from sa1b.report import duration_text

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
            yield Finding(SKEW, "ok", "one host has one clock", "", tuple(hosts))
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
