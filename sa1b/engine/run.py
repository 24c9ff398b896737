"""The parts of a run on one rank: data, model, optimizer, checkpoints, metrics."""

import time
import zlib
from dataclasses import replace
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from sa1b.console import command, counted
from sa1b.engine import deadline, estimate, metrics, resume, step_division
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.compression import powersgd_of
from sa1b.engine.config import Config, build, initial_weights, with_steps
from sa1b.engine.control import Control, StepFigures
from sa1b.engine.data_wait import BUSY, LoaderSettings
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.feed import Feed
from sa1b.engine.gradients import (
    autocast,
    grad_scaler,
    loss_divisor,
    seed_generators,
    unused_named,
)
from sa1b.engine.health import Health
from sa1b.engine.model import declared
from sa1b.engine.optim import averaged, freeze, lr_line, make_optimizer
from sa1b.engine.parallel import check_ranks, rank_shares, wrap
from sa1b.engine.phase import Phases
from sa1b.engine.pipeline import Pipeline, divide
from sa1b.engine.rank_time import RankTime
from sa1b.engine.ranks import DisagreementError, RankInfo, agree, check_shared_folder, hosts
from sa1b.engine.remote_run import RemoteRun
from sa1b.engine.utilisation import Sampler
from sa1b.engine.window import Window
from sa1b.errors import UsageError
from sa1b.stream.batch import Batch
from sa1b.stream.resume import ResumeError


