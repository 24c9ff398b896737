"""Masks: COCO's strings, runs, geometry on runs, dense masks.

A mask is stored as runs (`Runs`) and becomes pixels last, directly at the requested size. The modules:

    runs          the ragged pair that carries all masks of an image
    coco          COCO's compressed strings to runs and back
    geometry      area, boxes, crop, flips, resize and the padded frame, on runs
    points        is a point inside, a uniform point inside, on runs
    overlap       intersection and IoU, on runs
    grid          which source pixel a target pixel reads: the one rule of every back end
    raster        runs to pixels on the CPU
    raster_torch  the same bits in plain torch, on any device
    raster_triton the same bits from Triton kernels (kernels_triton), on a CUDA device

A back end for tensors is a module with the two functions `rasterize` and `rasterize_frame` of raster_torch,
same arguments, same bits, verified against grid's rule by the same tests. Only these back ends import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sa1b.masks.coco import decode, decode_joined, encode, encode_joined
    from sa1b.masks.geometry import (
        area,
        bbox,
        bbox_sa1b,
        crop,
        flip_horizontal,
        flip_vertical,
        frame,
        resize,
    )
    from sa1b.masks.grid import framed_size
    from sa1b.masks.overlap import intersection, iou
    from sa1b.masks.points import contains, nth_foreground, uniform_point
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
    "uniform_point",
]

MODULES = {
    "coco": ("decode", "decode_joined", "encode", "encode_joined"),
    "geometry": (
        "area",
        "bbox",
        "bbox_sa1b",
        "crop",
        "flip_horizontal",
        "flip_vertical",
        "frame",
        "resize",
    ),
    "grid": ("framed_size",),
    "overlap": ("intersection", "iou"),
    "points": ("contains", "nth_foreground", "uniform_point"),
    "raster": ("rasterize", "rasterize_frame"),
    "runs": ("MAX_PIXELS", "MaskError", "Runs", "SizeError"),
}


def __getattr__(name: str) -> object:
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
