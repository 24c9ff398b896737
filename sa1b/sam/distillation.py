"""Distillation of the image encoder: a small student learns the embeddings of a frozen teacher.

The teacher runs in the training loop, because its embeddings of SA-1B would take 23 TB; those of a small
subset can be cached, see `sa1b.sam.embedding_cache`. The student gets the teacher's prompt encoder and mask
decoder, frozen, so that it predicts masks from the first step on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sa1b.errors import UsageError
from sa1b.sam.embedding_cache import EmbeddingCache
from sa1b.sam.interactive import EvaluationProtocol, Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe, encoder_flops
from sa1b.sam.targets import Targets

_ENCODER = "image_encoder."


class Distillation(Interactive):
    """A student in training together with its teacher, of the same image size, patch size and channels.

    The loss of an image is the mean squared difference of both embeddings over channels and over the tokens
    that contain a part of the image. Only an evaluation uses the targets. The teacher is not a submodule: it
    is not saved, trained or sharded, and every rank has a copy. Without a `cache`, its embeddings are
    computed for every visit of an image.
    """

    figures = ("loss", "cosine")
    shown: Mapping[str, str] = {"cosine": "cosine"}

    def __init__(self, model: Sam, recipe: Recipe, teacher: Sam, cache: EmbeddingCache | None = None) -> None:
        super().__init__(model, recipe)
        check_sizes(model.config, teacher.config)
        self._cache = cache
        self._frozen = (teacher.eval().requires_grad_(False),)
        model.requires_grad_(False)
        model.image_encoder.requires_grad_(True)
        if not teacher.pixel_mean.is_meta:  # a meta model has no values, only sizes
            others = {
                name: tensor for name, tensor in teacher.state_dict().items() if not name.startswith(_ENCODER)
            }
            model.load_state_dict(others, strict=False)

    @property
    def teacher(self) -> Sam:
        """The frozen model."""
        return self._frozen[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # nn.Module's method has no types.
        of_teacher: Callable[..., Any] = self.teacher._apply
        of_student: Callable[..., Any] = super()._apply
        of_teacher(fn, recurse)
        return of_student(fn, recurse)

    def flops(self, images: float, masks: float) -> float:
        """Forward and backward pass of the student, and without a cache a forward pass of the teacher."""
        teacher = encoder_flops(self.teacher.config) if self._cache is None else 0.0
        return images * (3 * encoder_flops(self.model.config) + teacher)

    def forward(
        self,
        images: Tensor,
        targets: Targets,
        image_keys: Tensor,
        *,
        evaluate: bool = False,
        protocol: EvaluationProtocol | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a micro-batch, or its scores as those of `Interactive`.

        In training, sums over images, float32 scalars: "loss", with the gradient; "cosine", the mean cosine
        similarity of the tokens of both embeddings; "count", the number of images.
        """
        if evaluate or protocol is not None:
            return super().forward(images, targets, image_keys, evaluate=evaluate, protocol=protocol)
        embeddings = self.model.embed(images, self.kept(image_keys, self.model.config), targets.sizes)
        if self.teacher.pixel_mean.device != images.device:
            self.teacher.to(images.device)
        goal = self._wanted(images, targets.sizes)
        learned = embeddings[:, : self.model.config.channels].float()
        inside = _inside(targets.sizes, self.model.config)
        weights = inside / inside.sum(dim=(1, 2), keepdim=True)
        errors = (learned - goal).square().mean(dim=1)
        similarity = functional.cosine_similarity(learned.detach(), goal, dim=1)
        return {
            "loss": (weights * errors).sum(),
            "cosine": (weights * similarity).sum(),
            "count": weights.new_tensor(float(len(images))),
        }

    @torch.no_grad()
    def _wanted(self, images: Tensor, sizes: Tensor) -> Tensor:
        """The teacher's embeddings: float32 [B, channels, side, side]."""
        if self._cache is None or len(images) == 0:
            return self._computed(images, sizes).float()
        return self._cache.embeddings(images, sizes, self._computed)

    def _computed(self, images: Tensor, sizes: Tensor) -> Tensor:
        return self.teacher.embed(images, None, sizes)[:, : self.model.config.channels]


def check_sizes(student: ModelConfig, teacher: ModelConfig) -> None:
    """Refuse a student whose embeddings or decoder have other sizes than the teacher's, with a UsageError."""
    for name in ("patch_size", "channels", "pixel_features"):
        if getattr(student, name) != getattr(teacher, name):
            flag = f"--model.{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {getattr(student, name)}: the teacher has {getattr(teacher, name)}, and the student "
                f"takes over its mask decoder; pass {flag} {getattr(teacher, name)}"
            )


def _inside(sizes: Tensor, model: ModelConfig) -> Tensor:
    """Whether a token contains a part of the image: float32 [B, side, side]."""
    starts = torch.arange(model.side, device=sizes.device) * model.patch_size
    rows, columns = (starts < sizes[:, :, None]).unbind(1)
    return (rows[:, :, None] & columns[:, None, :]).float()
