"""The presets of `sa1b train`: settings of SAM models, of distilled ones and of grounding models."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
import tyro

from sa1b.arguments import Range, check_cache_flags, check_fields
from sa1b.engine.config import Config
from sa1b.engine.model import Scorer
from sa1b.engine.ranks.parallel import available_memory
from sa1b.engine.settings import CheckpointConfig, DataConfig, OptimConfig
from sa1b.errors import UsageError
from sa1b.grounding.alignment import GroundingRecipe, TextConfig
from sa1b.grounding.model import Grounding, GroundingScore
from sa1b.recipes.scorer import ClickScorer
from sa1b.recipes.weights import teacher_weights
from sa1b.sam.distillation import Distillation
from sa1b.sam.embedding_cache import open_cache
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS as MODELS
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import config_of, fit_weights, weights_digest
from sa1b.sam.recipe import Recipe
from sa1b.storage.protocols import protocol_of

Preset = Literal[
    "vit_b", "vit_l", "vit_h", "sam2", "vit_t", "tiny_vit", "repvit", "tiny",
    "distill", "distill_tiny_vit", "distill_repvit", "distill_tiny", "grounding", "grounding_tiny",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """The teacher of a distillation.

    Attributes:
        teacher: Weights of the teacher, a SAM: a published file (.safetensors, .pth), a checkpoint, the
            folder of a run, or the URL of one of these. For --dry-run and `sa1b plan train`, the name of a
            model is enough: vit_b, vit_l, vit_h.
        cache: Folder on a local disk that keeps the teacher's embeddings, rounded to float16, so that later
            epochs read them; for subsets of some ten thousand images, 2 MB each. By default the teacher
            computes the embedding of every image in every epoch.
        cache_bytes: Limit of the cache on each machine, in bytes; required with a cache. When it is reached,
            further embeddings are computed and not kept.
        digest: Digest of the teacher's weights, which is recorded in checkpoints.
    """

    teacher: str = ""
    cache: str | None = None
    cache_bytes: Annotated[int | None, Range(1)] = None
    digest: Annotated[str, tyro.conf.Suppress] = ""


@dataclass(frozen=True, slots=True)
class EmbeddingsConfig:
    """The embeddings of an image encoder that is not trained (--optim.freeze image_encoder).

    Attributes:
        cache: Folder on a local disk that keeps the embeddings, rounded to float16, so that later epochs and
            runs read them: 2 MB for each image with the published models, twice that with --data.flip. By
            default the image encoder runs on every image in every epoch.
        cache_bytes: Limit of the cache on each machine, in bytes; required with a cache. When it is reached,
            further embeddings are computed and not kept.
    """

    cache: str | None = None
    cache_bytes: Annotated[int | None, Range(1)] = None


def _check_cache(part: str, config: TeacherConfig | EmbeddingsConfig) -> None:
    check_cache_flags(f"--{part}.cache", config.cache, config.cache_bytes)
    check_fields(config, part)
    if protocol_of(config.cache or ""):
        raise UsageError(f"--{part}.cache {config.cache}: must be a folder on a local disk, not a URL")


def _check_memory(model: ModelConfig) -> None:
    """Refuse a model whose weights do not fit this machine: the system would kill the process silently."""
    # Attention and MLP of each block, the neck's last convolution and the positions; the rest is small.
    needed = 4 * (12 * model.depth * model.width**2 + 9 * model.channels**2 + model.side**2 * model.width)
    if torch.get_default_device().type != "meta" and needed > (available := available_memory()):
        raise UsageError(
            f"--model.width {model.width}, --model.depth {model.depth}, --model.channels {model.channels}, "
            f"--model.image-size {model.image_size}: the weights take at least {needed:,} bytes, and "
            f"{available:,.0f} are available; pass smaller sizes"
        )


class OfSam(Config):
    """What the settings of all presets have: the sizes of an image encoder, and SAM's scores by default."""

    __slots__ = ()
    preset: Preset
    model: ModelConfig

    @property
    def image_size(self) -> int:
        """Size of the padded square that the model takes, pixels."""
        return self.model.image_size

    def scorer(self, device: torch.device) -> Scorer:
        return ClickScorer(self.evaluation.protocol == "sam", device)

    def check(self) -> None:
        Config.check(self)
        low, rank = self.image_size // 4, self.model.lora_rank
        if rank and not isinstance(self, SamConfig):
            raise UsageError(f"--model.lora-rank {rank}: is for presets of SAM, not {self.preset}; drop it")
        if self.data.masks == 0 and not isinstance(self, DistillConfig):
            raise UsageError(
                "--data.masks 0: leaves this model nothing to learn; pass at least 1, or --preset distill"
            )
        if self.data.target_size is not None and self.data.target_size < low:
            raise UsageError(
                f"--data.target-size {self.data.target_size}: must be at least the {low} pixels of the "
                f"predicted masks (--model.image-size {self.image_size} / 4)"
            )


