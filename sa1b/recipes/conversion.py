"""Weights out: conversion to one file, or to a folder in the form of another program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from sa1b.errors import UsageError
from sa1b.recipes.weights import find_weights
from sa1b.sam import other_forms
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import FORMATS, config_of, preset_of, write_weights
from sa1b.storage.atomic import commit, flush

_ORIGINAL = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name
_NAMES = {  # how the names of a form's files begin
    "segment-anything": ("model.pth",),
    "safetensors": ("model.safetensors",),
    "transformers": ("config.json", "preprocessor_config.json", "model.safetensors"),
    "onnx": (other_forms.ENCODER, other_forms.DECODER),  # .data may follow
}
_PROMPTS = 100  # on which ONNX files are compared with torch


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion of weights."""

    source: str  # the checkpoint or file that was read
    target: str  # the file or folder that was written
    bytes: int  # its length, or that of its files
    model: str | None  # name of the preset with these sizes
    image_size: int  # of the model, pixels
    parameters: int  # number of them
    to: str | None  # None: one file
    compared: str | None  # with ONNX: how onnxruntime compares with torch

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "snippet": self.snippet()}

    def table(self) -> str:
        model = self.model or "of no preset's sizes"
        compared = f"  {self.compared}\n" if self.compared else ""
        return (
            f"{self.source}\n  model {model}, {self.image_size} pixels, {self.parameters:,} parameters\n"
            f"{compared}Complete: {self.target} ({self.bytes:,} bytes)\n\n{self.snippet()}"
        )

    def snippet(self) -> str:
        """Python code that loads the result with each program that can."""
        if self.to == "transformers":
            return f"""Load it with transformers:

    from transformers import SamModel

    model = SamModel.from_pretrained({self.target!r})
"""
        if self.to == "onnx":
            return f"""Load it with onnxruntime:

    import onnxruntime

    encoder = onnxruntime.InferenceSession({f"{self.target}/{other_forms.ENCODER}"!r})
    decoder = onnxruntime.InferenceSession({f"{self.target}/{other_forms.DECODER}"!r})
"""
        path = self.target if self.to is None else f"{self.target}/{_NAMES[self.to][0]}"
        text = f"""Load it with this package:

    import sa1b

    model = sa1b.load_model({path!r})
    # image: uint8 RGB [height, width, 3]; x, y: pixels of it
    # masks = sa1b.predict(model, image, points=[[x, y]]).masks

"""
        if self.model not in _ORIGINAL:
            return f"{text}The original package (segment_anything) has no model of these sizes."
        text += "Load it with the original package:\n\n    from segment_anything import sam_model_registry\n"
        if path.endswith(".pth"):
            return f"{text}    model = sam_model_registry[{self.model!r}](checkpoint={path!r})"
        return f"""{text}    from safetensors.torch import load_file

    model = sam_model_registry[{self.model!r}]()
    model.load_state_dict(load_file({path!r}))"""


def convert(
    source: str | PathLike[str],
    target: Path,
    *,
    to: str | None = None,
    overwrite: bool = False,
    scratch: Path | None = None,
) -> Converted:
    """Write weights to one file, or to a folder in the form `to`; else see `find_weights`.

    UsageError: the target exists, has files of others, or an unknown ending; or the form has no model of
    these sizes, or needs a package that is missing.
    """
    earlier = _earlier_files(target, to)
    if earlier and not overwrite:
        raise UsageError(f"--out {target}: exists; pass --overwrite to replace {'its files' if to else 'it'}")
    where, weights = find_weights(source, scratch)
    config, compared = config_of(weights), None
    if to is None:
        write_weights(target, weights)
        length = target.stat().st_size
    else:
        _check_form(to, config, where)
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", suffix=".partial", dir=target.parent) as name:
            compared = _write(Path(name), to, weights, config)
            paths = sorted(Path(name).iterdir())
            length = sum(path.stat().st_size for path in paths)
            for path in paths:
                flush(path)
                commit(path, target / path.name)
        for old in earlier - {path.name for path in paths}:
            (target / old).unlink()  # such as weights beside an ONNX file, which now contains them
    parameters = sum(tensor.numel() for tensor in weights.values())
    return Converted(
        where, str(target), length, preset_of(config), config.image_size, parameters, to, compared
    )


def _earlier_files(target: Path, to: str | None) -> set[str]:
    """The names of the files of an earlier conversion; UsageError: the target has others."""
    if to is None:
        if target.suffix not in FORMATS or target.is_dir():
            raise UsageError(
                f"--out {target}: must be a file that ends with .safetensors or .pth; tars become shards by "
                "`sa1b reshard`"
            )
        return {target.name} if target.exists() else set()
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if others := sorted(name for name in names if not name.startswith(_NAMES[to])):
        raise UsageError(
            f"--out {target}: has {others[0]}, which --to {to} does not write; name a new folder"
        )
    return names


def _check_form(to: str, config: ModelConfig, source: str) -> None:
    why = ""
    if to == "segment-anything" and preset_of(config) not in _ORIGINAL:
        why = f"model of these sizes, only {', '.join(_ORIGINAL)}"
    elif to == "transformers" and config.backbone:
        why = f"image encoder {config.backbone} (--model.backbone)"
    elif to == "transformers" and config.pixel_features:
        why = f"pixel features, and this model has {config.pixel_features} (--model.pixel-features)"
    if why:
        raise UsageError(f"{source}: --to {to}: that package has no {why}; pass --to safetensors or onnx")


def _write(folder: Path, to: str, weights: Mapping[str, Tensor], config: ModelConfig) -> str | None:
    """Write the files of a form; return how ONNX compares with torch."""
    if to == "transformers":
        other_forms.write_transformers(folder, weights, config)
        return None
    if to != "onnx":
        write_weights(folder / _NAMES[to][0], weights)
        return None
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise UsageError(
            f"--to onnx: missing: {', '.join(missing)}; pip install 'sa1b[onnx]', or pass another form"
        )
    model = Sam(config).eval()
    model.load_state_dict(dict(weights))
    other_forms.write_onnx(folder, model)
    form = f"opset {other_forms.OPSET}, any number of points"
    if find_spec("onnxruntime") is None:
        return f"{form}; not compared with torch, because onnxruntime is not installed"
    largest, differing = other_forms.largest_difference(folder, model, _PROMPTS)
    return (
        f"{form}; on {_PROMPTS} random prompts, logits of onnxruntime and torch differ by at most "
        f"{largest:.2g}, masks in {differing:.2g} of their pixels"
    )
