"""The model contract: what the engine asks of a model that it trains.

A model is a `torch.nn.Module` with the attributes of `Model`. It imports nothing of the engine. The smallest
complete one, an image autoencoder of one layer:

    class Autoencoder(nn.Module):
        figures = ("loss",)
        shown = {}

        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, images):
            errors = (self.layer(images.float() / 255) - images.float() / 255).square()
            return {"loss": errors.mean(dim=(1, 2, 3)).sum(), "count": errors.new_tensor(len(images))}

        def inputs(self, batch, seed):
            return (batch.images,)

        def weights(self):
            return self

        def read_weights(self, path):
            return torch.load(path, weights_only=True)

        def load_weights(self, weights):
            self.load_state_dict(weights)
            return "all weights"

        def fsdp_units(self):
            return []

        def layer_of(self, name):
            return None

        def decays(self, name, parameter):
            return parameter.ndim > 1

        def flops(self, images, masks):
            return 0.0

Its settings are a subclass of `sa1b.engine.config.Config` with `image_size` and `build`; `tests/engine/
reconstruction.py` is a complete second model, `sa1b.engine.presets` has the settings of SAM.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sa1b.stream.batch import Batch


@runtime_checkable
class Model(Protocol):
    """What a trained module provides beside `nn.Module`.

    `forward(*inputs)` computes the losses of a micro-batch and returns a dictionary of scalars, sums over
    what the loss is a mean of (masks, images): "loss", with the gradient; "count", how many were summed; and
    one sum for each further name in `figures`. The engine divides by the count over all ranks. A micro-batch
    may be empty: all sums are then 0, and every trained parameter still gets a gradient.

    Evaluation is optional. Settings whose `evaluates` is true promise what `sa1b.engine.evaluation` calls: a
    `forward` that takes `evaluate=True` and returns intersections, unions and logits as SAM's does.

    Attributes:
        figures: Names of the sums whose means are recorded each step, "loss" among them.
        shown: Figures of the progress line beside the loss: label to name in `figures`.
    """

    @property
    def figures(self) -> tuple[str, ...]: ...

    @property
    def shown(self) -> Mapping[str, str]: ...

    def inputs(self, batch: Batch, seed: int) -> tuple[Any, ...]:
        """The arguments of `forward` for a micro-batch on the device.

        Args:
            seed: of the run; random values are hashes of it and of the batch's positions.
        """
        ...

    def weights(self) -> nn.Module:
        """The module whose state dict is saved, by these names; it holds every parameter that is trained."""
        ...

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a published file, by the names of `weights()`, on the CPU.

        Raises:
            Sa1bError: damaged, or not of this kind of model.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Load tensors of a checkpoint or of `read_weights`; returns a line that says what was loaded.

        Raises:
            UsageError: they do not fit this model; one sentence that says why.
        """
        ...

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Groups of modules whose parameters FSDP gathers together, in the order of execution.

        They are gathered in the number format of the matrix products. All other parameters stay gathered, in
        float32. FSDP's hooks run around the call of each module of a group. If the first one has a method
        `gathered`, they run around that: a model that compiles the code which uses the group calls it in
        there, so that no hook is inside a graph, and uses the modules' `forward`.
        """
        ...

    def layer_of(self, name: str) -> int | None:
        """Layer of a parameter of `weights()` for layer-wise decay, from 0; None: the last one."""
        ...

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies to a parameter of `weights()`."""
        ...

    def flops(self, images: float, masks: float) -> float:
        """Operations of a training step: 2 for each multiplication and addition, without recomputation."""
        ...


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP; under FSDP, which shards in place, the same object."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def declared(module: nn.Module) -> Model:
    """The model inside what `wrap` returned.

    Raises:
        TypeError: it lacks a part of the contract; the message names the missing attributes.
    """
    module = unwrap(module)
    if isinstance(module, Model):
        return module
    names = [name for name in dir(Model) if not name.startswith("_") and not hasattr(module, name)]
    raise TypeError(f"{type(module).__name__} has no {', '.join(names)}: see sa1b.engine.model.Model")


def stored(module: nn.Module) -> nn.Module:
    """The module whose state dict is saved; a plain module stands for itself."""
    module = unwrap(module)
    return module.weights() if isinstance(module, Model) else module
