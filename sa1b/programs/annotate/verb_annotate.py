"""Find the masks of images with a trained model and write them in SA-1B's form.

Example: sa1b annotate photos --weights run --out labelled
         sa1b annotate photos more.jpg --weights sam_vit_b_01ec64.pth --out labelled --device cuda
         sa1b annotate --shards shards --weights run --name round2 --view unlabelled --existing hide

The output has a pair of image and annotation file for each image: `sa1b reshard labelled --out shards` makes
shards of it. With --shards and --name, the result is a layer of the dataset directory. To resume an
interrupted run, or to add images, run the same command again: complete images are skipped. Exit code 0: all
images are annotated; 2: nothing was annotated, or the disk failed; 3: annotated, and an image was refused;
130: interrupted.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range, share_of
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.shards import MAX_IMAGE_PIXELS, MAX_STORED_PIXELS
from sa1b.sources.path_arguments import check_here, check_writable, takes_endpoint

TOUR = (120, "Training", "label your own images", "sa1b annotate photos --weights run --out labelled")

if TYPE_CHECKING:
    import torch

    from sa1b.programs.annotate.annotate import ImageShare

_POLL_SECONDS = 0.2


@takes_endpoint
def main(
    images: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGES...", help_behavior_hint="")],
    /,
    *,
    weights: str,
    out: Path | None = None,
    shards: Annotated[str | None, tyro.conf.arg(metavar="ROOT")] = None,
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    view: str | None = None,
    existing: Literal["keep", "hide"] = "keep",
    on: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    points_per_side: int = 32,
    points_per_batch: int = 64,
    min_predicted_iou: float = 0.88,
    min_stability: float = 0.95,
    stability_offset: float = 1.0,
    max_box_iou: float = 0.7,
    crop_layers: int = 0,
    crop_overlap: float = 512 / 1500,
    crop_points_divisor: int = 1,
    crop_max_box_iou: float = 0.7,
    image_ids: Annotated[str, tyro.conf.arg(metavar="content|name|N")] = "content",
    quality: Annotated[int | None, Range(1, 100)] = None,
    max_pixels: Annotated[int, Range(1, MAX_STORED_PIXELS)] = MAX_IMAGE_PIXELS,
    device: str | None = None,
    precision: Literal["fp32", "tf32", "bf16"] = "fp32",
    part: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Find the masks of images with a trained model and write them in SA-1B's form.

    A grid of points covers each image, and the model predicts three masks for each point. Masks with a low
    predicted IoU or a low stability score are left out, and of masks with overlapping boxes only the best one
    is kept. The defaults are those of the published automatic mask generator.

    Args:
        images: Image files, folders of images at any depth, and dataset directories (folders or URLs).
        weights: A run folder, a checkpoint, or a .pth or .safetensors file with SAM weights; or the URL of
            one of these.
        out: Folder for the pairs; created if it is missing. The JPEGs have their original bytes. With
            --shards: folder for the annotations until the layer is complete, by default one in ROOT.
        shards: Annotate the images of this dataset directory (a folder or a URL) instead of IMAGES. The masks
            become the layer --name of it, written by the process after which no image is missing.
        name: With --shards: name of the new layer.
        view: With --shards: only the images of this view.
        existing: With --shards: what happens to the masks that the images have. keep: they stay. hide: the
            images have only the new masks in the layer.
        on: With --shards: name of the layer that the new one builds on.
        points_per_side: Points along each side of the image: 32 make 1024 points.
        points_per_batch: Points that are decoded together. A larger number needs more memory; the masks are
            the same.
        min_predicted_iou: Keep masks whose IoU, as predicted by the model, is above this number. A model that
            was trained for a short time needs a lower number than SAM.
        min_stability: Keep masks whose stability score is at least this number: the IoU of the masks at a
            higher and a lower threshold.
        stability_offset: Distance of these thresholds from the usual one, in logits.
        max_box_iou: If the boxes of masks have a higher IoU, only the mask with the highest predicted IoU is
            kept.
        crop_layers: Also use crops of the image, which finds smaller masks: layer 1 has 2 x 2 crops, layer 2
            has 4 x 4. Each crop costs as much as an image.
        crop_overlap: Overlap of the crops of layer 1, as a part of the shorter side of the image.
        crop_points_divisor: Each layer of crops has the points per side of the layer before, divided by this
            number.
        crop_max_box_iou: As --max-box-iou, between masks of different crops: those of smaller crops are kept.
        image_ids: Where image ids come from. content: a hash of the file, from 2**52 on, which depends
            neither on the name nor on other images. name: the number in sa_<id>.jpg. N: consecutive numbers
            from N on, in the order of the images: those that are added later must be the last ones. Images of
            dataset directories keep their ids.
        quality: Convert images in other formats to JPEGs of this quality, 1 to 100. By default they are
            refused.
        max_pixels: Largest accepted image in pixels, at most 268435456. `sa1b reshard` needs the same flag.
        device: cpu, cuda or cuda:N. By default the GPU of this rank if there is one.
        precision: Number format of the matrix products.
        part: Annotate only part I of N of the images, I from 0 to N - 1; the parts share --out.
            Under torchrun, the ranks share the images, or those of the part.
        json_output: Print the summary as JSON, without progress.
    """
    check_here("--out", out)
    if shards is not None:
        if name is None:
            raise UsageError("--name: missing; choose a name for the layer of --shards")
        if images:
            raise UsageError(f"{images[0]}: not with --shards, whose images are annotated; omit one of them")
        if (image_ids, quality) != ("content", None):
            raise UsageError("--image-ids and --quality: not with --shards; omit them")
        check_writable(f"annotate writes a layer of {shards}", shards)
    elif name or view or on or existing != "keep":
        raise UsageError("--name, --view, --existing and --on: only for a layer; pass --shards ROOT")
    elif out is None:
        raise UsageError("--out: missing; name a folder for the annotations, or pass --shards and --name")
    elif not images:
        raise UsageError(
            f"--out {out}: no IMAGES to annotate; name image files, or folders that contain them"
        )
    with loading():
        from sa1b.programs.annotate.annotate import annotate
        from sa1b.programs.annotate.layer import open_target
        from sa1b.recipes.weights import load_model
        from sa1b.sam.mask_generator import GeneratorConfig
    try:
        config = GeneratorConfig(
            points_per_side=points_per_side,
            points_per_batch=points_per_batch,
            min_predicted_iou=min_predicted_iou,
            min_stability=min_stability,
            stability_offset=stability_offset,
            max_box_iou=max_box_iou,
            crop_layers=crop_layers,
            crop_overlap=crop_overlap,
            crop_points_divisor=crop_points_divisor,
            crop_max_box_iou=crop_max_box_iou,
        )
    except ValueError as error:
        name, _, reason = str(error).partition("=")
        message = f"--{name.replace('_', '-')} {reason.replace(' must', ': must', 1)}"
        raise UsageError(message) from None
    layer = None
    if shards is not None and name is not None:
        layer = open_target(shards, name, view=view, existing=existing, on=on, out=out)
    share, rank, ranks = _part(part)
    where = _device(device)
    summary = annotate(
        images,
        load_model(weights, where),
        out or Path(),
        config,
        layer=layer,
        image_ids=image_ids,
        quality=quality,
        max_pixels=max_pixels,
        precision=precision,
        part=share,
        weights=weights,
        quiet=json_output or rank > 0,
    )
    present(summary, json_output)
    _wait_for_ranks(ranks)
    return summary.exit_code()