@dataclass(frozen=True, slots=True)
class SamConfig(OfSam):
    """A run that trains SAM.

    Attributes:
        preset: Set of defaults for all other flags. tiny: learns in minutes on two CPU cores. vit_b,
            vit_l, vit_h: the published models with the recipe of their paper. sam2: vit_b with the recipe of
            SAM 2's first stage, which is trained on SA-1B. vit_t, tiny_vit, repvit: small models, to be
            trained after distill, distill_tiny_vit, distill_repvit; the last two need the package timm.
            distill, distill_...: the image encoder of a small model learns the embeddings of a
            teacher; `--preset distill --help` shows their flags. grounding, grounding_tiny: SAM's image
            encoder and a text encoder, which find what a phrase describes; `--preset grounding --help`.
        model: Sizes of the model.
        recipe: Prompts and losses.
        embeddings: Those of an image encoder that is not trained.
    """

    preset: Preset = "vit_b"
    model: ModelConfig = field(default_factory=ModelConfig)
    recipe: Recipe = field(default_factory=Recipe)
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)

    def build(self) -> Interactive:
        """The model together with the simulated user of interactive training."""
        _check_memory(self.model)
        cache, limit = self.embeddings.cache, self.embeddings.cache_bytes
        opened = None
        if cache is not None and limit is not None and not self.evaluate_only:
            opened = partial(open_cache, "--embeddings.cache", cache, limit)
        return Interactive(Sam(self.model), self.recipe, opened)

    def check(self) -> None:
        OfSam.check(self)
        _check_cache("embeddings", self.embeddings)
        cache, frozen = self.embeddings.cache, self.optim.freeze
        if cache is not None and "image_encoder" not in frozen:
            raise UsageError(
                f"--embeddings.cache {cache}: the embeddings of a trained image encoder change in each step, "
                f"and --optim.freeze is {' '.join(frozen) or 'not given'}; pass --optim.freeze image_encoder"
            )
        if cache is not None and self.parallel.mode == "fsdp":
            raise UsageError(
                f"--embeddings.cache {cache}: needs the whole image encoder on each rank, not "
                "--parallel.mode fsdp; pass --parallel.mode ddp"
            )
        if self.model.lora_rank and self.init is None and not (self.dry_run or self.evaluate_only):
            raise UsageError(
                f"--model.lora-rank {self.model.lora_rank}: changes weights that are trained already; pass "
                "them as --init"
            )


