"""Batches on their way from a worker process of a DataLoader to the training process.

torch pickles a worker's batches in a background thread: tensors go into shared memory, and their file
descriptors through a Unix socket in the temporary folder. If that fails, Python prints a traceback in the
worker and drops the batch, and the training process waits for it without end. It fails where TMPDIR is too
long for the path of a socket (107 bytes), where `ulimit -n` is low and where /dev/shm is full. With
`send_errors` the error takes the place of the batch and is raised in the training process.
"""

import os
import tempfile
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from sa1b.errors import Sa1bError
from sa1b.stream.batch import Batch


class TransportError(Sa1bError):
    """A worker process cannot send its batches; the message says why and what to change."""


def send_errors() -> None:
    """In a worker process: send the error in place of every batch that cannot be sent."""
    ForkingPickler.register(Batch, _reduce)


def _reduce(batch: Batch) -> tuple[Any, ...]:
    try:
        # A pickle within the pickle: the tensors are shared here, where an error can still be replaced.
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return _batch, (bytes(ForkingPickler.dumps(columns)),)
    except Exception as error:
        message = (
            f"worker process {os.getpid()} cannot send a batch: {type(error).__name__}: {error}. Tensors go "
            f"through /dev/shm and a socket below {tempfile.gettempdir()}: set TMPDIR to a shorter path, "
            "raise `ulimit -n`, or enlarge /dev/shm (docker run --shm-size)"
        )
        return _fail, (message,)


def _batch(columns: bytes) -> Batch:
    return Batch(**ForkingPickler.loads(columns))


def _fail(message: str) -> NoReturn:
    raise TransportError(message)
