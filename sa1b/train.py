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
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # of a clone that is not installed
    from sa1b.console import before_training

    before_training()

import torch
from torch import Tensor

from sa1b.console import broken_pipe, command, counted
from sa1b.engine import config as settings
from sa1b.engine.checkpoint import resume
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.config import Config
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.mix_file import roots_of
from sa1b.engine.model import stored
from sa1b.engine.planner import dry_run
from sa1b.engine.ranks.agreement import DisagreementError, check_shared_folder
from sa1b.engine.ranks.process_group import set_timeout, start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import Buffers, TrainStep, clear, micro_batch, warm_up
from sa1b.engine.step.optim import averaged, lr_at, lr_line, set_lr, update_ema
from sa1b.engine.watch import metrics, signals
from sa1b.engine.watch.control import Control, Health, HealthError, StepFigures
from sa1b.engine.watch.hardware import Sampler, peak_seconds
from sa1b.engine.watch.loggers import Callback
from sa1b.engine.watch.metrics import BestScore, Metrics, Window
from sa1b.engine.watch.profiler import step_profiler
from sa1b.engine.watch.signals import exit_at_once
from sa1b.engine.watch.watchdog import EVALUATION, OTHER, Phases, Watchdog, record_collectives
from sa1b.engine.weights import state_digest
from sa1b.errors import CheckpointError, UsageError
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.recipes.scorer import score, scored_model
from sa1b.report import AboveBar
from sa1b.sam.kernel_proof import prove_for_run
from sa1b.storage.atomic import json_bytes, write_whole
from sa1b.storage.open import open_store
from sa1b.stream.batch import Batch
from sa1b.stream.plan import process_rank
from sa1b.stream.stats import BUSY, LoaderSettings
from sa1b.version import code_digest

TOUR = (
    100,
    "Training",
    "train a model",
    "sa1b train --preset tiny --data.root shards --out run\n"
    "                several GPUs: torchrun --nproc_per_node=8 -m sa1b.train ...",
)

GARBAGE_STEPS = 100  # between collections, of at most 16 ms; Python's own took 242 ms
RAISED_TOGETHER = (HealthError, CheckpointError, DisagreementError)  # all ranks raise it after the same step


@dataclass
class Run:
    """What a run consists of on this rank. `begin` makes it, in the state of its newest checkpoint."""

    config: Config
    rank_info: RankInfo
    phases: Phases
    control: Control
    feed: Feed
    held_out: Feed | None
    training: TrainStep  # model and optimizer
    checkpoints: Checkpoints
    health: Health
    metrics: Metrics
    best: BestScore
    sampler: Sampler
    window: Window
    step: int  # completed steps

    @property
    def finished(self) -> bool:
        return self.step >= self.config.optim.steps or self.best.exhausted

    @property
    def ended(self) -> bool:
        return bool(self.control.stop) or self.finished


def begin(
    config: Config,
    rank_info: RankInfo,
    phases: Phases,
    callbacks: Sequence[Callback] = (),
    remote: RemoteRun | None = None,
) -> Run:
    """All that a run needs; collective. `remote`: the run in a bucket if --out is a URL."""
    control = Control(rank_info, signals.deadline_of(config.deadline), limit=config.data.deadline)

    # Data. The order of samples is a formula of the seed, so the state of a feed is a position.
    feed = Feed(config.data, config.image_size, rank_info, config.folder, config.seed)
    config = settings.with_steps(config, feed.images)
    code = code_digest()
    settings.agree(config, rank_info, code=code, data=str(feed.receipt()))
    held_out = held_out_feed(config, rank_info, feed.stream)
    feeds = [one for one in (held_out, feed) if one is not None]
    phases.reading = lambda: next((what for one in feeds if (what := one.loader.reading())), None)

    # Model, with the weights of the seed or of --init. Its optimizer is made last: FSDP replaces parameters.
    weights = config.initial_weights
    model = settings.build(config, weights)
    digest = state_digest(stored(model)) if weights is not None and rank_info.rank == 0 else None
    training = TrainStep(model, config, rank_info, [*feed.sources])

    # State.
    if remote is None:
        check_shared_folder(config.folder, rank_info, config.data.deadline)
    checkpoints = Checkpoints(remote or config.folder, config.checkpoint, config.parallel.timeout_first)
    phases.enter("resume")
    step, last, said = resume.restore(config, checkpoints, training, feed)
    position, batch = feed.state_dict()["position"], config.data.global_batch
    feed.stream.damage_log.replay = lambda at: command(
        "replay", config.out, "--step", step + (at - position) // batch + 1
    )

    # Figures.
    about = metrics.about(rank_info, config.parallel, code)
    about |= {} if digest is None else {"weights": digest}
    about |= {"config": config.document(), "data": feed.receipt()}
    written = Metrics(
        config.logging, config.folder, rank_info, control, done=step, steps=config.optim.steps, about=about,
        last=last, shown=training.model.shown, callbacks=callbacks,
    )  # fmt: skip
    best = BestScore(config.evaluation, rank_info.gather(written.evaluations)[0])
    checkpoints.best = best.step
    machines = rank_info.gather(socket.gethostname())
    window = Window(machines, config.logging.window, written, LoaderSettings.of(feed.loader))
    health = Health(config.health, config.folder, rank_info, control)
    sampler = Sampler(rank_info.device, training.module)
    run = Run(
        config, rank_info, phases, control, feed, held_out, training, checkpoints, health, written, best,
        sampler, window, step,
    )  # fmt: skip
    if best.exhausted and step < config.optim.steps:
        said = [f"{config.out} ended after step {step:,}: {best.why}; raise it to train on"]
    elif not run.ended:
        said += [lr_line(config.optim, batch)]
        said += [resume.start(rank_info, machines, config.parallel, config.step_images(len(machines)))]
    if rank_info.rank == 0 and said:
        print("\n".join(said), flush=True)
    written.show(step, 0 if run.ended else config.optim.steps)
    return run


