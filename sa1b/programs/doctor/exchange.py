"""Exchange of findings between ranks through their key-value store, without a process group.

So the findings of each rank reach rank 0 even if no process group can start.
"""

import pickle
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import TCPStore

from sa1b.limit import Limited
from sa1b.programs.doctor.check import ABORTED, RankProcess, in_thread
from sa1b.programs.doctor.report import Finding

_CONNECT = 5.0  # seconds


def connect_reason(host: str, port: int, seconds: float = _CONNECT) -> str:
    """The reason for a failing connection, such as "timed out"; empty if the connection works."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "connection refused"
    except socket.gaierror:
        return "name not known"
    except OSError as error:
        text = (error.strerror or str(error)).lower()
        return "no route" if "unreachable" in text or "no route" in text else text
    return ""


_INTERVAL = 0.05  # seconds between two queries for an answer; a call of the store cannot be interrupted
_RETRY = 0.5  # seconds between two attempts to connect
_LOST = (
    "A rank may have ended or hang, or a link may be blocked: look at the findings of the others and "
    "of the check 'reachability', at `dmesg`, and with `py-spy dump --pid` at the stacks of ranks"
)


class KeyValueStore(Protocol):
    """The part of torch's Store that the checks use."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class _LimitedStore:
    """A store each of whose calls ends within a limit, in seconds: a stopped rank never answers."""

    def __init__(self, store: KeyValueStore, limit: float) -> None:
        self._store, self._limit, self._limited = store, limit, Limited()

    def set(self, key: str, value: str | bytes, /) -> None:
        self._limited.call(lambda: self._store.set(key, value), self._limit)

    def get(self, key: str, /) -> bytes:
        return self._limited.call(lambda: self._store.get(key), self._limit)

    def check(self, keys: list[str], /) -> bool:
        return self._limited.call(lambda: self._store.check(keys), self._limit)


class RankExchange:
    """Exchange of values between ranks through their key-value store; keys begin with "doctor/"."""

    def __init__(self, process: RankProcess) -> None:
        """Connect to the store of MASTER_ADDR and MASTER_PORT.

        Raises:
            RuntimeError: the store cannot be reached within the timeout.
            OverdueError: the program that listens there does not answer; so do later calls.
        """
        self._process = process
        at = (process.environment["MASTER_ADDR"], int(process.environment["MASTER_PORT"]))
        # As in torch.distributed.rendezvous, but the store does not wait for all ranks. The checks can then
        # name a rank that never connects.
        has_store = process.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = process.rank == 0 and not has_store
        end = time.monotonic() + process.wait
        # Torch would print tracebacks until rank 0 has started.
        while not serves and (reason := connect_reason(*at)):
            if time.monotonic() > end:
                raise RuntimeError(f"{reason}, tried for {process.wait:g} s")
            time.sleep(_RETRY)
        wait = timedelta(seconds=process.wait)

        def connect() -> Any:  # the stub of TCPStore lacks values of type bytes
            return TCPStore(*at, None, serves, timeout=wait, wait_for_workers=False, multi_tenant=True)

        # The constructor ignores its timeout if a foreign program listens there.
        self.store: KeyValueStore = _LimitedStore(
            self.wrap(Limited().call(connect, process.wait)), process.wait
        )

    def wrap(self, store: Any) -> Any:
        """The store itself; a subclass may replace it."""
        return store

    def send(self, topic: str, value: object) -> None:
        """Store a value of this rank for the others."""
        self.store.set(f"doctor/{topic}/{self._process.rank}", pickle.dumps(value))

    def receive(
        self, topic: str, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """The values that ranks (None: all) have stored within the timeout in seconds, by rank."""
        expected = range(self._process.world_size) if ranks is None else ranks
        end = time.monotonic() + (self._process.timeout if timeout is None else timeout)
        values: dict[int, Any] = {}
        while len(values) < len(expected):
            for rank in expected:
                key = f"doctor/{topic}/{rank}"
                if rank not in values and self.store.check([key]):
                    values[rank] = pickle.loads(self.store.get(key))
            if len(values) == len(expected) or time.monotonic() > end:
                break
            time.sleep(_INTERVAL)
        return values


@dataclass(frozen=True, slots=True)
class CheckTogether:
    """A check that all ranks run at the same time.

    Attributes:
        work: every rank calls it; it returns the findings of this rank, and must end by itself if another
            rank does not take part, within the timeout of the process.
        needs: names of checks; if one of them failed on any rank, this check is skipped on all.
    """

    name: str
    work: Callable[[RankProcess, RankExchange], Iterable[Finding]]
    needs: tuple[str, ...] = ()

    def run(self, process: RankProcess, exchange: RankExchange) -> list[Finding]:
        """The findings of this rank; an error, or a check that hangs, is a finding too."""

        def work() -> Iterable[Finding]:
            if process.device.type == "cuda":
                torch.cuda.set_device(process.device)  # of this thread
            return self.work(process, exchange)

        findings = in_thread(self.name, work, process.limit)
        return of_rank(
            [
                replace(finding, remedy=_LOST) if ABORTED in finding.values else finding
                for finding in findings
            ],
            process,
        )


def of_rank(findings: Sequence[Finding], process: RankProcess) -> list[Finding]:
    """The findings, where those without ranks and host get those of this process."""
    if process.world_size == 1:
        return list(findings)
    return [
        replace(finding, ranks=(process.rank,), host=process.host)
        if not finding.ranks and not finding.host
        else finding
        for finding in findings
    ]
