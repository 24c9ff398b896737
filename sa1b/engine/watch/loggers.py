"""Callbacks of a run, and the loggers that are callbacks: TensorBoard, Weights & Biases and MLflow.

    class Notify(Callback):
        def evaluation(self, step, scores, seconds):
            send(f"step {step}: {scores}")

    code = sa1b.train.main(callbacks=[Notify()])

Rank 0 calls them, in the loop of training: a callback that waits makes all ranks wait. An error of a callback
ends the run, except those of the loggers of a server, which end only the logging.
"""

import io
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sa1b.storage.atomic import append

SERVERS = ("wandb", "mlflow")
_LOG = logging.getLogger(__name__)


class Callback:
    """Methods that a run calls; a subclass defines those that it needs."""

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """A step is complete, counted from 1; its figures are those of metrics.jsonl."""

    def window(self, step: int, kind: Literal["ranks", "loader"], summary: Mapping[str, Any]) -> None:
        """A window of steps is complete: times of the ranks, or limits of their loaders."""

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        """An evaluation after `step` steps is complete."""

    def end(self) -> None:
        """The run ends, or stops with a checkpoint; after an error of another rank it is not called."""


class Logger(Callback):
    """A callback that logs the figures of every `every`-th step, and every score."""

    def __init__(self, every: int) -> None:
        self.every = every

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        if step % self.every == 0:
            self.add(step, figures)

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        self.add(step, scores)

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the values that are numbers."""
        raise NotImplementedError


class Curves(Logger):
    """A TensorBoard event file. From step `first` on, TensorBoard drops the points of earlier files of the
    folder. torch's SummaryWriter writes in a background thread, which ends with a traceback if the disk is
    full. `write`: runs a function that writes to a path, see `sa1b.engine.watch.control.Control`.
    """

    def __init__(
        self, every: int, folder: Path, first: int, write: Callable[[Path, Callable[[], object]], None]
    ) -> None:
        super().__init__(every)
        self._proto: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._records: Any = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._write = write
        number = time.time_ns()
        self.path = folder / f"events.out.tfevents.{number // 10**9}.{number % 10**9:09d}.{os.getpid()}"
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._append({"file_version": "brain.Event:2"}, {"step": first, "session_log": start})

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in numbers(figures).items()]
        self._append({"step": step, "summary": {"value": values}})

    def _append(self, *events: dict[str, Any]) -> None:
        data = io.BytesIO()
        for event in events:
            self._records(data).write(self._proto.Event(wall_time=time.time(), **event).SerializeToString())

        def write() -> None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, data.getvalue())

        self._write(self.path, write)


class ServerLogger(Logger):
    """A logger of a server; its first error is a warning and ends the logging, not the run.

    `key` identifies the run on the server, so that a resumed run continues there.
    """

    def __init__(
        self,
        every: int,
        key: str,
        log: Callable[[int, dict[str, float]], object],
        finish: Callable[[], object],
    ) -> None:
        super().__init__(every)
        self.key = key
        self._log, self._finish = log, finish
        self._failed = False

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        self._call(lambda: self._log(step, numbers(figures)))

    def end(self) -> None:
        self._call(self._finish)

    def _call(self, function: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            function()
        except Exception as error:
            self._failed = True
            text = (str(error).splitlines() or [""])[0]
            _LOG.warning("the logging to a server ends: %s: %s", type(error).__name__, text)


def open_server(
    name: str, project: str, every: int, run: Path, settings: Mapping[str, Any], key: str | None
) -> ServerLogger:
    """The logger of --logging.wandb or --logging.mlflow; `key`: of the run, if it was begun earlier."""
    package: Any = import_module(name)
    if name == "wandb":
        key = key or secrets.token_hex(8)
        opened = package.init(
            project=project, name=run.name, id=key, resume="allow", dir=str(run), config=dict(settings)
        )
        return ServerLogger(every, key, lambda step, figures: opened.log(figures, step=step), opened.finish)
    package.set_experiment(project)
    started = package.start_run(run_id=key, run_name=None if key else run.name)
    if key is None:
        package.log_params(flat(settings))
    return ServerLogger(
        every,
        started.info.run_id,
        lambda step, figures: package.log_metrics(figures, step=step, synchronous=False),
        package.end_run,
    )


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are numbers."""
    return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their flags: data.view, optim.lr."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return values
