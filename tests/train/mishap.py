"""What happens to a rank at a chosen moment of training, by patches of the package: see mishap_rank.py.

Other moments than these need none: see outside.py. The mishap says what, on which rank, at which step (counted from 0) and at which moment of it:

    stop    the rank is sent SIGTERM, "times" times; with "agent" torchrun is, which sends it to all ranks
    clock   the rank's clock is set a year forward, beyond any deadline
    kill    the rank is killed, if the file "once" is not there yet; with "after", so many seconds later
    raise   the rank raises RuntimeError("no more"), or OSError with "error": "OSError"
    nan     its loss is not finite, from the step on for "times" steps
    inf     its loss is, but not its gradient, from the step on for "times" steps
    apart   files that other ranks have written are not waited for
    record  nothing happens

With "at", one of `PLACES`, the rank raises there: RuntimeError, or the "error" that is named; "never": it waits.

With "all", it happens on every rank. The moment "evaluating" is within an evaluation after the step, counted from 1, after its micro-batch "batch".

With "into", a folder, each rank notes there which images each step had, how many graphs were compiled so far,
and how long it waits for others; with "pace", a step takes so many seconds longer. With "compile", torch.compile makes graphs
but no code of them.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from sa1b import train
from sa1b.engine.checkpoint import resume
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import CommitWriter
from sa1b.engine.ranks import agreement
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import TrainStep
from sa1b.engine.watch.control import Control, Health
from sa1b.engine.watch.metrics import Metrics
from sa1b.engine.watch.signals import Stop
from sa1b.sam.interactive import Interactive
from sa1b.sam.protocol import Score
from tests.engine.reconstruction import Reconstruction

AGENT = "tests.train.agent"


class Mishap(dict[str, Any]):
    """One of these for `command.start` and `command.torchrun`."""

    program = "tests.train.mishap_rank"


MOMENTS = ("begun", "judged", "agreed", "saved")
# Places where a rank can raise an error: the function, and the first step, counted from 0; -1: before it.
PLACES = {
    "resume": (resume, "restore", -1),
    "warm up": (train, "warm_up", -1),
    "first evaluation": (train, "evaluate", -1),
    "data": (Feed, "step", 1),
    "compute": (Reconstruction, "forward", 1),
    "sync": (TrainStep, "finish", 1),
    "update": (train, "update_ema", 1),
    "before an evaluation": (train, "evaluate", 1),
    "in an evaluation": (Score, "add", 1),
    "after an evaluation": (Metrics, "evaluation", 1),
    "save": (train, "save", 1),
    "write": (CommitWriter, "write_data", 1),
    "writing thread": (Checkpoints, "_write", 1),
    "upload": (RemoteRun, "push", 1),
    "end of a save": (Checkpoints, "_settle", 1),
    "closing": (train, "close", 1),
}
ERRORS: dict[str, Callable[[str], Exception]] = {
    "OSError": OSError,
    "RuntimeError": RuntimeError,
    "KeyError": KeyError,
    "never": lambda _: threading.Event().wait(),
}


def arrange(mishap: dict[str, Any]) -> None:
    """Prepare it in this process, which is a rank: RANK is set."""
    rank = int(os.environ.get("RANK", "0"))
    if mishap.get("compile"):  # the graphs are the same whatever makes code of them
        torch.compile = partial(torch.compile, backend="aot_eager")
    if "into" in mishap:
        _record(Path(mishap["into"]), rank, mishap.get("pace", 0.0))
    if rank != mishap.get("rank", 0) and not mishap.get("all"):
        return
    if "at" in mishap:
        _raise_at(*PLACES[mishap["at"]], ERRORS[mishap.get("error", "RuntimeError")])
    elif mishap["what"] in ("nan", "inf"):
        _spoil(mishap["what"], range(mishap["step"], mishap["step"] + mishap["times"]))
    elif mishap["what"] == "apart":
        agreement._SHOWN_AFTER = 0.0
    elif mishap.get("moment") == "evaluating":
        _interrupt_evaluation(mishap)
    elif mishap["what"] == "clock":
        _set_clock(mishap["step"])
    elif mishap["what"] in ("stop", "kill", "raise"):
        _signal(mishap)


def _raise_at(owner: Any, name: str, first: int, error: Callable[[str], Exception]) -> None:
    at_rate, function, current = train.lr_at, getattr(owner, name), [-1]

    def lr_at(config: Any, batch: int, step: int) -> float:
        current[0] = step
        return at_rate(config, batch, step)

    def raising(*arguments: Any, **options: Any) -> Any:
        if current[0] >= first:
            raise error("no more")
        return function(*arguments, **options)

    train.lr_at = lr_at
    setattr(owner, name, raising)


def _set_clock(at: int) -> None:
    at_rate, own_stop = train.lr_at, Control.own_stop
    current = [-1]

    def lr_at(config: Any, batch: int, step: int) -> float:
        current[0] = step
        return at_rate(config, batch, step)

    def asked(self: Control) -> Stop:
        if current[0] >= at:
            self._deadline -= 365 * 24 * 3600
        return own_stop(self)

    train.lr_at, Control.own_stop = lr_at, asked


def _interrupt_evaluation(mishap: dict[str, Any]) -> None:
    """SIGTERM once so many micro-batches were scored; waits there until this rank has it."""
    asked: list[int] = []
    add, evaluate, on_signal = Score.add, train.evaluate_if_due, Control._on_signal
    scored = [0]

    def run_evaluate(run: Any) -> Any:
        scored[0] = 0 if run.step == mishap["step"] else -(10**9)
        return evaluate(run)

    def score_add(self: Score, *arguments: Any) -> None:
        add(self, *arguments)
        scored[0] += 1
        if scored[0] == mishap["batch"]:
            os.kill(os.getppid() if mishap.get("agent") else os.getpid(), signal.SIGTERM)
            while not asked:
                time.sleep(0.01)
        if "scored" in mishap:
            Path(mishap["scored"]).write_text(str(scored[0]))

    def noted(self: Control, number: int, frame: object) -> None:
        asked.append(number)
        on_signal(self, number, frame)

    Score.add, train.evaluate_if_due, Control._on_signal = score_add, run_evaluate, noted


def _signal(mishap: dict[str, Any]) -> None:
    what, moment = mishap["what"], mishap.get("moment", "begun")

    def strike(step: int) -> None:
        if step != mishap["step"]:
            return
        if what == "raise":
            raise ERRORS[mishap["error"]]("no more")
        if what == "stop":
            for _ in range(mishap.get("times", 1)):
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if "after" in mishap:
            threading.Timer(mishap["after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        with contextlib.suppress(FileExistsError):
            Path(mishap["once"]).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    current = [-1]
    at_rate, at_step, at_save = train.lr_at, Metrics.step, train.save
    judge = Health.is_good

    def lr_at(config: Any, batch: int, step: int) -> float:
        current[0] = step
        if moment == "begun":
            strike(step)
        return at_rate(config, batch, step)

    def is_good(self: Health, step: int, *arguments: Any) -> bool:
        if moment == "judged":  # after the collective that asked all ranks whether to stop
            strike(step - 1)
        return judge(self, step, *arguments)

    def metrics_step(self: Any, step: int, figures: dict[str, float], **more: Any) -> None:
        at_step(self, step, figures, **more)
        if moment == "agreed":
            strike(current[0])

    def save(self: Any, *arguments: Any) -> None:
        at_save(self, *arguments)
        if moment == "saved":  # the asynchronous write has started
            strike(current[0])

    train.lr_at, Metrics.step, train.save = lr_at, metrics_step, save
    Health.is_good = is_good


def _spoil(what: str, steps: range) -> None:
    current = [-1]
    at_rate = train.lr_at

    def lr_at(config: Any, batch: int, step: int) -> float:
        current[0] = step
        return at_rate(config, batch, step)

    def spoil(model: Any, name: str) -> None:
        forward = getattr(model, name)

        def spoilt(self: Any, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
            sums = forward(self, *arguments, **options)
            if current[0] in steps and what == "nan":
                return {**sums, "loss": sums["loss"] * float("nan")}
            if current[0] in steps:
                sums["loss"].register_hook(lambda gradient: gradient * float("inf"))
            return sums

        setattr(model, name, spoilt)

    train.lr_at = lr_at
    spoil(Interactive, "_iterate")  # the last part of the model
    spoil(Reconstruction, "forward")


def _record(folder: Path, rank: int, pace: float) -> None:
    judge, set_timeout = Health.is_good, train.set_timeout

    def noted(rank_info: Any, seconds: float) -> None:
        set_timeout(rank_info, seconds)
        with (folder / f"{rank}.timeouts").open("a", encoding="utf-8") as file:
            file.write(f"{seconds}\n")

    def is_good(self: Health, step: int, *arguments: Any) -> bool:
        ids = torch.cat(arguments[-1]).tolist()
        with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
            graphs = counters["stats"]["unique_graphs"]
            of_step = {"step": step - 1, "ids": ids, "graphs": graphs, "pid": os.getpid()}
            of_step["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
            file.write(json.dumps(of_step) + "\n")
        time.sleep(pace)
        return judge(self, step, *arguments)

    Health.is_good, train.set_timeout = is_good, noted
