"""The fields of the JSON documents in a dataset directory and the types of their values.

A document that was damaged or edited can hold anything. Its fields are checked once, when it is read; later
code relies on the check. Unknown keys are ignored.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from sa1b.names import is_shard_of, is_source_name, parse_shard_name, shard_order, source_stem
from sa1b.storage.atomic import json_bytes

VIEW_SEAL = "document_sha256"  # the digest of a view's document without this field
_MOST = 2**63
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TABLE = re.compile(r"samples(-[0-9a-f]+)?\.bin")
_Check = Callable[[Any, str], None]


class FieldError(ValueError):
    """A value of the wrong type; the message names the field, the value and the expected type."""


def _is(test: Callable[[Any], bool], expected: str) -> _Check:
    def check(value: Any, where: str) -> None:
        if not test(value):
            raise FieldError(f"{where} is {str(value)[:60]!r}; expected {expected}")

    return check


def _list(item: _Check) -> _Check:
    def check(value: Any, where: str) -> None:
        _AN_ARRAY(value, where)
        for number, one in enumerate(value):
            item(one, f"{where}[{number}]")

    return check


def _map(item: _Check, key: _Check | None = None) -> _Check:
    def check(value: Any, where: str) -> None:
        _AN_OBJECT(value, where)
        for name, one in value.items():
            if key is not None:
                key(name, f"a name in {where}")
            item(one, f"{where}.{name}")

    return check


def _object(fields: Mapping[str, _Check], optional: Mapping[str, _Check] | None = None) -> _Check:
    def check(value: Any, where: str) -> None:
        _AN_OBJECT(value, where)
        for name, one in fields.items():
            path = f"{where}.{name}" if where else name
            if name not in value:
                raise FieldError(f"{path} is missing")
            one(value[name], path)
        for name, one in (optional or {}).items():
            if name in value:
                one(value[name], f"{where}.{name}" if where else name)

    return check


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


_AN_ARRAY = _is(lambda value: isinstance(value, list), "an array")
_AN_OBJECT = _is(lambda value: isinstance(value, dict), "an object")
_COUNT = _is(_is_count, "a count")
_COUNT_OR_NULL = _is(lambda value: value is None or _is_count(value), "a count or null")
_TEXT = _is(lambda value: isinstance(value, str), "a string")
_TEXT_OR_NULL = _is(lambda value: value is None or isinstance(value, str), "a string or null")
_FLAG = _is(lambda value: isinstance(value, bool), "true or false")
_DIGEST = _is(lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value)), "a sha256")
_SOURCE = _is(lambda value: isinstance(value, str) and is_source_name(value), "the name of a source")
_SHARD = _is(lambda value: isinstance(value, str) and bool(parse_shard_name(value)), "the name of a shard")
_SAMPLES = _is(
    lambda value: isinstance(value, str) and bool(_TABLE.fullmatch(value)), "a sample table's name"
)

_SHARDS = _list(
    _object(
        {
            "name": _SHARD,
            "images": _COUNT,
            "masks": _COUNT,
            "bytes": _COUNT,
            "sha256": _DIGEST,
            "index_bytes": _COUNT,
            "index_sha256": _DIGEST,
        }
    )
)
_OPTIONS = _object(
    {},
    {
        "images_per_shard": _is(lambda value: _is_count(value) and value > 0, "a count of at least 1"),
        "image_size": _COUNT_OR_NULL,
        "quality": _COUNT_OR_NULL,
        "keep_json": _FLAG,
        "index_runs": _FLAG,
        "decode_images": _FLAG,
        "annotations_only": _FLAG,
    },
)
_LARGEST = _object(dict.fromkeys(("masks", "runs", "rle_bytes", "jpg_bytes", "masks_bytes"), _COUNT))
_READING = _object(
    {"kind": _TEXT_OR_NULL},
    {
        "image_ids": _is(lambda value: value in ("keep", "hash"), "keep or hash"),
        "images": _FLAG,
        "ignore": _list(_TEXT),
        "part": _FLAG,
    },
)
_DATASET = _object(
    {
        "versions": _map(_TEXT),
        "options": _OPTIONS,
        "sources": _map(_DIGEST, key=_SOURCE),
        "totals": _object(
            {"images": _COUNT, "masks": _COUNT}, {"shard_bytes": _COUNT, "index_bytes": _COUNT}
        ),
        "largest": _LARGEST,
        "samples": _object(
            {"columns_sha256": _DIGEST, "ids_sha256": _DIGEST},
            {"name": _SAMPLES, "bytes": _COUNT, "sha256": _DIGEST},
        ),
        "shards": _SHARDS,
    },
    {"failed": _map(_TEXT, key=_SOURCE), "pending": _list(_SOURCE), "reading": _map(_READING, key=_SOURCE)},
)
_TASK = _object(
    {
        "source": _object(
            {
                "name": _SOURCE,
                "kind": _TEXT_OR_NULL,
                "size": _COUNT_OR_NULL,
                "mtime_ns": _is(lambda value: value is None or type(value) is int, "a time in ns or null"),
                "sha256": _TEXT_OR_NULL,
                "md5": _TEXT_OR_NULL,
            },
            {"reading": _READING},
        ),
        "options": _OPTIONS,
        "versions": _map(_TEXT),
        "shards": _SHARDS,
        "counts": _object(
            {
                "members": _COUNT_OR_NULL,
                "images": _COUNT,
                "masks": _COUNT,
                "jpg_bytes": _COUNT,
                "refused_members": _COUNT_OR_NULL,
                "refused": _map(_COUNT),
                "doubtful": _map(_COUNT),
            }
        ),
        "damage": _list(_AN_OBJECT),
        "largest": _LARGEST,
    },
    {"samples": _object({"bytes": _COUNT, "sha256": _DIGEST}), "quarantine": _map(_DIGEST)},
)
_VIEW = _object(
    {
        "names": _list(_TEXT),
        "images": _COUNT,
        "ids_sha256": _DIGEST,
        "rows_sha256": _DIGEST,
        "masks_where": _TEXT_OR_NULL,
        "chosen_by": _map(_TEXT),
        "dataset": _object({}, {"images": _COUNT, "ids_sha256": _DIGEST}),
    },
    {VIEW_SEAL: _DIGEST},
)


def check_dataset(document: Any) -> None:
    """Check the fields of dataset.json, and that each shard belongs to a listed source.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    _DATASET(document, "")
    by_stem = {source_stem(name): name for name in document["sources"]}
    names = [shard["name"] for shard in document["shards"]]
    for number, name in enumerate(names):
        source = by_stem.get(shard_order(name).stem)
        if source is None or not is_shard_of(name, source):
            raise FieldError(f"shards[{number}].name is {name!r}; no source of that shard is listed")
    if len(set(names)) < len(names):
        raise FieldError("shards has a name twice")


def check_task(document: Any, source: str) -> None:
    """Check the fields of the task file of a source, and that its shards belong to the source.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    _TASK(document, "")
    if document["source"]["name"] != source:
        raise FieldError(
            f"source.name is {document['source']['name']!r}; expected {source!r}, the file's name"
        )
    if not document["shards"]:
        raise FieldError("shards is empty")
    for number, shard in enumerate(document["shards"]):
        if not is_shard_of(shard["name"], source):
            raise FieldError(f"shards[{number}].name is {shard['name']!r}; expected a shard of {source!r}")


def check_view(document: Any) -> None:
    """Check the fields of a view's document and, where it has one, its digest.

    Raises:
        FieldError: a field is missing or invalid; the message names it.
    """
    _VIEW(document, "")
    if VIEW_SEAL in document and document[VIEW_SEAL] != view_seal(document):
        raise FieldError(f"its content does not have the digest that {VIEW_SEAL} gives: it was changed")


def view_seal(document: Mapping[str, Any]) -> str:
    """sha256 of the bytes of a view's document without the field VIEW_SEAL."""
    content = {name: value for name, value in document.items() if name != VIEW_SEAL}
    return hashlib.sha256(json_bytes(content)).hexdigest()
