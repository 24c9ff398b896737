"""A model that does not fulfil the contract is named with the part and the value, when it is built or first used."""

from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from sa1b.engine.model import Model, ModelError, checked, inputs_of

IMAGES = torch.rand(2, 3, 4, 4)


class Autoencoder(nn.Module):
    figures = ("loss",)
    shown: ClassVar[Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Any:
        errors = (self.layer(images) - images).square().mean(dim=(1, 2, 3))
        return self.result(errors)

    def result(self, errors: Tensor) -> Any:
        return {"loss": errors.sum(), "count": errors.new_tensor(len(errors))}

    def inputs(self, batch: Any, seed: int) -> Any:
        return (batch,)

    def weights(self) -> Any:
        return self

    def fsdp_units(self) -> Any:
        return []

    def layer_of(self, name: str) -> Any:
        return None

    def decays(self, name: str, parameter: Tensor) -> Any:
        return parameter.ndim > 1

    def not_called(self, *_: Any) -> Any:
        raise NotImplementedError

    read_weights = load_weights = flops = not_called


def changed(**parts: Any) -> nn.Module:
    return type("Changed", (Autoencoder,), parts)()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"decays": None}, "Changed: has no decays; see sa1b.engine.model.Model"),
        ({"flops": 0.0}, "Changed.flops is 0.0: must be a method"),
        ({"figures": "loss"}, "Changed.figures is 'loss': must be a tuple of names that contains \"loss\""),
        ({"figures": ("error",)}, "Changed.figures is ('error',): must be a tuple of names"),
        ({"shown": {"IoU": "iou"}}, "Changed.shown is {'IoU': 'iou'}: must be a dictionary, label -> name"),
        ({"weights": lambda self: {}}, "Changed.weights() is {}: must be a module"),
        ({"weights": lambda self: nn.Module()}, "Changed.weights() is Module(): must have a parameter that"),
        (
            {"layer_of": lambda self, name: "x"},
            "Changed.layer_of('layer.weight') is 'x': must be int or None",
        ),
        ({"decays": lambda *_: None}, "Changed.decays('layer.weight', ...) is None: must be True or False"),
        ({"fsdp_units": lambda self: None}, "Changed.fsdp_units() is None: must be a list"),
    ],
)
def test_attributes_are_checked_when_the_model_is_built(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        checked(changed(**parts))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda self, errors: errors.sum(),
            "Changed.forward() is a tensor []: must be a dictionary with ('co",
        ),
        (lambda self, errors: None, "Changed.forward() is None: must be a dictionary"),
        (
            lambda self, errors: {"loss": errors.sum()},
            "Changed.forward()['count'] is None: must be in the result, which has ['loss']",
        ),
        (
            lambda self, errors: {"loss": errors, "count": torch.ones(())},
            "Changed.forward()['loss'] is a tensor [2]: must be a tensor without dimensions, a sum",
        ),
        (
            lambda self, errors: {"loss": errors.sum().detach(), "count": torch.ones(())},
            "Changed.forward()['loss'] is a tensor []: must have a gradient (not detached)",
        ),
        (
            lambda self, errors: {"loss": errors.sum(), "count": 2},
            "Changed.forward()['count'] is 2: must be a tensor without dimensions",
        ),
    ],
)
def test_the_result_of_forward_is_checked_in_the_first_training_step(result: Any, message: str) -> None:
    model = checked(changed(result=result))
    with torch.no_grad():
        model(IMAGES)  # an evaluation, whose result is another
    with pytest.raises(ModelError) as refused:
        model(IMAGES)
    assert str(refused.value).startswith(message)


def test_a_figure_that_forward_omits_is_named() -> None:
    model = checked(changed(figures=("loss", "error")))
    with pytest.raises(ModelError, match=r"forward\(\)\['error'\] is None: must be in the result"):
        model(IMAGES)


def test_later_steps_are_not_checked() -> None:
    model = checked(Autoencoder())
    model(IMAGES)
    assert not model._forward_hooks


def test_inputs_must_be_a_tuple() -> None:
    assert inputs_of(cast(Model, Autoencoder()), cast(Any, IMAGES), 0) == (IMAGES,)
    with pytest.raises(ModelError, match=r"Changed.inputs\(\) is a tensor \[2, 3, 4, 4\]: must be a tuple"):
        inputs_of(cast(Model, changed(inputs=lambda self, batch, seed: batch)), cast(Any, IMAGES), 0)
