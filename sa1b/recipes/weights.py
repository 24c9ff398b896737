"""Weights of SAM: a model from a run or a file, the teacher of a distillation, and the flags of caches."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from sa1b.arguments import Range, check_arguments, check_cache_flags, check_fields
from sa1b.console import counted
from sa1b.engine import weights
from sa1b.engine.ranks.parallel import available_memory
from sa1b.errors import Sa1bError, UsageError
from sa1b.grounding.alignment import GroundingRecipe, TextConfig
from sa1b.grounding.model import Grounding, is_grounding
from sa1b.sam.initial_weights import fit_weights
from sa1b.sam.low_rank import merged
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import WeightsError, config_of, read_weights, weights_digest
from sa1b.storage.protocols import protocol_of
from sa1b.stream.text import open_tokenizer


def find_weights(source: str | PathLike[str], scratch: Path | None = None) -> tuple[str, dict[str, Tensor]]:
    """The weights in a run, a checkpoint or a file, with low-rank changes added to the weights that they
    change; see `sa1b.engine.weights.find_weights`.
    """
    where, tensors = weights.find_weights(source, read_weights, scratch)
    return where, merged(tensors)


@check_arguments
def load_model(source: str | Path, device: torch.device | str = "cpu") -> Sam:
    """The model in a run, a checkpoint or a file of weights, ready for `sa1b.predict`.

    Args:
        source: the folder of a run (--out of `sa1b train`; its newest good checkpoint is taken), a
            checkpoint in it, or a .pth or .safetensors with the published names; or the URL of one of these.

    Raises:
        UsageError: the source is not a path, or the device is a GPU and torch finds none.
        CheckpointError: the file or folder does not exist, or the checkpoint is damaged.
        WeightsError: the file is damaged, or does not contain a SAM.
        OSError: the source cannot be read.
    """
    if not isinstance(source, str | PathLike):
        raise UsageError(f"source {source!r}: not a path; pass {weights.KINDS}")
    _check_device(device)
    where, tensors = find_weights(source)
    if is_grounding(tensors):
        raise WeightsError(f"{where}: a grounding model; load its run with sa1b.load_grounding")
    try:
        model = Sam(config_of(tensors))
        model.load_state_dict(tensors)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise WeightsError(
            f"{where}: not the weights of a SAM ({type(error).__name__}: {first}); pass {weights.KINDS}"
        ) from None
    return model.to(device).eval()


def _check_device(device: torch.device | str) -> None:
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r}: must be 'cpu', 'cuda' or 'cuda:N'") from None
    if target.type == "cuda" and (target.index or 0) >= (count := torch.cuda.device_count()):
        gpus = f"only {counted(count, 'GPU')}" if count else "no GPU"
        raise UsageError(f"device {str(device)!r}: torch finds {gpus}; pass device='cpu'")


@check_arguments
def load_grounding(source: str | PathLike[str], device: torch.device | str = "cpu") -> Grounding:
    """The model of a run with `--preset grounding`, ready for `sa1b.ground`.

    Args:
        source: the folder of a run (--out of `sa1b train`; its newest good checkpoint is taken), or a
            checkpoint in it. The sizes of the model are in the run's config.json.

    Raises:
        UsageError: the source is not the run of a grounding model.
        CheckpointError: the checkpoint is damaged, or there is none.
        OSError: the source cannot be read.
    """
    _check_device(device)
    path = Path(source)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    try:
        document = json.loads((run / "config.json").read_bytes())
        text, recipe = TextConfig(**document["text"]), GroundingRecipe(**document["recipe"])
        sizes, data = ModelConfig.saved({**document["model"], "kernels": "auto"}), document["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{source}: not the run of a grounding model ({type(error).__name__}: {error}); pass the --out "
            "of `sa1b train --preset grounding`"
        ) from None
    model = grounding_of(sizes, text, recipe, SimpleNamespace(**data))
    where, weights = find_weights(path)
    if not is_grounding(weights):
        raise UsageError(f"{where}: the weights of another model; pass the run of a grounding model")
    model.load_weights(weights)
    return model.to(device).eval()


def grounding_of(
    sizes: ModelConfig, text: TextConfig, recipe: GroundingRecipe, data: Any, capacity: int = 1
) -> Grounding:
    """The model of a run; `data`: its settings. UsageError: the number of tokens is not known."""
    vocabulary = 1 if data.text_width else text.vocabulary or open_tokenizer(data.tokenizer).vocabulary
    if vocabulary is None:
        raise UsageError(
            f"--data.tokenizer {data.tokenizer}: does not state its number of tokens; pass --text.vocabulary"
        )
    lengths = {"length": data.text_tokens, "vectors": data.text_width, "capacity": capacity}
    return Grounding(sizes, text, recipe, vocabulary=vocabulary, tokenizer=data.tokenizer, **lengths)


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

    def check(self) -> None:
        """UsageError names the flag of a setting that does not fit the others."""
        if not self.teacher:
            raise UsageError(
                "--distill.teacher: missing; pass the weights of a SAM: a run, a .safetensors or a .pth"
            )
        _check_cache("distill", self)


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

    def check(self, frozen: Collection[str], mode: str) -> None:
        """UsageError names the flag of a setting that does not fit the others."""
        if self.cache is not None and "image_encoder" not in frozen:
            raise UsageError(
                f"--embeddings.cache {self.cache}: the embeddings of a trained image encoder change in every "
                f"step, and --optim.freeze is {' '.join(frozen) or 'not given'}; pass --optim.freeze "
                "image_encoder"
            )
        if self.cache is not None and mode == "fsdp":
            raise UsageError(
                f"--embeddings.cache {self.cache}: needs the whole image encoder on each rank, not "
                f"--parallel.mode fsdp; pass --parallel.mode ddp"
            )
        _check_cache("embeddings", self)


def _check_cache(part: str, config: TeacherConfig | EmbeddingsConfig) -> None:
    check_cache_flags(f"--{part}.cache", config.cache, config.cache_bytes)
    check_fields(config, part)
    if protocol_of(config.cache or ""):
        raise UsageError(f"--{part}.cache {config.cache}: must be a folder on a local disk, not a URL")


def open_teacher(source: str, student: ModelConfig, scratch: Path | None) -> Sam:
    """The teacher with the student's image size; a model's name gives random weights. UsageError: no SAM."""
    weights = None if _is_name(source) else _weights(source, scratch)
    config = PRESETS[source] if weights is None else config_of(weights)
    if student.image_size % config.patch_size:
        raise UsageError(
            f"--model.image-size {student.image_size}: must be a multiple of the teacher's patch size "
            f"{config.patch_size}"
        )
    config = replace(config, image_size=student.image_size, compile_blocks=student.compile_blocks)
    teacher = Sam(config)
    if weights is not None and not teacher.pixel_mean.is_meta:
        teacher.load_state_dict(fit_weights(weights, config)[0])
    return teacher


def teacher_digest(source: str, scratch: Path | None) -> str:
    """A digest of names, shapes and values of the teacher's weights; raises the errors of `open_teacher`."""
    if _is_name(source):
        raise UsageError(
            f"--distill.teacher {source}: is the name of a model; to train, pass the file of its weights"
        )
    return weights_digest(_weights(source, scratch))[:16]


