"""Galleries of source tars, folders of pairs and shards without index: one pass over all members.

The two members of an image may be far apart. The first member stays in memory if the image may still be
chosen. These members take at most WAITING_BYTES; beyond the limit, the image with the lowest priority loses
its bytes first. Of the other images, the gallery keeps only numbers.

The choice of images depends on the image ids and the seed only, so that the galleries of a source tar and
of its shards show the same images. The images with the smallest keyed hash are chosen: a uniform sample of
the input.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sa1b.errors import BadSample
from sa1b.hashing import Purpose, random_words
from sa1b.masks.runs import MaskError
from sa1b.names import image_name, member_name, parse_member_path
from sa1b.programs.gallery.chart import Survey
from sa1b.shards import MAX_STORED_PIXELS, annotation, jpeg, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.record import RecordError
from sa1b.sources.source import Source, SourceReader
from sa1b.sources.tar_stream import Damage, Member

SPARE = 8  # additional images that replace images that cannot be decoded
NEVER = 2**64 - 1  # rank of an image that is not shown
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The images to show: `ids`, or if `ids` is empty a random sample of size `count`."""

    ids: tuple[int, ...] = ()
    count: int = 24
    seed: int = 0  # of the random sample
    # [N], ids to choose from, such as those of a view
    images: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)
    layers: tuple[str, ...] = ()  # of a dataset directory: the layers that apply to the masks
    predictions: Path | None = None  # the file that names `ids`; None: the flag --id

    @property
    def limit(self) -> int:
        """Number of images to keep before decoding."""
        return len(self.ids) or self.count + SPARE

    def ranks(self, image_ids: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Rank of each image, uint64: the images with the smallest ranks are chosen, NEVER excludes one."""
        ids = np.asarray(image_ids, np.uint64)
        if self.ids:
            requested = np.array(self.ids, np.uint64)
            order = np.argsort(requested, kind="stable")
            at = np.minimum(np.searchsorted(requested, ids, sorter=order), len(requested) - 1)
            ranks = order[at].astype(np.uint64)
            ranks[requested[order[at]] != ids] = NEVER
            return ranks
        words = random_words(self.seed, Purpose.GALLERY, ids)
        return words >> np.uint64(1)  # below 2^63: every image can be chosen

    def best(self, image_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Indices of the chosen images, smallest rank first, at most `limit`; 1 s for 11 million ids."""
        ranks = self.ranks(image_ids)
        limit = min(self.limit, len(ranks))
        best = np.argpartition(ranks, limit - 1)[:limit] if limit else np.empty(0, np.int64)
        best = best[np.lexsort((image_ids[best], ranks[best]))]
        chosen: npt.NDArray[np.int64] = best[ranks[best] != NEVER]
        return chosen


@dataclass(slots=True)
class Skipped:
    """Skipped members: number and first examples of each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, message: str) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(message)


@dataclass(frozen=True, slots=True, eq=False)
class Exhibit:
    """One chosen image; `place` is the name of its shard, tar or folder."""

    jpeg: bytes
    annotations: Annotations
    place: str


@dataclass(slots=True, eq=False)
class Gathered:
    """The data of one input, as shown on the page; its name is untrusted text."""

    kind: str
    name: str
    known_images: int | None = None  # total of the input, if the survey covers a part
    known_masks: int | None = None  # the same; may be unknown
    facts: list[tuple[str, str]] = field(default_factory=list)  # labels and texts of additional facts
    # name, images, masks and bytes of each file; None where unknown
    parts: list[tuple[str, int | None, int | None, int]] = field(default_factory=list)
    part_noun: str = "file"
    rule: str = ""  # how the images were chosen
    survey: Survey = field(default_factory=Survey)
    # names of the surveyed shards, and the number of all; None: all were surveyed
    surveyed: tuple[list[str], int] | None = None
    skipped: Skipped = field(default_factory=Skipped)
    exhibits: Iterable[Exhibit] = ()  # chosen images, smallest rank first, with spare ones at the end
    # requested ids that the input contains, also those of bad images
    found: set[int] = field(default_factory=set)

    @property
    def images(self) -> int:
        return self.survey.images if self.known_images is None else self.known_images

    @property
    def masks(self) -> int | None:
        """Number of masks of the input; None: unknown."""
        return self.survey.masks if self.surveyed is None else self.known_masks


WAITING_BYTES = 256 << 20
_NUMBERS = ("area", "predicted_iou", "stability_score", "runs_count")


@dataclass(slots=True)
class _Half:
    """One member of an image whose other member has not been read yet; `rank`: see Choice."""

    # Masks and data are dropped if the image can no longer be chosen.
    ending: str
    rank: int
    frame: tuple[int, int] | None = None
    annotations: Annotations | None = None
    data: bytes | None = None
    kept_bytes: int = 0


class _Pass:
    """One pass over members in any order."""

    def __init__(self, choice: Choice, gathered: Gathered) -> None:
        self.choice, self.gathered = choice, gathered
        self.skipped = gathered.skipped
        self.halves: dict[int, _Half] = {}
        self.done: set[int] = set()
        self.refused: set[int] = set()  # a member was bad: the other member is ignored
        self.best: list[tuple[int, int]] = []  # heap of (-rank, id) of complete images, largest rank on top
        self.exhibits: dict[int, Exhibit] = {}
        self.waiting: list[tuple[int, int]] = []  # heap of (-rank, id) of single members with their bytes
        self.waiting_bytes = 0
        self.sharded = False  # the input has mask records, so that its annotation files are copies

    def member(self, member: Member, place: str) -> None:
        named = parse_member_path(member.name)
        masks = named is not None and named.ending == "masks"
        if member.kind == "folder" or (self.sharded and member.name.endswith(".json")):
            return
        where = f"{member.name} in {place}"
        if member.reason:
            self.skipped.add(member.reason, f"{where}: {member.detail}")
            return
        if member.kind != "file":
            self.skipped.add("not_a_file", f"{where}: {member.kind}")
            return
        if named is None:
            self.skipped.add("unexpected_name", f"{where}: neither sa_<id>.jpg nor masks of an image")
            return
        self.sharded |= masks
        image_id, ending = named
        rank = int(self.choice.ranks([image_id])[0])
        if self.choice.ids and rank != NEVER:
            self.gathered.found.add(image_id)
        first = self.halves.get(image_id)
        if image_id in self.refused:
            return
        if image_id in self.done or (first is not None and (first.ending == "jpg") == (ending == "jpg")):
            self.skipped.add("duplicate", f"{where}: the image has such a member already")
            return
        try:
            half = _read_half(member.data, ending, image_id, rank)
        except BadSample as error:
            self.skipped.add(error.reason, f"{where}: {error}")
            self._forget(image_id)
            self.refused.add(image_id)
            return
        if first is None:
            self._wait(image_id, half)
        else:
            self._forget(image_id)
            self.done.add(image_id)
            image, masks_half = (half, first) if ending == "jpg" else (first, half)
            self._whole(image_id, image, masks_half, place)

    def finish(self) -> None:
        """Count the members without a partner, and store the chosen images."""
        for image_id, half in sorted(self.halves.items()):
            self.skipped.add("unpaired", f"{member_name(image_id, half.ending)}: its partner is missing")
        ranks = sorted((-rank, image_id) for rank, image_id in self.best)
        self.gathered.exhibits = [self.exhibits[image_id] for _, image_id in ranks]

    def _wait(self, image_id: int, half: _Half) -> None:
        self.halves[image_id] = half
        if not self._wanted(half.rank):
            _strip(half)
            return
        self.waiting_bytes += half.kept_bytes
        heapq.heappush(self.waiting, (-half.rank, image_id))
        while self.waiting_bytes > WAITING_BYTES and self.waiting and not self.choice.ids:
            _, least = heapq.heappop(self.waiting)
            if least in self.halves:
                self.waiting_bytes -= self.halves[least].kept_bytes
                _strip(self.halves[least])

    def _forget(self, image_id: int) -> None:
        half = self.halves.pop(image_id, None)
        if half is not None:
            self.waiting_bytes -= half.kept_bytes

    def _wanted(self, rank: int) -> bool:
        return rank != NEVER and (len(self.best) < self.choice.limit or rank < -self.best[0][0])

    def _whole(self, image_id: int, image: _Half, masks: _Half, place: str) -> None:
        annotations = masks.annotations
        assert image.frame is not None
        assert annotations is not None
        height, width = image.frame
        if masks.ending == "json" and (height, width) != (annotations.height, annotations.width):
            message = f"JPEG of {width} x {height}, annotated as {annotations.width} x {annotations.height}"
            self.skipped.add("image_size", f"{image_name(image_id)} in {place}: {message}")
            return
        self.gathered.survey.add(
            np.array([annotations.width]),
            np.array([annotations.height]),
            np.array([len(annotations)]),
            *(getattr(annotations, name) for name in _NUMBERS),
        )
        rank = image.rank
        if image.data is None or not masks.kept_bytes or not self._wanted(rank):
            return
        self.exhibits[image_id] = Exhibit(image.data, annotations, place)
        heapq.heappush(self.best, (-rank, image_id))
        if len(self.best) > self.choice.limit:
            del self.exhibits[heapq.heappop(self.best)[1]]


def _read_half(data: bytes, ending: str, image_id: int, rank: int) -> _Half:
    if ending == "jpg":
        frame = jpeg.frame(data)
        return _Half(ending, rank, frame=(frame.height, frame.width), data=data, kept_bytes=len(data))
    if ending == "json":
        annotations = annotation.parse_annotation(data, image_id, MAX_STORED_PIXELS).annotations
    else:
        try:
            annotations = record.decode(data)
            annotations.runs()
        except (RecordError, MaskError) as error:
            raise BadSample("damaged_record", str(error)) from None
    return _Half(ending, rank, annotations=annotations, kept_bytes=len(data))


def _strip(half: _Half) -> None:
    """Release the bytes and the masks; keep the numbers for the survey."""
    half.kept_bytes = 0
    half.data = None
    if half.annotations is not None:
        numbers = {name: getattr(half.annotations, name) for name in Annotations.__slots__}
        half.annotations = Annotations(**numbers | {"rle": np.empty(0, np.uint8), "text": None})


def read_members(
    parts: Sequence[Source], choice: Choice, gathered: Gathered, progress: Callable[[int], None]
) -> bool:
    """Read all sources once. Return whether one of them has mask records and so is a shard."""
    read = _Pass(choice, gathered)
    sharded = False
    for source in parts:
        read.sharded = False
        name = source.path.name
        before = gathered.survey.images, gathered.survey.masks
        reader = SourceReader(source, progress=progress)
        try:
            for item in reader.items():
                if isinstance(item, Damage):
                    gathered.skipped.add(item.reason, f"{name} at offset {item.offset:,}: {item.message}")
                else:
                    read.member(item, name)
        finally:
            reader.close()
        sharded |= read.sharded
        images, masks = gathered.survey.images - before[0], gathered.survey.masks - before[1]
        gathered.parts.append((name, images, masks, source.size))
    read.finish()
    return sharded
