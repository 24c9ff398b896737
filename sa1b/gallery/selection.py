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

SPARE = 8  # images beyond the number asked for, to take the place of pictures that do not decode
NEVER = 2**64 - 1  # rank of an image that is not shown
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """Which images to show: `ids`, or if there are none `count` of all, drawn by `seed`."""

    ids: tuple[int, ...] = ()
    count: int = 24
    seed: int = 0

    @property
    def limit(self) -> int:
        """Images to keep until pictures have been decoded."""
        return len(self.ids) or self.count + SPARE

    def ranks(self, image_ids: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """How little each image is wanted, uint64: the smallest are chosen, NEVER is not."""
        ids = np.asarray(image_ids, np.uint64)
        if self.ids:
            wanted = {image_id: rank for rank, image_id in enumerate(self.ids)}
            return np.array([wanted.get(int(image_id), NEVER) for image_id in ids], np.uint64)
        words = random_words(self.seed, Purpose.GALLERY, ids)
        return words >> np.uint64(1)  # below 2^63: every image can be chosen


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
        facts: label and text of whatever else is worth saying.
        parts: of each file: name, images, masks, bytes (None where unknown).
        exhibits: chosen images, most wanted first; may be more than asked for.
    """

    kind: str
    name: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[str, int | None, int | None, int]] = field(default_factory=list)
    survey: Survey = field(default_factory=Survey)
    skipped: Skipped = field(default_factory=Skipped)
    exhibits: Iterable[Exhibit] = ()
    found: set[int] = field(default_factory=set)  # of the ids asked for, bad ones included
