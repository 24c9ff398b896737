"""The grounding model of a run, ready for `sa1b.ground`."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from sa1b.errors import UsageError
from sa1b.grounding.model import Grounding, is_grounding
from sa1b.grounding.recipe import GroundingRecipe
from sa1b.grounding.text_encoder import TextConfig
from sa1b.recipes.weights import find_weights
from sa1b.sam.model import ModelConfig
from sa1b.stream.tokenizer import open_tokenizer


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
    path = Path(source)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    try:
        document = json.loads((run / "config.json").read_bytes())
        settings = document["text"], document["model"], document["recipe"], document["data"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{source}: not the run of a grounding model ({type(error).__name__}: {error}); pass the --out "
            "of `sa1b train --preset grounding`"
        ) from None
    model = _built(*settings)
    where, weights = find_weights(path)
    if not is_grounding(weights):
        raise UsageError(f"{where}: the weights of another model; pass the run of a grounding model")
    model.load_weights(weights)
    return model.to(device).eval()


def _built(
    text: dict[str, Any], model: dict[str, Any], recipe: dict[str, Any], data: Mapping[str, Any]
) -> Grounding:
    sizes = TextConfig(**text)
    vocabulary = sizes.vocabulary or (
        1 if data["text_width"] else open_tokenizer(data["tokenizer"]).vocabulary
    )
    return Grounding(
        ModelConfig(**{**model, "global_blocks": tuple(model["global_blocks"])}),
        sizes,
        GroundingRecipe(**recipe),
        vocabulary=vocabulary or 1,
        length=data["text_tokens"],
        vectors=data["text_width"],
        tokenizer=data["tokenizer"],
    )
