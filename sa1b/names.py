"""Names of members, sources and shards, and the rules that connect them.

member  sa_<id>.jpg, sa_<id>.json, sa_<id>.masks    id: an integer below 2**63 without leading zeros
source  sa_000020                                   its stem, 000020, is the name without "sa_"
shard   sa1b-<stem>-<part>.tar                      part: at least four digits, more from 10,000 on

A name that becomes part of a path contains no "/" and does not begin with a dot.
"""

import re
import unicodedata
from collections.abc import Container
from typing import NamedTuple

MASK_KEYS = (  # of an annotation in SA-1B, in their order
    "bbox", "area", "segmentation", "predicted_iou", "point_coords", "crop_box", "id", "stability_score",
)  # fmt: skip
SHARD_PREFIX = "sa1b-"
ID_END = 2**63  # ids of images and masks are smaller
_IMAGE_PREFIX = "sa_"
_MEMBER = re.compile(r"sa_(0|[1-9][0-9]{0,18})\.(jpg|json|masks)")
_SHORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_QUARANTINE = re.compile(r"[0-9]{6,}-[A-Za-z0-9._-]*|(refused|warnings)\.jsonl")
_SHARD = re.compile(r"sa1b-([A-Za-z0-9_.-]+)-([0-9]{4}|[1-9][0-9]{4,})\.tar")


class MemberName(NamedTuple):
    """The parts of a member's name; `ending` is "jpg", "json" or "masks"."""

    image_id: int
    ending: str


class ShardName(NamedTuple):
    """The parts of a shard's name, ordered by stem, then by part as a number."""

    stem: str
    part: int


def image_name(image_id: int) -> str:
    """`sa_<id>`, the name of an image in messages and on pages."""
    return f"{_IMAGE_PREFIX}{image_id}"


def member_name(image_id: int, ending: str) -> str:
    return f"{_IMAGE_PREFIX}{image_id}.{ending}"


def parse_member_name(name: str) -> MemberName | None:
    """The parts of `sa_<id>.<ending>`; None if `name` does not have this form."""
    match = _MEMBER.fullmatch(name)
    if match is None or int(match[1]) >= ID_END:
        return None
    return MemberName(int(match[1]), match[2])


def parse_member_path(path: str) -> MemberName | None:
    """Like `parse_member_name`, for the path of a member in a source, with or without folders.

    The ending may be in upper case, `sa_5.JPG`; it is returned in lower case. The result is None for absolute
    paths and for paths with empty, `.` or `..` parts, except for one leading `./`.
    """
    *folders, last = path.removeprefix("./").split("/")
    if any(part in ("", ".", "..") for part in folders):
        return None
    stem, dot, ending = last.rpartition(".")
    return parse_member_name(f"{stem}{dot}{ending.lower()}")


# Files of `sa1b annotate`: its settings, and a line for each image, beside its folders of pairs.
ANNOTATE_SETTINGS, ANNOTATE_LINES, ANNOTATE_FORMAT = "annotate.json", "annotate.jsonl", "sa1b-annotate-1"
OPTIONS = ".options.json"  # of `sa1b reshard` in a dataset directory, until a source is finished


def unicode_forms(name: str) -> dict[str, None]:
    """The name, and its composed and decomposed forms: macOS decomposes the names of files, and lists of them
    are composed.
    """
    forms = [name]
    if not name.isascii():
        forms += [unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]
    return dict.fromkeys(forms)


def is_bare_name(name: str) -> bool:
    """Whether `name` can be the name of a file: no path, no hidden file, no control character."""
    return name.isprintable() and not name.startswith(".") and "/" not in name and name != ""


def is_short_name(name: str) -> bool:
    """Whether `name` is at most 64 letters, digits, dots, dashes and underscores: of a view or layer."""
    return _SHORT.fullmatch(name) is not None


def is_source_name(name: str) -> bool:
    """Whether `name` is a valid name of a source. Its stem becomes part of file names."""
    return _STEM.fullmatch(source_stem(name)) is not None


def named_source(text: str, known: Container[str]) -> str | None:
    """The source that a user names by its name or by that of its tar or folder; None: not a bare name."""
    # Only the result becomes part of a path: it contains no "/" and does not begin with a dot.
    name = text.rstrip("/")
    if name not in known and name.removesuffix(".tar") in known:
        name = name.removesuffix(".tar")
    return name if is_source_name(name) else None


def source_stem(source: str) -> str:
    """The part of a source's name that its shards' names contain."""
    return source.removeprefix(_IMAGE_PREFIX)


def source_name(stem: str) -> str:
    """The usual source name for a stem: `sa_<stem>` for digits, as in SA-1B, else the stem itself."""
    return f"{_IMAGE_PREFIX}{stem}" if stem.isdigit() else stem


def shard_name(source: str, part: int) -> str:
    """The file name of a source's shard number `part`, counted from 0."""
    return f"{SHARD_PREFIX}{source_stem(source)}-{part:04d}.tar"


def parse_shard_name(name: str) -> ShardName | None:
    """The parts of `sa1b-<stem>-<part>.tar`; None if `name` does not have this form."""
    match = _SHARD.fullmatch(name)
    return None if match is None else ShardName(match[1], int(match[2]))


def is_shard_of(name: str, source: str) -> bool:
    parts = parse_shard_name(name)
    return parts is not None and parts.stem == source_stem(source)


def is_quarantine_file(name: str) -> bool:
    """Whether `name` is the name of a file that the package writes to the quarantine of a source."""
    return _QUARANTINE.fullmatch(name) is not None


def shard_order(name: str) -> ShardName:
    """The sort key of shards: part 10,000 comes after part 9,999. Other names sort as text."""
    return parse_shard_name(name) or ShardName(name, -1)
