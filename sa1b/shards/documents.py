"""The fields of the JSON documents in a dataset directory and the types of their values.

A document that was damaged or edited can hold anything. Its fields are checked once, when it is read; later
code relies on the check. Unknown keys are ignored.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sa1b.names import is_shard_of, is_source_name, parse_shard_name, shard_order, source_stem
from sa1b.storage.atomic import json_bytes

VIEW_FORMAT, LAYER_FORMAT = "sa1b-view-2", "sa1b-layer-1"
SEAL = "document_sha256"  # the digest of the document of a view or a layer without this field
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
TableName = Annotated[str, Meta(pattern=r"^samples-[0-9a-f]{16}\.bin\Z")]
_Document = TypeVar("_Document")
# msgspec crashes if the garbage collector runs while two threads meet a type for the first time.
_FIRST_CONVERSION = threading.Lock()


class FieldError(ValueError):
    """A missing or invalid value; the message names the field and what was expected."""


def _check_source(name: str) -> None:
    if not is_source_name(name):
        raise ValueError(f"{name[:60]!r} is not the name of a source")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The manifest's entry for one shard. Sizes in bytes."""

    name: str
    images: Count
    masks: Count
    bytes: Count
    sha256: Digest
    index_bytes: Count
    index_sha256: Digest

    def __post_init__(self) -> None:
        if not parse_shard_name(self.name):
            raise ValueError(f"{self.name[:60]!r} is not the name of a shard")


@dataclass(frozen=True, slots=True)
class Options:
    """The options that determine the bytes of the shards."""

    # the last shard of a source may hold fewer
    images_per_shard: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 1024
    image_size: Count | None = None  # longer side of stored images, pixels; None: original bytes
    quality: Count | None = None  # JPEG quality of re-encoded images; None if image_size is None
    keep_json: bool = False  # the shards also contain the annotation files verbatim
    index_runs: bool = True  # the index holds the decoded masks
    decode_images: bool = False  # every JPEG was decoded, and refused where that failed
    # without images; in documents only if True: the bytes of other directories stay the same
    annotations_only: bool = False

    def document(self) -> dict[str, Any]:
        """The options as in dataset.json and task files."""
        return {name: value for name, value in asdict(self).items() if value or name != "annotations_only"}

    def flags(self) -> dict[str, str]:
        """Field -> the flag that sets it so, as typed on reshard's command line."""
        return {
            "images_per_shard": f"--images-per-shard {self.images_per_shard}",
            "image_size": f"--image-size {self.image_size}" if self.image_size else "no --image-size",
            "quality": f"--quality {self.quality}" if self.quality else "no --quality",
            "keep_json": "--keep-json" if self.keep_json else "no --keep-json",
            "decode_images": "--decode-images" if self.decode_images else "no --decode-images",
            "index_runs": "masks in the index (no --no-index-runs)" if self.index_runs else "--no-index-runs",
            "annotations_only": "--annotations-only" if self.annotations_only else "no --annotations-only",
        }

    def difference(self, other: "Options") -> tuple[str, str] | None:
        """The first flag that differs, with its value in `self` and its value in `other`."""
        flags, others = self.flags(), other.flags()
        return next(((flags[name], others[name]) for name in flags if flags[name] != others[name]), None)


@dataclass(frozen=True, slots=True)
class Task:
    """A finished source."""

    # name, kind, size in bytes, mtime_ns and sha256; md5 if a checklist had it; perhaps READING
    source: dict[str, Any]
    options: Options
    versions: dict[str, str]  # of the package and of the libraries that shape the bytes
    shards: list[ShardInfo]
    counts: dict[str, Any]  # members, images, masks, jpg_bytes; refused, doubtful: reason -> pairs
    damage: list[dict[str, Any]]  # stretches of the source that could not be read
    largest: dict[str, int]  # per image: masks, runs, and bytes of jpg, masks and decoded record
    samples: dict[str, Any] | None = None  # bytes and sha256 of tasks/<source>.samples; None: not written yet
    quarantine: dict[str, str] | None = None  # sha256 of its lists, by file name; None: none, or not known
    # if the task file is lost or damaged: its digest by dataset.json, which has the other values too, see
    # sa1b.shards.manifest. Never written
    listed: str | None = None

    @property
    def name(self) -> str:
        return str(self.source["name"])

    @property
    def warnings(self) -> dict[str, int]:
        """Reason -> number of images that were stored with a warning; "doubtful" in the file."""
        counts: dict[str, int] = self.counts["doubtful"]
        return counts


class _Largest(Struct):
    masks: Count
    runs: Count
    rle_bytes: Count
    jpg_bytes: Count
    masks_bytes: Count


class _Reading(Struct):
    kind: str | None
    image_ids: Literal["keep", "hash"] | UnsetType = UNSET
    images: bool | UnsetType = UNSET
    images_only: bool | UnsetType = UNSET
    ignore: list[str] | UnsetType = UNSET
    max_pixels: Count | UnsetType = UNSET
    categories: list[dict[str, Any]] | UnsetType = UNSET
    left_out: dict[str, Count] | UnsetType = UNSET
    part: bool | UnsetType = UNSET


class _Totals(Struct):
    images: Count
    masks: Count
    shard_bytes: Count
    index_bytes: Count
    refused: Count
    doubtful: Count


class _Table(Struct):
    name: TableName
    bytes: Count
    sha256: Digest
    ids_sha256: Digest
    columns_sha256: Digest


