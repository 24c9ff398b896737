"""Conversion of weights: to one file, or to a folder in the form of another program."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from sa1b.engine.checkpoint.folder import step_of
from sa1b.errors import UsageError
from sa1b.grounding.model import is_grounding
from sa1b.recipes.weights import find_weights
from sa1b.sam import other_forms
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import FORMATS, config_of, preset_of, weights_digest, write_weights
from sa1b.storage.atomic import commit, flush, temporary_path
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.storage.protocols import protocol_of
from sa1b.version import __version__

PUBLISHED = ("vit_b", "vit_l", "vit_h")  # models that the original package can build by name
_README = "README.md"
_FILE = {"segment-anything": "model.pth", "safetensors": "model.safetensors"}
_NAMES = {  # how the names of a form's files begin
    "transformers": ("config.json", "preprocessor_config.json", "model.safetensors"),
    "onnx": (other_forms.ENCODER, other_forms.DECODER),  # .data may follow
    **{to: (name,) for to, name in _FILE.items()},
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
    to: str | None  # None: one file, without a model card
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

    def snippet(self, folder: str | None = None) -> str:
        """Python code that loads the result with each program that can; `folder`: in which it is by then."""
        path, pth = folder or self.target, self.target.endswith(".pth")
        if self.to == "transformers":
            return (
                "Load it with transformers:\n\n    from transformers import SamModel\n\n"
                f"    model = SamModel.from_pretrained({path!r})\n"
            )
        if self.to == "onnx":
            return (
                "Load it with onnxruntime:\n\n    import onnxruntime\n\n"
                f"    encoder = onnxruntime.InferenceSession({f'{path}/{other_forms.ENCODER}'!r})\n"
                f"    decoder = onnxruntime.InferenceSession({f'{path}/{other_forms.DECODER}'!r})\n"
            )
        if self.to is not None:
            path, pth = f"{path}/{_FILE[self.to]}", self.to == "segment-anything"
        sa1b_text = (
            "Load it with this package:\n\n"
            "    import sa1b\n\n"
            f"    model = sa1b.load_model({path!r})\n"
            "    # image: uint8 RGB [height, width, 3]; x, y: pixels of it\n"
            "    # masks = sa1b.predict(model, image, points=[[x, y]]).masks\n"
        )
        if self.model not in PUBLISHED:
            return f"{sa1b_text}\nThe original package (segment_anything) has no model of these sizes."
        if pth:
            load = f"    model = sam_model_registry[{self.model!r}](checkpoint={path!r})"
        else:
            load = (
                "    from safetensors.torch import load_file\n\n"
                f"    model = sam_model_registry[{self.model!r}]()\n"
                f"    model.load_state_dict(load_file({path!r}))"
            )
        return (
            f"{sa1b_text}\nLoad it with the original package:\n\n"
            f"    from segment_anything import sam_model_registry\n{load}"
        )


def convert(
    source: str | PathLike[str],
    target: Path,
    *,
    to: str | None = None,
    overwrite: bool = False,
    scratch: Path | None = None,
) -> Converted:
    """Write weights to one file, or to a folder with README.md in the form `to`; else see `find_weights`.

    UsageError: the target exists, or a file has an unknown ending; or --overwrite would leave files of
    another form beside the new ones; or the form has no model of these sizes,
    or needs a package that is missing.
    """
    _check_target(target, to, overwrite)
    where, weights = find_weights(source, scratch)
    if is_grounding(weights):
        raise UsageError(
            f"{where}: a grounding model, which needs the settings of its run; load the run with "
            "sa1b.load_grounding, or pass it as --init"
        )
    config = config_of(weights)
    done = Converted(
        source=where,
        target=str(target),
        bytes=0,
        model=preset_of(config),
        image_size=config.image_size,
        parameters=sum(tensor.numel() for tensor in weights.values()),
        to=to,
        compared=None,
    )
    if to is None:
        write_weights(target, weights)
        return replace(done, bytes=target.stat().st_size)
    _check_form(to, config, done)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = temporary_path(target)
    folder.mkdir()
    try:
        done = replace(done, compared=_write(folder, to, weights, config))
        (folder / _README).write_text(card(where, _facts(done, weights), done.snippet(".")), "utf-8")
        paths = sorted(folder.iterdir(), key=lambda path: path.name == _README)  # the card last
        done = replace(done, bytes=sum(path.stat().st_size for path in paths))
        names = {path.name for path in paths}
        if target.exists():
            _refuse_others(target, to, {path.name for path in target.iterdir()} - names)
        for path in paths:
            flush(path)
            commit(path, target / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def _check_target(target: Path, to: str | None, overwrite: bool) -> None:
    if to is None:
        if target.suffix not in FORMATS or target.is_dir():
            raise UsageError(
                f"--out {target}: must be a file that ends with .safetensors or .pth; tars become shards by "
                "`sa1b reshard`"
            )
        if target.exists() and not overwrite:
            raise UsageError(f"--out {target}: exists; pass --overwrite to replace it")
        return
    if target.exists() and not target.is_dir():
        raise UsageError(f"--out {target}: is a file; name a folder for --to {to}")
    if not target.exists() or not any(target.iterdir()):
        return
    readme = target / _README
    if not readme.exists() or MARK not in readme.read_text(errors="replace"):
        raise UsageError(f"--out {target}: has files of others; name a new folder for --to {to}")
    names = {path.name for path in target.iterdir()} - {_README}
    _refuse_others(target, to, {name for name in names if not name.startswith(_NAMES[to])})
    if not overwrite:
        raise UsageError(f"--out {target}: exists; pass --overwrite to replace its files")


def _refuse_others(target: Path, to: str, others: set[str]) -> None:
    if others:
        raise UsageError(
            f"--out {target}: has {min(others)}, which --to {to} does not write; name a new folder"
        )


def _check_form(to: str, config: ModelConfig, done: Converted) -> None:
    if to == "segment-anything" and done.model not in PUBLISHED:
        why = f"has no model of these sizes, only {', '.join(PUBLISHED)}"
    elif to == "transformers" and config.backbone:
        why = f"has no image encoder {config.backbone} (--model.backbone)"
    elif to == "transformers" and config.pixel_features:
        why = f"has no pixel features, and this model has {config.pixel_features} (--model.pixel-features)"
    else:
        return
    raise UsageError(f"{done.source}: --to {to}: that package {why}; pass --to safetensors or onnx")


def _write(folder: Path, to: str, weights: Mapping[str, Tensor], config: ModelConfig) -> str | None:
    """Write the files of a form except README.md; return how ONNX compares with torch."""
    if to in _FILE:
        write_weights(folder / _FILE[to], weights)
        return None
    if to == "transformers":
        other_forms.write_transformers(folder, weights, config)
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


def _facts(done: Converted, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The table of a model card."""
    facts = {
        "model": done.model or "own sizes",
        "image size": f"{done.image_size} pixels",
        "parameters": f"{done.parameters:,}",
        "sha256 of names and values": weights_digest(weights),
    }
    return facts | ({"ONNX": done.compared} if done.compared else {})


