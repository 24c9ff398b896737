"""Claims: exclusive work on a source by one of many processes and machines that share a dataset directory.

    claim = Claim.take(store, "tasks/sa_000020.claim", timeout=120)
    with claim:                    None instead of a claim: another process has it
        ...                        the heartbeat runs in a thread
        claim.check()              before the work is committed

A claim is a file or object that is created exclusively. Its modification time is the heartbeat. It contains
a timeout in seconds. Another process may take over the claim when the last heartbeat is older than this. The
claim of a process of this machine is live until that process ends.

Claims avoid double work; they do not protect data. Two processes may hold the same claim after a machine was
suspended or a clock jumped. Both then write the same bytes under the same names, so that the result is
correct in any order.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType

from sa1b.errors import LockedError
from sa1b.storage.atomic import is_of_dead_process, json_bytes, start_of, this_machine, this_process
from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.store import Store

ENDING = ".claim"
TIMEOUT = 120.0  # seconds without a heartbeat
_BEATS = 6  # heartbeats in a timeout
_CLOCKS = 1.0  # seconds by which two readings of a file server's clock may differ
_POLL, _QUIET = 0.2, 5.0  # seconds between two checks, and before a wait is reported
LONGEST = 1_000_000  # seconds; a longer timeout is a mistake
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a claim, as recorded in the claim's file."""

    host: str
    pid: int
    process: str  # name of the process, see sa1b.storage.atomic
    token: str  # random value that identifies this claim
    age: float  # seconds since the heartbeat, by the file system's clock; below 0: dated in the future
    timeout: float = TIMEOUT  # seconds without a heartbeat after which the claim may be taken over
    started: int | None = None  # start time of the process, see sa1b.storage.atomic; None: unknown

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}" if self.token else "an unknown process"

    @property
    def is_here(self) -> bool:
        """Whether the holder is a running process of this machine."""
        if self.started is None or not self.process.startswith(f"{this_machine()}-"):
            return False
        return start_of(self.pid) == self.started and not is_of_dead_process(self.process)

    def is_live(self, timeout: float = 0.0) -> bool:
        """Whether the claim may not be taken over yet, by its own timeout or this one if longer."""
        if is_of_dead_process(self.process, self.started):
            return False
        return self.age <= max(timeout, self.timeout) or self.is_here

    def terms(self, path: str) -> str:
        """When the claim of a file ends, and what to do, as text for a message."""
        if self.is_here:
            return f"{path}: held until process {self.pid} of this machine ends"
        left = max(0.0, self.timeout - max(0.0, self.age))
        return (
            f"{path}: taken over {self.timeout:g} s after its last heartbeat, in at most {left:,.0f} s "
            "without a heartbeat; remove this file if no process uses it"
        )


