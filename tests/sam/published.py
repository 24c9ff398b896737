"""The published implementation, the package segment_anything, at any size and with random weights.

A reference for the tests. The package imports torchvision for parts that no test uses. Importing torchvision
fails with a CPU build of torch, so an empty module replaces it during the import.
"""

import importlib
import sys
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn

from sa1b.sam.mask_decoder import DenseEmbedding
from sa1b.sam.model import ModelConfig
from tests.sam.random_weights import randomise

STAND_INS = ("torchvision", "torchvision.ops", "torchvision.ops.boxes", "torchvision.transforms")


def modeling() -> ModuleType:
    return module("segment_anything.modeling")


def module(name: str) -> ModuleType:
    """A module of the published package."""
    return modules(name)[0]


def modules(*names: str) -> list[ModuleType]:
    """Modules of the published package, imported together: another call imports other copies."""
    with stand_ins():
        pytest.importorskip(
            "segment_anything",
            reason="the package segment_anything, a reference of this test, is not installed",
        )
        return [importlib.import_module(name) for name in names]


def stand_ins() -> AbstractContextManager[object]:
    """A context in which torchvision is an empty module."""
    functional = "torchvision.transforms.functional"
    return patch.dict(sys.modules, {name: MagicMock() for name in (*STAND_INS, functional)})


def build(config: ModelConfig, seed: int = 0) -> nn.Module:
    """The published model with the sizes of `config`, in eval mode, with no weight equal to zero or one."""
    published = modeling()
    torch.manual_seed(seed)
    model = published.Sam(
        image_encoder=published.ImageEncoderViT(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=config.window,
            global_attn_indexes=config.global_blocks,
            out_chans=config.channels,
        ),
        prompt_encoder=published.PromptEncoder(
            embed_dim=config.channels,
            image_embedding_size=(config.side, config.side),
            input_image_size=(config.image_size, config.image_size),
            mask_in_chans=16,
        ),
        mask_decoder=published.MaskDecoder(
            transformer_dim=config.channels,
            transformer=published.TwoWayTransformer(
                depth=2,
                embedding_dim=config.channels,
                num_heads=config.channels // 32,
                mlp_dim=8 * config.channels,
            ),
            iou_head_hidden_dim=config.channels,
        ),
    )
    randomise(model)
    return model.eval()


def dense(embedding: DenseEmbedding, masks: int, side: int) -> Tensor:
    """Our dense embedding in the published form, [M, channels, side, side]."""
    found = embedding.constant[None, :, None].expand(masks, -1, side * side)
    if embedding.features is not None:
        found = found + embedding.basis.T @ embedding.features
    return found.unflatten(2, (side, side))
