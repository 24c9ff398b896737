"""`TrainingData`: a run of Lightning resumes after the last batch that was trained on, at every step."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import UsageError
from tests.stream.recorded import RECIPE, make_root

# The tests import lightning: that takes seconds in each process that collects this file.
pytestmark = [
    pytest.mark.skipif(
        find_spec("lightning") is None, reason="needs lightning: pip install -e '.[examples]'"
    ),
    pytest.mark.filterwarnings("ignore::Warning:lightning"),  # of what this machine lacks
]
IMAGES, BATCH, EPOCHS = 11, 4, 3  # the last step of an epoch has 3 images
STEPS = EPOCHS * 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("lightning"), IMAGES)


def model() -> Any:
    """A model that records the positions that it is trained on, and after how many batches it is validated."""
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[int] = []
            self.validated: list[int] = []

        def training_step(self, batch: sa1b.Batch, index: int) -> torch.Tensor:
            self.seen += batch.positions.tolist()
            return (self.weight - batch.images.float().mean() / 255) ** 2

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated.append(len(self.seen))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Model()


def make(root: Path, kind: str, **options: Any) -> Any:
    from sa1b.stream.lightning import TrainingData

    settings = {"global_batch": BATCH, "damage_log": root.parent / "damage_log", **RECIPE, **options}
    if kind == "Loader":
        return TrainingData(lambda: sa1b.Loader(sa1b.Stream(root, **settings), threads=1, quiet=True))
    return TrainingData(lambda: DataLoader(sa1b.Stream(root, **settings), batch_size=None))


def fit(data: Any, steps: int, *callbacks: Any, checkpoint: Path | None = None, **options: Any) -> Any:
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=-1,
        enable_checkpointing=any("ModelCheckpoint" in type(one).__name__ for one in callbacks), num_sanity_val_steps=0, max_steps=steps,
        callbacks=[data, *callbacks], **options,
    )  # fmt: skip
    trained = model()
    trainer.fit(trained, data, [0], ckpt_path=checkpoint)
    return trained


def saving(folder: Path) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize("kind", ["Loader", "DataLoader"])
def test_a_run_resumes_exactly_at_every_step_of_three_epochs(
    root: Path, tmp_path: Path, kind: str, epochs: int | None
) -> None:
    keep = saving(tmp_path)
    whole = fit(make(root, kind, epochs=epochs), STEPS + 4, keep)
    assert whole.seen == list(range(len(whole.seen)))
    for step in range(1, STEPS + 1):
        again = fit(make(root, kind, epochs=epochs), STEPS + 4, checkpoint=tmp_path / f"step={step}.ckpt")
        before = BATCH * step if epochs is None else IMAGES * (step // 3) + BATCH * (step % 3)
        assert again.seen == whole.seen[before:], step
        assert torch.equal(again.weight, whole.weight)
        later = [before + images for images in again.validated]
        assert later in (whole.validated, [images for images in whole.validated if images > before])


@pytest.mark.parametrize("epochs", [1, None])
def test_a_run_that_ended_continues(root: Path, tmp_path: Path, epochs: int | None) -> None:
    path = tmp_path / "end.ckpt"
    for step in (0, 2, 3, STEPS):
        data = make(root, "Loader", epochs=epochs)
        first = fit(data, step)
        first.trainer.save_checkpoint(path)
        again = fit(make(root, "Loader", epochs=epochs), STEPS + 4, checkpoint=path)
        assert first.seen + again.seen == list(range(len(first.seen) + len(again.seen))), step


@pytest.mark.parametrize("epochs", [1, None])
def test_micro_batches_resume_after_the_last_step_of_the_optimizer(
    root: Path, tmp_path: Path, epochs: int | None
) -> None:
    def data() -> Any:
        return make(root, "Loader", epochs=epochs, micro_batch=2)

    keep = saving(tmp_path)
    whole = fit(data(), STEPS, keep, accumulate_grad_batches=2)
    assert whole.seen == list(range(len(whole.seen)))
    for step in (1, 3, 4):
        again = fit(data(), STEPS, checkpoint=tmp_path / f"step={step}.ckpt", accumulate_grad_batches=2)
        assert again.seen == whole.seen[len(whole.seen) - len(again.seen) :]
        assert len(again.seen) == len(whole.seen) - (BATCH * step - (epochs is not None) * (step // 3))
        assert torch.equal(again.weight, whole.weight)


def test_steps_of_the_optimizer_within_a_step_of_the_stream_are_refused(root: Path) -> None:
    with pytest.raises(UsageError, match=r"Trainer\(accumulate_grad_batches=2\)"):
        fit(make(root, "Loader", micro_batch=2), 2)


def test_a_checkpoint_between_two_steps_of_the_optimizer_is_warned_of(root: Path, tmp_path: Path) -> None:
    import lightning

    class Between(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                with pytest.warns(UserWarning, match="step 1: a checkpoint has no accumulated gradients"):
                    trainer.save_checkpoint(tmp_path / "between.ckpt")

    fit(make(root, "Loader", micro_batch=2), 2, Between(), accumulate_grad_batches=2)
    again = make(root, "Loader", micro_batch=2)
    with pytest.raises(UsageError, match="saved after a step of the optimizer"):
        fit(again, 4, checkpoint=tmp_path / "between.ckpt", accumulate_grad_batches=2)


def test_wrong_uses_are_refused(root: Path) -> None:
    import lightning

    from sa1b.stream.lightning import TrainingData

    trainer: Callable[..., Any] = lightning.Trainer
    data = make(root, "Loader")
    with pytest.raises(UsageError, match=r"Trainer\(callbacks=\[...\]\)"):
        trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1).fit(model(), data)
    with pytest.raises(UsageError, match="must return a sa1b.Loader"):
        fit(TrainingData(lambda: DataLoader([1, 2])), 1)  # type: ignore[arg-type]
