"""The model contract: the interface of a model that the engine trains.

A model is a `torch.nn.Module` with the attributes of `Model`. It does not import the engine. A minimal
complete example is an image autoencoder with one layer:

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

The settings of a model are a subclass of `sa1b.engine.config.Config` with `image_size` and `build`;
`tests/engine/reconstruction.py` is a complete second model, `sa1b.recipes.presets` has the settings of SAM.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sa1b.errors import UsageError
from sa1b.stream.batch import Batch


@runtime_checkable
class Model(Protocol):
    """Interface of a trained module, in addition to `nn.Module`.

    `forward(*inputs)` computes the losses of a micro-batch and returns a dictionary of scalars. They are sums
    over masks or images: "loss", with the gradient; "count", the number of summed terms; and one sum for each
    further name in `figures`. The engine divides by the count over all ranks. For an empty micro-batch, all
    sums are 0, and every trained parameter still gets a gradient. Optional: "of_images", float32 [B, F], the
    sums of each image that `image_figures` names, "loss" and "count" among them; the figures of each source
    of a mixture are computed from them.

    `forward` may use torch's random numbers, for dropout: torch's generators are seeded by the seed of the
    run, the step, the rank and the micro-batch, so that a resumed run has the same numbers, and ranks have
    different ones. The result then depends on the number of ranks. For random values that do not depend on
    it, see `inputs`.

    Evaluation is optional: the settings contain a scorer, see `sa1b.engine.config.Config.scorer`. The scorer
    of SAM, `sa1b.recipes.scorer.ClickScorer`, takes every model whose `forward` accepts `evaluate=True` and
    returns intersections, unions and logits in the same form.

    Attributes:
        figures: Names of the sums whose means are recorded each step, including "loss".
        shown: Figures of the progress line besides the loss: label -> name in `figures`.
    """

    @property
    def figures(self) -> tuple[str, ...]: ...

    @property
    def shown(self) -> Mapping[str, str]: ...

    def inputs(self, batch: Batch, seed: int) -> tuple[Any, ...]:
        """The arguments of `forward` for a micro-batch on the device; `seed` is that of the run."""
        ...

    def weights(self) -> nn.Module:
        """The module whose state dict is saved; it contains every trained parameter."""
        ...

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a published file, by the names of `weights()`, on the CPU; Sa1bError: damaged."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Load tensors of a checkpoint or of `read_weights`; return a line that describes them.
        UsageError: the tensors do not fit this model; the message is one sentence with the reason.
        """
        ...

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Groups of modules whose parameters FSDP gathers together, in the order of execution.

        These parameters are gathered in the number format of the matrix products. All other parameters stay
        gathered, in float32. FSDP's hooks run around the call of each module of a group. If the first module
        has a method `gathered`, the hooks run around that method instead. A model with compiled code calls
        the compiled function inside `gathered`, where it uses the modules' `forward`: then no hook is in a
        graph.
        """
        ...

    def layer_of(self, name: str) -> int | None:
        """Layer of a parameter of `weights()` for layer-wise decay, from 0; None: the last one."""
        ...

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies to a parameter of `weights()`."""
        ...

    def flops(self, images: float, masks: float) -> float:
        """Floating-point operations of a training step, 2 per multiply-add, without recomputation."""
        ...


class Scorer(Protocol):
    """The results of an evaluation: sums over all images, and masks to show."""

    def add(self, module: nn.Module, inputs: Any, batch: Batch) -> None:
        """Evaluate a micro-batch: call the module once, on every rank, with `inputs`."""
        ...

    def predictions(self, batch: Batch) -> list[tuple[int, str]]:
        """Position and line of predictions.jsonl for each image of the micro-batch that was added last."""
        ...

    def all_reduce(self) -> None:
        """Add the sums of all ranks; collective."""
        ...

    def result(self) -> dict[str, float]:
        """The scores by name; "empty" is the number of masks that are left out, without a pixel."""
        ...


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP; FSDP changes the module in place and adds no wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def declared(module: nn.Module) -> Model:
    """The model inside the result of `wrap`; ModelError names the attributes that it lacks."""
    module = unwrap(module)
    if isinstance(module, Model):
        return module
    names = [name for name in dir(Model) if not name.startswith("_") and getattr(module, name, None) is None]
    raise ModelError(f"{type(module).__name__}: has no {', '.join(names)}; see sa1b.engine.model.Model")


class ModelError(UsageError):
    """A model lacks attributes of the contract; the message names them."""


def stored(module: nn.Module) -> nn.Module:
    """The module whose state dict is saved; for a plain module, the module itself."""
    module = unwrap(module)
    return module.weights() if isinstance(module, Model) else module


HALF = 32  # bits of an image id in each of two numbers, which float64 represents exactly


def by_source(
    of_images: Tensor, source: Tensor, names: Sequence[str], figures: Sequence[str]
) -> dict[str, Tensor]:
    """The sums of each source, as "loss/NAME", from those of images, [B, F]; `source`: numbers, int64 [B]."""
    belongs = source == torch.arange(len(names), device=source.device)[:, None]
    sums = torch.where(belongs[:, :, None], of_images, 0).sum(dim=1)
    return {f"{kind}/{name}": sums[i, j] for i, name in enumerate(names) for j, kind in enumerate(figures)}


def worst_image(parts: Sequence[tuple[Tensor, Tensor, Tensor]], figures: Sequence[str]) -> dict[str, Tensor]:
    """Loss, position and halves of the id of the image with the highest mean loss, -inf without a mask."""
    if not parts:
        return {}
    sums, ids, positions = map(torch.cat, zip(*parts, strict=True))
    loss, count = sums[:, figures.index("loss")].double(), sums[:, figures.index("count")]
    mean = functional.pad(torch.where(count > 0, loss / count, -torch.inf), (0, 1), value=-torch.inf)
    of_images = functional.pad(
        torch.stack((positions, ids >> HALF, ids & ((1 << HALF) - 1))), (0, 1), value=-1
    )
    # The maximum of numbers with a NaN is the NaN.
    worst = torch.cat((mean[None], of_images.double())).index_select(1, mean.argmax()[None])
    names = ("worst_loss", "worst_position", "worst_id_high", "worst_id_low")
    return dict(zip(names, worst[:, 0].unbind(), strict=True))
