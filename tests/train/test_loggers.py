"""What a run gives to callbacks, TensorBoard and the server of figures, and what their errors do."""

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sa1b.engine.watch.loggers import Callback
from tests.kit import Done
from tests.processes import REPOSITORY
from tests.train.command import lines
from tests.train.inside import SAM, make_root, train

FLAGS = (*SAM, "--optim.steps", 4, "--checkpoint.every", 2)


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
    """Stands in for the packages wandb and mlflow; a call in `fails` raises."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[Any, ...]] = []
        self.fails: tuple[str, ...] = ()
        monkeypatch.setitem(sys.modules, name, self)

    def note(self, what: str, *given: Any) -> Any:
        if what in self.fails:
            raise RuntimeError("the server is gone\nfor good")
        self.calls.append((what, *given))
        return SimpleNamespace(
            log=lambda figures, step: self.note("log", step, figures), finish=lambda: self.note("end")
        )

    def init(self, **given: Any) -> Any:
        return self.note("init", given)

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        self.note("log", step, figures)

    def end_run(self) -> None:
        self.note("end")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("loggers"))


def trained(root: Path, out: Path, *flags: object, code: int = 0, **more: Any) -> Done:
    return train("--data.root", root, "--out", out, *FLAGS, *flags, code=code, **more)


def test_callbacks_get_the_figures_of_metrics_the_windows_and_the_end(root: Path, tmp_path: Path) -> None:
    out, recorder = tmp_path / "run", Recorder()
    trained(root, out, "--logging.window", 2, "--logging.every", 3, callbacks=[recorder, Callback()])
    steps = {call[1]: call[2] for call in recorder.calls if call[0] == "step"}
    assert list(steps) == [1, 2, 3, 4]
    written = [line for line in lines(out) if "loss" in line]
    assert [line["step"] for line in written] == [2, 3, 4]  # with a checkpoint, the third, the last
    assert all(line == {"step": line["step"], **steps[line["step"]]} for line in written)
    windows = [call[1:] for call in recorder.calls if call[0] == "window"]
    assert [(step, kind) for step, kind, _ in windows] == [(3, "ranks"), (3, "loader")]
    assert [{"step": step, kind: summary} for step, kind, summary in windows] == [
        line for line in lines(out) if "loss" not in line
    ]
    assert recorder.calls[-1] == ("end",)


def test_the_server_gets_figures_and_a_resumed_run_goes_on_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, server = tmp_path / "run", Server("wandb", monkeypatch)
    flags = ("--logging.wandb", "project", "--logging.every", 2)
    trained(root, out, *flags)
    begun = server.calls[0][1]
    assert (begun["project"], begun["name"], begun["config"]["optim"]["steps"]) == ("project", "run", 4)
    logged = [call for call in server.calls if call[0] == "log"]
    written = {line["step"]: line for line in lines(out)}
    assert [(step, figures["loss"]) for _, step, figures in logged] == [
        (step, written[step]["loss"]) for step in (2, 4)
    ]
    assert all(isinstance(value, float) for _, _, figures in logged for value in figures.values())
    assert server.calls[-1] == ("end",)
    server.calls.clear()
    trained(root, out, *flags, "--optim.steps", 6)
    assert server.calls[0][1]["id"] == begun["id"]
    assert [call[1] for call in server.calls if call[0] == "log"] == [6]


def test_an_error_of_the_server_at_the_start_ends_the_run_and_a_later_one_the_logging(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("wandb", monkeypatch)
    server.fails = ("init",)
    done = trained(root, tmp_path / "run", "--logging.wandb", "project", code=1)
    assert "error: RuntimeError: the server is gone" in done.err
    server.fails = ("log", "end")
    trained(root, tmp_path / "run", "--logging.wandb", "project")
    assert [call[0] for call in server.calls] == ["init"]
    assert (
        caplog.messages.count("the logging to Weights & Biases ends: RuntimeError: the server is gone") == 1
    )


@pytest.mark.parametrize(
    ("package", "flags"),
    [("wandb", ("--logging.wandb", "project")), ("tensorboard", ("--logging.tensorboard", "True"))],
)
def test_a_package_that_is_missing_is_named_before_the_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setitem(sys.modules, package, None)
    done = trained(root, tmp_path / "run", *flags, code=2)
    assert re.search(rf"error: {flags[0]}: .*is missing; pip install", done.err)
    assert not (tmp_path / "run").exists()


def test_curves_are_those_of_metrics_also_after_a_run_that_was_killed(root: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    for steps in (2, 4):
        trained(root, out, "--logging.tensorboard", "True", "--optim.steps", steps)
    curves = events.EventAccumulator(str(out / "tensorboard")).Reload()
    written = [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines(out)]
    assert [(event.step, event.value) for event in curves.Scalars("loss")] == written
    assert [step for step, _ in written] == [1, 2, 3, 4]


def test_the_callback_for_mlflow_on_the_page_of_training_logs_each_step(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server("mlflow", monkeypatch)
    page = (REPOSITORY / "docs" / "training.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "mlflow" in block)
    names: dict[str, Any] = {}
    exec(code[: code.index("exit_at_once(main")], names)
    out = tmp_path / "run"
    trained(root, out, callbacks=[names["Mlflow"]()])
    assert [call[0] for call in server.calls] == [*(4 * ["log"]), "end"]
    assert [(step, figures["loss"]) for _, step, figures in server.calls[:-1]] == [
        (line["step"], line["loss"]) for line in lines(out)
    ]
