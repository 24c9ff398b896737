"""Callbacks of a run, and those of TensorBoard and Weights & Biases.

    class Notify(Callback):
        def evaluation(self, step, scores, seconds):
            send(f"step {step}: {scores}")

    code = sa1b.train.main(callbacks=[Notify()])

Rank 0 calls them, in the loop of training: a callback that waits makes all ranks wait, and its error ends the
run.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

_LOG = logging.getLogger(__name__)


class Callback:
    """Methods that a run calls; a subclass defines those that it needs."""

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """A step is complete, counted from 1; its figures are those of metrics.jsonl."""

    def window(self, step: int, kind: Literal["ranks", "loader"], summary: Mapping[str, Any]) -> None:
        """A window of steps is complete: the ranks that took longest, or limits of their loaders."""

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        """An evaluation after `step` steps is complete."""

    def end(self) -> None:
        """The run ends, or stops with a checkpoint; after an error of another rank it is not called."""


@dataclass(frozen=True, slots=True)
class Logger(Callback):
    """Logs the numbers of every `every`-th step, and every score; `call` handles errors."""

    every: int
    call: Callable[[Callable[[], object]], object]
    log: Callable[[int, dict[str, float]], object]
    finish: Callable[[], object]

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        if step % self.every == 0:
            self.evaluation(step, figures, 0.0)

    def evaluation(self, step: int, scores: Mapping[str, Any], seconds: float) -> None:
        values = {name: float(one) for name, one in scores.items() if isinstance(one, int | float)}
        self.call(lambda: self.log(step, values))

    def end(self) -> None:
        self.call(self.finish)


@cache
def _silence_thread() -> None:
    """`add_scalar` raises the error that ends TensorBoard's thread, which prints it too."""
    print_error = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            print_error(error)

    threading.excepthook = hook


def tensorboard(
    every: int, folder: Path, first: int, write: Callable[[Path, Callable[[], object]], None]
) -> Logger:
    """Curves; from step `first` on, TensorBoard drops points of earlier files; `write` as `Control.write`."""
    opened: Any = import_module("torch.utils.tensorboard").SummaryWriter
    writers: list[Any] = []  # none if the folder cannot be written
    _silence_thread()
    write(folder, lambda: writers.append(opened(str(folder), purge_step=first, flush_secs=10)))

    def log(step: int, values: Mapping[str, float]) -> None:
        for writer in writers:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    return Logger(every, partial(write, folder), log, lambda: [writer.close() for writer in writers])


def wandb(project: str, every: int, run: Path, settings: Mapping[str, Any], key: str) -> Logger:
    """The logger of --logging.wandb; `key` identifies the run there, so that a resumed run goes on there."""
    opened = import_module("wandb").init(
        project=project, name=run.name, id=key, resume="allow", dir=str(run), config=dict(settings)
    )
    works = True

    def call(work: Callable[[], object]) -> None:  # an error of the server must not end the run
        nonlocal works
        try:
            if works:
                work()
        except Exception as error:
            works, text = False, (str(error).splitlines() or [""])[0]
            _LOG.warning("the logging to Weights & Biases ends: %s: %s", type(error).__name__, text)

    return Logger(every, call, lambda step, values: opened.log(values, step=step), opened.finish)