def train(run: Run) -> None:
    """Steps until the last one or a stop; evaluations and checkpoints in between."""
    config, rank_info, feed, training = run.config, run.rank_info, run.feed, run.training
    module, optimizer, scaler = training.module, training.optimizer, training.scaler
    control, phases = run.control, run.phases
    phases.enter(OTHER, step=run.step)
    control.poll()
    if run.step not in run.best.evaluations:  # also one that a stop interrupted
        record_scores(run, evaluate_if_due(run))
    batches: Iterator[Batch] = iter(())  # of the first step
    if not run.ended:
        phases.enter("data")
        batches = feed.step()
        batch = next(batches)
        phases.enter("warm up")
        warm_up(module, partial(training.forward_backward, batch, run.step))
        batches = chain([batch], batches)
    first, buffers = run.step, Buffers(module, shared=config.parallel.broadcast_buffers)
    steps, say = config.logging.profile, run.metrics.say
    profiler = step_profiler(steps, first, config.folder, rank_info, control, say)
    while not run.ended:
        phases.begin(run.step)
        buffers.keep()
        set_lr(optimizer, lr := lr_at(config.optim, config.data.global_batch, run.step))
        totals, ids = dict[str, Tensor](), list[Tensor]()
        phases.enter("data", 1)
        for number, batch in enumerate(batches if run.step == first else feed.step(), 1):
            phases.enter("compute", number)
            with micro_batch(module, last=number == feed.micro_batches):
                sums = training.forward_backward(batch, run.step, number)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
            ids.append(batch.ids)
            phases.enter("data", number + 1)
        phases.enter("sync")
        norm, busy = training.finish(totals["count"]), feed.stream.stats.busy_seconds().values()
        own = {"data_wait": phases.seconds["data"], **run.sampler.latest()}
        own |= zip(BUSY, busy, strict=True)
        figures = control.exchange(totals, norm, sum(map(len, ids)), own, training.worst())
        phases.enter("update")
        loss = figures.means["loss"]
        if run.health.is_good(run.step + 1, loss, figures.norm, figures.own_loss, ids):
            scaler.step(optimizer)
            update_ema(optimizer, config.optim, run.step)
            buffers.share()
        else:
            buffers.restore()
            if run.health.skipped == 1:
                say(f"step {run.step + 1} is skipped: loss {loss}, gradient norm {figures.norm}")
        scaler.update()
        clear(module, optimizer)
        if run.step % GARBAGE_STEPS == 0:
            gc.collect()  # on all ranks in the same step, so that they do not wait for each other in turn
        phases.enter(OTHER)
        if profiler is not None:
            profiler.step()
        if run.step == first:
            set_timeout(rank_info, config.parallel.timeout)
        run.step += 1
        end_step(run, figures, lr)
    if profiler is not None:
        profiler.stop()
    run.health.end(run.step)


def end_step(run: Run, figures: StepFigures, lr: float) -> None:
    """Evaluate, save a checkpoint and record the step that has just ended, each if it is due."""
    config, step, phases, took = run.config, run.step, run.phases, run.phases.total()
    model, precision = run.training.model, config.parallel.precision
    ideal = peak_seconds(model, figures.images, figures.count, precision, run.rank_info)
    scores = evaluate_if_due(run)
    due = run.ended or step % config.checkpoint.every == 0 or step == run.best.step
    if saves := due and not run.health.lost:
        # The process may be killed after the checkpoint and before the step's line is written.
        line = metrics.figures_of(figures, phases, lr, ideal)
        save(run, metrics.json_figures({"step": step, **line}))
    run.control.took(took, run.checkpoints.seconds * (2 if run.checkpoints.in_flight else 1))
    epochs = {f"epochs/{name}": seen for name, (_, seen) in run.feed.seen().items()}
    line = metrics.figures_of(figures, phases, lr, ideal) | epochs
    run.metrics.step(step, line, always=saves or run.ended)
    run.window.add(step, figures.ranks, took)
    record_scores(run, scores)


def record_scores(run: Run, scores: dict[str, float] | None) -> None:
    if scores is not None:
        how = run.config.evaluation.how(scores)
        run.metrics.evaluation(run.step, scores, run.phases.seconds[EVALUATION], how)


