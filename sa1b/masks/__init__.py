"""Masks: COCO's strings, runs, geometry on runs, dense masks.

A mask is stored as runs (`Runs`) and is rasterised last, directly at the requested size. The modules:

    runs          all masks of an image as two arrays: run lengths and offsets
    coco          COCO's compressed strings and polygons to runs and back
    geometry      area, boxes, points, crop, flips, resize, padded frame, intersection and IoU, on runs
    grid          rule for the source pixel that a target pixel reads, common to all back ends
    raster        runs to pixels on the CPU, and pixels or a model's logits to runs
    raster_torch  the same bits in plain torch, where a GPU's kernels are not proved
    raster_triton the same bits from Triton kernels, on a CUDA device
    *_kernels     loops over runs, compiled by numba: see sa1b.kernel

A back end for tensors is a module with the functions `rasterize` and `rasterize_frame`. They take the
arguments of those in raster_torch and return the same bits. The same tests verify each back end against the
rule in grid. Only these back ends import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sa1b.masks.coco import decode, decode_joined, encode, encode_joined
    from sa1b.masks.geometry import (
        area,
        bbox,
        bbox_sa1b,
        contains,
        crop,
        flip_horizontal,
        flip_vertical,
        frame,
        intersection,
        iou,
        nth_foreground,
        resize,
        suppress,
        uniform_point,
    )
    from sa1b.masks.grid import framed_size
    from sa1b.masks.raster import rasterize, rasterize_frame
    from sa1b.masks.runs import MAX_PIXELS, MaskError, Runs, SizeError

__all__ = [
    "MAX_PIXELS",
    "MaskError",
    "Runs",
    "SizeError",
    "area",
    "bbox",
    "bbox_sa1b",
    "contains",
    "crop",
    "decode",
    "decode_joined",
    "encode",
    "encode_joined",
    "flip_horizontal",
    "flip_vertical",
    "frame",
    "framed_size",
    "intersection",
    "iou",
    "nth_foreground",
    "rasterize",
    "rasterize_frame",
    "resize",
    "suppress",
    "uniform_point",
]


def __getattr__(name: str) -> object:
    for module in ("runs", "grid", "coco", "raster", "geometry") if name in __all__ else ():
        if hasattr(submodule := import_module(f"{__name__}.{module}"), name):
            return getattr(submodule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
