"""What `sa1b.integrations` uses of SAM 2's training code, of iopath and of torch_em, as these have it.

With SA1B_SAM2, SA1B_SAM3 or SA1B_MICRO_SAM set to folders of sources and of packages such as iopath, separated by
":", the real modules are imported instead.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import torch
from pycocotools import mask as coco_mask

from tests.integrations import project

SAM2, SAM3, TORCH_EM = "SA1B_SAM2", "SA1B_SAM3", "SA1B_MICRO_SAM"
VOSFrame = make_dataclass("VOSFrame", ["frame_idx", "image_path", ("data", Any, None)])
VOSVideo = make_dataclass("VOSVideo", ["video_name", "video_id", "frames"])


class LazySegments:
    """`load_images` and the sampler use its keys; the masks, COCO's dicts, are decoded with []."""

    def __init__(self) -> None:
        self.segments: dict[int, Any] = {}
        self.cache: dict[int, Any] = {}

    def __setitem__(self, key: int, mask: dict[str, Any]) -> None:
        self.segments[key] = mask

    def __getitem__(self, key: int) -> Any:
        if key not in self.cache:
            pixels = coco_mask.decode([self.segments[key]])
            self.cache[key] = torch.from_numpy(pixels).permute(2, 0, 1)[0]
        return self.cache[key]

    def __len__(self) -> int:
        return len(self.segments)

    def keys(self) -> Any:
        return self.segments.keys()


class PathManager:
    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def register_handler(self, handler: Any, allow_override: bool = False) -> None:
        for prefix in handler._get_supported_prefixes():
            assert allow_override or prefix not in self.handlers
            self.handlers[prefix] = handler

    def open(self, path: str, mode: str = "r") -> Any:
        handler = next(one for prefix, one in self.handlers.items() if path.startswith(prefix))
        return handler._open(path, mode)


class ImageCollectionDataset:
    """It reads images and labels by position, and cuts patches."""

    def __init__(self, raw: Any, labels: Any, patch_shape: Any, **options: Any) -> None:
        self.raw_images, self.label_images = raw, labels


_MEMBERS: dict[str, dict[str, Any]] = {
    "training.dataset.vos_raw_dataset": {"VOSFrame": VOSFrame, "VOSVideo": VOSVideo},
    "training.dataset.vos_segment_loader": {"LazySegments": LazySegments},
    "iopath.common.file_io": {"PathHandler": object, "g_pathmgr": PathManager()},
    "torch_em.data": {"ImageCollectionDataset": ImageCollectionDataset},
}
_MADE: dict[str, ModuleType] = {}
for _module, _found in _MEMBERS.items():
    for _end in range(1, len(_parts := _module.split(".")) + 1):
        _MADE.setdefault(_name := ".".join(_parts[:_end]), ModuleType(_name))
    vars(_MADE[_module]).update(_found)


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the modules can be imported; those for which sources are named are real."""
    given = {"training": (SAM2,), "iopath": (SAM2, SAM3), "torch_em": (TORCH_EM,)}
    names = [name for name in _MADE if not any(map(project.folders, given[name.split(".")[0]]))]
    sys.modules.update({name: _MADE[name] for name in names})
    try:
        with project.imported(SAM2), project.imported(SAM3), project.imported(TORCH_EM):
            for name in _MADE:
                importlib.import_module(name)
            yield
    finally:
        for name in names:
            del sys.modules[name]
