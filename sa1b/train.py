"""Train a model on SA-1B: one loop, from one CPU process to many nodes, that resumes exactly.

    python sa1b/train.py --preset tiny --data.root shards --out run
    torchrun --nproc_per_node=8 sa1b/train.py --preset vit_b --data.root s3://bucket/shards
        --parallel.mode ddp --parallel.precision bf16 --data.micro-batch 4 --out run

The same command goes on where a run ended or was killed, with any number of ranks and in any mode. Exit code
0: done, or stopped with a checkpoint; 1: failed; 2: a setting does not fit.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # Until there is something to save, Ctrl-C ends at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# torchrun starts this file by its path: its folder is then where Python looks first, not the package's.
if __name__ == "__main__" and sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn

from sa1b.engine import config as settings
from sa1b.engine import estimate, metrics
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.config import Config, build, initial_weights
from sa1b.engine.control import Control, StepTime
from sa1b.engine.evaluation import evaluate, held_out_feed, score
from sa1b.engine.feed import Feed
from sa1b.engine.gradients import autocast, finish, grad_scaler, micro_batch, warm_up
from sa1b.engine.health import Health, HealthError
from sa1b.engine.metrics import ChromeTrace
from sa1b.engine.model import declared
from sa1b.engine.optim import freeze, lr_at, lr_line, make_optimizer, set_lr
from sa1b.engine.parallel import set_timeout, start, stop, wrap
from sa1b.engine.presets import PRESETS
from sa1b.engine.ranks import RankInfo, agree, check_shared_folder, explain
from sa1b.errors import CheckpointError, UsageError
from sa1b.storage.atomic import json_bytes, write_whole
from sa1b.stream.batch import Batch
from sa1b.stream.dataset import ResumeError

RAISED_TOGETHER = (HealthError, CheckpointError)  # by all ranks after the same step: none waits for another


class Run:
    """All that a run is made of, on one rank, as it was after the last step that a checkpoint holds."""

    def __init__(self, config: Config, rank_info: RankInfo) -> None:
        self.config, self.rank_info = config, rank_info
        self.step = 0
        self.control = Control(rank_info)
        check_shared_folder(config.out, rank_info)
        data, size = config.data, config.image_size
        self.feed = Feed(data, size, rank_info, config.out, config.seed)
        self.held_out = held_out_feed(config.evaluation, data, size, rank_info, config.out, self.feed.stream)
        module = build(config, initial_weights(config))
        freeze(module, config.optim)
        self.module: nn.Module = wrap(module, config.parallel, rank_info)
        self.model = declared(self.module)
        self.optimizer = make_optimizer(self.module, config.optim, data.global_batch)
        self.scaler = grad_scaler(config.parallel.precision, rank_info.device)
        self.checkpoints = Checkpoints(config.out, config.checkpoint)
        last = self._resume()
        self.health = Health(config.health, config.out, rank_info, self.control)
        self.metrics = metrics.Metrics(
            config.logging,
            config.out,
            rank_info,
            self.control,
            self.step,
            config.optim.steps,
            about=metrics.about(rank_info, config.parallel.mode, config.parallel.precision),
            last=last,
            shown=self.model.shown,
        )

    def _resume(self) -> dict[str, Any] | None:
        """Go on from the newest good checkpoint, if there is one; the metrics of its step."""
        if self.config.resume == "no" and self.checkpoints.newest() is not None:
            raise UsageError(
                f"--resume no, but {self.config.out} has checkpoints: choose another --out, or move it away"
            )
        state = self.checkpoints.resume(self.module, self.optimizer)
        if state is not None:
            self.step = int(state["step"])
            try:
                self.feed.load_state_dict(state["stream"])
            except ResumeError as error:
                raise ResumeError(
                    f"{error}. Pass the --seed and --data.view that {self.config.out} began with, or "
                    "another --out"
                ) from None
            self.scaler.load_state_dict(state["scaler"])
            if self.rank_info.rank == 0:
                print(f"going on after step {self.step:,} at position {state['stream']['position']:,}")
        agree(self.module, self.rank_info)
        return None if state is None else state.get("metrics")

    def save(self, line: dict[str, Any] | None) -> None:
        """A checkpoint of what was trained so far.

        Args:
            line: metrics of the last step, as far as they are known.
        """
        state = {
            "step": self.step,
            "metrics": line,
            "stream": self.feed.state_dict(),
            "scaler": self.scaler.state_dict(),
            "config": self.config.document(),
        }
        self.checkpoints.save(self.step, self.module, self.optimizer, state)

    def evaluate(self) -> None:
        """Score the held-out images and write the scores down, unless the run is asked to stop meanwhile."""
        if self.held_out is not None:
            config, began = self.config, time.perf_counter()
            scores = evaluate(
                self.module,
                self.held_out,
                config.evaluation,
                config.parallel,
                self.rank_info,
                config.out,
                self.control,
            )
            if scores is not None:
                self.metrics.evaluation(self.step, scores, time.perf_counter() - began)

    def close(self) -> None:
        """End threads and files; waits for the checkpoint that is being written."""
        try:
            self.feed.close()
            self.metrics.close()
        finally:
            self.checkpoints.close()


def train(run: Run) -> None:
    """The loop: until the last step, or until a rank was asked to stop."""
    config, rank_info, module, model, feed = run.config, run.rank_info, run.module, run.model, run.feed
    precision, scaler, optimizer = config.parallel.precision, run.scaler, run.optimizer
    control = run.control
    trace = ChromeTrace(config.logging.profile, config.out, rank_info, control)
    module.train()

    def forward_backward(batch: Batch) -> dict[str, Tensor]:
        inputs = model.inputs(batch, config.seed)
        with autocast(precision, rank_info.device):
            sums: dict[str, Tensor] = module(*inputs)
        torch.autograd.backward(scaler.scale(sums["loss"]))
        return {name: sums[name].detach() for name in (*model.figures, "count")}

    def evaluate_if_due(saved: bool) -> None:
        every, ends = config.evaluation.every, run.step == config.optim.steps
        if not every or control.stopping or not (ends or run.step % every == 0):
            return
        run.evaluate()
        if control.stopping and not saved:
            run.save(None)

    if control.any_rank(run.metrics.lacks_evaluation(run.step)):
        evaluate_if_due(saved=run.step > 0)  # of step 0: what there is to gain; else one that was interrupted
    if run.step < config.optim.steps and not control.stopping:
        warm_up(module, partial(forward_backward, feed.peek()))
    first = run.step
    while run.step < config.optim.steps and not control.stopping:
        trace.before(run.step)
        waited, seconds = feed.waited, StepTime()
        rate = lr_at(config.optim, config.data.global_batch, run.step)
        set_lr(optimizer, rate)
        totals: dict[str, Tensor] = {}
        ids: list[Tensor] = []
        with seconds.part("compute"):
            for number, batch in enumerate(feed.step(), 1):
                with micro_batch(module, last=number == feed.micro_batches):
                    sums = forward_backward(batch)
                totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
                ids.append(batch.ids)
        seconds.data = feed.waited - waited
        seconds.compute -= seconds.data
        with seconds.part("update"):
            norm = finish(
                module, optimizer, scaler, totals["count"], rank_info, grad_clip=config.optim.grad_clip
            )
            figures = control.exchange(totals, norm, sum(map(len, ids)), seconds)
            loss = figures.means["loss"]
            if run.health.is_good(run.step, loss, figures.norm, figures.own_loss, ids):
                scaler.step(optimizer)
            elif run.health.skipped == 1:
                run.metrics.say(f"step {run.step + 1} is skipped: loss {loss}, gradient norm {figures.norm}")
            scaler.update()
            optimizer.zero_grad()
        trace.after(run.step)
        if run.step == first:
            set_timeout(rank_info, config.parallel.timeout)
        run.step += 1
        run.checkpoints.poll()
        ideal = estimate.peak_seconds(model, figures.images, figures.count, rank_info)
        ends = control.stopping or run.step == config.optim.steps
        saves = (ends or run.step % config.checkpoint.every == 0) and not run.health.lost
        if saves:
            # A kill may come after the checkpoint and before the step's line.
            line = metrics.figures_of(figures, seconds, rate, rank_info, ideal)
            with seconds.part("checkpoint"):
                run.save(metrics.json_figures({"step": run.step, **line}))
        run.metrics.step(run.step, metrics.figures_of(figures, seconds, rate, rank_info, ideal))
        evaluate_if_due(saved=saves or bool(run.health.lost))
    trace.close()
    run.health.end(run.step)


def run(config: Config) -> None:
    """Do what the settings ask for, on this rank."""
    rank_info = start(config.parallel)
    config = settings.agree(config, rank_info)
    if config.dry_run:
        estimate.plan(config, rank_info)
    elif config.evaluate_only:
        score(config, build(config, config.init or config.out), rank_info)
    else:
        train_and_close(Run(config, rank_info))
    stop()  # only here: a rank that raises would wait for the others


def train_and_close(run: Run) -> None:
    """Train until the end, or until the run is asked to stop, and write what is in flight."""
    config, rank_info, control = run.config, run.rank_info, run.control
    if rank_info.rank == 0:
        with control.writing():
            write_whole(config.out / "config.json", json_bytes(config.document()))
        print(lr_line(config.optim, config.data.global_batch), flush=True)
    control.install()
    try:
        train(run)
    except BaseException as error:
        # Closing waits for the checkpoint in flight, which all ranks write together.
        if rank_info.world_size == 1 or isinstance(error, RAISED_TOGETHER):
            run.close()
        raise
    run.close()
    control.check()
    if control.stopping and rank_info.rank == 0:
        print(f"stopped after step {run.step:,} with a checkpoint; the same command goes on from there")


def main(presets: Mapping[str, Config] = PRESETS) -> int:
    """The command line.

    Args:
        presets: settings by the name that `--preset` takes; those of another model train that model.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    rank = int(os.environ.get("RANK", "0"))
    try:
        run(settings.parse(sys.argv[1:], __doc__, presets))
    except SystemExit as error:  # of help, or of a flag that cannot be read
        return _refused(rank, int(error.code or 0))
    except UsageError as error:
        if rank == 0:  # the same on all ranks
            sys.stderr.write(f"error: {error}\n")
        return _refused(rank, 2)
    except Exception as error:
        # In one write: the lines of several ranks would mix.
        sys.stderr.write(explain(error, rank))
        return 1
    return 0


def _refused(rank: int, code: int) -> int:
    """The exit code of a rank that was refused its settings, when rank 0 has had the time to say why."""
    if rank > 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)  # torchrun ends all ranks with the first one
    return code


def exit_at_once(code: int) -> NoReturn:
    """End this process without waiting for other ranks or for threads.

    A rank that has failed must not leave its process group in order, which needs the other ranks. One that
    has succeeded has written and closed everything; threads of torch's process groups that outlive the
    interpreter can abort it, and torchrun would then call a run failed that has ended well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_at_once(main())
