"""The fields of the JSON documents in a dataset directory and the types of their values.

A document that was damaged or edited can hold anything. Its fields are checked once, when it is read; later
code relies on the check. Unknown keys are ignored.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sa1b.names import is_shard_of, is_source_name, parse_shard_name, shard_order, source_stem
from sa1b.storage.atomic import json_bytes

VIEW_SEAL = "document_sha256"  # the digest of a view's document without this field
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
TableName = Annotated[str, Meta(pattern=r"^samples-[0-9a-f]{16}\.bin\Z")]


_Document = TypeVar("_Document")


class FieldError(ValueError):
    """A missing or invalid value; the message names the field and what was expected."""


def _check_source(name: str) -> None:
    if not is_source_name(name):
        raise ValueError(f"{name[:60]!r} is not the name of a source")


class _Shard(Struct):
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


class _Options(Struct):
    images_per_shard: Annotated[int, Meta(ge=1, le=2**63 - 1)] | UnsetType = UNSET
    image_size: Count | None = None
    quality: Count | None = None
    keep_json: bool = False
    index_runs: bool = False
    decode_images: bool = False
    annotations_only: bool = False


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
    ignore: list[str] | UnsetType = UNSET
    max_pixels: Count | UnsetType = UNSET
    categories: list[dict[str, Any]] | UnsetType = UNSET
    part: bool | UnsetType = UNSET


class _Totals(Struct):
    images: Count
    masks: Count
    shard_bytes: Count
    index_bytes: Count


class _Table(Struct):
    name: TableName
    bytes: Count
    sha256: Digest
    ids_sha256: Digest
    columns_sha256: Digest


class _Dataset(Struct):
    versions: dict[str, str]
    options: _Options
    sources: dict[str, Digest]
    totals: _Totals
    largest: _Largest
    samples: _Table
    shards: list[_Shard]
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
    options: _Options
    versions: dict[str, str]
    shards: Annotated[list[_Shard], Meta(min_length=1)]
    counts: _Counts
    damage: list[dict[str, Any]]
    largest: _Largest
    samples: _TaskSamples | UnsetType = UNSET
    quarantine: dict[str, Digest] | UnsetType = UNSET


class _ViewDataset(Struct):
    images: Count
    ids_sha256: Digest


class _View(Struct):
    names: list[str]
    images: Count
    ids_sha256: Digest
    rows_sha256: Digest
    masks_where: str | None
    chosen_by: dict[str, str]
    dataset: _ViewDataset
    document_sha256: Digest


def _converted(document: Any, kind: type[_Document]) -> _Document:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error).replace("`$.", "`")) from None


def check_dataset(document: Any) -> None:
    """Check the fields of dataset.json, and that each shard belongs to a listed source.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    _converted(document, _Dataset)


def check_task(document: Any, source: str) -> None:
    """Check the fields of the task file of a source, and that its shards belong to the source.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    task = _converted(document, _Task)
    if task.source.name != source:
        raise FieldError(f"source.name is {task.source.name!r}; expected {source!r}, the file's name")
    for number, shard in enumerate(task.shards):
        if not is_shard_of(shard.name, source):
            raise FieldError(f"shards[{number}].name is {shard.name!r}; expected a shard of {source!r}")


def check_view(document: Any) -> None:
    """Check the fields and the digest of a view's document.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    view = _converted(document, _View)
    if view.document_sha256 != view_seal(document):
        raise FieldError(f"its content does not have the digest that {VIEW_SEAL} gives: it was changed")


def view_seal(document: Mapping[str, Any]) -> str:
    """sha256 of the bytes of a view's document without the field VIEW_SEAL."""
    content = {name: value for name, value in document.items() if name != VIEW_SEAL}
    return hashlib.sha256(json_bytes(content)).hexdigest()
