"""The contenders and their names."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.task import Delivered, Pair


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender of the comparison.

    Attributes:
        name: name of its rows and of its folder of files.
        kind: "ours", "peer", "tuned" (a peer beyond its documentation) or "limit".
        module: of benchmarks.peers; function: of that module.
        needs: packages to import.
        workers: number of processes or threads besides the consumer of the batches.
    """

    name: str
    kind: str
    module: str
    function: str = "batches"
    needs: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 1, 2)

    def missing(self) -> list[str]:
        """The needed packages that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]

    @property
    def batches(self) -> Callable[..., Iterator[Delivered]]:
        found: Callable[..., Iterator[Delivered]] = getattr(self._module, self.function)
        return found

    @property
    def convert(self) -> Callable[[Iterable[Pair], Path], None] | None:
        """The function that writes its files; None if it reads the shards of this package."""
        return getattr(self._module, "convert", None)

    @property
    def prepare(self) -> Callable[..., object] | None:
        """The function that makes the checkpoint from which `batches` resumes; None if it needs none."""
        return getattr(self._module, "prepare", None)

    @property
    def files(self) -> str:
        """Name of the folder of its files; contenders of one module share them."""
        return self.module

    @property
    def _module(self) -> Any:
        return import_module(f"benchmarks.peers.{self.module}")


COCO = ("pycocotools", "cv2")

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("sa1b.Loader", "ours", "ours", "loader", workers=(1, 2)),
        Contender("sa1b.Loader(dense=..., read_only=True)", "ours", "ours", "drawn", workers=(1, 2)),
        Contender("sa1b.Stream in DataLoader", "ours", "ours", "dataloader"),
        Contender("webdataset", "peer", "webdataset_tars", needs=("webdataset", *COCO)),
        Contender("extracted files", "peer", "extracted_files", needs=COCO),
        Contender("MosaicML Streaming", "peer", "mosaic_shards", needs=("streaming", "transformers", *COCO)),
        Contender("litData", "peer", "litdata_chunks", needs=("litdata", *COCO)),
        Contender("extracted files, tuned", "tuned", "extracted_files", "tuned", needs=COCO),
        Contender("JPEG decoding alone", "limit", "limits", "decoding", workers=(0,)),
        Contender("reading alone", "limit", "limits", "reading", workers=(0,)),
        Contender("clearing the output", "limit", "limits", "clearing", workers=(0,)),
    )
}
