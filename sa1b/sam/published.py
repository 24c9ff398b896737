"""Files of weights with the published names: reading, writing, and fitting to the sizes of a model.

A `.pth` is a plain dictionary from names to tensors, as published with "Segment Anything" (2023). It is a
pickle in a zip archive; this module unpickles only tensors. A `.safetensors` has the same names without a
pickle. Loaders of these formats do not detect flipped bits. This module verifies the checksums of zip
archives, and writes a digest into each `.safetensors`.

Training starts from a SAM, also of another image size, or from a plain ViT for the image encoder, such as
the published MAE ViT-B, ViT-L and ViT-H (He et al., "Masked Autoencoders Are Scalable Vision Learners",
2022), the initial weights of the published SAM. Position embeddings are resized as in ViTDet's code (Li et
al. 2022): absolute ones with bicubic, relative ones with linear interpolation; kernels of another patch size
(ViT-H has 14 pixels) with bicubic interpolation.
"""

import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from sa1b.errors import Sa1bError, UsageError
from sa1b.sam.low_rank import merged
from sa1b.sam.model import PATCH_SIZE, PRESETS, ModelConfig, Sam
from sa1b.storage.atomic import commit, flush, naming_final

FORMATS = (".pth", ".safetensors")
_SIZES = (
    "width", "depth", "heads", "patch_size", "channels", "image_size", "window", "global_blocks",
    "pixel_features", "backbone",
)  # fmt: skip
_OF_BLOCKS = ("heads", "global_blocks", "window")  # sizes that have no meaning without blocks
_DIGEST = "sa1b_sha256"
PUBLISHED = {
    "sam_vit_b_01ec64.pth": "vit_b",
    "sam_vit_l_0b3195.pth": "vit_l",
    "sam_vit_h_4b8939.pth": "vit_h",
}  # name of a file -> preset; the last six characters of a name are the first of the file's MD5
_ENCODER = "image_encoder."
_POSITIONS, _KERNEL = f"{_ENCODER}pos_embed", f"{_ENCODER}patch_embed.proj.weight"
_OF_VIT = re.compile(
    r"pos_embed|patch_embed\.proj\.|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc[12])\."
)
_PASS = "pass a file with the published names"
_AGAIN = "download or write it again"


class WeightsError(Sa1bError):
    """A file that does not contain the weights of a SAM; the message names the file and its contents."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file, float32, on the CPU; runs no code of it. WeightsError: it is not a SAM's."""
    tensors = read_tensors(path)
    check_weights(str(path), tensors)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file or in its entry "model", float32, on the CPU; runs no code of it.

    WeightsError: damaged, or no such table; or a published file that is not there. FileNotFoundError: another
    file that is not there.
    """
    if path.name in PUBLISHED and not path.exists():
        raise WeightsError(
            f"{path}: no such file; download {path.name} from the model checkpoints of "
            "https://github.com/facebookresearch/segment-anything and pass its path, with --preset "
            f"{PUBLISHED[path.name]} to train or evaluate; the page Evaluation has the scores to expect"
        )
    with path.open("rb") as file:
        start = file.read(16)
    is_safetensors = start[7:9] == b"\0{"  # the length of the header, below 2**56, and its first byte
    try:
        if is_safetensors:
            with safe_open(path, framework="pt") as opened:
                names, about = opened.keys(), opened.metadata() or {}
                loaded: Any = {name: opened.get_tensor(name) for name in names}
            is_whole = about.get(_DIGEST) in (None, weights_digest(loaded))
        else:
            is_whole = not zipfile.is_zipfile(path)
            if not is_whole:
                with zipfile.ZipFile(path) as archive:
                    is_whole = archive.testzip() is None
            with warnings.catch_warnings(action="ignore"):  # torch warns of code, which it refuses
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        what = f"damaged, or holds objects other than tensors ({type(error).__name__}); {_AGAIN}"
        if start and not (is_safetensors or start.startswith((b"PK", b"\x80"))):  # a zip archive, a pickle
            what = f"not a file of weights, it begins with {start!r}; pass a .pth or .safetensors"
        raise WeightsError(f"{path}: {what}") from None
    if not is_whole:
        raise WeightsError(f"{path}: damaged, its bytes are not those that were written; {_AGAIN}")
    if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):
        loaded = loaded["model"]  # MAE and many training codes save weights in this entry
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path}: holds a {type(loaded).__name__}, not a dictionary of tensors; {_PASS}")
    for name, tensor in loaded.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise WeightsError(
                f"{path}: not a plain dictionary of tensors, {name!r} is a {type(tensor).__name__}; "
                "if one entry contains the weights, save that entry alone with torch.save"
            )
        if not (tensor.is_floating_point() or name.endswith(".num_batches_tracked")):
            raise WeightsError(f"{path}: not a SAM: {name} is {tensor.dtype}; {_PASS}")
    return {name: tensor.to(torch.float32) for name, tensor in loaded.items()}


def check_weights(where: str, weights: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if names and shapes of tensors are not those of a SAM of any size."""
    if (sentence := misfit(weights)) is not None:
        raise WeightsError(f"{where}: {sentence}; {_PASS}")


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights atomically, in the format of the suffix. UsageError: another one. OSError: the path."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: must end with .pth or .safetensors, the formats that can be written")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    last = {tensor.data_ptr(): name for name, tensor in whole.items()}
    for name, tensor in whole.items():
        if tensor.untyped_storage().nbytes() > tensor.nbytes or last[tensor.data_ptr()] != name:
            whole[name] = tensor.clone()  # not the larger tensor of which it is a part, nor one of two names
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            naming_final(path),
            TemporaryDirectory(prefix=".", suffix=".partial", dir=path.parent) as folder,
        ):
            file = Path(folder, path.name)
            file.touch()
            mode = file.stat().st_mode  # by the umask; safetensors makes files for their owner only
            if path.suffix == ".pth":
                torch.save(whole, file)
            else:
                save_file(whole, file, {"format": "pt", _DIGEST: weights_digest(whole)})
                _sort_names(file)
            file.chmod(mode)
            flush(file)
            commit(file, path)
    except (RuntimeError, SafetensorError) as error:  # the errors if the disk is full
        raise OSError(f"{path}: cannot be written ({error}); free space on this disk") from error


