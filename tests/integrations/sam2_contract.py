"""What `sa1b.integrations.sam2` uses of SAM 2's training code and of iopath, as these packages have it.

`installed` puts the modules into `sys.modules`. With SA1B_SAM2 set to folders of SAM 2's sources and of its
packages iopath and omegaconf, separated by ":", the real modules are imported instead.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

SOURCES = os.environ.get("SA1B_SAM2", "")
NAMES = (
    "training",
    "training.dataset",
    "training.dataset.vos_raw_dataset",
    "training.dataset.vos_segment_loader",
)


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


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the modules can be imported."""
    if SOURCES:
        with patch.object(sys, "path", [*SOURCES.split(":"), *sys.path]):
            for name in (*NAMES, "iopath.common.file_io"):
                importlib.import_module(name)
            yield
        return
    modules = {
        name: ModuleType(name) for name in (*NAMES, "iopath", "iopath.common", "iopath.common.file_io")
    }
    members: dict[str, dict[str, Any]] = {
        "training.dataset.vos_raw_dataset": {"VOSFrame": VOSFrame, "VOSVideo": VOSVideo},
        "training.dataset.vos_segment_loader": {"LazySegments": LazySegments},
        "iopath.common.file_io": {"PathHandler": PathHandler, "g_pathmgr": PathManager()},
    }
    for name, found in members.items():
        vars(modules[name]).update(found)
    with patch.dict(sys.modules, modules):
        yield
