"""Train a model on SA-1B: one loop, from one CPU process to many nodes, that resumes exactly.

Example: sa1b train --preset tiny --data.root shards --out run
         torchrun --nproc_per_node=8 -m sa1b.train --preset vit_b --data.root s3://bucket/shards
             --parallel.mode ddp --parallel.precision bf16 --data.micro-batch 4 --out run

The same command resumes a run that ended or was killed, with any number of ranks and in any mode. Exit code
0: done, or stopped with a checkpoint; 1: failed; 2: a setting is invalid; 130: interrupted before training.
"""

import gc
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # of a clone that is not installed
    from sa1b.console import before_training

    before_training()

import torch
from torch import Tensor

from sa1b.console import broken_pipe, command, counted
from sa1b.engine import config as settings
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.config import Config
from sa1b.engine.planner import dry_run
from sa1b.engine.ranks.agreement import DisagreementError
from sa1b.engine.ranks.process_group import set_timeout, start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.gradients import Buffers, clear, micro_batch, warm_up
from sa1b.engine.step.optim import lr_at, set_lr, update_ema
from sa1b.engine.step.run import Run
from sa1b.engine.watch.control import HealthError
from sa1b.engine.watch.loggers import Callback
from sa1b.engine.watch.phase import OTHER, Phases
from sa1b.engine.watch.profiler import StepProfiler
from sa1b.engine.watch.signals import exit_at_once, failed, how_it_stopped, refused, stdout_is_closed
from sa1b.engine.watch.watchdog import Watchdog, record_collectives
from sa1b.errors import CheckpointError, UsageError
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.recipes.scorer import score, scored_model
from sa1b.report import AboveBar
from sa1b.sam.kernel_proof import prove_for_run
from sa1b.storage.atomic import json_bytes, write_whole
from sa1b.storage.open import open_store
from sa1b.stream.plan import process_rank

TOUR = (
    100,
    "Training",
    "train a model",
    "sa1b train --preset tiny --data.root shards --out run\n"
    "                several GPUs: torchrun --nproc_per_node=8 -m sa1b.train ...",
)

GARBAGE_STEPS = 100  # between collections, of at most 16 ms; Python's own took 242 ms
RAISED_TOGETHER = (HealthError, CheckpointError, DisagreementError)  # all ranks raise it after the same step


def train(run: Run) -> None:
    """The training loop, until the last step or until a rank is asked to stop."""
    config, rank_info, module, feed = run.config, run.rank_info, run.module, run.feed
    optimizer, scaler, control, phases = run.optimizer, run.scaler, run.control, run.phases
    profiler = StepProfiler(config.logging.profile, config.folder, rank_info, control, run.metrics.say)
    phases.enter(OTHER, step=run.step)
    run.evaluate_if_missing()
    if not run.ended:
        with phases.part("data"):
            batch = feed.peek()
        with phases.part("warm up"):
            warm_up(module, partial(run.forward_backward, batch))
    first, buffers = run.step, Buffers(module, shared=config.parallel.broadcast_buffers)
    while not run.ended:
        profiler.before(run.step)
        phases.begin(run.step)
        buffers.keep()
        set_lr(optimizer, lr := lr_at(config.optim, config.data.global_batch, run.step))
        totals, ids = dict[str, Tensor](), list[Tensor]()
        for number, batch in phases.numbered("data", feed.step()):
            with phases.part("compute", number), micro_batch(module, last=number == feed.micro_batches):
                sums = run.forward_backward(batch, number)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
            ids.append(batch.ids)
        with phases.part("sync"):
            norm = run.train_step.finish(totals["count"])
            images, numbers = sum(map(len, ids)), run.numbers()
            figures = control.exchange(totals, norm, images, numbers, run.worst())  # waits for the device
        with phases.part("update"):
            loss = figures.means["loss"]
            if run.health.is_good(run.step + 1, loss, figures.norm, figures.own_loss, ids):
                scaler.step(optimizer)
                update_ema(optimizer, config.optim, run.step)
                buffers.share()
            else:
                buffers.restore()
                if run.health.skipped == 1:
                    skipped = f"step {run.step + 1} is skipped: loss {loss}, gradient norm {figures.norm}"
                    run.metrics.say(skipped)
            scaler.update()
            clear(module, optimizer)
            if run.step % GARBAGE_STEPS == 0:
                gc.collect()  # on all ranks in the same step, so that they do not wait for each other in turn
        profiler.after(run.step)
        if run.step == first:
            set_timeout(rank_info, config.parallel.timeout)
        run.step += 1
        run.record(figures, lr)
    profiler.close()
    run.health.end(run.step)


def run(config: Config, callbacks: Sequence[Callback] = ()) -> int:
    """Train, evaluate or print estimates on this rank, according to the settings; return the exit code."""
    return _run(config, callbacks, Phases())


