"""What a run records: JSON lines, TensorBoard, a progress bar and a Chrome trace."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from sa1b.engine.ranks import RankInfo
from sa1b.errors import UsageError
from sa1b.storage.atomic import write_whole

PARTS = ("data", "compute", "update")  # of a step's time, which are measured


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is written down. RUN/metrics.jsonl is always.

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
            raise UsageError("--logging.every must be at least 1")
        if self.profile is not None and not 0 <= self.profile[0] <= self.profile[1]:
            raise UsageError("--logging.profile takes a first step and a last one that is not before it")
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UsageError("--logging.tensorboard needs TensorBoard: pip install 'sa1b[tensorboard]'")


@dataclass(slots=True)
class StepTime:
    """Where the seconds of a step went, on this process's clock.

    On a GPU the kernels of `compute` may end in `update`, where the loss is read and the device waited for.
    """

    data: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    total: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)


def step_means(
    totals: dict[str, torch.Tensor], images: int, stop: bool, seconds: StepTime, rank_info: RankInfo
) -> dict[str, float]:
    """The figures of a step over all ranks, in one collective; waits for the device.

    Args:
        totals: this rank's sums over its masks, of the model's figures, and "count".
        images: of this rank.
        stop: whether this rank was asked to end.
        seconds: of this rank.

    Returns:
        The figures divided by the masks of all ranks; "masks", "images" in all; "stop": ranks asked to end;
        "data", "compute", "update", "total": seconds, means over ranks.
    """
    times = [seconds.data, seconds.compute, seconds.update, seconds.total]
    names = [name for name in totals if name != "count"]
    own = torch.stack([totals[name].double() for name in (*names, "count")]).cpu()
    own = torch.cat((own, torch.tensor([images, stop, *times], dtype=torch.float64)))
    if rank_info.world_size > 1:
        if dist.get_backend() == "nccl":
            own = own.to(rank_info.device)
        dist.all_reduce(own)
    *sums, masks, all_images, stops, data, compute, update, total = own.tolist()
    found = {name: value / masks if masks else 0.0 for name, value in zip(names, sums, strict=True)}
    found |= {"masks": masks, "images": all_images, "stop": stops}
    parts = {"data": data, "compute": compute, "update": update, "total": total}
    return found | {name: value / rank_info.world_size for name, value in parts.items()}


class Metrics:
    """Writes the figures of a run; does nothing on ranks other than 0.

    Args:
        run: folder of the run.
        done: steps that are done already: lines of later ones, of a run that was killed, are taken out.
        steps: of the whole run.
        shown: figures of the progress line beside the loss: label to name.
    """

    def __init__(
        self,
        config: LoggingConfig,
        run: Path,
        rank_info: RankInfo,
        done: int,
        steps: int,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._shown = shown or {}
        self._first = rank_info.rank == 0
        self._bar: tqdm[Any] | None = None
        self._board: Any = None
        self.path = run / "metrics.jsonl"
        if not self._first:
            return
        self._drop_after(done)
        self._file = self.path.open("a", encoding="utf-8")
        if config.tensorboard or (config.tensorboard is None and find_spec("tensorboard") is not None):
            from torch.utils import tensorboard

            writer: Any = tensorboard.SummaryWriter
            self._board = writer(run / "tensorboard", purge_step=done + 1)
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Write down a step that is done, counted from 1."""
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

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """Write down an evaluation after so many steps, and say it."""
        if not self._first:
            return
        self._write({"step": step, "evaluation": scores})
        self.say(f"step {step}: {score_line(scores)}")

    def say(self, line: str) -> None:
        """A line on stdout beside the progress line; rank 0 only."""
        if self._first:
            tqdm.write(line)

    def close(self) -> None:
        """End the progress line and the files."""
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._first:
            self._file.close()

    def _write(self, figures: dict[str, Any]) -> None:
        flat = {**figures, **figures.get("evaluation", {})}
        # JSON has no word for what is not finite.
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in flat.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, figures["step"])

    def _drop_after(self, done: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                # A run that begins again from nothing evaluates step 0 again.
                keep = done > 0 and line.endswith("\n") and json.loads(line)["step"] <= done
            except ValueError:
                keep = False  # cut off by a kill
            if keep:
                kept.append(line)
        write_whole(self.path, "".join(kept).encode())


def score_line(scores: dict[str, float]) -> str:
    """An evaluation in one line."""
    prompts = {"1_click": "1 click", "3_clicks": "3 clicks", "5_clicks": "5 clicks", "box": "box"}
    if not scores["masks"]:
        return "mIoU: the held-out images have no mask"
    words = [f"{scores[f'miou_{prompt}']:.3f} ({label})" for prompt, label in prompts.items()]
    return f"mIoU {', '.join(words)} on {scores['masks']:,.0f} masks"


def figures_of(
    means: dict[str, float], rate: float, norm: float, rank_info: RankInfo, utilisation: float | None
) -> dict[str, float]:
    """What is written down of a step.

    Args:
        means: of `step_means`.
        rate: learning rate.
        norm: of the gradient before clipping.
        utilisation: part of the devices' peak operations that the step would need in one second, MFU times
            seconds; None where the peak is not known.
    """
    total = means["total"]
    other = total - means["data"] - means["compute"] - means["update"]
    found = {name: value for name, value in means.items() if name not in (*PARTS, "total", "stop")}
    found |= {"lr": rate, "grad_norm": norm}
    found |= {"images_per_s": means["images"] / total, "masks_per_s": means["masks"] / total}
    found |= {"data_wait": means["data"] / total, "seconds": total}
    found |= {f"seconds_{name}": means[name] for name in PARTS}
    found |= {"seconds_other": other, "peak_memory_gb": peak_memory(rank_info.device) / 1e9}
    if utilisation is not None:
        found["mfu"] = utilisation / total
    return found


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: of the device's memory, or of this process's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class ChromeTrace:
    """Records the steps `first` to `last` and writes RUN/trace-<rank>.json behind the last one.

    Args:
        steps: first and last step, counted from 0; None: nothing is recorded.
    """

    def __init__(self, steps: tuple[int, int] | None, run: Path, rank_info: RankInfo) -> None:
        self.path = run / f"trace-{rank_info.rank}.json"
        self._steps = steps
        self._on_gpu = rank_info.device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before each step."""
        if self._steps is not None and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called behind each step."""
        if self._profile is not None and self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._profile, self._steps = None, None