def evaluate_if_due(run: Run) -> dict[str, float] | None:
    """The scores of the held-out images; None: not due, or a stop was requested meanwhile."""
    settings, training, step = run.config.evaluation, run.training, run.step
    first = settings.best is not None and step == 0  # which refuses an unknown score early
    due = first or step == run.config.optim.steps or (settings.every > 0 and step % settings.every == 0)
    held_out, rank_info = run.held_out, run.rank_info
    if not due or held_out is None or run.control.stop:
        return None
    run.phases.enter(EVALUATION)
    module = training.module
    with averaged(module, training.optimizer):
        scores = evaluate(module, held_out, run.config, rank_info, control=run.control, phases=run.phases)
    run.phases.enter(OTHER)
    if scores is not None:
        run.best.add(step, scores)
        run.checkpoints.best = run.best.step
    return scores


def save(run: Run, line: dict[str, Any]) -> None:
    state = {
        "step": run.step,
        "metrics": line,
        "stream": run.feed.state_dict(),
        "scaler": run.training.scaler.state_dict(),
        "config": run.config.document(),
    }
    run.phases.enter("checkpoint")
    run.checkpoints.save(run.step, run.training.module, run.training.optimizer, state)
    run.phases.enter(OTHER)


def close(run: Run) -> None:
    """Stop threads and close files; wait for the checkpoint that is being written."""
    run.phases.enter("closing")
    try:
        run.feed.close()
        run.metrics.close()
    finally:
        run.checkpoints.close()


def run(config: Config, callbacks: Sequence[Callback] = (), phases: Phases | None = None) -> int:
    code, phases = 0, phases or Phases()
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
        remote = None
        with watchdog, ExitStack() as claim:
            if config.is_remote:
                store, limit = open_store(config.out, scratch=config.scratch), config.parallel.timeout_first
                remote = RemoteRun(store, config.folder, limit)
                claim.callback(remote.release)  # if the run cannot start
            begun = begin(config, rank_info, phases, callbacks, remote)
            claim.pop_all()
            code = train_and_close(begun)
    stop()  # not after an error, because this rank would wait for the others
    return code


def train_and_close(run: Run) -> int:
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
            close(run)
        raise
    finally:
        gc.enable()
        gc.unfreeze()
    close(run)
    control.check()
    is_due = config.evaluation.view is not None and run.step not in run.best.evaluations
    if rank_info.rank == 0 and run.finished and not is_due:
        if marker := os.environ.get("SA1B_FINISHED"):  # a job script does not queue this run again
            write_whole(Path(marker), b"")
        if run.step > begun:
            print("\n".join(how_it_ended(run)), flush=True)
    elif control.stop and rank_info.rank == 0:
        end = signals.how_it_stopped(run.step, checkpoint_of(run), config.deadline, control.stop)
        print(end, flush=True)
    if control.restarts:
        control.wait_for_agent()
    return int(control.restarts)


def checkpoint_of(run: Run) -> str:
    return f"{run.config.out.rstrip('/')}/checkpoints/{folder_name(run.step)}"


def how_it_ended(run: Run) -> list[str]:
    """The last lines of a finished run: its checkpoint, its score or loss, and a command that uses it."""
    config, out = run.config, run.config.out.rstrip("/")
    lines = [f"checkpoint: {checkpoint_of(run)}", f"result: {run.metrics.result}"]
    lines += run.best.lines(out)
    seen = run.feed.seen().items()
    if parts := [f"{name} {counted(one, 'image')} ({epochs:.3g} epochs)" for name, (one, epochs) in seen]:
        lines.append(f"seen: {', '.join(parts)}")
    if isinstance(config, SamConfig):
        annotated = f"{PurePath(out).name if config.is_remote else out}-annotated"
        words = [roots_of(config.data)[0], "--weights", out, "--out", annotated]
        words += [] if config.data.endpoint is None else ["--endpoint", config.data.endpoint]
        lines.append(f"next: {command('annotate')} {shlex.join(words)}")
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
    config: Config | None = None
    phases, rank, world_size = Phases(), 0, 1
    try:
        rank, world_size = process_rank()
        words = sys.argv[1:] if arguments is None else arguments
        if not words and presets is PRESETS and Path("demo/shards/dataset.json").exists():
            words = ["--preset", "tiny", "--data.root", "demo/shards"]
            sys.stderr.write("" if rank else f"{shlex.join(words)}: without arguments, after `make demo`\n")
        # The other presets do not fit a CPU: hours for a step, a terabyte of activations.
        on_cpu = "tiny" if presets is PRESETS and not torch.cuda.is_available() else None
        config = settings.parse(words, __doc__, presets, prog, on_cpu=on_cpu)
        return run(config, callbacks, phases)
    except SystemExit as error:  # the text of --help
        return int(error.code or 0)
    except UsageError as error:
        return signals.refused(error, rank, phases, on_all=config is None)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and signals.stdout_is_closed():
            return broken_pipe()
        images = 1 if config is None or config.evaluate_only else config.micro_batches(world_size)[0]
        return signals.failed(error, rank, world_size, images, phases)


if __name__ == "__main__":
    exit_at_once(main())