_LARGE = ("width", "depth", "channels", "image-size")  # sizes that decide how many weights there are


def check_memory(model: ModelConfig) -> None:
    """Refuse a model whose weights do not fit this machine; on the meta device, no weight takes memory."""
    if torch.get_default_device().type == "meta":
        return
    # Attention and MLP of each block, the neck's last convolution and the positions; the rest is small.
    numbers = model.depth * 12 * model.width**2 + 9 * model.channels**2 + model.side**2 * model.width
    needed, available = 4 * numbers, available_memory()
    if needed > available:
        sizes_of = (f"--model.{name} {getattr(model, name.replace('-', '_'))}" for name in _LARGE)
        raise UsageError(
            f"{', '.join(sizes_of)}: the weights take at least {needed:,} bytes, and {available:,.0f} are "
            "available; pass smaller sizes"
        )


def _is_name(source: str) -> bool:
    return source in PRESETS and not Path(source).exists()


def _weights(source: str, scratch: Path | None) -> dict[str, Tensor]:
    try:
        with torch.device("cpu"):  # a model that is built only for its sizes is on the meta device
            where, weights = find_weights(source, scratch)
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--distill.teacher: {error}") from None
    if is_grounding(weights):
        raise UsageError(f"--distill.teacher {where}: a grounding model has no mask decoder; pass a SAM")
    return weights
