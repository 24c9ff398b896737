"""Stages of one pass that run in parallel, each in its own thread, with queues of a bounded number of bytes.

    with Pipeline() as pipeline:
        members = pipeline.stage("read", read(), size=len, max_bytes=16 << 20)
        checked = pipeline.stage("check", (check(item) for item in members), size=len, max_bytes=16 << 20)
        for item in checked:
            write(item)

The order of the items is kept. An error of a stage reaches the loop at once, before the queued items. Every
thread has ended when the `with` block ends, also after an error or Ctrl-C.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class _StoppedError(Exception):
    """Ends the thread of a stage when the pipeline stops; raised in these threads only."""


class Pipeline:
    """The threads and queues of one pass."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # notified when a queue or `stopped` changes
        self.stopped = False
        self._threads: list[threading.Thread] = []

    def stage(
        self, name: str, items: Iterable[T], *, size: Callable[[T], int], max_bytes: int
    ) -> Iterator[T]:
        """The same items, produced in a separate thread.

        Args:
            name: name of the thread.
            items: iterated over in the thread.
            size: returns the bytes of an item.
            max_bytes: limit of the queue in bytes; an item that is larger is queued alone.

        Raises:
            MemoryError: no thread can be started.
        """
        queue = _Queue(self, size, max_bytes)
        thread = threading.Thread(target=queue.fill, args=(items,), name=f"sa1b {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            raise MemoryError(str(error)) from None
        self._threads.append(thread)
        return queue

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()


class _Queue(Iterator[T], Generic[T]):
    """Items that one stage has produced and the next one has not received."""

    def __init__(self, pipeline: Pipeline, size: Callable[[T], int], max_bytes: int) -> None:
        self._pipeline, self._size, self._max_bytes = pipeline, size, max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._held_bytes = 0
        self._ended = False
        self._error: BaseException | None = None

    def fill(self, items: Iterable[T]) -> None:
        """Put all items into the queue; the function of the thread."""
        error = None
        try:
            for item in items:
                self._put(item)
        except _StoppedError:
            pass
        except BaseException as raised:
            error = raised
        with self._pipeline.changed:
            self._ended, self._error = True, error
            self._pipeline.changed.notify_all()

    def __next__(self) -> T:
        changed = self._pipeline.changed
        with changed:
            while True:
                if self._pipeline.stopped:
                    raise _StoppedError
                if self._error is not None:
                    raise self._error
                if self._items:
                    item, size = self._items.popleft()
                    self._held_bytes -= size
                    changed.notify_all()
                    return item
                if self._ended:
                    raise StopIteration
                changed.wait()

    def _put(self, item: T) -> None:
        size = self._size(item)
        changed = self._pipeline.changed
        with changed:
            while self._items and self._held_bytes + size > self._max_bytes:
                if self._pipeline.stopped:
                    raise _StoppedError
                changed.wait()
            if self._pipeline.stopped:
                raise _StoppedError
            self._items.append((item, size))
            self._held_bytes += size
            changed.notify_all()