class Claim:
    """A claim of this process, a context with heartbeats; `previous`: holder before, or None."""

    def __init__(
        self, store: Store, name: str, token: str, timeout: float, previous: Holder | None, data: bytes
    ) -> None:
        self.name, self.previous = name, previous
        self._store, self._token, self._timeout, self._data = store, token, timeout, data
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {name}", daemon=True)

    @classmethod
    def take(cls, store: Store, name: str, *, timeout: float = TIMEOUT) -> "Claim | None":
        """Take a claim that is free or no longer live; None if another process holds it.

        `timeout` is the seconds without a heartbeat after which others may take it over; an existing claim
        has its own.
        """
        token = secrets.token_hex(8)
        holding = {"host": socket.gethostname(), "pid": os.getpid(), "process": this_process()}
        data = json_bytes({**holding, "started": start_of(os.getpid()), "timeout": timeout, "token": token})
        previous = None
        if not store.put_if_absent(name, data):
            previous = observe(store, name)
            if previous is not None and previous.is_live():
                return None
            if previous is None:  # released since
                taken = store.put_if_absent(name, data)
            else:
                taken = store.replace_if(name, data, _has_token(previous.token))
            if not taken:
                return None
        return cls(store, name, token, timeout=timeout, previous=previous, data=data)

    def check(self) -> None:
        """Raise LockedError if the claim was taken over by another process."""
        if not self.is_held():
            current = holder(self._store, self.name)
            raise LockedError(
                f"{self._store.url(self.name)}: another process ({current or 'already ended'}) took over "
                f"this claim after {self._timeout:,.0f} s without a heartbeat and continues its work; if "
                "this machine was only slow, raise --claim-timeout"
            )

    def is_held(self) -> bool:
        """Whether this process still holds the claim."""
        current = holder(self._store, self.name)
        return current is not None and current.token == self._token

    def release(self) -> None:
        """End the heartbeat and remove the file unless another process has it, or the store is away."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(StorageError):
            _remove(self._store, self.name, self._token)

    def __enter__(self) -> "Claim":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UnavailableError):
            self._end.set()  # the claim ends by its timeout, or when this process has ended
        else:
            self.release()

    def _beat(self) -> None:
        while not self._end.wait(self._timeout / _BEATS):
            # A missing claim or a temporary error of the store is ignored here; `check` detects a lost claim.
            with contextlib.suppress(OSError, StorageError):
                self._store.renew(self.name, self._data)


@contextlib.contextmanager
def exclusive(store: Store, name: str, written: str) -> Iterator[None]:
    """Hold a claim, after another process; `written`: the file, for the message of a long wait."""
    began = time.monotonic()
    has_warned = False
    while (claim := Claim.take(store, name)) is None:
        time.sleep(_POLL)
        if not has_warned and time.monotonic() - began > _QUIET:
            has_warned = True
            current = holder(store, name)
            path = store.url(name)
            terms = path if current is None else current.terms(path)
            other = current or "another process"
            _LOG.warning("waiting for %s, which writes %s (%s)", other, written, terms)
    with claim:
        yield


def holder(store: Store, name: str) -> Holder | None:
    """The holder of a claim, live or not; None if the claim is free or is being released."""
    try:
        document = json.loads(store.read(name))
        host, pid, process = str(document["host"]), int(document["pid"]), str(document["process"])
        token = str(document["token"])
        timeout, started = _timeout(document.get("timeout")), document.get("started")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Truncated by a crash of the machine: the holder is unknown, the age is that of the file.
        host, pid, process, token, timeout, started = "unknown", 0, "", "", TIMEOUT, None
    age = store.age(name)
    return (
        None
        if age is None
        else Holder(host, pid, process, token=token, age=age, timeout=timeout, started=started)
    )


def observe(store: Store, name: str) -> Holder | None:
    """Like `holder`, for a process that waits: a heartbeat in the future counts as a heartbeat now."""
    # The modification time of the file is set to now, so that the claim ages from now on unless its process
    # sends another heartbeat.
    current = holder(store, name)
    if current is None or current.age >= -_CLOCKS:
        return current
    with contextlib.suppress(OSError, StorageError):
        store.renew(name, store.read(name))
    return replace(current, age=0.0)


def _timeout(value: object) -> float:
    if isinstance(value, int | float) and 0 < value <= LONGEST:
        return float(value)
    return TIMEOUT


def live_holders(store: Store, folder: str) -> dict[str, Holder]:
    """Live claims directly in a folder: name without the ending -> holder."""
    holders = {}
    for name in store.names(folder, ENDING):
        current = holder(store, f"{folder}/{name}")
        if current is not None and current.is_live():
            holders[name.removesuffix(ENDING)] = current
    return holders


def remove_dead(store: Store, name: str, *, timeout: float = math.inf) -> None:
    """Remove a claim of an ended process of this machine, or without heartbeat for its timeout."""
    current = observe(store, name)
    if current is not None and not current.is_live(timeout):
        _remove(store, name, current.token)


def _remove(store: Store, name: str, token: str) -> bool:
    """Remove the claim with this token; False if the claim has another token by now."""
    return store.remove_if(name, _has_token(token))


def _has_token(token: str) -> Callable[[bytes], bool]:
    """Whether the content of a claim has a token; "": whether it is not a claim."""

    def matches(data: bytes) -> bool:
        try:
            return str(json.loads(data)["token"]) == token
        except (ValueError, KeyError, TypeError):
            return not token

    return matches
