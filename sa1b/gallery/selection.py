"""Which images a gallery shows, and what reading an input has brought together.

Which images are chosen depends on their ids and the seed alone, so that a source tar and the shards made of
it show the same ones: those with the smallest keyed hash, a uniform sample of the whole input.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sa1b.gallery.histograms import Survey
from sa1b.hashing import Purpose, random_words
from sa1b.shards.annotation import Annotations

SPARE = 8  # images beyond the number asked for, to take the place of images that do not decode
NEVER = 2**64 - 1  # rank of an image that is not shown
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """Which images to show: `ids`, or if there are none `count` of all, sampled by `seed`.

    Attributes:
        images: only of these image ids, such as those of a view; None: of all.
    """

    ids: tuple[int, ...] = ()
    count: int = 24
    seed: int = 0
    images: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)

    @property
    def limit(self) -> int:
        """Images to keep until some have been decoded."""
        return len(self.ids) or self.count + SPARE

    def ranks(self, image_ids: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """How little each image is wanted, uint64: the smallest are chosen, NEVER is not."""
        ids = np.asarray(image_ids, np.uint64)
        if self.ids:
            wanted = np.array(self.ids, np.uint64)
            order = np.argsort(wanted, kind="stable")
            at = np.minimum(np.searchsorted(wanted, ids, sorter=order), len(wanted) - 1)
            ranks = order[at].astype(np.uint64)
            ranks[wanted[order[at]] != ids] = NEVER
            return ranks
        words = random_words(self.seed, Purpose.GALLERY, ids)
        return words >> np.uint64(1)  # below 2^63: every image can be chosen

    def best(self, image_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Where the chosen images are among these, the most wanted first: at most `limit`.

        1 s for 11 million.
        """
        ranks = self.ranks(image_ids)
        limit = min(self.limit, len(ranks))
        best = np.argpartition(ranks, limit - 1)[:limit] if limit else np.empty(0, np.int64)
        best = best[np.lexsort((image_ids[best], ranks[best]))]
        chosen: npt.NDArray[np.int64] = best[ranks[best] != NEVER]
        return chosen


@dataclass(slots=True)
class Skipped:
    """What could not be used: reason -> how often, and the first examples of each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, message: str) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(message)


@dataclass(frozen=True, slots=True, eq=False)
class Exhibit:
    """One chosen image as it was read.

    Attributes:
        jpeg: bytes as stored.
        place: the file it comes from, for a person.
    """

    jpeg: bytes
    annotations: Annotations
    place: str


@dataclass(slots=True, eq=False)
class Gathered:
    """What an input holds.

    Attributes:
        kind, name: what it is, in words, and what it is called; not to be trusted.
        known_images, known_masks: in all, where the survey does not count them; masks may be unknown.
        facts: label and text of whatever else is worth saying.
        parts: of each file: name, images, masks, bytes (None where unknown).
        survey: what was counted; surveyed: the shards that it comes from, and of how many, None: all.
        exhibits: chosen images, most wanted first; may be more than asked for.
    """

    kind: str
    name: str
    known_images: int | None = None
    known_masks: int | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[str, int | None, int | None, int]] = field(default_factory=list)
    survey: Survey = field(default_factory=Survey)
    surveyed: tuple[list[str], int] | None = None
    skipped: Skipped = field(default_factory=Skipped)
    exhibits: Iterable[Exhibit] = ()
    found: set[int] = field(default_factory=set)  # of the ids asked for, bad ones included

    @property
    def images(self) -> int:
        """Images in all."""
        return self.survey.images if self.known_images is None else self.known_images

    @property
    def masks(self) -> int | None:
        """Masks in all, None: unknown."""
        return self.survey.masks if self.surveyed is None else self.known_masks
