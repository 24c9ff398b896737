"""Choice of the images of a gallery, and the data that is gathered from an input.

The choice depends on the image ids and the seed only, so that the galleries of a source tar and of its shards
show the same images. The images with the smallest keyed hash are chosen: a uniform sample of the input.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Purpose, random_words
from sa1b.programs.gallery.histograms import Survey
from sa1b.shards.annotation import Annotations

SPARE = 8  # additional images that replace images that cannot be decoded
NEVER = 2**64 - 1  # rank of an image that is not shown
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The images to show: `ids`, or if `ids` is empty a random sample of size `count`.

    Attributes:
        seed: seed of the random sample.
        images: uint64 [N], ids to choose from, such as those of a view; None: all images.
    """

    ids: tuple[int, ...] = ()
    count: int = 24
    seed: int = 0
    images: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)

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
    """The data of one input, as shown on the page.

    Attributes:
        kind, name: kind and name of the input; `name` is untrusted text.
        known_images, known_masks: totals of the input, if the survey covers a part of it; masks may be None.
        facts: labels and texts of additional facts.
        parts: name, images, masks and bytes of each file; None where unknown.
        rule: how the images were chosen.
        surveyed: names of the surveyed shards and the number of all shards; None: all were surveyed.
        exhibits: chosen images, smallest rank first, with spare ones at the end.
        found: requested ids that the input contains, also those of bad images.
    """

    kind: str
    name: str
    known_images: int | None = None
    known_masks: int | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[str, int | None, int | None, int]] = field(default_factory=list)
    part_noun: str = "file"
    rule: str = ""
    survey: Survey = field(default_factory=Survey)
    surveyed: tuple[list[str], int] | None = None
    skipped: Skipped = field(default_factory=Skipped)
    exhibits: Iterable[Exhibit] = ()
    found: set[int] = field(default_factory=set)

    @property
    def images(self) -> int:
        return self.survey.images if self.known_images is None else self.known_images

    @property
    def masks(self) -> int | None:
        """Number of masks of the input; None: unknown."""
        return self.survey.masks if self.surveyed is None else self.known_masks