MARK = "Written by `sa1b convert`."  # which a folder must have for --overwrite
_SETTINGS = ("preset", "seed", "model", "recipe", "optim", "distill")
_DATA = (
    "view", "layers", "global_batch", "masks", "strategy", "flip", "min_pixels", "block_size", "target_size",
)  # fmt: skip
_LICENCE = """
The weights have the licence under which they are published, within those of the training data and of the
weights that training started from. SA-1B is released under the SA-1B Dataset Research License: for research
only, without redistribution of its images and without identification of the people in them, see
<https://ai.meta.com/datasets/segment-anything/>. If SA-1B is among the training data, read that licence
before you publish or use these weights. No image of the training data is in this folder.
"""


def card(where: str, facts: Mapping[str, str], snippet: str) -> str:
    """The text of README.md.

    Args:
        where: checkpoint or file that was converted; the files of its run are read if they are there.
        facts: name -> value, for the table at the top.
        snippet: code that loads the weights.
    """
    absolute = where if protocol_of(where) else str(Path(where).absolute())
    run, _, checkpoint = absolute.rpartition("/checkpoints/")
    step, config = step_of(checkpoint) or 0, json.loads(_text(run, "config.json") or "null")
    lines = [json.loads(line) for line in _text(run, "metrics.jsonl").split("\n")[:-1]]  # the complete ones
    parts = [
        "---\ntags: [image-segmentation, segment-anything]\n---",
        f"# Segment Anything ({facts['model']})\n\n{MARK} sa1b {__version__}.\n",
        *_rows(facts),
        f"\n## Use\n\n{snippet.strip()}\n\n## Training\n",
    ]
    if config is None:
        parts.append(f"Unknown: converted from the file `{where.rpartition('/')[2]}`.")
    else:
        shown = {name: config[name] for name in _SETTINGS if name in config}
        shown["data"] = {name: config["data"][name] for name in _DATA if name in config["data"]}
        text = json.dumps(shown, indent=1)
        parts.append(f"{step:,} steps. Settings, as in the run's config.json:\n\n```json\n{text}\n```")
        starts = [line["run"] for line in lines if "run" in line and line["run"]["step"] < step]
        if starts:
            parts += ["\nData, as recorded at the last start before this step:\n", *_data(starts[-1]["data"])]
    scores = [line for line in lines if "evaluation" in line and line["step"] <= step]
    parts.append("\n## Scores\n")
    if scores:
        view, evaluation = config["evaluation"]["view"] if config else None, scores[-1]["evaluation"]
        parts.append(f"After step {scores[-1]['step']:,}, on the held-out view `{view}`:\n")
        numbers = {name: value for name, value in evaluation.items() if isinstance(value, float)}
        parts += _rows({**evaluation, **{name: f"{value:.4g}" for name, value in numbers.items()}})
    else:
        parts.append("No evaluation is recorded.")
    return "\n".join([*parts, "\n## Licence", _LICENCE])


def _rows(values: Mapping[str, str]) -> list[str]:
    """A table in Markdown."""
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]


def _data(receipt: dict[str, Any]) -> list[str]:
    lines = []
    for name, source in receipt["sources"].items():
        folder = str(source["root"]).rstrip("/").rpartition("/")[2]
        lines += [
            f"- `{name if name != source['root'] else folder}`: directory `{folder}`, view `{source['view']}`"
        ]
    return lines + [f"- {name}: `{digest}`" for name, digest in _digests(receipt["stream"])]


def _digests(state: Any, path: str = "") -> list[tuple[str, str]]:
    """The digests in the state of a stream or of a mixture, with their places."""
    if not isinstance(state, dict):
        return []
    digests = [
        (f"{path}{name}", value) for name, value in state.items() if name.endswith("_sha256") and value
    ]
    return digests + [pair for name, value in state.items() for pair in _digests(value, f"{path}{name}.")]


def _text(run: str, name: str) -> str:
    """A file of a run; "" without it, or without a run."""
    with contextlib.suppress(MissingError, FileNotFoundError):
        return open_store(run).read(name).decode() if run else ""
    return ""
