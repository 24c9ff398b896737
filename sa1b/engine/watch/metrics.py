"""Records of a run: JSON lines, a progress line, callbacks, the best score, and windows of steps."""

import json
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from sa1b.arguments import Range, check_fields
from sa1b.console import counted
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.model import HALF
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import EvaluationConfig, ParallelConfig
from sa1b.engine.watch.control import Control, StepFigures
from sa1b.engine.watch.hardware import SAMPLED
from sa1b.engine.watch.loggers import Callback, tensorboard, wandb
from sa1b.engine.watch.watchdog import PARTS, Phases
from sa1b.errors import UsageError
from sa1b.shards.manifest import versions
from sa1b.storage.atomic import append_line, write_whole
from sa1b.stream.stats import BUSY, DATA_WAIT, STAGES, LoaderSettings, limiting, remedy
from sa1b.version import __version__


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Records besides RUN/metrics.jsonl, which is always written.

    Attributes:
        every: Steps between lines of RUN/metrics.jsonl; a line has the figures of its step. Steps with a
            checkpoint and the last one always have a line.
        window: Steps after which two lines name the ranks that waited longest for data, and computed longest.
        tensorboard: Write curves to RUN/tensorboard; by default if TensorBoard is installed.
        wandb: Project of Weights & Biases that gets the figures of these lines and the settings, through the
            package wandb. A run that is resumed goes on there.
        profile: First and last step, counted from 0, that torch's profiler records after a step of warm-up:
            a Chrome trace, RUN/trace-<rank>.json, for Perfetto, and the ten costliest operations,
            RUN/operations-<rank>.txt.
    """

    every: Annotated[int, Range(1)] = 1
    window: Annotated[int, Range(1)] = 50
    tensorboard: bool | None = None
    wandb: Annotated[str | None, tyro.conf.arg(metavar="PROJECT")] = None
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "logging")
        for package in ("tensorboard", "wandb"):
            if getattr(self, package) and find_spec(package) is None:
                raise UsageError(f"--logging.{package}: the package is missing; pip install {package}")


class Metrics:
    """Writes the figures of a run on rank 0; `last`: those of step `done`, `shown`: of the progress line."""

    def __init__(
        self, config: LoggingConfig, run: Path, rank_info: RankInfo, control: Control, done: int, steps: int,
        *, about: Mapping[str, Any], last: Mapping[str, Any] | None = None,
        shown: Mapping[str, str] | None = None, callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self._every, self._control, self._shown = config.every, control, shown or {}
        self._first = rank_info.rank == 0
        self._bar: tqdm[Any] | None = None
        self._callbacks = list(callbacks) if self._first else []
        self.evaluations: dict[int, dict[str, float]] = {}  # of earlier starts: step -> scores
        self.path, self.result = run / "metrics.jsonl", ""  # score or loss of the last step
        if not self._first:
            return
        servers = dict[str, str]()  # keys of the run there
        written = control.within(self.path, lambda: self._keep_until(done))
        for line in written:
            servers |= line.get("run", {}).get("servers", {})
            if "evaluation" in line:
                self.evaluations[line["step"]] = line["evaluation"]
        if config.tensorboard or (config.tensorboard is None and find_spec("tensorboard") is not None):
            self._callbacks.append(tensorboard(config.every, run / "tensorboard", done + 1, control.write))
        if config.wandb is not None and done < steps:
            key = servers.setdefault("wandb", secrets.token_hex(8))
            self._callbacks.append(wandb(config.wandb, config.every, run, about.get("config", {}), key))
        if done and last is not None and not any("loss" in line and line["step"] == done for line in written):
            self._append(last)
            for callback in self._callbacks:
                callback.step(done, last)
        self._append({"run": {"step": done, **about, **({"servers": servers} if servers else {})}})

    def show(self, done: int, steps: int) -> None:
        if self._first and done < steps:
            interval = 0.5 if sys.stderr.isatty() else 10
            given: dict[str, Any] = {"desc": "train", "unit": "step", "mininterval": interval}
            self._bar = tqdm(total=steps, initial=done, dynamic_ncols=True, **given)

    def step(self, step: int, figures: Mapping[str, Any], *, always: bool = False) -> None:
        self.result = f"loss {figures['loss']:.4f} in the last step"
        if always or step % self._every == 0:
            self._append({"step": step, **figures})
        for callback in self._callbacks:
            callback.step(step, figures)
        if self._bar is not None:
            shown = {"loss": f"{figures['loss']:.4f}"}
            shown |= {label: f"{figures[name]:.3f}" for label, name in self._shown.items()}
            shown |= {"images/s": f"{figures['images_per_s']:.1f}", "wait": f"{figures['data_wait']:.0%}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float, how: Any) -> None:
        self._append({"step": step, "evaluation": {**scores, **how}, "seconds": seconds})
        for callback in self._callbacks:
            callback.evaluation(step, scores, seconds)
        self.result = score_line({**scores, **how})
        self.say(f"step {step}: {self.result}")

    def window(self, step: int, kind: Literal["ranks", "loader"], summary: Mapping[str, Any]) -> None:
        self._append({"step": step, kind: summary})
        for callback in self._callbacks:
            callback.window(step, kind, summary)

    def say(self, line: str) -> None:
        if self._first:
            tqdm.write(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        for callback in self._callbacks:
            callback.end()

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._first:
            text = json.dumps(json_figures(line), allow_nan=False)
            self._control.write(self.path, lambda: append_line(self.path, text))

    def _keep_until(self, done: int) -> list[dict[str, Any]]:
        """Remove the lines of steps after `done`, and cut ones; the documents of the others."""
        if not self.path.exists():
            return []
        kept: list[tuple[str, dict[str, Any]]] = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError):
                document = json.loads(line)
                step = document["run"]["step"] if "run" in document else document["step"]
                # A run that starts from scratch evaluates step 0 again.
                if done > 0 and line.endswith("\n") and step <= done:
                    kept.append((line, document))
        write_whole(self.path, "".join(line for line, _ in kept).encode())
        return [document for _, document in kept]


def json_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as JSON values: None replaces numbers that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def about(rank_info: RankInfo, parallel: ParallelConfig, code: str) -> dict[str, Any]:
    device = rank_info.device
    return {
        "world_size": rank_info.world_size,
        "mode": parallel.mode,
        "precision": parallel.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "sa1b": __version__,
        "code": code,
        "libraries": versions(),
    }


def score_line(scores: Mapping[str, Any]) -> str:
    prompts = {"1_click": "1 click", "3_clicks": "3 clicks", "5_clicks": "5 clicks", "box": "box"}
    left_out = [f"masks without a pixel {scores['empty']:,.0f}"] if scores.get("empty") else []
    if damaged := scores.get("damaged"):
        left_out.append(f"damaged images {damaged:,.0f} (see damaged.jsonl)")
    without = f"; left out: {', '.join(left_out)}" if left_out else ""
    if "masks" not in scores:  # a scorer of the model
        count, *means = (item for item in scores.items() if item[0] not in ("empty", "damaged"))
        words = [f"{name} {value:.3f}" for name, value in means]
        return f"{', '.join(words) or 'nothing to evaluate'} on {count[1]:,.0f} {count[0]}{without}"
    if not scores["masks"]:
        return f"mIoU: there is no mask to evaluate on{without}"
    words = []
    for prompt, label in prompts.items():
        oracle = scores.get(f"miou_{prompt}_oracle")
        best = "" if oracle is None else f", oracle {oracle:.3f}"
        words.append(f"{scores[f'miou_{prompt}']:.3f} ({label}{best})")
    parts = [
        f"{source} {scores[f'miou_1_click/{source}']:.3f} on {count:,.0f} masks"
        for kind, _, source, count in ((*name.partition("/"), value) for name, value in scores.items())
        if kind == "masks" and source and count
    ]
    of_sources = f"; 1 click by source: {', '.join(parts)}" if parts else ""
    limit = scores["masks_per_image"]
    limit = "all masks of an image" if limit is None else f"at most {counted(limit, 'mask')} an image"
    how = f"; protocol {scores['protocol']}, clicks at {scores['clicks']}, {limit}"
    return f"mIoU {', '.join(words)} on {scores['masks']:,.0f} masks{of_sources}{without}{how}"


def figures_of(figures: StepFigures, phases: Phases, lr: float, utilisation: float | None) -> dict[str, Any]:
    total, ranks = phases.total(), figures.ranks
    waits, memory = ranks["data_wait"], ranks["peak_memory"]
    whole = int(figures.count) if figures.count.is_integer() else figures.count
    recorded: dict[str, Any] = {**figures.means, "masks": whole, "images": figures.images}
    names = ("worst_loss", "worst_position", "worst_id_high", "worst_id_low")
    images = zip(*(ranks.get(name, ()) for name in names), strict=True)
    if known := [image for image in images if image[0] != -math.inf]:
        loss, position, high, low = max(known, key=lambda image: (math.isnan(image[0]), image[0]))
        worst = {"id": (int(high) << HALF) + int(low), "position": int(position), "loss": loss}
        recorded["worst_image"] = json_figures(worst)
    recorded |= {"lr": lr, "grad_norm": figures.norm}
    recorded |= {"images_per_s": figures.images / total, "masks_per_s": figures.count / total}
    recorded |= {"data_wait": min(sum(waits) / len(waits) / total, 1.0), "seconds": total}
    recorded |= {f"seconds_{name}": phases.seconds[name] for name in PARTS}
    recorded |= {"seconds_other": total - sum(phases.seconds[name] for name in PARTS)}
    recorded |= {"peak_memory_gb": max(memory) / 1e9, "peak_memory_gb_min": min(memory) / 1e9}
    recorded |= {"peak_memory_gb_mean": sum(memory) / len(memory) / 1e9}
    recorded |= {"peak_memory_rank": memory.index(max(memory))}
    for name in SAMPLED:
        if some := [value for value in ranks.get(name, ()) if not math.isnan(value)]:
            mean = sum(some) / len(some)
            recorded |= {f"{name}_min": min(some), f"{name}_mean": mean, f"{name}_max": max(some)}
    return recorded if utilisation is None else {**recorded, "mfu": utilisation / total}


class BestScore:
    """The best score of a run, and the evaluations since then; the same on all ranks."""

    def __init__(self, config: EvaluationConfig, evaluations: Mapping[int, dict[str, float]]) -> None:
        self._config, self.evaluations = config, dict[int, dict[str, float]]()  # step -> scores
        self.step: int | None = None  # None: without --evaluation.best, or before the first evaluation
        self._best, self._since = -math.inf, 0
        for step, scores in sorted(evaluations.items()):
            self.add(step, scores)

    def add(self, step: int, scores: dict[str, float]) -> None:
        self.evaluations[step], name = scores, self._config.best
        if name is None:
            return
        if isinstance(scores.get(name, ""), str):
            raise UsageError(f"--evaluation.best {name}: not a score; choose from {', '.join(scores)}")
        self._since += 1
        if scores[name] is not None and scores[name] > self._best:  # one that is not a number is no better
            self.step, self._best, self._since = step, scores[name], 0

    @property
    def exhausted(self) -> bool:
        return 0 < self._config.patience <= self._since

    @property
    def why(self) -> str:
        return f"{counted(self._since, 'evaluation')} without a better score (--evaluation.patience)"

    def lines(self, out: str) -> list[str]:
        if self.step is None:
            return []
        at = f"{out}/checkpoints/{folder_name(self.step)}"
        at = at if self.step else "the weights before the first step"
        lines = [f"best: {at} with {self._config.best} {self._best:.4g}"]
        return [*lines, f"stopped: {self.why}"] if self.exhausted else lines


class Window:
    """Of each `size` steps, the ranks that waited and computed longest, and what limits the former."""

    def __init__(self, hosts: Sequence[str], size: int, metrics: Metrics, loader: LoaderSettings) -> None:
        self._hosts, self._size, self._metrics, self._loader = hosts, size, metrics, loader
        self._steps, self._seconds = -1, 0.0
        self._sums, self._busy = dict[str, list[float]](), dict[str, list[float]]()
        self._limit: str | None = None  # as reported last

    def add(self, step: int, ranks: Mapping[str, Sequence[float]], seconds: float) -> None:
        self._steps += 1
        if self._steps:
            self._seconds += seconds
            for name, some in self._sums.items():
                self._sums[name] = [total + number for total, number in zip(some, ranks[name], strict=True)]
            if self._steps % self._size:
                return
            self._end(step, ranks)
        self._seconds, self._busy = 0.0, {name: [*ranks[name]] for name in BUSY}
        self._sums = {name: [0.0] * len(self._hosts) for name in ("data_wait", "forward")}

    def _end(self, step: int, ranks: Mapping[str, Sequence[float]]) -> None:
        summary: dict[str, Any] = {"steps": self._size}
        for name, some in self._sums.items():
            summary[name] = self._rank(some, max) | {"seconds": round(max(some) / self._size, 6)}
        clocks = [math.inf if math.isnan(clock) else clock for clock in ranks.get("gpu_clock_mhz", ())]
        if clocks and min(clocks) < math.inf:
            summary["gpu_clock"] = self._rank(clocks, min) | {"mhz": min(clocks)}
        self._metrics.window(step, "ranks", summary)
        rank: int = summary["data_wait"]["rank"]
        wait = self._sums["data_wait"][rank] / max(self._seconds, 1e-9)
        limit, shares = limiting(
            {stage: ranks[f"busy_{stage}"][rank] - self._busy[f"busy_{stage}"][rank] for stage in STAGES}
        )
        busy = {stage: round(share, 3) for stage, share in shares.items()}
        loader = {"rank": rank, "data_wait": round(wait, 4), "limiting": limit, "busy": busy}
        self._metrics.window(step, "loader", loader)
        known, self._limit = self._limit, limit if wait > DATA_WAIT else None
        if self._limit not in (None, known):  # once per incident
            on = f" on rank {rank}" if len(self._hosts) > 1 else ""
            what = remedy(str(limit), self._loader)
            self._metrics.say(f"data wait {wait * 100:.0f} %{on}: {limit} limits; {what}")

    def _rank(self, numbers: Sequence[float], extreme: Callable[[Sequence[float]], float]) -> dict[str, Any]:
        rank = numbers.index(extreme(numbers))
        return {"rank": rank, "host": self._hosts[rank]}
