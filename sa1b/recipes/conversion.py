"""Conversion of weights: to one file, or to a folder in the form of another program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from sa1b.errors import UsageError
from sa1b.grounding.model import is_grounding
from sa1b.recipes.weights import find_weights
from sa1b.sam import other_forms
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import FORMATS, config_of, preset_of, write_weights
from sa1b.storage.atomic import commit, flush

PUBLISHED = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name
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
        path = self.target
        if self.to == "transformers":
            load = f"    model = SamModel.from_pretrained({path!r})\n"
            return f"Load it with transformers:\n\n    from transformers import SamModel\n\n{load}"
        if self.to == "onnx":
            load = "Load it with onnxruntime:\n\n    import onnxruntime\n\n"
            for name, file in (("encoder", other_forms.ENCODER), ("decoder", other_forms.DECODER)):
                load += f"    {name} = onnxruntime.InferenceSession({f'{path}/{file}'!r})\n"
            return load
        path = path if self.to is None else f"{path}/{_NAMES[self.to][0]}"
        text = (
            "Load it with this package:\n\n"
            "    import sa1b\n\n"
            f"    model = sa1b.load_model({path!r})\n"
            "    # image: uint8 RGB [height, width, 3]; x, y: pixels of it\n"
            "    # masks = sa1b.predict(model, image, points=[[x, y]]).masks\n\n"
        )
        if self.model not in PUBLISHED:
            return f"{text}The original package (segment_anything) has no model of these sizes."
        text += "Load it with the original package:\n\n    from segment_anything import sam_model_registry\n"
        if path.endswith(".pth"):
            return f"{text}    model = sam_model_registry[{self.model!r}](checkpoint={path!r})"
        return (
            f"{text}    from safetensors.torch import load_file\n\n"
            f"    model = sam_model_registry[{self.model!r}]()\n"
            f"    model.load_state_dict(load_file({path!r}))"
        )


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
    if is_grounding(weights):
        raise UsageError(
            f"{where}: a grounding model, which needs the settings of its run; load the run with "
            "sa1b.load_grounding, or pass it as --init"
        )
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
    return Converted(
        source=where,
        target=str(target),
        bytes=length,
        model=preset_of(config),
        image_size=config.image_size,
        parameters=sum(tensor.numel() for tensor in weights.values()),
        to=to,
        compared=compared,
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
    if target.exists() and not target.is_dir():
        raise UsageError(f"--out {target}: is a file; name a folder for --to {to}")
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if others := sorted(name for name in names if not name.startswith(_NAMES[to])):
        raise UsageError(
            f"--out {target}: has {others[0]}, which --to {to} does not write; name a new folder"
        )
    return names


def _check_form(to: str, config: ModelConfig, source: str) -> None:
    if to == "segment-anything" and preset_of(config) not in PUBLISHED:
        why = f"has no model of these sizes, only {', '.join(PUBLISHED)}"
    elif to == "transformers" and config.backbone:
        why = f"has no image encoder {config.backbone} (--model.backbone)"
    elif to == "transformers" and config.pixel_features:
        why = f"has no pixel features, and this model has {config.pixel_features} (--model.pixel-features)"
    else:
        return
    raise UsageError(f"{source}: --to {to}: that package {why}; pass --to safetensors or onnx")


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