class _Dataset(Struct):
    versions: dict[str, str]
    options: Options
    sources: dict[str, Digest]
    totals: _Totals
    largest: _Largest
    samples: _Table
    shards: list[ShardInfo]
    failed: dict[str, str] = {}
    pending: list[str] = []
    reading: dict[str, _Reading] = {}

    def __post_init__(self) -> None:
        for names in (self.sources, self.failed, self.pending, self.reading):
            for name in names:
                _check_source(name)
        by_stem = {source_stem(name): name for name in self.sources}
        for number, shard in enumerate(self.shards):
            source = by_stem.get(shard_order(shard.name).stem)
            if source is None or not is_shard_of(shard.name, source):
                raise ValueError(
                    f"shards[{number}].name is {shard.name!r}; no source of that shard is listed"
                )
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("shards has a name twice")


class _Source(Struct, forbid_unknown_fields=True):
    name: str
    kind: str | None
    size: Count | None
    mtime_ns: int | None
    sha256: str | None
    md5: str | None
    reading: _Reading | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_source(self.name)


class _Counts(Struct, forbid_unknown_fields=True):
    members: Count | None
    images: Count
    masks: Count
    jpg_bytes: Count
    refused_members: Count | None
    refused: dict[str, Count]
    doubtful: dict[str, Count]


class _TaskSamples(Struct):
    bytes: Count
    sha256: Digest


class _Task(Struct):
    source: _Source
    options: Options
    versions: dict[str, str]
    shards: Annotated[list[ShardInfo], Meta(min_length=1)]
    counts: _Counts
    damage: list[dict[str, Any]]
    largest: _Largest
    samples: _TaskSamples | UnsetType = UNSET
    quarantine: dict[str, Digest] | UnsetType = UNSET


class _ViewDataset(Struct):
    images: Count
    ids_sha256: Digest


class LayerName(Struct):
    """A layer that another one builds on, or that a view was made with."""

    name: str
    digest: Digest


class _View(Struct):
    names: list[str]
    images: Count
    ids_sha256: Digest
    rows_sha256: Digest
    masks_where: str | None
    chosen_by: dict[str, str]
    dataset: _ViewDataset
    document_sha256: Digest
    layers: list[LayerName] = []


class _StoredFile(Struct):
    bytes: Count
    sha256: Digest


class LayerInfo(Struct):
    """The document of a layer, `layer.json`, see sa1b.shards.layer. Counts are of images and masks."""

    name: str
    digest: Digest
    dataset: _ViewDataset  # that it was made for
    images: Count
    added: Count
    replaced: Count
    hidden: Count
    masks: _StoredFile  # masks.bin
    index: _StoredFile  # index.parquet
    parent: LayerName | None
    provenance: dict[str, Any]
    document_sha256: Digest

    def figures(self) -> dict[str, Any]:
        """Name, digest and counts."""
        return {
            key: getattr(self, key) for key in ("name", "digest", "images", "added", "replaced", "hidden")
        }


def converted(document: Any, kind: type[_Document]) -> _Document:
    try:
        with _FIRST_CONVERSION:
            return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error).replace("`$.", "`")) from None


def check_dataset(document: Any) -> None:
    """Check dataset.json, and that each shard belongs to a listed source; FieldError names the field."""
    options = converted(document, _Dataset).options.document()
    if lost := sorted(options.keys() - document["options"].keys()):
        raise FieldError(f"options has no {lost[0]}")


def check_task(document: Any, source: str) -> tuple[list[ShardInfo], Options]:
    """The shards and options of a source's task file, all fields checked; FieldError names a wrong one."""
    task = converted(document, _Task)
    if task.source.name != source:
        raise FieldError(f"source.name is {task.source.name!r}; expected {source!r}, the file's name")
    for number, shard in enumerate(task.shards):
        if not is_shard_of(shard.name, source):
            raise FieldError(f"shards[{number}].name is {shard.name!r}; expected a shard of {source!r}")
    return task.shards, task.options


def check_view(document: Any) -> None:
    """Check the fields and the digest of a view's document; FieldError names the field."""
    converted(document, _View)
    _check_seal(document)


def view_digest(ids_sha256: str, masks_where: str | None, layers: Sequence[str] = ()) -> str:
    """The digest that identifies a view, from that of its sorted ids, its condition, and those of its layers.

    Without the others, it is that of the ids; see docs/dataset-format.md.
    """
    if masks_where is None and not layers:
        return ids_sha256
    text = f"{ids_sha256} {masks_where or ''}" + "".join(f"\n{digest}" for digest in layers)
    return hashlib.sha256(text.encode()).hexdigest()


def view_arguments(
    chosen_by: Mapping[str, str], layers: Sequence[str], names: Sequence[str]
) -> tuple[str, list[str]]:
    """The verb that selects a view again, and its arguments after the dataset directory."""
    flags = [word for flag, value in chosen_by.items() if flag != "sql" for word in (f"--{flag}", value)]
    flags += ["--layers", *layers] if layers else []
    is_query = "sql" in chosen_by
    flags += ["--as-view" if is_query else "--name", names[0]] if names else []
    return ("query", [chosen_by["sql"], *flags]) if is_query else ("view", flags)


def check_layer(document: Any) -> LayerInfo:
    """The fields of a layer's document, which are checked like its digest; FieldError names the field."""
    info = converted(document, LayerInfo)
    _check_seal(document)
    return info


def _check_seal(document: Mapping[str, Any]) -> None:
    if document[SEAL] != seal_of(document):
        raise FieldError(f"its content does not have the digest that {SEAL} gives: it was changed")


def seal_of(document: Mapping[str, Any]) -> str:
    """sha256 of the bytes of the document of a view or a layer without the field SEAL."""
    content = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json_bytes(content)).hexdigest()
