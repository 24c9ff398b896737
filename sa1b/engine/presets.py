"""The presets of `sa1b train`: settings of SAM models."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from sa1b.engine.checkpoint.checkpoints import CheckpointConfig
from sa1b.engine.config import Config
from sa1b.engine.feed import DataConfig
from sa1b.engine.optim import OptimConfig
from sa1b.errors import UsageError
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe

Preset = Literal["vit_b", "vit_l", "vit_h", "sam2", "tiny"]


@dataclass(frozen=True, slots=True)
class SamConfig(Config):
    """A run that trains SAM.

    Attributes:
        preset: Set of defaults for all other flags. tiny: learns in minutes on two CPU cores. vit_b,
            vit_l, vit_h: the published models with the recipe of their paper. sam2: vit_b with the recipe of
            SAM 2's first stage, which is trained on SA-1B.
        model: Sizes of the model.
        recipe: Prompts and losses.
    """

    evaluates: ClassVar[bool] = True

    preset: Preset = "vit_b"
    model: ModelConfig = field(default_factory=ModelConfig)
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def image_size(self) -> int:
        """Size of the padded square that the model takes, pixels."""
        return self.model.image_size

    def build(self) -> Interactive:
        """The model together with the simulated user of interactive training."""
        return Interactive(Sam(self.model), self.recipe)

    def check(self) -> None:
        """See `Config.check`."""
        Config.check(self)
        if self.data.masks == 0:
            raise UsageError("--data.masks 0: leaves SAM nothing to learn; pass at least 1")
        low = self.image_size // 4
        if self.data.target_size is not None and self.data.target_size < low:
            raise UsageError(
                f"--data.target-size {self.data.target_size}: must be at least the {low} pixels of the "
                f"decoder's masks (--model.image-size {self.image_size} / 4)"
            )


def _published(model: Preset, **recipe: Any) -> SamConfig:
    """A model of the paper with its batch, learning rate, schedule, layer decay and drop path."""
    drop_path, batch = recipe.pop("drop_path"), recipe["reference_batch"]
    return SamConfig(
        preset=model,
        data=DataConfig(global_batch=batch),
        model=replace(MODELS[model], drop_path=drop_path),
        optim=OptimConfig(**recipe),
    )


# vit_b, vit_l, vit_h: "Segment Anything" (Kirillov et al. 2023), appendix A, "Training recipe". ViT-H at
# batch 256 for 90,000 steps; ViT-B and ViT-L at batch 128 for 180,000, with milestones at the same fractions
# of the run. A preset cannot set two parts of the recipe: initial weights of MAE (--init), and no masks of
# more than 90 % of an image (a view with "area_fraction < 0.9"). The paper does not specify the limit of the
# gradient norm (here 1), the mean over the iterations of a mask, and losses at the decoder's resolution.
#
# sam2: "SAM 2" (Ravi et al. 2024), appendix "Training", first stage on SA-1B, with the values of the base
# model. Deviations: the image encoder is SAM's ViT-B, not Hiera-B+; images are padded to the square, not
# stretched; there is no head for occlusion and no loss for it; the predicted IoU has no sigmoid, for
# compatibility of exported weights with the published SAM; the same view as above excludes masks above 90 %.
#
# tiny: not published. The recipe is SAM's, shortened until it learns in minutes. The model compares pixels
# with the clicked pixels (sa1b.sam.similarity); SAM has to learn this.
PRESETS: dict[str, SamConfig] = {
    "vit_b": _published(
        "vit_b", lr=8e-4, reference_batch=128, layer_decay=0.6, drop_path=0.6, steps=180_000,
        milestones=(120_000, 173_332),
    ),
    "vit_l": _published(
        "vit_l", lr=4e-4, reference_batch=128, layer_decay=0.8, drop_path=0.4, steps=180_000,
        milestones=(120_000, 173_332),
    ),
    "vit_h": _published("vit_h", lr=8e-4, reference_batch=256, layer_decay=0.8, drop_path=0.4),
    "sam2": SamConfig(
        preset="sam2",
        data=DataConfig(global_batch=256, masks=64, flip=0.5),
        model=replace(MODELS["vit_b"], drop_path=0.2),
        recipe=Recipe(
            clicks=7, unprompted=0, iou_loss="absolute", iou_masks="all", iteration_loss="sum",
            feedback_gradient=True,
        ),
        optim=OptimConfig(
            lr=4e-4, reference_batch=256, schedule="rsqrt", steps=90_000, warmup=1_000, timescale=1_000,
            cooldown=5_000, layer_decay=0.9, weight_decay=0.1, grad_clip=0.1,
        ),
    ),
    "tiny": SamConfig(
        preset="tiny",
        data=DataConfig(global_batch=8, masks=16, flip=0.5),
        model=MODELS["tiny"],
        # A weighted cross entropy instead of the focal loss. From random weights, a model with the focal loss
        # predicts only background for some hundred steps, because most pixels are background.
        recipe=Recipe(
            box_probability=0.25, clicks=1, unprompted=0, focal_weight=1, focal_alpha=0.75, focal_gamma=0,
            iou_weight=2, iou_masks="all", all_masks_share=0.5,
        ),
        optim=OptimConfig(
            lr=3e-3, reference_batch=8, schedule="cosine", steps=200, warmup=20, layer_decay=1.0,
            weight_decay=0.05, min_lr_ratio=0.05,
        ),
        checkpoint=CheckpointConfig(every=100),
    ),
}  # fmt: skip