def _run(config: Config, callbacks: Sequence[Callback], phases: Phases) -> int:
    code = 0
    if config.parallel.device != "cpu" and torch.cuda.is_available():
        record_collectives(config.folder)
    rank_info = start(config.parallel)
    config = config.resolved()
    if config.dry_run or config.evaluate_only:
        settings.agree(config, rank_info)
    watchdog = Watchdog(config.health.stall, config.parallel, config.folder, rank_info, phases)
    if config.dry_run:
        dry_run(config, rank_info)
    elif config.evaluate_only:
        if config.is_remote and rank_info.rank == 0:  # not to stdout, where --json prints the scores
            sys.stderr.write(f"predictions and damage log of the evaluation are in {config.folder}\n")
        with watchdog:
            score(config, partial(scored_model, config), rank_info, phases)
    else:
        prove_for_run(config, rank_info.device, rank_info.local_rank)
        with watchdog:
            code = train_and_close(begin(config, rank_info, phases, callbacks))
    stop()  # not after an error, because this rank would wait for the others
    return code


def begin(config: Config, rank_info: RankInfo, phases: Phases, callbacks: Sequence[Callback] = ()) -> Run:
    """A run in the state of its newest checkpoint. If it cannot start, the claim of its URL is released."""
    if not config.is_remote:
        return Run(config, rank_info, phases, callbacks=callbacks)
    store, limit = open_store(config.out, scratch=config.scratch), config.parallel.timeout_first
    remote = RemoteRun(store, config.folder, limit)
    try:
        return Run(config, rank_info, phases, remote, callbacks)
    except BaseException:
        remote.release()
        raise


def train_and_close(run: Run) -> int:
    """Train until the end or until a stop is requested, then finish all writes; return the exit code."""
    config, rank_info, control = run.config, run.rank_info, run.control
    if rank_info.rank == 0:
        path = config.folder / "config.json"
        control.write(path, lambda: write_whole(path, json_bytes(config.document())))
    control.install()
    gc.collect()
    gc.freeze()  # what exists now is not searched again, which makes a collection short
    gc.disable()
    begun = run.step
    try:
        train(run)
    except BaseException as error:
        # Closing waits for the checkpoint in flight, which all ranks write together.
        if rank_info.world_size == 1 or isinstance(error, RAISED_TOGETHER):
            run.close()
        raise
    finally:
        gc.enable()
        gc.unfreeze()
    run.close()
    control.check()
    if rank_info.rank == 0 and run.finished:
        if marker := os.environ.get("SA1B_FINISHED"):  # a job script does not queue this run again
            write_whole(Path(marker), b"")
        if run.step > begun:
            print("\n".join(how_it_ended(run)), flush=True)
    elif control.stopping and rank_info.rank == 0:
        print(how_it_stopped(run.step, run.checkpoint, config.deadline, control.stop), flush=True)
    if control.restarts:
        control.wait_for_agent()
    return int(control.restarts)


def how_it_ended(run: Run) -> list[str]:
    """The last lines of a finished run: its checkpoint, its score or loss, and a command that uses it."""
    config, out, name = run.config, run.config.out.rstrip("/"), PurePath(run.config.out).name
    lines = [f"checkpoint: {run.checkpoint}", f"result: {run.metrics.result}"]
    lines += run.best.lines(out)
    if seen := run.feed.seen():
        parts = [
            f"{source} {counted(images, 'image')} ({epochs:.3g} epochs)"
            for source, (images, epochs) in seen.items()
        ]
        lines.append(f"seen: {', '.join(parts)}")
    if isinstance(config, SamConfig):
        annotated = f"{name if config.is_remote else out}-annotated"
        words = [config.roots()[0], "--weights", out, "--out", annotated]
        words += [] if config.data.endpoint is None else ["--endpoint", config.data.endpoint]
        lines.append(f"next: {command('annotate')} {shlex.join(words)}")
    elif config.evaluation.view is not None:
        lines.append(f"next: {settings.program()} {shlex.join(sys.argv[1:])} --evaluate-only")
    return lines


def main(
    presets: Mapping[str, Config] = PRESETS,
    *,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run the training command and return its exit code.

    Args:
        presets: name for `--preset` -> settings; settings of another model train that model.
        arguments: command-line arguments; by default those of this process.
        prog: name of the command in the help; by default the command that started this process.
        callbacks: objects with methods of `sa1b.engine.watch.loggers.Callback`, called on rank 0.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[AboveBar()])
    try:
        rank, world_size = process_rank()
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    config: Config | None = None
    phases = Phases()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        if not words and presets is PRESETS and Path("demo/shards/dataset.json").exists():
            words = ["--preset", "tiny", "--data.root", "demo/shards"]
            sys.stderr.write("" if rank else f"{shlex.join(words)}: without arguments, after `make demo`\n")
        # The other presets do not fit a CPU: hours for a step, a terabyte of activations.
        on_cpu = "tiny" if presets is PRESETS and not torch.cuda.is_available() else None
        config = settings.parse(words, __doc__, presets, prog, on_cpu=on_cpu)
        return _run(config, callbacks, phases)
    except SystemExit as error:  # the text of --help
        return int(error.code or 0)
    except UsageError as error:
        return refused(error, rank, on_all=config is None)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            return broken_pipe()
        images = 1 if config is None or config.evaluate_only else config.micro_batches(world_size)[0]
        return failed(error, rank, world_size, images, starting=not phases.steps)


if __name__ == "__main__":
    exit_at_once(main())
