"""Random access to the samples of a dataset directory; training reads through sa1b.stream."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadType, BadValue, check_arguments, plain_root, whole_number
from sa1b.arguments import path as check_path
from sa1b.console import command, counted
from sa1b.errors import ManifestError, TableError, UsageError
from sa1b.masks.runs import chosen_indices
from sa1b.report import first_names, size_text
from sa1b.shards import manifest
from sa1b.shards.annotation import Annotations
from sa1b.shards.display import SHEET_DEADLINE, SHEET_IMAGES, Displayed, contact_sheet
from sa1b.shards.layer import Layer, check_layers, check_unchanged, open_layers, reopen_layers
from sa1b.shards.sample import PendingRead, Sample, check_size, location_of, submit
from sa1b.shards.sample_table import SampleTable, is_intact, open_table
from sa1b.storage.cache import fetch_once
from sa1b.storage.errors import MissingError, ReplacedError
from sa1b.storage.range_cache import RangeCache, StoredObject, open_cache
from sa1b.storage.reader import Reader

if TYPE_CHECKING:
    from PIL.Image import Image

_ATTEMPTS = 3  # at opening a directory to which a process adds sources
_BLOCK = 8  # samples whose reads start together
MANIFEST_CAP = 256 << 20  # bytes of a dataset.json: 5 MB for the 11,000 shards of all of SA-1B


class Dataset(Displayed):
    """The samples of a dataset directory, sorted by image id. Opening reads the manifest and maps the table.

    `ds[i]`, `ds.by_id(image_id)`, `len(ds)`, iteration. A notebook shows a few of its images with their
    masks, always the same ones. Safe to share between threads. An open dataset does not change while sources
    are added to the directory, also in worker processes that receive it by pickle. Open it again for the new
    version.

    Args:
        root: folder that `sa1b reshard` made, or its URL (s3://...). The sample table of a URL is copied to
            this machine once, see sa1b.storage.cache.
        deadline: seconds that one read may take over all its attempts.
        storage_options: for fsspec's file system, see sa1b.storage.reader.
        cache: folder on a local disk that caches the data read from the URL; see sa1b.storage.range_cache.
            Which shards it contains is a formula of their names and the limit. It can be shared by any number
            of processes and datasets, and removed at any time.
        cache_bytes: limit of the cache for this dataset directory, in bytes.
        layers: names of layers that `sa1b layer add` made: the masks of the samples are those of the shards
            with the changes of these layers, in this order; see docs/layers.md.

    Raises:
        ManifestError, TableError: no dataset there, its files do not belong together, or a layer is missing,
            damaged or made for other masks.
        ValueError: only one of cache and cache_bytes, or the cache is a URL or on the disk of the dataset.
        sa1b.storage.errors.StorageError: the URL cannot be read.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        deadline: float = 300.0,
        storage_options: Mapping[str, Any] | None = None,
        cache: Path | str | None = None,
        cache_bytes: int | None = None,
        layers: Sequence[str] = (),
    ) -> None:
        layers = check_layers(layers)
        cache_bytes = check_cache(cache, cache_bytes)
        self._open(root, deadline, storage_options)
        for attempt in range(_ATTEMPTS):
            self.manifest = self._read_manifest()
            try:
                self._map_table()
            except (FileNotFoundError, MissingError):
                # Sources were added since the manifest was read: the new manifest lists a new table.
                if attempt + 1 == _ATTEMPTS or self.manifest == self._read_manifest():
                    name = self.reader.url(self.manifest["samples"]["name"])
                    way_out = f"run `{command('index', self.root)}` to rebuild it"
                    raise TableError(f"{name}: missing; {way_out}") from None
            else:
                break
        if cache is not None:
            self.reader.cache = open_cache(cache, cache_bytes, self.root, self.stored_shards())
        self.layers: tuple[Layer, ...] = open_layers(self.reader, self.table, layers)

    def stored_shards(self) -> list[StoredObject]:
        """The shards with their sizes and digests, as a cache of the directory names them."""
        shards = self.manifest["shards"]
        return [StoredObject(shard["name"], shard["bytes"], shard["sha256"]) for shard in shards]

    def _open(self, root: Path | str, deadline: float, storage_options: Mapping[str, Any] | None) -> None:
        check_path("root", root, "the folder that `sa1b reshard` made, or its URL")
        if (PurePath(root).name == manifest.DATASET and not Path(root).is_dir()) or Path(root).is_file():
            raise manifest.no_dataset(root)
        root = plain_root(root)
        place = root if "://" in root else Path(root).absolute()  # the process may change its folder
        self._arguments = place, deadline, storage_options
        self.reader = Reader(root, deadline=deadline, options=storage_options)
        self.root = self.reader.root

    def _map_table(self, path: Path | None = None) -> None:
        """Map the table that the manifest names, from `path` if it has been moved."""
        self.shards: list[str] = [shard["name"] for shard in self.manifest["shards"]]
        self.failed: dict[str, str] = dict(self.manifest.get("failed", {}))
        self.pending: list[str] = list(self.manifest.get("pending", []))
        samples = self.manifest["samples"]
        self._samples = path or fetch_once(self.reader, samples["name"], samples["sha256"])
        # Paths at which other processes open this version after its files are removed.
        self._files = (self._keep(self._samples), self._manifest_file)
        self.table: SampleTable = open_table(self._samples, self.root)
        if (self.table.digest, self.table.ids_digest) != (samples["columns_sha256"], samples["ids_sha256"]):
            raise ManifestError(
                f"{self._samples}: not the sample table that {manifest.DATASET} lists; "
                f"run `{command('index', self.root)}` to rebuild both"
            )

    def __reduce__(self) -> tuple[Callable[..., "Dataset"], tuple[Any, ...]]:
        # Another process reads manifest and table itself; they are not copied.
        kept = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files if file is not None]
        layers = [(layer.info.name, layer.info.digest) for layer in self.layers]
        return _reopen, (self._arguments, self.table.digest, kept, self.reader.cache, layers)

    def __repr__(self) -> str:
        counts = [f"{len(self):,} images"]
        totals = self.manifest["totals"]
        counts += [f"{totals['masks']:,} masks", size_text(totals["shard_bytes"])]
        counts += ["annotations only"] * annotations_only(self)
        counts += [f"layer {layer.info.name}" for layer in self.layers]
        shown = f"Dataset({str(self.root)!r}: {', '.join(counts)} in {counted(len(self.shards), 'shard')}"
        return f"{shown}; {self.lacks()})" if self.lacks() else f"{shown})"

    def _preview(self) -> "Image":
        """A contact sheet of images evenly spread over the ids: one read each, under a short deadline."""
        count = len(self)
        rows = sorted({i * count // SHEET_IMAGES for i in range(SHEET_IMAGES)} if count else ())
        root, deadline, options = self._arguments
        with Reader(root, deadline=min(deadline, SHEET_DEADLINE), options=options) as reader:
            reads: list[Callable[[], Sample]]
            try:  # all at the same time
                locations = [location_of(self.table, row, self.shards) for row in rows]
                reads = [
                    partial(_sample, submit(reader, [location], self.layers)[0]) for location in locations
                ]
            except (IndexError, OverflowError):  # a damaged table: each cell shows the error
                reads = [partial(self.__getitem__, row) for row in rows]
            return contact_sheet(list(zip(self.table.image_id[rows].tolist(), reads, strict=True)), count)

    def lacks(self) -> str:
        """The sources that a partial dataset lacks, as text; empty if it is complete."""
        parts = [
            f"{counted(len(names), 'source')} {what} ({first_names(names, 3)})"
            for names, what in ((sorted(self.failed), "failed"), (self.pending, "pending"))
            if names
        ]
        return "partial: " + ", ".join(parts) if parts else ""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Sample:
        """The i-th sample by image id. IndexError: no such row; ShardError: its bytes are damaged."""
        count = len(self)
        if not isinstance(i, int | np.integer) or isinstance(i, bool):
            raise BadType(f"sample {i!r}: the index must be an integer; by_id() takes image ids")
        if not -count <= i < count:
            raise IndexError(f"sample {i} of {count}")
        (pending,) = self.submit([i % count])
        return _sample(pending)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def submit(self, rows: Sequence[int], *, text: bool = True) -> list[PendingRead]:
        """Start to read rows; `text`: see `Change.apply`. TableError: damage of the table shows here."""
        try:
            locations = [location_of(self.table, row, self.shards) for row in rows]
            return submit(self.reader, locations, self.layers, text=text)
        except (IndexError, OverflowError):  # no such shard or offset
            self.check_table()
            raise

    def samples(self, rows: npt.ArrayLike) -> Iterator[Sample]:
        """The samples of some rows, in their order; the next ones are read while one is used.

        Neighbours in a shard share a read, so rows in the order of the shards are fastest. Memory: at most 16
        samples. An error of `dataset[i]` is raised when the sample's turn comes.
        """
        order = chosen_indices(rows, len(self)).tolist()
        blocks = (self.submit(order[i : i + _BLOCK]) for i in range(0, len(order), _BLOCK))
        following = next(blocks, [])
        while following:
            current, following = following, next(blocks, [])
            for pending in current:
                yield _sample(pending)

    def masks(self, rows: Sequence[int]) -> Iterator[Annotations]:
        """The annotations of some rows, in their order; reads no images. Raises the errors of `samples`."""
        locations = [location_of(self.table, row, self.shards).without_image() for row in rows]
        blocks = (locations[i : i + _BLOCK] for i in range(0, len(locations), _BLOCK))
        for block in blocks:
            for read in [submit(self.reader, [location], self.layers)[0] for location in block]:
                yield read.result()[1]

    def row(self, image_id: int) -> int:
        """The row of an image; KeyError: the dataset does not hold it."""
        if not isinstance(image_id, int | np.integer) or isinstance(image_id, bool):
            raise BadType(f"image_id {image_id!r}: must be an integer, the number in sa_<id>.jpg")
        possible = 0 <= image_id < 2**64
        i = int(np.searchsorted(self.table.image_id, np.uint64(image_id))) if possible else len(self)
        if i == len(self) or int(self.table.image_id[i]) != image_id:
            raise KeyError(f"image {image_id} is not in {self.root}")
        return i

    def by_id(self, image_id: int) -> Sample:
        """The sample of an image; KeyError: the dataset does not hold it. ShardError: it is damaged."""
        return self[self.row(image_id)]

    def annotation_file(self, i: int) -> Any:
        """The original annotation file of sample i, parsed."""
        return self[i].annotations.to_json()

    def check_table(self) -> None:
        """Verify the sample table against its digest: 0.3 s for all of SA-1B.

        Opening does not verify the table, so that it stays fast. Call this if a sample seems damaged.

        Raises:
            TableError: the table does not match its digest.
        """
        if not is_intact(self.table):
            raise TableError(
                f"{self._samples}: the columns do not match their digest; "
                f"run `{command('index', self.root)}` to rebuild it"
            )

    def check_shard(self, shard: str) -> None:
        """Check that the dataset still has the shard and the layers that were opened.

        Call this if a sample of the shard seems damaged, as every sample does after the shard was replaced.
        ReplacedError: dataset.json lists another shard of this name, or none. StorageError: the store cannot
        be read, or its object has another size.
        """
        try:
            place, is_local = Path(self._arguments[0]), self.reader.is_local
            now = manifest.read_dataset(place) if is_local else self._fetch_manifest()
        except (ManifestError, MissingError):
            return  # no proof that the shard was replaced
        if _digest_of(self.manifest, shard) != _digest_of(now, shard):
            url = self.reader.url(shard)
            raise ReplacedError(f"{url}: replaced since the dataset was opened; open it again", url=url)
        check_unchanged(self.reader, self.layers)
        if not is_local:
            check_size(self.reader, shard, self.manifest)

    def _read_manifest(self) -> dict[str, Any]:
        self._manifest_file: BufferedReader | None = None
        if self.reader.is_local:
            path = Path(self.root) / manifest.DATASET
            with contextlib.suppress(FileNotFoundError):  # then the next line says more
                self._manifest_file = self._keep(path)
                return manifest.parse_dataset(self._manifest_file.read(), path)
            return manifest.read_dataset(Path(self.root))
        return self._fetch_manifest()

    def _fetch_manifest(self) -> dict[str, Any]:
        url = self.reader.url(manifest.DATASET)
        try:
            return manifest.parse_dataset(self.reader.read_whole(manifest.DATASET, MANIFEST_CAP), url)
        except MissingError as error:
            raise ManifestError(
                f"{self.root}: no dataset there ({error}); pass a copy of the --out folder of `sa1b reshard`"
            ) from None

    def _keep(self, path: Path) -> BufferedReader:
        """Open a file that stays open as long as the dataset."""
        file = path.open("rb")
        weakref.finalize(self, file.close)
        return file


def _digest_of(document: dict[str, Any], shard: str) -> Any:
    """The sha256 of a shard in dataset.json; None if it is not listed."""
    return next((entry["sha256"] for entry in document["shards"] if entry["name"] == shard), None)


def _sample(pending: PendingRead) -> Sample:
    jpeg, annotations = pending.result()
    location = pending.location
    return Sample(location.image_id, bytes(jpeg), annotations, location.shard, location.start)


def _reopen(
    arguments: tuple[Path | str, float, Mapping[str, Any] | None],
    digest: str,
    kept: list[str],
    cache: RangeCache | None,
    layers: list[tuple[str, str]],
) -> Dataset:
    """The same version in another process, with the open files of table and manifest in `kept`."""
    dataset = Dataset.__new__(Dataset)
    dataset._open(*arguments)
    dataset.reader.cache = cache
    with contextlib.suppress(FileNotFoundError, MissingError):
        dataset.manifest = dataset._read_manifest()
        if dataset.manifest["samples"]["columns_sha256"] == digest:
            dataset._map_table()
            dataset.layers = reopen_layers(dataset.reader, dataset.table, layers)
            return dataset
    with contextlib.suppress(OSError, ValueError, ManifestError, TableError):
        # If the first process has closed the file, the path is missing or is another file.
        table, document = map(Path, kept)
        dataset._manifest_file = dataset._keep(document)
        dataset.manifest = manifest.parse_dataset(dataset._manifest_file.read(), document)
        dataset._map_table(table)
        dataset.layers = reopen_layers(dataset.reader, dataset.table, layers)
        return dataset
    raise TableError(
        f"{dataset.reader.url(manifest.DATASET)}: replaced since the dataset was opened; open it again"
    )


def check_cache(cache: object, cache_bytes: object, *, is_open: bool = False) -> int:
    """The limit of a cache, from the arguments of a caller; 0 without a cache. ValueError if one is invalid
    or missing, or if the dataset is open already, so that a cache comes too late.
    """
    if cache is None and cache_bytes is None:
        return 0
    if cache is None:
        raise BadValue(f"cache_bytes={cache_bytes!r} is the limit of a cache; also pass cache, its folder")
    check_path("cache", cache, "a folder on a local disk")
    if cache_bytes is None:
        raise BadValue(f"cache={str(cache)!r} needs a limit; also pass cache_bytes")
    if is_open:
        raise BadValue(f"cache={str(cache)!r}: the dataset is open already; pass it to sa1b.open(cache=...)")
    return whole_number("cache_bytes", cache_bytes, 1)


@partial(check_arguments, name="sa1b.open")
def open_dataset(
    root: str | Path,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    cache_bytes: int | None = None,
    layers: Sequence[str] = (),
) -> Dataset:
    """Open a dataset directory: read its manifest and map its sample table.

        dataset = sa1b.open("shards")
        sample = dataset[0]  # or dataset.by_id(223750)

    Args:
        root: the folder that `sa1b reshard` made, or its URL (s3://...).
        storage_options: of a URL, for fsspec's file system, such as {"endpoint_url": ...}.
        cache: folder on a local disk that caches the data read from the URL, see `Dataset`.
        cache_bytes: limit of the cache for this dataset directory, in bytes.
        layers: names of layers whose changes the masks have, see `Dataset`.

    Raises:
        ManifestError, TableError: no dataset there, its files do not belong together, or a layer is missing,
            damaged or made for other masks.
        ValueError: the arguments for the cache are invalid.
        StorageError: the URL cannot be read.
    """
    return Dataset(root, storage_options=storage_options, cache=cache, cache_bytes=cache_bytes, layers=layers)


def annotations_only(dataset: Dataset) -> bool:
    """Whether `sa1b reshard --annotations-only` made the dataset directory: its shards contain no images."""
    return bool(dataset.manifest["options"].get("annotations_only", False))


def check_images(dataset: Dataset, use: str, instead: str = "") -> None:
    """UsageError that names the use, if there are no images. `instead` is a way out: "run B, or "."""
    if annotations_only(dataset):
        raise UsageError(
            f"{dataset.root}: {use} needs images, and this directory has annotations only "
            f"(--annotations-only); {instead}convert the sources with `{command('reshard')}` to another "
            "--out, without that flag"
        )
