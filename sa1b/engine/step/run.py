"""The parts of a run on one rank: data, model, optimizer, checkpoints, metrics."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, simplefilter

from torch import Tensor, nn

from sa1b.console import command
from sa1b.engine.checkpoint import resume
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import folder_name
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.config import Config, agree, build, initial_weights, with_steps
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.model import by_source, declared, stored, worst_image
from sa1b.engine.precision import grad_scaler
from sa1b.engine.ranks.agreement import agree_on_weights, check_shared_folder, hosts
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import finish, forward_backward, loss_divisor, seed_generators
from sa1b.engine.step.optim import averaged, freeze, lr_line, make_optimizer
from sa1b.engine.watch import metrics
from sa1b.engine.watch.control import Control, Health, StepFigures
from sa1b.engine.watch.hardware import Sampler, peak_seconds
from sa1b.engine.watch.loggers import Callback
from sa1b.engine.watch.metrics import BestScore
from sa1b.engine.watch.phase import ForwardTime, Phases
from sa1b.engine.watch.signals import deadline_of
from sa1b.engine.watch.window import Window
from sa1b.engine.weights import state_digest
from sa1b.errors import UsageError
from sa1b.stream.batch import Batch
from sa1b.stream.bottleneck import BUSY, LoaderSettings
from sa1b.stream.mix import Mix
from sa1b.stream.plan import ResumeError
from sa1b.version import code_digest


class TrainStep:
    """A new model, which is frozen and distributed here, with its optimizer; all ranks create it together."""

    def __init__(self, module: nn.Module, config: Config, rank_info: RankInfo) -> None:
        self.config, self.rank_info = config, rank_info
        freeze(module, config.optim)
        self.module = wrap(module, config.parallel, rank_info)
        self.model = declared(self.module)
        batch = config.data.global_batch
        self.optimizer = make_optimizer(self.module, config.optim, batch)
        self.scaler = grad_scaler(config.parallel.precision, rank_info.device)
        self.divisor = loss_divisor(batch * max(config.data.masks, 1))

    def forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch; see the function of this name."""
        inputs, precision = self.model.inputs(batch, self.config.seed), self.config.parallel.precision
        return forward_backward(self.module, inputs, self.divisor, precision, self.rank_info, self.scaler)

    def finish(self, count: Tensor) -> Tensor:
        """Turn the sums into the gradient of the global batch; `count`: sum over this rank's
        micro-batches.
        """
        module, optimizer, clip = self.module, self.optimizer, self.config.optim.grad_clip
        return finish(module, optimizer, self.scaler, count / self.divisor, self.rank_info, grad_clip=clip)


