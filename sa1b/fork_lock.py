"""A lock that a forked process finds free, whatever the threads of its parent do."""

import os
import threading
import weakref
from typing import Any


class ForkLock:
    """A context, as `threading.Lock`. A thread of the parent that held it does not exist in the child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


_ALL: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _ALL:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
