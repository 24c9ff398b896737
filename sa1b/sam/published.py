"""Published files of weights: one `.pth` or `.safetensors` with the published names.

A `.pth` is a plain dictionary from names to tensors, as published with "Segment Anything" (2023). It is a
pickle in a zip archive; this module unpickles only tensors. A `.safetensors` has the same names without a
pickle. Loaders of these formats do not detect flipped bits. This module verifies the checksums of zip
archives, and writes a digest into each `.safetensors`.
"""

import hashlib
import json
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sa1b.errors import Sa1bError, UsageError
from sa1b.sam.model import PATCH_SIZE, PRESETS, ModelConfig, Sam
from sa1b.storage.atomic import commit, flush, naming_final, temporary_path

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
_PUBLISHER = "https://github.com/facebookresearch/segment-anything"
_PASS = "pass a file with the published names"
_AGAIN = "download or write it again"


class WeightsError(Sa1bError):
    """A file that does not contain the weights of a SAM; the message names the file and its contents."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file, float32, on the CPU; runs no code of it. WeightsError: it is not a SAM's."""
    tensors = read_tensors(path)
    check_weights(path, tensors)
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The unchanged tensors in a file or in its entry "model".

    WeightsError: damaged, or no such table; or a published file that is not there. FileNotFoundError: another
    file that is not there.
    """
    if path.name in PUBLISHED and not path.exists():
        raise WeightsError(
            f"{path}: no such file; download {path.name} from the model checkpoints of {_PUBLISHER} and pass "
            f"its path, with --preset {PUBLISHED[path.name]} to train or evaluate; the page Evaluation has "
            "the scores to expect"
        )
    with path.open("rb") as file:
        start = file.read(16)
    if start[7:9] == b"\0{":  # the length of the header, below 2**56, and its first byte
        return _read_safetensors(path)
    return _read_pickled(path, start)


def check_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if names, shapes or types of tensors are not those of a SAM."""
    try:
        needed = shapes_of(config_of(tensors))
    except ValueError as error:
        names = ", ".join(sorted(tensors)[:3]) or "none"
        raise WeightsError(
            f"{path}: not a SAM ({error}): it holds {len(tensors)} tensors, such as {names}; {_PASS}"
        ) from None
    for name in sorted(tensors.keys() | needed.keys()):
        has = list(tensors[name].shape) if name in tensors else "missing"
        want = list(needed[name]) if name in needed else "nothing"
        if has != want:
            raise WeightsError(
                f"{path}: not a SAM: {name} is {has}, where the rest of the file needs {want}; {_PASS}"
            )
        if not (tensors[name].is_floating_point() or name.endswith(".num_batches_tracked")):
            raise WeightsError(f"{path}: not a SAM: {name} is {tensors[name].dtype}; {_PASS}")


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights atomically, in the format of the path's suffix. UsageError: unknown suffix. OSError: the
    path.
    """
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: must end with .pth or .safetensors, the formats that can be written")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copy views: the file must not contain a larger tensor of which a weight is a part.
    whole = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }
    temporary = temporary_path(path)
    try:
        with naming_final(path):
            temporary.touch()
            mode = temporary.stat().st_mode  # by the umask; safetensors makes files for their owner only
            if path.suffix == ".pth":
                torch.save(whole, temporary)
            else:
                save_file(whole, temporary, {"format": "pt", _DIGEST: weights_digest(whole)})
                _sort_header(temporary)
            temporary.chmod(mode)
            flush(temporary)
            commit(temporary, path)
    except (RuntimeError, SafetensorError) as error:  # the errors if the disk is full
        why = f"cannot be written ({_first_line(error)}); free space on this disk"
        raise OSError(f"{path}: {why}") from error
    finally:
        with suppress(OSError):  # an error on a disk that is read-only
            temporary.unlink()


def config_of(weights: Mapping[str, Tensor]) -> ModelConfig:
    """The sizes of the model of these weights; if windows are as large as the image, all blocks are global.

    Windows may be larger than the image, which is padded to one window. ValueError: the names or shapes are
    not a SAM's.
    """
    try:
        _, side, _, width = weights["image_encoder.pos_embed"].shape
        of_tokens = (name.split(".")[2] for name in weights if name.startswith("image_encoder.patch_embed."))
        backbone = next((part for part in of_tokens if part not in ("proj", "lateral")), "")
        patch_size = PATCH_SIZE
        if not backbone:
            patch_size = weights["image_encoder.patch_embed.proj.weight"].shape[-1]
        depth = len({name.split(".")[2] for name in weights if name.startswith("image_encoder.blocks.")})
        tables = [weights[f"image_encoder.blocks.{block}.attn.rel_pos_h"].shape for block in range(depth)]
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
            channels=weights["image_encoder.neck.0.weight"].shape[0],
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
    """The name of the preset with these sizes."""
    sizes = [getattr(config, name) for name in _SIZES]
    return next(
        (key for key, preset in PRESETS.items() if [getattr(preset, name) for name in _SIZES] == sizes), None
    )


def misfit(weights: Mapping[str, Tensor], model: ModelConfig) -> str | None:
    """Why weights do not fit a model, in a sentence that names the flags; None: they fit."""
    needed, shapes = shapes_of(model), {name: tensor.shape for name, tensor in weights.items()}
    if shapes == needed:
        return None
    try:
        config = config_of(weights)
    except ValueError:
        return f"{len(weights)} tensors that are not those of a SAM, such as {min(weights, default='none')}"
    unused = _OF_BLOCKS if config.depth == 0 else ()
    theirs = {name: _value(config, name) for name in _SIZES if name not in unused}
    differing = {name: value for name, value in theirs.items() if value != _value(model, name)}
    if not differing:
        first = min(name for name in shapes.keys() | needed.keys() if shapes.get(name) != needed.get(name))
        return f"weights of another model than that of --model: {first} is {list(shapes.get(first, ()))}"
    flags = {f"--model.{name.replace('_', '-')}": name for name in differing}
    sizes = (
        f"{flag} is {_value(model, name)}, the weights have {theirs[name]}" for flag, name in flags.items()
    )
    kind, remedy = "weights", " ".join(f"{flag} {theirs[name]}" for flag, name in flags.items())
    if (preset := preset_of(config)) is not None:
        kind, remedy = f"{preset} weights", f"--preset {preset} without {', '.join(flags)}"
    return f"{kind} of other sizes: {', '.join(sizes)}: pass {remedy}"


def shapes_of(model: ModelConfig) -> dict[str, torch.Size]:
    """The names and shapes of the published weights of a model."""
    with torch.device("meta"):
        return {name: x.shape for name, x in Sam(replace(model, lora_rank=0)).state_dict().items()}


def _value(config: ModelConfig, name: str) -> str:
    """A size in the form of its flag."""
    size = getattr(config, name)
    text = " ".join(map(str, size)) if isinstance(size, tuple) else str(size)
    return text or "''"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            digest = (file.metadata() or {}).get(_DIGEST)
    except SafetensorError as error:
        raise WeightsError(f"{path}: damaged, or not a .safetensors ({error}); {_AGAIN}") from None
    if digest not in (None, weights_digest(tensors)):
        raise WeightsError(f"{path}: damaged, its bytes are not those that were written; {_AGAIN}")
    return tensors


def _read_pickled(path: Path, start: bytes) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise WeightsError(f"{path}: damaged, its part {damaged} has a wrong checksum; {_AGAIN}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a pickle with code, which is refused below
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (WeightsError, OSError):
        raise
    except Exception as error:
        if start and not start.startswith((b"PK", b"\x80")):  # a zip archive, or a pickle
            raise WeightsError(
                f"{path}: not a file of weights, it begins with {start!r}; pass a .pth or .safetensors"
            ) from None
        raise WeightsError(
            f"{path}: damaged, or holds objects other than tensors ({type(error).__name__}); {_AGAIN}"
        ) from None
    return _tensors(path, loaded)


def _tensors(path: Path, loaded: object) -> dict[str, Tensor]:
    if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):
        loaded = loaded["model"]  # MAE and many training codes save weights in this entry
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path}: holds a {type(loaded).__name__}, not a dictionary of tensors; {_PASS}")
    tensors: dict[str, Tensor] = {}
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{path}: not a plain dictionary of tensors, {name!r} is a {type(value).__name__}; "
                "if one entry contains the weights, save that entry alone with torch.save"
            )
        tensors[name] = value
    return tensors


def _sort_header(path: Path) -> None:
    """Sort the names, so that equal weights give identical files: the library writes them in random order."""
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
