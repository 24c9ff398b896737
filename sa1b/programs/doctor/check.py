"""A check, the process that runs it, and the exchange of findings between ranks.

Ranks exchange findings through their key-value store, without a process group. So the findings of each rank
reach rank 0 even if no process group can start.
"""

import os
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import TCPStore

from sa1b.limit import Limited
from sa1b.programs.doctor.report import Finding
from sa1b.stream.plan import process_rank

ABORTED = "aborted"  # in the values of a finding: the check did not end, or ended by an error


@dataclass(frozen=True, slots=True)
class RankProcess:
    """This process, its rank, and the settings of the user."""

    root: str | None = None
    out: Path | None = None
    seconds: float = 5.0  # of each measurement of a rate
    timeout: float = 60.0  # seconds that a rank waits for the others
    largest_message: int = 256 << 20  # bytes, of the bandwidth sweep
    rate: float | None = None  # images per second that a rank trains; None: estimated from its device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # a GPU has an index
    host: str = field(default_factory=socket.gethostname)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    system: Path = Path("/")  # folder in which /sys, /proc, /etc and /dev are mounted

    @property
    def deadline(self) -> float:
        """Seconds in which storage must answer; shorter than `wait`."""
        return self.timeout / 2

    @property
    def limit(self) -> float:
        """Seconds after which a check of this rank counts as hanging."""
        return self.deadline + 4 * self.seconds

    @property
    def wait(self) -> float:
        """Seconds that a rank waits for another one, in which a check may hang."""
        return max(self.timeout, 1.2 * self.limit)

    @classmethod
    def of_this_process(cls, **settings: Any) -> "RankProcess":
        """This process, by the variables of torchrun; ValueError if they contradict each other."""
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            value = os.environ.get(name, "0")
            if not value.isdecimal():
                raise ValueError(f"{name}={value}: must be a whole number; torchrun sets it")
        rank, world_size = process_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an old driver; the check of devices reports it
            visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
        index = 0 if visible == 1 else local_rank
        device = torch.device("cuda", index) if index < visible else torch.device("cpu")
        return cls(
            **settings,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Check:
    """A check by one rank alone."""

    name: str
    # a finding without ranks and host gets those of the process
    work: Callable[[RankProcess], Iterable[Finding]]
    needs: tuple[str, ...] = ()  # names of checks; if one of them failed, this check is skipped
    measures: bool = False  # takes several seconds, which is announced

    def run(self, process: RankProcess, before: Iterable[Finding] = ()) -> list[Finding]:
        """The findings of this rank. An error of the check itself is a finding too."""
        # The check runs in a separate thread, because a read of a dead file server or a call of a broken
        # driver may never return. Such a check is a finding as well, and its thread keeps running.
        if skipped := missing_need(self.name, self.needs, before):
            return [skipped]
        return in_thread(self.name, lambda: self.work(process), process.limit)


def in_thread(check: str, work: Callable[[], Iterable[Finding]], limit: float) -> list[Finding]:
    """The findings of a check; an error or more than `limit` seconds is a finding too."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(work())
        except Exception as error:
            findings.append(crashed(check, error))

    thread = threading.Thread(target=run, name=check, daemon=True)
    thread.start()
    thread.join(limit)
    return [*findings, *([hung(check, limit)] if thread.is_alive() else [])]


def missing_need(check: str, needs: tuple[str, ...], before: Iterable[Finding]) -> Finding | None:
    """The finding that a check is skipped because one that it needs has failed; None if none has."""
    failed = next(
        (finding.check for finding in before if finding.check in needs and finding.state == "failed"), None
    )
    if failed is None:
        return None
    return Finding(check, "skipped", f"the check {failed!r} failed", "Fix that first")


def hung(check: str, seconds: float) -> Finding:
    return Finding(
        check,
        "failed",
        f"did not end within {seconds:g} s",
        "A file system, a store or a driver does not answer: look at `df`, `mount` and `dmesg`",
        values={ABORTED: True},
    )


def crashed(check: str, error: Exception) -> Finding:
    return Finding(
        check,
        "failed",
        f"the check ended by {type(error).__name__}: {error}".splitlines()[0],
        "Report this with the output of --json; the other checks are not affected",
        values={ABORTED: True},
    )


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
        """Connect to the store of MASTER_ADDR and MASTER_PORT. RuntimeError: it cannot be reached within the
        timeout. OverdueError: what listens there does not answer; so do later calls.
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
        """The values that these ranks (None: all) store within `timeout` seconds, by rank."""
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
    """A check that all ranks run at the same time; if one of `needs` failed on any rank, it is skipped on
    all. `work` returns the findings of this rank, and must end by itself, within the timeout of the process,
    if another rank does not take part.
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
