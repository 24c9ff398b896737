"""The settings of a run, the check of a pair, and the handling of bad input.

Bad pairs are refused. If many pairs of a source have the same problem, the run stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa1b.errors import BadSample, SystematicError
from sa1b.shards import MAX_IMAGE_PIXELS, annotation, jpeg
from sa1b.shards.documents import Options
from sa1b.shards.quarantine import Quarantine
from sa1b.shards.shard import Pair
from sa1b.sources.discovery import FORMATS
from sa1b.sources.pairing import MemberPair
from sa1b.sources.source import Source, SourceFormat
from sa1b.sources.stored_file import Link
from sa1b.storage.claim import TIMEOUT

# A reason is systematic if it applies to more pairs than both limits.
MIN_SYSTEMATIC = 20  # pairs
SYSTEMATIC_FRACTION = 0.01  # of the pairs of a source
_EARLY_PAIRS = 1000  # pairs that are read before the first check
_EARLY_FACTOR = 2  # the limit before the end of the source is this factor times SYSTEMATIC_FRACTION


@dataclass(frozen=True, slots=True)
class Policy:
    """Handling of bad input. It does not change the bytes of good pairs."""

    stop: bool = False  # at the first refusal instead of quarantining
    accept: frozenset[str] = frozenset()  # reasons that may be frequent
    md5: str | None = None  # expected, of the source file
    # folder for members that wait for their partner; None: in the dataset directory
    spill: Path | None = None
    spill_memory: int = 128 << 20  # bytes of waiting members that are kept in memory
    max_pixels: int = MAX_IMAGE_PIXELS  # of the largest accepted image, at most MAX_STORED_PIXELS

    def reading(self, source: Source) -> dict[str, Any]:
        """`Source.reading`, and max_pixels if it is not the default: larger images were refused."""
        if self.max_pixels == MAX_IMAGE_PIXELS:
            return source.reading
        return {"kind": source.kind, **source.reading, "max_pixels": self.max_pixels}


@dataclass(frozen=True, slots=True)
class IngestRun:
    """Settings of a run; the flags of `sa1b reshard`."""

    workers: int = 1
    checklist: Path | None = None  # file with the md5 of sources
    recheck: bool = False  # recognise finished sources by digest instead of size and time
    replace: bool = False  # a finished source by one with the same name and other content
    redo: tuple[str, ...] = ()  # finished sources to convert again; their task files are not read
    rename: Mapping[Path, str] | None = None  # path -> name of the source
    ignore: tuple[str, ...] = ()  # patterns of files and folders that are left out and not listed
    formats: Sequence[SourceFormat] = FORMATS  # see sa1b.sources.discovery.formats_with
    links: tuple[Link, ...] = ()  # to further sources
    # (I, N): only the sources I, I + N, I + 2 N, ... by name, without finishing the dataset unless `finish`
    task: tuple[int, int] | None = None
    finish: bool = False  # with `task`: finish the dataset if no other task has sources left
    claim_timeout: float = TIMEOUT  # seconds without a heartbeat until others may take over
    # seconds without progress until a worker is killed; its source is retried once
    stall_timeout: float = 600.0
    space_check: bool = True  # refuse to start if the disk is too small
    quiet: bool = False  # no progress and no notes


def check_pair(members: MemberPair, options: Options, max_pixels: int) -> Pair:
    """Parse both members, compare them, and scale the image down if `options.image_size` is set.

    With `options.annotations_only`, the image is checked too, and the pair to store has none. BadSample: the
    pair cannot be used. MemoryError: memory is exhausted; the pair may be valid.
    """
    data, text = members.image.data, members.text.data
    parsed = annotation.parse_annotation(text, members.image_id, max_pixels)
    frame = jpeg.frame(data, max_pixels)
    height, width = parsed.annotations.height, parsed.annotations.width
    if (frame.height, frame.width) != (height, width):
        raise BadSample(
            "image_size", f"JPEG of {frame.width} x {frame.height}, annotated as {width} x {height}"
        )
    jpeg.check_length(frame)
    if options.decode_images:
        jpeg.check_decodes(data)
    if options.annotations_only:
        data, height, width = b"", 0, 0
    elif options.image_size is not None:
        data, height, width = jpeg.scale_down(data, frame, options.image_size, options.quality or 95)
    if frame.trailing_bytes:
        message = f"{frame.trailing_bytes:,} bytes after the end of the JPEG"
        parsed.warnings.add("jpeg_trailing_bytes", message)
    keep = text if options.keep_json else None
    return Pair(
        data,
        height,
        width,
        annotations=parsed.annotations,
        runs=parsed.runs,
        text=keep,
        warnings=parsed.warnings,
    )


class SystematicCheck:
    """Counts the pairs of a source by reason; an error if a reason that is not in `accept` is too frequent.

    At the end of the source (`check`) the limit is more than 20 pairs and more than 1 % of the pairs. Before
    the end (`check_early`), from 1,000 pairs on, it is more than 20 pairs and more than 2 % of the estimated
    number of pairs in the source. The estimate assumes that the unread part has the same density of pairs as
    the part read so far. The early result equals the result at the end, unless the unread part is more than
    twice as dense. A source with only bad pairs is stopped after 2 % of its bytes if the two members of a
    pair are adjacent, and after 14 % if the members are in random order.
    """

    def __init__(self, path: object, total_bytes: int, accept: frozenset[str]) -> None:
        self._path, self._total_bytes, self._accept = path, total_bytes, accept

    def check(self, quarantine: Quarantine, images: int) -> None:
        """Check at the end of the source, with its stored pairs. SystematicError: a reason is too frequent;
        the message has examples and the flag that accepts it.
        """
        self._raise_over(quarantine, images, SYSTEMATIC_FRACTION * _pairs(quarantine, images))

    def check_early(self, quarantine: Quarantine, images: int, members: int, stored_bytes: int) -> None:
        """As `check` while the source is read: `members` are in its first `stored_bytes` bytes."""
        if members < 2 * _EARLY_PAIRS:
            return
        expected = members / 2 * max(1.0, self._total_bytes / max(1, stored_bytes))
        self._raise_over(quarantine, images, _EARLY_FACTOR * SYSTEMATIC_FRACTION * expected)

    def _raise_over(self, quarantine: Quarantine, images: int, limit: float) -> None:
        for reason, count in sorted((quarantine.refused + quarantine.warnings).items()):
            frequent = count > MIN_SYSTEMATIC and count > limit
            # A damaged archive may lose thousands of partners. The damage is reported, not each lost partner.
            if frequent and reason not in self._accept and not reason.endswith("_partner_lost"):
                examples = "".join(f"\n  {example}" for example in quarantine.examples[reason])
                raise SystematicError(
                    f"{self._path}: {count:,} of {_pairs(quarantine, images):,} pairs have the problem "
                    f"{reason!r}, too many to be chance; examples:{examples}\n"
                    f"If the problem is expected, run again with --accept {reason}"
                )


def _pairs(quarantine: Quarantine, images: int) -> int:
    return images + sum(quarantine.refused.values())
