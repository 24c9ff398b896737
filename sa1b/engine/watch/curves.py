"""Curves of a run: a TensorBoard event file."""

import io
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sa1b.storage.atomic import append


class Curves:
    """A TensorBoard event file.

    torch's SummaryWriter writes in a background thread, which ends with a traceback if the disk is full.

    Args:
        folder: folder of the file; every start of a run has a new file.
        first: step from which TensorBoard drops the points of earlier files.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self._proto: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._records: Any = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        number = time.time_ns()
        self.path = folder / f"events.out.tfevents.{number // 10**9}.{number % 10**9:09d}.{os.getpid()}"
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._append({"file_version": "brain.Event:2"}, {"step": first, "session_log": start})

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write a point for each value that is a number."""
        values = [
            {"tag": name, "simple_value": float(value)}
            for name, value in figures.items()
            if isinstance(value, int | float)
        ]
        self._append({"step": step, "summary": {"value": values}})

    def _append(self, *events: dict[str, Any]) -> None:
        data = io.BytesIO()
        for event in events:
            self._records(data).write(self._proto.Event(wall_time=time.time(), **event).SerializeToString())
        append(self.path, data.getvalue())
