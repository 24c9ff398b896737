"""Weights in and out: the model of a run or a file, the teacher of a distillation, and conversion to one file
or to a folder in the form of another program.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sa1b.arguments import check_arguments
from sa1b.console import counted
from sa1b.engine import weights
from sa1b.errors import Sa1bError, UsageError
from sa1b.grounding.alignment import GroundingRecipe, TextConfig
from sa1b.grounding.model import Grounding, is_grounding
from sa1b.sam import other_forms, published
from sa1b.sam.low_rank import merged
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.storage.atomic import commit, flush

_ORIGINAL = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name
_NAMES = {  # how the names of a form's files begin
    "segment-anything": ("model.pth",),
    "safetensors": ("model.safetensors",),
    "transformers": ("config.json", "preprocessor_config.json", "model.safetensors"),
    "onnx": (other_forms.ENCODER, other_forms.DECODER),  # .data may follow
}
_PROMPTS = 100  # on which ONNX files are compared with torch


def find_weights(source: str | PathLike[str], scratch: Path | None = None) -> tuple[str, dict[str, Tensor]]:
    """The weights of a SAM in a run, a checkpoint or a file, with low-rank changes added to the weights that
    they change, see `sa1b.engine.weights.find_weights`. WeightsError: they are not those of a SAM.
    """
    where, tensors = weights.find_weights(source, published.read_tensors, scratch)
    if is_grounding(tensors):
        raise published.WeightsError(
            f"{where}: a grounding model, not a SAM; pass its run to sa1b.load_grounding, or as --init"
        )
    tensors = merged(tensors)
    published.check_weights(where, tensors)
    return where, tensors


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
    tensors = find_weights(source)[1]
    model = Sam(published.config_of(tensors))
    model.load_state_dict(tensors)
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
    length, vectors = data["text_tokens"], data["text_width"]
    model = Grounding(sizes, text, recipe, tokenizer=data["tokenizer"], length=length, vectors=vectors)
    model.load_weights(weights.find_weights(path, published.read_tensors)[1])
    return model.to(device).eval()


def teacher_weights(source: str, scratch: Path | None) -> dict[str, Tensor] | None:
    """The weights of a teacher; None: the name of a model. UsageError: no SAM."""
    if source in PRESETS and not Path(source).exists():
        return None
    try:
        with torch.device("cpu"):  # a model that is built only for its sizes is on the meta device
            return find_weights(source, scratch)[1]
    except (Sa1bError, OSError) as error:
        raise UsageError(f"--distill.teacher: {error}") from None


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
    config, compared = published.config_of(weights), None
    if to is None:
        published.write_weights(target, weights)
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
        where, str(target), length, published.preset_of(config), config.image_size, parameters, to, compared
    )


def _earlier_files(target: Path, to: str | None) -> set[str]:
    """The names of the files of an earlier conversion; UsageError: the target has others."""
    if to is None:
        if target.suffix not in published.FORMATS or target.is_dir():
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
    why = ""
    if to == "segment-anything" and published.preset_of(config) not in _ORIGINAL:
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
        published.write_weights(folder / _NAMES[to][0], weights)
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
