"""What a run records: JSON lines, TensorBoard, a progress bar and a Chrome trace."""

import errno
import io
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import sa1b
from sa1b.engine.control import Control, StepFigures, StepTime
from sa1b.engine.ranks import RankInfo
from sa1b.errors import UsageError
from sa1b.storage.atomic import append, append_line, write_whole

PARTS = ("data", "compute", "update", "checkpoint")  # of a step's time, which are measured


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is recorded; RUN/metrics.jsonl always is.

    Attributes:
        every: Steps from one line of JSON to the next; a line has the figures of its step.
        tensorboard: Curves in RUN/tensorboard; by default if TensorBoard is installed.
        profile: First and last step of a Chrome trace, RUN/trace-<rank>.json; open it in Perfetto.
    """

    every: int = 1
    tensorboard: bool | None = None
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"--logging.every {self.every}: must be at least 1")
        if self.profile is not None and not 0 <= self.profile[0] <= self.profile[1]:
            raise UsageError(
                f"--logging.profile {self.profile}: must be a first and a last step, in this order"
            )
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UsageError("--logging.tensorboard: TensorBoard is missing; pip install 'sa1b[tensorboard]'")


class Metrics:
    """Writes the figures of a run; does nothing on ranks other than 0.

    RUN/metrics.jsonl has a line of JSON for each start of the run, {"run": {...}}, the first of which is its
    first line; for each step that is logged, {"step": 7, "loss": ...}; and for each evaluation, {"step": 7,
    "evaluation": {...}, "seconds": ...}. A failed write is reported to `control` and stops the run in order.

    Args:
        run: folder of the run.
        control: of the run.
        done: steps that are done already: lines of later ones, of a run that was killed, are taken out.
        steps: of the whole run.
        about: what describes this start of the run: world size, precision, versions.
        last: the line of step `done` from its checkpoint, written if a kill came before it.
        shown: what the progress line shows beside the loss: label -> figure.
    """

    def __init__(
        self,
        config: LoggingConfig,
        run: Path,
        rank_info: RankInfo,
        control: Control,
        done: int,
        steps: int,
        *,
        about: Mapping[str, Any] | None = None,
        last: Mapping[str, Any] | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._first = rank_info.rank == 0
        self._control = control
        self._shown = dict(shown or {})
        self._bar: tqdm[Any] | None = None
        self._curves: Curves | None = None
        self._evaluated: set[int] = set()
        self.path = run / "metrics.jsonl"
        if not self._first:
            return
        steps_there = self._drop_after(done)
        if config.tensorboard or (config.tensorboard is None and find_spec("tensorboard") is not None):
            with self._control.writing():
                self._curves = Curves(run / "tensorboard", done + 1)
        if done and last is not None and done not in steps_there and done % config.every == 0:
            self._write(last)
        self._write({"run": {"step": done, **(about or {})}})
        if done >= steps:
            return
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Record a step that is done, counted from 1."""
        if not self._first:
            return
        if step % self._config.every == 0:
            self._write({"step": step, **figures})
        if self._bar is not None:
            shown = {"loss": f"{figures['loss']:.4f}"}
            shown |= {label: f"{figures[name]:.3f}" for label, name in self._shown.items()}
            shown |= {"images/s": f"{figures['images_per_s']:.1f}", "wait": f"{figures['data_wait']:.0%}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        """Record an evaluation after so many steps, and print it."""
        if not self._first:
            return
        self._write({"step": step, "evaluation": dict(scores), "seconds": seconds})
        self._evaluated.add(step)
        self.say(f"step {step}: {score_line(scores)}")

    def lacks_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl has no evaluation after this step; False on ranks other than 0."""
        return self._first and step not in self._evaluated

    def say(self, line: str) -> None:
        """A line on stdout beside the progress line; rank 0 only."""
        if self._first:
            tqdm.write(line)

    def close(self) -> None:
        """End the progress line."""
        if self._bar is not None:
            self._bar.close()

    def _write(self, figures: Mapping[str, Any]) -> None:
        with self._control.writing():
            append_line(self.path, json.dumps(json_figures(figures)))
        if self._curves is not None and "step" in figures:
            flat = {**figures, **figures.get("evaluation", {})}
            with self._control.writing():
                self._curves.add(int(figures["step"]), flat)

    def _drop_after(self, done: int) -> set[int]:
        """Take out the lines of steps after `done`; returns the steps that still have one."""
        if not self.path.exists():
            return set()
        kept, found = [], set()
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                document = json.loads(line)
                step = document["run"]["step"] if "run" in document else document["step"]
                # A run that begins again from nothing evaluates step 0 again.
                keep = done > 0 and line.endswith("\n") and step <= done
            except (ValueError, KeyError, TypeError):
                keep = False  # cut off by a kill
            if keep:
                kept.append(line)
                if "evaluation" in document:
                    self._evaluated.add(step)
                elif "run" not in document:
                    found.add(step)
        write_whole(self.path, "".join(kept).encode())
        return found


class Curves:
    """A TensorBoard event file.

    torch's SummaryWriter writes in a thread of its own, which dies with a traceback on a full disk.

    Args:
        folder: of the file; every start of a run has its own.
        first: step from which on TensorBoard drops the points of earlier files.
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
        """Write a point of each curve, of what is a number."""
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


def json_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as JSON takes them, which has no word for what is not finite: None stands there."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def about(rank_info: RankInfo, mode: str, precision: str) -> dict[str, Any]:
    """The description of a start of a run: what its figures depend on."""
    device = rank_info.device
    return {
        "world_size": rank_info.world_size,
        "mode": mode,
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "sa1b": sa1b.__version__,
    }


def score_line(scores: Mapping[str, float]) -> str:
    """An evaluation in one line."""
    prompts = {"1_click": "1 click", "3_clicks": "3 clicks", "5_clicks": "5 clicks", "box": "box"}
    left_out = [
        label.format(f"{scores[name]:,.0f}")
        for name, label in (
            ("empty", "masks without a pixel {}"),
            ("damaged", "damaged images {} (see damaged.jsonl)"),
        )
        if scores.get(name)
    ]
    without = f"; left out: {', '.join(left_out)}" if left_out else ""
    if not scores["masks"]:
        return f"mIoU: there is no mask to evaluate on{without}"
    words = []
    for prompt, label in prompts.items():
        oracle = scores.get(f"miou_{prompt}_oracle")
        best = "" if oracle is None else f", oracle {oracle:.3f}"
        words.append(f"{scores[f'miou_{prompt}']:.3f} ({label}{best})")
    return f"mIoU {', '.join(words)} on {scores['masks']:,.0f} masks{without}"


def figures_of(
    figures: StepFigures, seconds: StepTime, lr: float, rank_info: RankInfo, utilisation: float | None
) -> dict[str, float]:
    """The recorded figures of a step.

    "seconds" is the whole step on rank 0's clock, from its beginning to this call: optimizer, exchange and
    checkpoint included. "seconds_data", "seconds_compute", "seconds_update", "seconds_checkpoint" and
    "seconds_other" are its parts. "data_wait" is the part of the step that ranks wait for data, a mean over
    ranks; "slowest_rank" is the one whose data and computation took longest, "seconds_slowest" its time.

    Args:
        lr: learning rate.
        utilisation: part of the devices' peak operations that the step would need in one second, MFU times
            seconds; None where the peak is not known.
    """
    total = seconds.total()
    parts = {name: getattr(seconds, name) for name in PARTS}
    waits = sum(figures.data) / len(figures.data)
    slowest = figures.slowest
    whole = int(figures.count) if figures.count.is_integer() else figures.count
    found = {**figures.means, "masks": whole, "images": figures.images}
    found |= {"lr": lr, "grad_norm": figures.norm}
    found |= {"images_per_s": figures.images / total, "masks_per_s": figures.count / total}
    found |= {"data_wait": min(waits / total, 1.0), "seconds": total}
    found |= {f"seconds_{name}": value for name, value in parts.items()}
    found |= {"seconds_other": total - sum(parts.values())}
    found |= {"slowest_rank": slowest, "seconds_slowest": figures.data[slowest] + figures.compute[slowest]}
    found |= {"peak_memory_gb": peak_memory(rank_info.device) / 1e9}
    if utilisation is not None:
        found["mfu"] = utilisation / total
    return found


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: of the device's memory, or of this process's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class ChromeTrace:
    """Records the steps `first` to `last` and writes RUN/trace-<rank>.json after the last one.

    Args:
        steps: first and last step, counted from 0; None: nothing is recorded.
    """

    def __init__(
        self, steps: tuple[int, int] | None, run: Path, rank_info: RankInfo, control: Control
    ) -> None:
        self.path = run / f"trace-{rank_info.rank}.json"
        self._steps = steps
        self._control = control
        self._on_gpu = rank_info.device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before each step."""
        if self._steps is not None and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called after each step."""
        if self._profile is not None and self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far."""
        if self._profile is None:
            return
        self._profile.stop()
        with self._control.writing():
            try:
                self._profile.export_chrome_trace(str(self.path))
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error), str(self.path)) from error
            if not _ends_as_json(self.path):  # torch's writer reports no failed write
                raise OSError(errno.EIO, "the trace was not written to its end", str(self.path))
        self._profile, self._steps = None, None


def _ends_as_json(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")
