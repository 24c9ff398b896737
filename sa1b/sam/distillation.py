"""Distillation of the image encoder: a small student learns the embeddings of a frozen teacher.

The teacher runs in the training loop, because its embeddings of SA-1B would take 23 TB; those of a small
subset can be cached, see `sa1b.sam.embedding_cache`. The student gets the teacher's prompt encoder and mask
decoder, frozen, so that it predicts masks from the first step on.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from sa1b.errors import UsageError
from sa1b.sam.embedding_cache import EmbeddingCache
from sa1b.sam.interactive import EvaluationProtocol, Interactive
from sa1b.sam.model import Sam
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

    teacher: Sam

    def __init__(self, model: Sam, recipe: Recipe, teacher: Sam, cache: EmbeddingCache | None = None) -> None:
        super().__init__(model, recipe)
        for name in ("patch_size", "channels", "pixel_features"):
            flag, own = f"--model.{name.replace('_', '-')}", getattr(model.config, name)
            if own != (theirs := getattr(teacher.config, name)):
                raise UsageError(
                    f"{flag} {own}: the teacher has {theirs}, and the student takes over its mask decoder; "
                    f"pass {flag} {theirs}"
                )
        self._cache = cache
        self.__dict__["teacher"] = teacher.eval().requires_grad_(False)  # no submodule
        model.requires_grad_(False)
        model.image_encoder.requires_grad_(True)
        if not teacher.pixel_mean.is_meta:  # a meta model has no values, only sizes
            others = {name: x for name, x in teacher.state_dict().items() if not name.startswith(_ENCODER)}
            model.load_state_dict(others, strict=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # nn.Module's method has no types.
        of_teacher, of_student = cast(Any, self.teacher._apply), cast(Any, super()._apply)
        of_teacher(fn, recurse)
        return of_student(fn, recurse)

    def flops(self, images: float, masks: float) -> float:
        """Forward and backward pass of the student, and without a cache a forward pass of the teacher."""
        teacher = encoder_flops(self.teacher.config) if self._cache is None else 0.0
        return images * (3 * encoder_flops(self.model.config) + teacher)

    def forward(
        self, images: Tensor, targets: Targets, image_keys: Tensor, *, evaluate: bool = False,
        protocol: EvaluationProtocol | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a micro-batch, or its scores as those of `Interactive`.

        In training, sums over images, float32 scalars: "loss", with the gradient; "cosine", the mean cosine
        similarity of the tokens of both embeddings; "count", the number of images.
        """
        if evaluate or protocol is not None:
            return super().forward(images, targets, image_keys, evaluate=evaluate, protocol=protocol)
        embeddings = self.model.embed(images, self.kept(image_keys, self.model.config), targets.sizes)
        if self.teacher.pixel_mean.device != images.device:
            self.teacher.to(images.device)
        with torch.no_grad():
            if self._cache is None or len(images) == 0:
                goal = self._computed(images, targets.sizes).float()
            else:
                goal = self._cache.embeddings(images, targets.sizes, self._computed)
        learned = embeddings[:, : self.model.config.channels].float()
        # Whether a token contains a part of the image.
        starts = (
            torch.arange(self.model.config.side, device=targets.sizes.device) * self.model.config.patch_size
        )
        rows, columns = (starts < targets.sizes[:, :, None]).unbind(1)
        inside = (rows[:, :, None] & columns[:, None, :]).float()
        weights = inside / inside.sum(dim=(1, 2), keepdim=True)
        errors = (learned - goal).square().mean(dim=1)
        similarity = functional.cosine_similarity(learned.detach(), goal, dim=1)
        return {
            "loss": (weights * errors).sum(),
            "cosine": (weights * similarity).sum(),
            "count": weights.new_tensor(float(len(images))),
        }

    def _computed(self, images: Tensor, sizes: Tensor) -> Tensor:
        """The teacher's embeddings: [B, channels, side, side]."""
        return self.teacher.embed(images, None, sizes)[:, : self.model.config.channels]
