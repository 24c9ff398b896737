"""SA-1B for training: indexed shards, masks as runs, exact streaming.

Public names are imported on first use, so that `import sa1b` and `--help` are fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sa1b.version import __version__

if TYPE_CHECKING:
    from sa1b.grounding.find import ground
    from sa1b.ingest.verb_reshard import reshard
    from sa1b.recipes.weights import load_grounding, load_model
    from sa1b.sam.mask_generator import generate_masks
    from sa1b.sam.prediction import embed_image, predict
    from sa1b.shards.dataset import Dataset
    from sa1b.shards.dataset import open_dataset as open
    from sa1b.shards.record import webdataset_decoder
    from sa1b.shards.sample import Sample
    from sa1b.stream.batch import Batch
    from sa1b.stream.dataset import Stream
    from sa1b.stream.loader import Loader
    from sa1b.stream.mix import Mix
    from sa1b.stream.text import Text

_PUBLIC = {
    "reshard": ("sa1b.ingest.verb_reshard", "reshard"),
    "open": ("sa1b.shards.dataset", "open_dataset"),
    "Dataset": ("sa1b.shards.dataset", "Dataset"),
    "Sample": ("sa1b.shards.sample", "Sample"),
    "Stream": ("sa1b.stream.dataset", "Stream"),
    "Loader": ("sa1b.stream.loader", "Loader"),
    "Mix": ("sa1b.stream.mix", "Mix"),
    "Text": ("sa1b.stream.text", "Text"),
    "Batch": ("sa1b.stream.batch", "Batch"),
    "load_model": ("sa1b.recipes.weights", "load_model"),
    "generate_masks": ("sa1b.sam.mask_generator", "generate_masks"),
    "load_grounding": ("sa1b.recipes.weights", "load_grounding"),
    "ground": ("sa1b.grounding.find", "ground"),
    "embed_image": ("sa1b.sam.prediction", "embed_image"),
    "predict": ("sa1b.sam.prediction", "predict"),
    "webdataset_decoder": ("sa1b.shards.record", "webdataset_decoder"),
}

__all__ = [
    "Batch",
    "Dataset",
    "Loader",
    "Mix",
    "Sample",
    "Stream",
    "Text",
    "__version__",
    "embed_image",
    "generate_masks",
    "ground",
    "load_grounding",
    "load_model",
    "open",
    "predict",
    "reshard",
    "webdataset_decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sa1b' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