class Run:
    """A run on one rank, in the state of its newest checkpoint; all ranks create it together. `step`:
    completed steps. `remote`: the run in a bucket if --out is a URL; `close` closes it.
    """

    def __init__(
        self,
        config: Config,
        rank_info: RankInfo,
        phases: Phases,
        remote: RemoteRun | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.rank_info, self.phases = config, rank_info, phases
        self.step, self.best = 0, BestScore(config.evaluation)
        self._images: list[tuple[Tensor, Tensor, Tensor]] = []  # of this step, see `worst_image`
        self.control = Control(rank_info, *deadline_of(config.deadline), limit=config.data.deadline)
        data = config.data
        self.feed = Feed(data, config.image_size, rank_info, config.folder, config.seed)
        config = with_steps(config, self.feed.images)
        config = self.config = agree(config, rank_info, code=code_digest(), data=str(self.feed.receipt()))
        self.held_out = held_out_feed(config, rank_info, self.feed.stream)
        phases.reading = self.reading
        weights = initial_weights(config)
        module = build(config, weights)
        digest = state_digest(stored(module)) if weights is not None and rank_info.rank == 0 else None
        self.train_step = step = TrainStep(module, config, rank_info)
        if remote is None:
            check_shared_folder(config.folder, rank_info, config.data.deadline)
        elif rank_info.rank == 0:
            print(f"files of the run are in {config.folder} until they are uploaded", flush=True)
        self.module, self.model = step.module, step.model
        self.optimizer, self.scaler = step.optimizer, step.scaler
        self.forward_time = ForwardTime(self.module, rank_info.device)
        self.sampler = Sampler(rank_info.device)
        self.checkpoints = Checkpoints(
            remote or config.folder, config.checkpoint, config.parallel.timeout_first
        )
        with phases.part("resume"):
            last, said = self._resume()
        self.feed.stream.damage_log.replay = partial(
            _replay, config.out, self.step, self.feed.state_dict()["position"], data.global_batch
        )
        self.health = Health(config.health, config.folder, rank_info, self.control)
        self.metrics = metrics.Metrics(
            config.logging,
            config.folder,
            rank_info,
            self.control,
            done=self.step,
            steps=config.optim.steps,
            about=metrics.about(rank_info, config.parallel.mode, config.parallel.precision)
            | ({} if digest is None else {"weights": digest})
            | {"config": config.document(), "data": self.feed.receipt()},
            last=last,
            shown=self.model.shown,
            callbacks=callbacks,
            settings=config.document(),
        )
        self.best.share(self.metrics.evaluations, rank_info)
        self.checkpoints.best = self.best.step
        self.window: Window | None = None
        machines = hosts(rank_info)
        if self.best.exhausted and self.step < config.optim.steps:
            said = [f"{config.out} ended after step {self.step:,}: {self.best.why}; raise it to train on"]
        elif not self.ended:
            said += [lr_line(config.optim, data.global_batch)]
            said += [resume.start(rank_info, machines, config.parallel, config.step_images(len(machines)))]
        if rank_info.rank == 0 and said:
            print("\n".join(said), flush=True)
        self.metrics.show(self.step, 0 if self.ended else config.optim.steps)
        if rank_info.rank == 0:
            loader = LoaderSettings.of(self.feed.loader)
            self.window = Window(machines, config.logging.window, self.metrics, loader)

    def _resume(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Resume from the newest good checkpoint, if any; return its metrics and what to print."""
        if self.config.resume == "no" and self.checkpoints.steps():
            raise UsageError(
                f"--resume no: --out {self.config.out} has checkpoints; pass another --out, or move it away"
            )
        out, settings, said = self.config.out, self.config.document(), list[str]()
        try:
            state = self.checkpoints.resume(self.module, self.optimizer)
        except MismatchError as error:
            resume.check_model(error.state.get("config", {}), settings, out)
            raise
        if state is not None:
            saved = state.get("config", {})
            resume.check_trained(saved, settings, out)
            self.step = int(state["step"])
            try:
                with catch_warnings(record=True) as noted:
                    simplefilter("always")
                    batch = saved.get("data", settings["data"])["global_batch"]
                    self.feed.load_state_dict({"history": [[0, 0, batch]]} | state["stream"])
            except ResumeError as error:
                resume.refuse_sequence(saved, settings, out, error)
            if state["scaler"]:  # empty unless the checkpoint is of fp16; the scale then starts anew
                self.scaler.load_state_dict(state["scaler"])
            steps, position = self.config.optim.steps, state["stream"]["position"]
            said += resume.lines(saved, settings, out, step=self.step, steps=steps, position=position)
            # On all ranks, as warnings, they would be printed many times.
            said += [f"warning: {warning.message}" for warning in noted]
        agree_on_weights(self.module, self.rank_info)
        return None if state is None else state.get("metrics"), said

    def save(self, line: dict[str, Any] | None) -> None:
        """Save a checkpoint of the current state; `line`: the metrics of the last step that are known."""
        state = {
            "step": self.step,
            "metrics": line,
            "stream": self.feed.state_dict(),
            "scaler": self.scaler.state_dict(),
            "config": self.config.document(),
        }
        self.checkpoints.save(self.step, self.module, self.optimizer, state)

    def reading(self) -> str | None:
        """The sample that this rank waits for, with its shard and offset; None if it waits for none."""
        held_out = None if self.held_out is None else self.held_out.reading()
        return held_out or self.feed.reading()

    def evaluate(self) -> None:
        """Evaluate on the held-out images and record the scores, unless a stop is requested meanwhile."""
        scorer = self.config.scorer(self.rank_info.device)
        if self.held_out is not None and scorer is not None:
            began = time.perf_counter()
            with averaged(self.module, self.optimizer), self.phases.part("evaluation"):
                scores = evaluate(
                    self.module,
                    self.held_out,
                    scorer,
                    self.config,
                    self.rank_info,
                    control=self.control,
                    phases=self.phases,
                )
            if scores is not None:
                seconds = time.perf_counter() - began
                self.metrics.evaluation(self.step, scores, seconds, self.config.evaluation.how(scores))
                self.best.add(self.step, scores)
                self.checkpoints.best = self.best.step

    @property
    def ended(self) -> bool:
        """Whether the run ends after this step; the same on all ranks."""
        return self.control.stopping or self.step >= self.config.optim.steps or self.best.exhausted

    @property
    def checkpoint(self) -> str:
        """Path or URL of the checkpoint after this step."""
        return f"{self.config.out.rstrip('/')}/checkpoints/{folder_name(self.step)}"

    @property
    def finished(self) -> bool:
        """Whether another start would do nothing: all steps are done, and the evaluation after them."""
        due = self.config.evaluation.view is not None and self.metrics.lacks_evaluation(self.step)
        return (self.step >= self.config.optim.steps or self.best.exhausted) and not due

    def forward_backward(self, batch: Batch, number: int = 0) -> dict[str, Tensor]:
        """Add the gradient of the micro-batch with this number; return the model's sums, without gradient."""
        seed_generators(self.config.seed, self.step, self.rank_info.rank, number)
        sums = self.train_step.forward_backward(batch)
        totals = {name: sums[name] for name in (*self.model.figures, "count")}
        kinds, mix = getattr(self.model, "image_figures", ()), self.feed.stream
        if number <= 1:
            self._images = []
        if kinds and "of_images" in sums:
            self._images.append((sums["of_images"], batch.ids, batch.positions))
            if isinstance(mix, Mix) and batch.source_index is not None:
                totals |= by_source(sums["of_images"], batch.source_index, list(mix.streams), kinds)
        return totals

    def worst(self) -> dict[str, Tensor]:
        """The image of this rank with the highest loss in the step, see `worst_image`."""
        return worst_image(self._images, getattr(self.model, "image_figures", ()))

    def numbers(self) -> dict[str, float]:
        """Numbers of this rank that the ranks exchange after each step.

        `data_wait`: seconds of this step in which it waited for data; `forward`: those of the last forward
        pass of the step before; `peak_memory`: bytes; the last sample of its device, see `Sampler`; busy
        seconds of the loader's stages so far.
        """
        busy = self.feed.stream.stats.busy_seconds()
        return {
            "data_wait": self.phases.seconds["data"],
            "forward": self.forward_time.seconds(),
            "peak_memory": metrics.peak_memory(self.rank_info.device),
            **self.sampler.latest(),
            **dict(zip(BUSY, busy.values(), strict=True)),
        }

    def record(self, figures: StepFigures, lr: float) -> None:
        """Record the step that has just ended; save a checkpoint and evaluate if they are due."""
        took = self.phases.total()
        precision = self.config.parallel.precision
        ideal = peak_seconds(self.model, figures.images, figures.count, precision, self.rank_info)
        saves = (self.ended or self.step % self.config.checkpoint.every == 0) and not self.health.lost
        if saves:
            # The process may be killed after the checkpoint and before the step's line is written.
            line = metrics.figures_of(figures, self.phases, lr, ideal)
            with self.phases.part("checkpoint"):
                self.save(metrics.json_figures({"step": self.step, **line}))
        self.control.took(took, self.checkpoints.seconds * (2 if self.checkpoints.in_flight else 1))
        epochs = {f"epochs/{name}": seen for name, (_, seen) in self.feed.seen().items()}
        line = metrics.figures_of(figures, self.phases, lr, ideal) | epochs
        self.metrics.step(self.step, line, always=saves or self.ended)
        if self.window is not None:
            self.window.add(self.step, figures.ranks, took)
        self._evaluate_if_due(saved=saves or bool(self.health.lost))

    def evaluate_if_missing(self) -> None:
        """Evaluate before the first step, or, after a resume, repeat an evaluation that was interrupted."""
        if self.control.any_rank(self.metrics.lacks_evaluation(self.step)):
            self._evaluate_if_due(saved=self.step > 0)

    def _evaluate_if_due(self, saved: bool) -> None:
        settings, last = self.config.evaluation, self.step == self.config.optim.steps
        first = settings.best is not None and self.step == 0  # which refuses an unknown score early
        every = settings.every > 0 and self.step % settings.every == 0
        due = settings.view is not None and (first or last or every)
        if self.control.stopping or not due:
            return
        self.evaluate()
        needed = self.control.stopping or self.best.exhausted or 0 < self.step == self.best.step
        if needed and not saved:
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
            self.control.close()


def _replay(out: str, step: int, position: int, batch: int, at: int) -> str:
    """The command that shows the step of `position`, in a run with `step` steps at position `at`."""
    return command("replay", out, "--step", step + (at - position) // batch + 1)