class Run:
    """A run on one rank, in the state of its newest checkpoint; all ranks create it together.

    Attributes:
        step: Number of completed steps.
        divisor: see `sa1b.engine.gradients.loss_divisor`.

    Args:
        remote: the run in a bucket if --out is a URL; `close` closes it.
    """

    def __init__(
        self, config: Config, rank_info: RankInfo, phases: Phases, remote: RemoteRun | None = None
    ) -> None:
        self.config, self.rank_info, self.phases = config, rank_info, phases
        self.step = 0
        self.control = Control(rank_info, deadline.of(config.deadline))
        if remote is None:
            check_shared_folder(config.folder, rank_info)
        elif rank_info.rank == 0:
            print(f"files of the run are in {config.folder} until they are uploaded", flush=True)
        data, size = config.data, config.image_size
        shares = rank_shares(config.parallel, rank_info.world_size)
        divided = config.parallel.divides_steps
        self.feed = Feed(data, size, rank_info, config.folder, config.seed, shares=shares, divided=divided)
        config = self.config = with_steps(config, len(self.feed.stream.view))
        self.held_out = held_out_feed(
            config.evaluation, data, size, rank_info, config.folder, self.feed.stream
        )
        phases.reading = self.reading
        module = build(config, initial_weights(config))
        freeze(module, config.optim)
        self.module: nn.Module = wrap(module, config.parallel, rank_info)
        self.model = declared(self.module)
        self.optimizer = make_optimizer(
            self.module, config.optim, data.global_batch, sharded=config.parallel.mode == "zero1"
        )
        self.times = RankTime(phases, self.module, self.optimizer, rank_info)
        self.sampler = Sampler(rank_info.device)
        self.scaler = grad_scaler(config.parallel.precision, rank_info.device)
        self.divisor = loss_divisor(data.global_batch * max(data.masks, 1))
        self.checkpoints = Checkpoints(remote or config.folder, config.checkpoint)
        with phases.part("resume"):
            last = self._resume()
        self.health = Health(config.health, config.folder, rank_info, self.control)
        if rank_info.rank == 0 and not self.ended:
            print(lr_line(config.optim, data.global_batch), flush=True)  # before the progress bar
        self.metrics = metrics.Metrics(
            config.logging,
            config.folder,
            rank_info,
            self.control,
            self.step,
            config.optim.steps,
            about=metrics.about(rank_info, config.parallel.mode, config.parallel.precision),
            last=last,
            shown=self.model.shown,
        )
        machines, self.window = hosts(rank_info), None
        if rank_info.rank == 0:
            self.window = Window(
                machines,
                config.logging.window,
                self.metrics,
                LoaderSettings.of(self.feed),
                separable=self.times.separable,
                shares=shares,
                divided=divided,
            )

    def _resume(self) -> dict[str, Any] | None:
        """Resume from the newest good checkpoint, if there is one; return the metrics of its step."""
        if self.config.resume == "no" and self.checkpoints.steps():
            raise UsageError(
                f"--resume no: --out {self.config.out} has checkpoints; pass another --out, or move it away"
            )
        out, own = self.config.out, self.config.document()
        try:
            state = self.checkpoints.resume(self.module, self.optimizer)
        except MismatchError as error:
            resume.check_model(error.state.get("config", {}), own, out)
            raise
        if state is not None:
            saved = state.get("config", {})
            resume.check_trained(saved, own, out)
            self.step = int(state["step"])
            try:
                with catch_warnings(record=True) as noted:
                    simplefilter("always")
                    self.feed.load_state_dict(state["stream"])
            except ResumeError:
                resume.check_sequence(saved, own, out)
                raise
            if state["scaler"]:  # empty unless the checkpoint is of fp16; the scale then starts anew
                self.scaler.load_state_dict(state["scaler"])
            self._resume_compression(state.get("compression"))
            if self.rank_info.rank == 0:
                self._print_resume(saved, state["stream"]["position"])
                for one in noted:  # on all ranks, as warnings, they would be printed many times
                    print(f"warning: {one.message}")
        agree(self.module, self.rank_info)
        return None if state is None else state.get("metrics")

    def _resume_compression(self, saved: dict[str, Any] | None) -> None:
        powersgd = powersgd_of(self.module)
        if powersgd is None or saved is None:
            return
        reason = powersgd.load_state_dict(saved)
        if reason and self.rank_info.rank == 0:
            print(f"the error feedback of PowerSGD is dropped: {reason}")

    def _print_resume(self, saved: resume.Settings, position: int) -> None:
        steps = self.config.optim.steps
        if self.step >= steps:
            more = "" if self.step == steps else f" and is at step {self.step:,}"
            has = f"{self.config.out} has all {counted(steps, 'step')}{more}"
            print(f"{has}: raise --optim.steps to continue training")
            return
        print(f"resuming after step {self.step:,} at position {position:,}")
        for line in resume.changes(saved, self.config.document(), self.step):
            print(line)

    def save(self, line: dict[str, Any] | None) -> None:
        """Save a checkpoint of the current state.

        Args:
            line: the metrics of the last step that are known.
        """
        powersgd = powersgd_of(self.module)
        state = {
            "step": self.step,
            "metrics": line,
            "stream": self.feed.state_dict(),
            "scaler": self.scaler.state_dict(),
            "compression": None if powersgd is None else powersgd.state_dict(),
            "config": self.config.document(),
        }
        self.checkpoints.save(self.step, self.module, self.optimizer, state)

    def reading(self) -> str | None:
        """The sample that this rank waits for, with its shard and offset; None if it waits for none."""
        held_out = None if self.held_out is None else self.held_out.reading()
        return held_out or self.feed.reading()

    def evaluate(self) -> None:
        """Evaluate on the held-out images and record the scores, unless a stop is requested meanwhile."""
        if self.held_out is not None:
            config, began = self.config, time.perf_counter()
            with averaged(self.module, self.optimizer), self.phases.part("evaluation"):
                scores = evaluate(
                    self.module,
                    self.held_out,
                    config.evaluation,
                    config.parallel,
                    self.rank_info,
                    config.folder,
                    self.control,
                    self.phases,
                )
            if scores is not None:
                self.metrics.evaluation(self.step, scores, time.perf_counter() - began)

    @property
    def ended(self) -> bool:
        """Whether the run ends after this step; the same on all ranks."""
        return self.control.stopping or self.step >= self.config.optim.steps

    @property
    def finished(self) -> bool:
        """Whether another start would do nothing: all steps are done, and the evaluation after them."""
        due = bool(self.config.evaluation.every) and self.metrics.lacks_evaluation(self.step)
        return self.step >= self.config.optim.steps and not due

    def forward_backward(self, batch: Batch, number: int = 0) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch's loss; return the model's sums, without gradient.

        The loss is divided by `divisor`. The caller must divide its count by `divisor` too.

        Args:
            number: number of the micro-batch in its step.
        """
        seed_generators(self.config.seed, self.step, self.rank_info.rank, number)
        inputs = self.model.inputs(batch, self.config.seed)
        if isinstance(self.module, Pipeline):
            return self.module.forward_backward(inputs, self.divisor)
        with unused_named(self.module), autocast(self.config.parallel.precision, self.rank_info.device):
            sums: dict[str, Tensor] = self.module(*inputs)
        self.times.backward(self.scaler.scale(sums["loss"] / self.divisor))
        return {name: sums[name].detach() for name in (*self.model.figures, "count")}

    @property
    def counts(self) -> bool:
        """Whether this rank counts the images of its batches: in a pipeline, all ranks read the same ones."""
        return not isinstance(self.module, Pipeline) or self.module.counts

    def numbers(self, ids: list[Tensor]) -> dict[str, float]:
        """Numbers of this rank that the ranks exchange after each step.

        `data_wait`: seconds of this step in which it waited for data; times of the last complete step, see
        `RankTime.seconds`; `peak_memory`: bytes; the last sample of its device, see `Sampler`; busy seconds
        of the loader's stages so far; in a pipeline `images`: see `check_images`.

        Args:
            ids: ids of this rank's images, int64 [B] for each micro-batch.
        """
        busy = self.feed.stream.stats.busy_seconds()
        return {
            "data_wait": self.phases.seconds["data"],
            **self.times.seconds(),
            "peak_memory": metrics.peak_memory(self.rank_info.device),
            **self.sampler.latest(),
            **dict(zip(BUSY, busy.values(), strict=True)),
            **({"images": _digest(ids)} if isinstance(self.module, Pipeline) else {}),
        }

    def check_images(self, figures: StepFigures) -> None:
        """Check that all stages of a pipeline have read the same images in this step.

        A sample that is damaged for one rank only, which then reads a substitute, would otherwise pair the
        features of one image with the masks of another.

        Raises:
            DisagreementError: raised on all ranks.
        """
        digests = figures.ranks.get("images", [])
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise DisagreementError(
                f"step {self.step + 1}: {counted(len(others), 'stage')} of the pipeline (rank "
                f"{', '.join(map(str, others[:8]))}) read other images than rank 0, because a sample is "
                f"damaged for some ranks only; {self.config.folder / 'damaged.jsonl'} lists it. Repair that "
                f"copy of the dataset (`{command('verify')}`), and start the same command again"
            )

    def record(self, figures: StepFigures, lr: float) -> None:
        """Record the step that has just ended; save a checkpoint and evaluate if they are due."""
        self.checkpoints.poll()
        took = self.phases.total()
        precision = self.config.parallel.precision
        ideal = estimate.peak_seconds(self.model, figures.images, figures.count, precision, self.rank_info)
        saves = (self.ended or self.step % self.config.checkpoint.every == 0) and not self.health.lost
        if saves:
            # The process may be killed after the checkpoint and before the step's line is written.
            line = metrics.figures_of(figures, self.phases, lr, ideal)
            with self.phases.part("checkpoint"):
                self.save(metrics.json_figures({"step": self.step, **line}))
        self.control.took(took, self.checkpoints.seconds * (2 if self.checkpoints.in_flight else 1))
        self.metrics.step(self.step, metrics.figures_of(figures, self.phases, lr, ideal))
        asked = self.control.take_table_request()
        if self.window is not None:
            self.window.add(self.step, figures.ranks, asked=asked)
        self._evaluate_if_due(saved=saves or bool(self.health.lost))

    def evaluate_if_missing(self) -> None:
        """Evaluate before the first step, or, after a resume, repeat an evaluation that was interrupted."""
        if self.control.any_rank(self.metrics.lacks_evaluation(self.step)):
            self._evaluate_if_due(saved=self.step > 0)

    def _evaluate_if_due(self, saved: bool) -> None:
        every, ends = self.config.evaluation.every, self.step == self.config.optim.steps
        if not every or self.control.stopping or not (ends or self.step % every == 0):
            return
        self.evaluate()
        if self.control.stopping and not saved:
            with self.phases.part("checkpoint"):
                self.save(None)

    def close(self) -> None:
        """Stop threads and close files; wait for the checkpoint that is being written."""
        self.phases.enter("closing")
        self.sampler.close()
        try:
            self.feed.close()
            self.metrics.close()
        finally:
            self.checkpoints.close()


def fitted(config: Config, world_size: int) -> Config:
    """The settings for this number of ranks; every rank refuses here what does not fit, before any one waits.

    A pipeline without --data.micro-batch gets micro-batches that fit.

    Raises:
        UsageError: the message names the flag.
    """
    check_ranks(config.parallel, world_size)
    config = replace(config, data=step_division.fitting(config.data, config.parallel, world_size))
    if not config.evaluate_only:
        config.micro_batches(world_size)
    if config.parallel.mode == "pipeline":
        with torch.device("meta"):
            module = build(config, None)
        freeze(module, config.optim)
        divide(module, world_size)
    return config


def _digest(ids: list[Tensor]) -> float:
    """A number that represents the images of a step and their order; exact as float64."""
    return float(zlib.crc32(torch.cat(ids).cpu().numpy().tobytes()))