def _wait_for_ranks(count: int) -> None:
    """Wait until all ranks are finished: torchrun ends the others when one exits with a code other than 0."""
    environment = os.environ
    if count == 1 or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # not started by torchrun
        return
    from torch._C._distributed_c10d import TCPStore

    key = f"sa1b-annotate-finished-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        done = store.add(key, 1)
        while done < count:
            time.sleep(_POLL_SECONDS)
            done = store.add(key, 0)
    except RuntimeError:  # torchrun has ended, so no process has to be waited for
        return


def _part(text: str | None) -> "tuple[ImageShare, int, int]":
    """The images of this process, its rank and the number of ranks: under torchrun, they share --part."""
    from sa1b.programs.annotate.annotate import ImageShare
    from sa1b.stream.plan import process_rank

    try:
        index, count = share_of("--part", text) or (0, 1)
        rank, ranks = process_rank()
        return ImageShare(index + count * rank, count * ranks), rank, ranks
    except ValueError as error:
        raise UsageError(f"{error}") from None


def _device(name: str | None) -> "torch.device":
    import torch

    if name is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", index) if index < torch.cuda.device_count() else torch.device("cpu")
    try:
        device = torch.device(name)
        is_supported = device.type in ("cpu", "cuda")
    except RuntimeError:
        is_supported = False
    if not is_supported:
        raise UsageError(f"--device {name}: must be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this process sees {torch.cuda.device_count()} GPUs; pass cpu")
    return device