def _sort_names(path: Path) -> None:
    """Sort the header, so that equal weights give identical files: the library writes it in random order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.dumps(json.loads(file.read(size)), sort_keys=True, separators=(",", ":"))
        if len(header) <= size:
            file.seek(8)
            file.write(header.encode().ljust(size))


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 of the names, types, shapes and values of weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_of(weights: Mapping[str, Tensor]) -> ModelConfig:
    """The sizes of the model of these weights; if windows are as large as the image, all blocks are global.

    Windows may be larger than the image, which is padded to one window. ValueError: the names or shapes are
    not a SAM's.
    """
    try:
        _, side, _, width = weights[_POSITIONS].shape
        of_tokens = (name.split(".")[2] for name in weights if name.startswith(f"{_ENCODER}patch_embed."))
        backbone = next((part for part in of_tokens if part not in ("proj", "lateral")), "")
        patch_size = PATCH_SIZE if backbone else weights[_KERNEL].shape[-1]
        depth = len({name.split(".")[2] for name in weights if name.startswith(f"{_ENCODER}blocks.")})
        tables = [weights[f"{_ENCODER}blocks.{block}.attn.rel_pos_h"].shape for block in range(depth)]
        reach = [(length + 1) // 2 for length, _ in tables]  # tokens per axis in the attention of a block
        default = side if reach else ModelConfig().window
        return ModelConfig(
            image_size=side * patch_size,
            patch_size=patch_size,
            width=width,
            depth=depth,
            heads=width // tables[0][1] if tables or not backbone else 1,
            global_blocks=tuple(block for block, tokens in enumerate(reach) if tokens == side),
            window=next((tokens for tokens in reach if tokens != side), default),
            backbone=backbone,
            channels=weights[f"{_ENCODER}neck.0.weight"].shape[0],
            pixel_features=len(weights.get("similarity.pixels.last.bias", ())),
        )
    except KeyError as error:
        name = str(error.args[0])
        prefix = next((key.removesuffix(name) for key in weights if key.endswith(f".{name}")), None)
        advice = "" if prefix is None else f", but there is {prefix}{name}: remove the prefix {prefix!r}"
        raise ValueError(f"{name} must be in it{advice}") from None
    except (IndexError, ZeroDivisionError) as error:
        raise ValueError(f"shapes must be those of a SAM ({error})") from None


def preset_of(config: ModelConfig) -> str | None:
    """The name of the preset with the sizes of a result of `config_of`."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)


def misfit(weights: Mapping[str, Tensor], model: ModelConfig | None = None) -> str | None:
    """Why weights do not fit a model of any image size, in a sentence that names the flags; None: they fit.
    Without a model, one of the sizes that the weights have.
    """
    try:
        theirs = config_of(weights)
    except ValueError as error:
        names = ", ".join(sorted(weights)[:3]) or "none"
        return f"not a SAM ({error}): it holds {len(weights)} tensors, such as {names}"
    model = model or theirs
    with suppress(ValueError):  # of another patch size
        model = replace(model, image_size=theirs.image_size)
    has, needs = ({name: list(x.shape) for name, x in of.items()} for of in (weights, tensors_of(model)))
    first = min((name for name in has | needs if has.get(name) != needs.get(name)), default=None)
    if first is None:
        return None
    sizes = [(name, *(_value(getattr(of, name)) for of in (model, theirs))) for name in _SIZES]
    flags = {
        f"--model.{name.replace('_', '-')}": (ours, size)
        for name, ours, size in sizes
        if ours != size and (theirs.depth or name not in _OF_BLOCKS)
    }
    if not flags:
        missing = f"where the rest of the file needs {needs.get(first, 'nothing')}"
        return f"not a SAM: {first} is {has.get(first, 'missing')}, {missing}"
    kind, remedy = "weights", " ".join(f"{flag} {size}" for flag, (_, size) in flags.items())
    if (preset := preset_of(theirs)) is not None:
        kind, remedy = f"{preset} weights", f"--preset {preset} without {', '.join(flags)}"
    differ = ", ".join(f"{flag} is {ours}, the weights have {size}" for flag, (ours, size) in flags.items())
    return f"{kind} of other sizes: {differ}: pass {remedy}"


