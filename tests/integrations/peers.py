"""What `sa1b.integrations` uses of SAM 2's training code, of iopath and of torch_em, as these have it.

With SA1B_SAM2, SA1B_SAM3 or SA1B_MICRO_SAM set to folders of sources and of packages such as iopath, separated by
":", the real modules are imported instead.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.integrations import project

SAM2, SAM3, TORCH_EM = "SA1B_SAM2", "SA1B_SAM3", "SA1B_MICRO_SAM"


@dataclass
class VOSFrame:
    frame_idx: int
    image_path: str
    data: Any = None
    is_conditioning_only: bool | None = False


@dataclass
class VOSVideo:
    video_name: str
    video_id: int
    frames: list[VOSFrame]


class LazySegments:
    """`load_images` and the sampler use its keys; the masks are read with []."""

    def __init__(self) -> None:
        self.segments: dict[int, Any] = {}
        self.cache: dict[int, Any] = {}

    def __setitem__(self, key: int, item: Any) -> None:
        self.segments[key] = item

    def __contains__(self, key: int) -> bool:
        return key in self.segments

    def __len__(self) -> int:
        return len(self.segments)

    def keys(self) -> Any:
        return self.segments.keys()


class PathHandler:
    pass


class PathManager:
    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def register_handler(self, handler: Any, allow_override: bool = False) -> None:
        for prefix in handler._get_supported_prefixes():
            assert allow_override or prefix not in self.handlers
            self.handlers[prefix] = handler

    def open(self, path: str, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        handler = next(one for prefix, one in self.handlers.items() if path.startswith(prefix))
        return handler._open(path, mode, buffering, **more)


class ImageCollectionDataset:
    """It reads images and labels by position, and cuts patches."""

    def __init__(self, raw: Any, labels: Any, patch_shape: Any, **options: Any) -> None:
        self.raw_images, self.label_images = raw, labels


_MEMBERS: dict[str, dict[str, Any]] = {
    "training.dataset.vos_raw_dataset": {"VOSFrame": VOSFrame, "VOSVideo": VOSVideo},
    "training.dataset.vos_segment_loader": {"LazySegments": LazySegments},
    "iopath.common.file_io": {"PathHandler": PathHandler, "g_pathmgr": PathManager()},
    "torch_em.data": {"ImageCollectionDataset": ImageCollectionDataset},
}
_MADE: dict[str, ModuleType] = {}
for _module, _found in _MEMBERS.items():
    for _end in range(1, len(_parts := _module.split(".")) + 1):
        _MADE.setdefault(_name := ".".join(_parts[:_end]), ModuleType(_name))
    vars(_MADE[_module]).update(_found)


def replaced() -> list[str]:
    """The modules of packages for which no sources are named."""
    given = {"training": SAM2, "iopath": SAM2, "torch_em": TORCH_EM}
    named = {package for package, variable in given.items() if project.folders(variable)}
    named |= {"iopath"} if project.folders(SAM3) else set()
    return [name for name in _MADE if name.split(".")[0] not in named]


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the modules can be imported."""
    names = replaced()
    sys.modules.update({name: _MADE[name] for name in names})
    try:
        with project.imported(SAM2), project.imported(SAM3), project.imported(TORCH_EM):
            for name in _MADE:
                importlib.import_module(name)
            yield
    finally:
        for name in names:
            del sys.modules[name]