@dataclass(frozen=True, slots=True)
class DistillConfig(OfSam):
    """A run in which the image encoder of a small SAM, the student, learns the embeddings of a larger one.

    Attributes:
        preset: Set of defaults for all other flags. distill: a student with the sizes of vit_t.
            distill_tiny_vit, distill_repvit: students with TinyViT-5M and RepViT-M1.0, which need the
            package timm. distill_tiny: a student for the teacher that `--preset tiny` trains.
        distill: The teacher, and a cache of its embeddings.
        model: Sizes of the student. Image size, patch size and channels are also those of the teacher.
        recipe: Prompts of evaluations.
    """

    preset: Preset = "distill"
    distill: TeacherConfig = field(default_factory=TeacherConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    recipe: Recipe = field(default_factory=Recipe)

    def build(self) -> Distillation:
        """Student and teacher, which has the student's image size; a model's name gives random weights."""
        _check_memory(self.model)
        student = Sam(self.model)  # first, so that its initial weights do not depend on the teacher's sizes
        weights = teacher_weights(self.distill.teacher, self.scratch)
        sizes = MODELS[self.distill.teacher] if weights is None else config_of(weights)
        sizes = replace(sizes, image_size=self.image_size, compile_blocks=self.model.compile_blocks)
        teacher = Sam(sizes)
        if weights is not None and not teacher.pixel_mean.is_meta:
            teacher.load_state_dict(fit_weights(weights, sizes)[0])
        cache, limit, digest = self.distill.cache, self.distill.cache_bytes, self.distill.digest
        opened = None
        if cache is not None and limit is not None and digest and not self.evaluate_only:
            opened = open_cache("--distill.cache", cache, limit, digest)  # no digest: a dry run
        return Distillation(student, self.recipe, teacher, opened)

    def resolved(self) -> "DistillConfig":
        """The settings with the digest of the teacher; see `Config.resolved`."""
        if self.dry_run:
            return self
        weights = teacher_weights(self.distill.teacher, self.scratch)
        if weights is None:
            raise UsageError(
                f"--distill.teacher {self.distill.teacher}: is the name of a model; to train, pass the file "
                "of its weights"
            )
        return replace(self, distill=replace(self.distill, digest=weights_digest(weights)[:16]))

    def check(self) -> None:
        OfSam.check(self)
        if not self.distill.teacher:
            raise UsageError(
                "--distill.teacher: missing; pass the weights of a SAM: a run, a .safetensors or a .pth"
            )
        _check_cache("distill", self.distill)


@dataclass(frozen=True, slots=True)
class GroundingConfig(OfSam):
    """A run that trains a grounding model.

    Attributes:
        preset: Set of defaults for all other flags. grounding: the image encoder of vit_b. grounding_tiny:
            learns in minutes on two CPU cores.
        model: Sizes of the image encoder.
        text: Sizes of the text encoder.
        recipe: Losses.
    """

    reads_text: ClassVar[bool] = True

    preset: Preset = "grounding"
    model: ModelConfig = field(default_factory=ModelConfig)
    text: TextConfig = field(default_factory=TextConfig)
    recipe: GroundingRecipe = field(default_factory=GroundingRecipe)

    def build(self) -> Grounding:
        """The model. In a process group, its capacity is that of the group's micro-batches."""
        _check_memory(self.model)
        data, world_size = self.data, dist.get_world_size() if dist.is_initialized() else 1
        images = data.global_batch if self.evaluate_only else self.micro_batches(world_size)[0]
        return Grounding(
            self.model, self.text, self.recipe, tokenizer=data.tokenizer, length=data.text_tokens,
            vectors=data.text_width, capacity=images * data.masks,
        )  # fmt: skip

    def scorer(self, device: torch.device) -> GroundingScore:
        return GroundingScore(device)

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """See `Config.micro_batches`; several micro-batches would change the contrastive loss."""
        size, count = Config.micro_batches(self, world_size)
        if count > 1 and self.recipe.negatives == "step":
            raise UsageError(
                f"--data.micro-batch {size}: the {count} micro-batches of a step would each compare only "
                "their own regions and phrases, which is another loss; drop it and use more ranks, or pass "
                "--recipe.negatives micro-batch to train with that loss"
            )
        return size, count

    def check(self) -> None:
        OfSam.check(self)
        if self.evaluation.coco is not None:
            raise UsageError("--evaluation.coco: has no phrases for a grounding model; use --evaluation.view")
        if self.data.text is None:
            raise UsageError(
                "--data.text: missing; pass a table with a phrase for each mask, such as the phrases.parquet "
                "of `sa1b synthesize --phrases`"
            )


def _published(model: Preset, batch: int, drop_path: float, **optim: Any) -> SamConfig:
    """A model of the paper with its batch, learning rate, schedule, layer decay and drop path."""
    return SamConfig(
        preset=model,
        data=DataConfig(global_batch=batch),
        model=replace(MODELS[model], drop_path=drop_path),
        optim=OptimConfig(reference_batch=batch, **optim),
    )


def _cosine(batch: int, lr: float, steps: int, warmup: int, **more: Any) -> OptimConfig:
    given: dict[str, Any] = {"schedule": "cosine", "layer_decay": 1.0} | more
    return OptimConfig(lr=lr, reference_batch=batch, steps=steps, warmup=warmup, **given)


def _tiny(lr: float, steps: int, masks: int = 16) -> dict[str, Any]:
    """Settings of the presets that learn in minutes on two CPU cores."""
    return {
        "data": DataConfig(global_batch=8, masks=masks, flip=0.5),
        "optim": _cosine(8, lr, steps, 20, weight_decay=0.05, min_lr_ratio=0.05),
        "checkpoint": CheckpointConfig(every=100),
    }


# vit_b, vit_l, vit_h: "Segment Anything" (Kirillov et al. 2023), appendix A, "Training recipe". ViT-H at
# batch 256 for 90,000 steps; ViT-B and ViT-L at batch 128 for 180,000, with milestones at the same fractions
# of the run. A preset cannot set two parts of the recipe: initial weights of MAE (--init), and no masks of
# more than 90 % of an image (a view with "area_fraction < 0.9"). The paper does not specify the limit of the
# gradient norm (here 1), the mean over the iterations of a mask, and losses at the decoder's resolution.
#
# sam2: "SAM 2" (Ravi et al. 2024), appendix "Training", first stage on SA-1B, with the values of the base
# model, and prompts and losses of its published training code. docs/recipes.md lists the deviations.
#
# vit_t, tiny_vit, repvit: not published. SAM's recipe without drop path and layer decay, for distillation.
#
# tiny: not published. The recipe is SAM's, shortened until it learns in minutes. The model compares pixels
# with the clicked pixels (sa1b.sam.similarity); SAM has to learn this. A weighted cross entropy replaces the
# focal loss: from random weights, a model with the focal loss predicts only background for some hundred
# steps, because most pixels are background.
_LONG: dict[str, Any] = {"steps": 180_000, "milestones": (120_000, 173_332)}
_SMALL: dict[str, Any] = {
    "data": DataConfig(global_batch=64),
    "optim": _cosine(64, 2e-4, 90_000, 250, weight_decay=0.1),
}
_TINY_RECIPE = Recipe(
    box_probability=0.25, clicks=1, unprompted=0, focal_weight=1, focal_alpha=0.75, focal_gamma=0,
    iou_weight=2, iou_masks="all", all_masks_share=0.5,
)  # fmt: skip
SAM_PRESETS: dict[str, SamConfig] = {
    "vit_b": _published("vit_b", 128, 0.6, lr=8e-4, layer_decay=0.6, **_LONG),
    "vit_l": _published("vit_l", 128, 0.4, lr=4e-4, layer_decay=0.8, **_LONG),
    "vit_h": _published("vit_h", 256, 0.4, lr=8e-4, layer_decay=0.8),
    "sam2": SamConfig(
        preset="sam2",
        data=DataConfig(global_batch=256, masks=64, flip=0.5),
        model=replace(MODELS["vit_b"], drop_path=0.2),
        recipe=Recipe(
            clicks=7, unprompted=0, iou_loss="absolute", iou_masks="all", iteration_loss="sum",
            feedback_gradient=True, box_noise_kind="uniform", box_masks="one",
        ),
        optim=OptimConfig(
            lr=4e-4, reference_batch=256, schedule="rsqrt", steps=90_000, warmup=1_000, timescale=1_000,
            cooldown=5_000, layer_decay=0.9, weight_decay=0.1, grad_clip=0.1,
        ),
    ),
    "vit_t": SamConfig(preset="vit_t", model=MODELS["vit_t"], **_SMALL),
    "tiny": SamConfig(preset="tiny", model=MODELS["tiny"], recipe=_TINY_RECIPE, **_tiny(3e-3, 200)),
    "tiny_vit": SamConfig(preset="tiny_vit", model=MODELS["tiny_vit"], **_SMALL),
    "repvit": SamConfig(preset="repvit", model=MODELS["repvit"], **_SMALL),
}  # fmt: skip

# distill, distill_...: not published. Training reads no masks. The student starts from random weights,
# therefore there is no layer decay.
_STUDENT: dict[str, Any] = {
    "data": DataConfig(global_batch=64, masks=0, flip=0.5),
    "optim": _cosine(64, 1e-3, 90_000, 1_000, weight_decay=0.05),
}
DISTILL_PRESETS: dict[str, DistillConfig] = {
    "distill": DistillConfig(preset="distill", model=MODELS["vit_t"], **_STUDENT),
    "distill_tiny": DistillConfig(
        preset="distill_tiny",
        model=replace(MODELS["tiny"], width=64, heads=2),
        recipe=_TINY_RECIPE,
        **_tiny(3e-3, 200, masks=0),
    ),
    "distill_tiny_vit": DistillConfig(preset="distill_tiny_vit", model=MODELS["tiny_vit"], **_STUDENT),
    "distill_repvit": DistillConfig(preset="distill_repvit", model=MODELS["repvit"], **_STUDENT),
}

# grounding: not published; sizes of vit_b, the losses of the recipe, and the optimizer of SAM's recipe.
# grounding_tiny: the same for the image sizes of `tiny`.
GROUNDING_PRESETS: dict[str, GroundingConfig] = {
    "grounding": GroundingConfig(
        data=DataConfig(global_batch=64, masks=32, flip=0.5),
        model=replace(MODELS["vit_b"], drop_path=0.1),
        optim=_cosine(64, 4e-4, 90_000, 1_000, layer_decay=0.8, weight_decay=0.1),
    ),
    "grounding_tiny": GroundingConfig(
        preset="grounding_tiny",
        model=replace(MODELS["tiny"], pixel_features=0, channels=64),
        text=TextConfig(width=128, depth=2),
        recipe=GroundingRecipe(features=64),
        **_tiny(1e-3, 400),
    ),
}

PRESETS: dict[str, SamConfig | DistillConfig | GroundingConfig] = (
    SAM_PRESETS | DISTILL_PRESETS | GROUNDING_PRESETS
)