def _value(size: object) -> str:
    """A size in the form of its flag."""
    return (" ".join(map(str, size)) if isinstance(size, tuple) else str(size)) or "''"


def tensors_of(model: ModelConfig) -> dict[str, Tensor]:
    """The published weights of a model, without values."""
    with torch.device("meta"):
        return Sam(replace(model, lora_rank=0)).state_dict()


def fit_weights(weights: Mapping[str, Tensor], model: ModelConfig) -> tuple[dict[str, Tensor], str]:
    """Weights of a SAM or a plain ViT in the sizes of a model, with low-rank changes added to the weights,
    and a line that describes them. UsageError names the flag of a size that differs.
    """
    weights, needed, resized = merged(weights), tensors_of(model), list[str]()
    kind, fitted, left_out = "a SAM", dict(weights), list[str]()
    if "pos_embed" in weights and "blocks.0.attn.qkv.weight" in weights:
        kind, fitted = "a ViT for the image encoder", _of_vit(weights, model)
        left_out = sorted(name for name in weights if not _OF_VIT.match(name))
    elif (sentence := misfit(weights, model)) is not None:
        raise UsageError(sentence)
    for name, shape in ((name, list(tensor.shape)) for name, tensor in needed.items()):
        theirs = name.removeprefix(_ENCODER).replace(".mlp.lin", ".mlp.fc")
        has = list(fitted[name].shape) if name in fitted else None
        if has == shape or (has is None and not _OF_VIT.match(theirs)):
            continue
        if has is not None and name == _POSITIONS and len(has) == 4:
            planes = _resized(fitted[name].permute(0, 3, 1, 2), shape[1:3], "bicubic")
            fitted[name] = planes.permute(0, 2, 3, 1).contiguous()
            resized.append(f"pos_embed, from {has[1]} x {has[2]} to {shape[1]} x {shape[2]} tokens")
        elif has is not None and name == _KERNEL and len(has) == 4:
            fitted[name] = _resized(fitted[name], shape[2:], "bicubic")
            resized.append(f"{theirs}, from {has[-1]} to {shape[-1]} pixels")
        elif ".rel_pos_" in name:
            fitted[name] = _resized(fitted[name].T[None], shape[:1], "linear")[0].T.contiguous()
        else:
            raise UsageError(
                f"weights with {theirs} {has or 'missing'}: the image encoder has {shape}; pass weights of "
                "the same shape"
            )
    without = dict.fromkeys(  # the parts of the model that they belong to
        "relative positions" if ".rel_pos_" in name else ".".join(name.split(".")[: 1 + (_ENCODER in name)])
        for name in needed
        if name not in fitted
    )
    parts = {
        "resized": "; ".join(resized), "left out": ", ".join(left_out), "initial values": ", ".join(without)
    }  # fmt: skip
    notes = (f"; {part}: {names}" for part, names in parts.items() if names)
    return fitted, f"{len(fitted)} tensors of {kind}{''.join(notes)}"


def _resized(tensor: Tensor, size: list[int], mode: str) -> Tensor:
    return F.interpolate(tensor, tuple(size), mode=mode, align_corners=False)


def _of_vit(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a ViT by their names in a SAM; the positions are a square, without the class token."""
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    width, positions = weights["blocks.0.attn.qkv.weight"].shape[-1], weights["pos_embed"]
    if (width, depth) != (model.width, model.depth):
        raise UsageError(
            f"weights of a ViT of width {width} and depth {depth}: the image encoder has width {model.width} "
            f"and depth {model.depth}; pass the --preset or --model.width and --model.depth of these sizes"
        )
    used = {name: tensor for name, tensor in weights.items() if _OF_VIT.match(name)}
    side = round(max(positions.numel() // width - 1, 0) ** 0.5)
    if positions.shape == (1, 1 + side**2, width):
        used["pos_embed"] = positions[:, 1:].reshape(1, side, side, width)
    return {_ENCODER + name.replace(".mlp.fc", ".mlp.lin"): tensor for name, tensor in used.items()}
