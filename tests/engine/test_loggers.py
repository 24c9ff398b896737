"""Callbacks of a run and loggers of servers: what they get, on which rank, and errors of a server."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sa1b.engine.settings import EvaluationConfig
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.loggers import Callback, flat
from sa1b.engine.watch.metrics import BestScore, LoggingConfig, Metrics
from sa1b.engine.watch.signals import WriteError
from sa1b.errors import UsageError
from tests.engine.stream_root import place_of

FIGURES = {"loss": 0.5, "images_per_s": 3.0, "data_wait": 0.2}
SCORES = {"boxes": 3, "mean": 0.25}


class Recorder(Callback):
    """Everything that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def step(self, *given: Any) -> None:
        self.calls.append(("step", *given))

    def window(self, *given: Any) -> None:
        self.calls.append(("window", *given))

    def evaluation(self, *given: Any) -> None:
        self.calls.append(("evaluation", *given))

    def end(self) -> None:
        self.calls.append(("end",))


class Server(ModuleType):
    """Stands in for the packages wandb and mlflow."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False
        self.finish = self.end_run = lambda: self.calls.append(("end",))

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any]) -> Any:
        self.check()
        self.calls.append(("begin", project, id, config))
        return SimpleNamespace(log=lambda figures, step: self.add(step, figures), finish=self.finish)

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, *, run_id: str | None, run_name: str | None) -> Any:
        self.calls.append(("begin", self.experiment, run_id or "made", None))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made"))

    def log_params(self, settings: dict[str, Any]) -> None:
        self.calls[-1] = (*self.calls[-1][:3], settings)

    def log_metrics(self, figures: dict[str, float], *, step: int, synchronous: bool) -> None:
        assert not synchronous
        self.add(step, figures)

    def add(self, step: int, figures: dict[str, float]) -> None:
        self.check()
        self.calls.append((step, figures))

    def check(self) -> None:
        if self.fails:
            raise RuntimeError("the server is gone\nfor good")


def metrics_of(run: Path, done: int = 0, rank: int = 0, callbacks: Any = (), **config: Any) -> Metrics:
    place = place_of(rank, 2)
    settings = {"optim": {"lr": 0.1}}
    logging = LoggingConfig(tensorboard=False, **config)
    return Metrics(logging, run, place, Control(place), done, 9, callbacks=callbacks, settings=settings)


@pytest.mark.parametrize("rank", [0, 1])
def test_callbacks_get_all_steps_windows_evaluations_and_the_end_on_the_first_rank(
    tmp_path: Path, rank: int
) -> None:
    recorder = Recorder()
    metrics = metrics_of(tmp_path, rank=rank, callbacks=[recorder, Callback()], every=2)
    for step in (1, 2):
        metrics.step(step, FIGURES)
    metrics.window(2, "loader", {"limit": "decode"})
    metrics.evaluation(2, SCORES, 1.5, {})
    metrics.close()
    expected = [
        ("step", 1, FIGURES), ("step", 2, FIGURES), ("window", 2, "loader", {"limit": "decode"}),
        ("evaluation", 2, SCORES, 1.5), ("end",),
    ]  # fmt: skip
    assert recorder.calls == ([] if rank else expected)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_gets_figures_and_scores_and_a_resumed_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = Server(name)
    monkeypatch.setitem(sys.modules, name, server)
    metrics = metrics_of(tmp_path, every=2, **{name: "project"})
    for step in (1, 2, 3):
        metrics.step(step, {**FIGURES, "slowest": None})
    metrics.evaluation(3, SCORES, 1.5, {})
    metrics.close()
    begun, *rest = server.calls
    settings = {"optim": {"lr": 0.1}} if name == "wandb" else {"optim.lr": 0.1}
    assert (begun[0], begun[1], begun[3]) == ("begin", "project", settings)
    assert rest == [(2, FIGURES), (3, SCORES), ("end",)]
    server.calls.clear()
    metrics_of(tmp_path, 3, **{name: "project"}).close()
    assert server.calls[0][2] == begun[2]
    server.calls.clear()
    metrics_of(tmp_path / "other", **{name: "project"}).close()
    assert name == "mlflow" or server.calls[0][2] != begun[2]


def test_an_error_of_a_server_ends_the_logging_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("wandb")
    monkeypatch.setitem(sys.modules, "wandb", server)
    metrics = metrics_of(tmp_path, wandb="project")
    server.fails = True
    metrics.step(1, FIGURES)
    server.fails = False
    metrics.step(2, FIGURES)
    metrics.close()
    assert caplog.messages == ["the logging to a server ends: RuntimeError: the server is gone"]
    assert len(server.calls) == 1


def test_a_server_that_cannot_be_opened_stops_all_ranks_after_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server("wandb")
    server.fails = True
    monkeypatch.setitem(sys.modules, "wandb", server)
    place = place_of(0, 1)
    control = Control(place)
    metrics = Metrics(LoggingConfig(tensorboard=False, wandb="project"), tmp_path, place, control, 0, 9)
    metrics.step(1, FIGURES)
    assert control.poll()
    text = "--logging.wandb project: RuntimeError: the server is gone; set wandb up on the machine of rank 0, or drop the flag"
    with pytest.raises(WriteError, match=text):
        control.check()
    metrics.close()


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr("sa1b.engine.watch.metrics.find_spec", lambda package: None)
        with pytest.raises(
            UsageError, match=f"--logging.{name}: the package {name} is missing; pip install {name}"
        ):
            LoggingConfig(**{name: "project"})


def test_settings_are_flat_by_their_flags() -> None:
    assert flat({"seed": 1, "data": {"view": None, "mix": {"a": 2}}}) == {
        "seed": 1,
        "data.view": None,
        "data.mix.a": 2,
    }


def test_the_best_score_and_the_evaluations_since() -> None:
    best = BestScore(EvaluationConfig(view="held", every=1, best="mean", patience=2))
    found = []
    scores: list[Any] = [0.5, 0.25, 0.75, None, 0.75, 0.1]
    for step, score in enumerate(scores):
        best.add(step, {"mean": score})
        found.append((best.step, best.since, best.exhausted))
    assert found == [(0, 0, False), (0, 1, False), (2, 0, False), (2, 1, False), (2, 2, True), (2, 3, True)]
    with pytest.raises(UsageError, match="--evaluation.best mean: not a score; choose from boxes, miou"):
        best.add(6, {"boxes": 3, "miou": 0.5})
    without = BestScore(EvaluationConfig())
    without.add(0, {"mean": 1.0})
    assert (without.step, without.exhausted) == (None, False)


def test_patience_needs_a_score_and_a_view() -> None:
    with pytest.raises(UsageError, match="--evaluation.best mean: needs --evaluation.view"):
        EvaluationConfig(best="mean")
    givens: list[dict[str, Any]] = [{"view": "held", "every": 2}, {"view": "held", "best": "mean"}]
    for given in givens:
        with pytest.raises(UsageError, match="--evaluation.patience 3: counts evaluations"):
            EvaluationConfig(patience=3, **given)
