"""The wanted pairs of a source: its other members are skipped, and reading ends when nothing wanted is left.

The members of a tar are in random order and gzip has no random access, so that a tar is read from its start
up to the last wanted member. Which tar contains an image is not known in advance. The ids of a tar are a
contiguous block, and their range is known soon, because the order is random: of a tar of SA-1B with 22,372
members, 4,096 members suffice to exclude an image whose id is 1 % of the block outside of the range.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from sa1b.names import parse_member_path
from sa1b.sources.tar_stream import Damage, Member

_FIRST_SAMPLE = 1024  # members; the range is judged after twice this number
_CHECK_EVERY = 64
_GAPS = 32  # the largest id is at most this number of mean gaps above the largest one of a random sample
_ENDINGS = {"jpg": 1, "json": 2}
_BOTH = 3


class WantedPairs:
    """Filters the members of one source.

    Args:
        ids: image ids, ascending, each once.
        is_block: the source contains a contiguous block of ids in random order, so that an id far outside of
            the range of the members read so far is not in the source.

    Attributes:
        ids, is_block: as above.
        first, last: smallest and largest image id read so far; None before the first member of a pair.
        is_whole: the source was read to its end.
        damage: what could not be read of it.
    """

    def __init__(self, ids: npt.NDArray[np.uint64], *, is_block: bool) -> None:
        self.ids = ids
        self.first: int | None = None
        self.last: int | None = None
        self.is_whole = False
        self.damage: list[Damage] = []
        self.is_block = is_block
        self._seen = np.zeros(len(ids), np.uint8)  # bits of _ENDINGS
        self._left = len(ids)
        self._members = 0
        self._samples = [(0, 0, 0), (0, 0, 0)]  # members, first and last at the last two powers of two

    def found(self) -> npt.NDArray[np.uint64]:
        """The wanted ids whose two members have been read."""
        found: npt.NDArray[np.uint64] = self.ids[self._seen == _BOTH]
        return found

    def absent(self) -> npt.NDArray[np.uint64]:
        """Wanted ids inside the range of a source that was read to its end, without two members in it."""
        if not self.is_whole or self.first is None or self.last is None:
            return self.ids[:0]
        inside = (self.ids >= np.uint64(self.first)) & (self.ids <= np.uint64(self.last))
        absent: npt.NDArray[np.uint64] = self.ids[inside & (self._seen != _BOTH)]
        return absent

    def filter(self, items: Iterable[Member | Damage]) -> Iterator[Member | Damage]:
        """The wanted members and all damage, until nothing wanted can follow."""
        for item in items:
            if isinstance(item, Damage):
                self.damage.append(item)
                yield item
                continue
            named = parse_member_path(item.name)
            if named is None or named.ending not in _ENDINGS:
                continue
            if self._see(named.image_id, _ENDINGS[named.ending]):
                yield item
            if not self._left or (self._members % _CHECK_EVERY == 0 and self._is_complete()):
                return
        self.is_whole = True

    def _see(self, image_id: int, bit: int) -> bool:
        """Record a member; whether it is wanted."""
        self._members += 1
        self.first = image_id if self.first is None else min(self.first, image_id)
        self.last = image_id if self.last is None else max(self.last, image_id)
        if self._members >= _FIRST_SAMPLE and self._members.bit_count() == 1:
            self._samples = [self._samples[1], (self._members, self.first, self.last)]
        row = int(np.searchsorted(self.ids, np.uint64(image_id)))
        if row == len(self.ids) or int(self.ids[row]) != image_id:
            return False
        self._left -= int(self._seen[row] | bit) == _BOTH and int(self._seen[row]) != _BOTH
        self._seen[row] |= bit
        return True

    def _is_complete(self) -> bool:
        """Whether every pair that is left lies far outside of the range of the ids read so far."""
        if not self.is_block or self.first is None or self.last is None:
            return False
        members, first, last = self._samples[0]
        if not members:
            return False
        # In random order, the first members determine the range. Otherwise, it is not known before the end.
        margin = _GAPS * (last - first + 1) // members
        if self.first < first - margin or self.last > last + margin:
            return False
        margin = _GAPS * (self.last - self.first + 1) // self._members
        left = self.ids[self._seen != _BOTH]
        low, high = max(0, self.first - margin), self.last + margin
        return not ((left >= np.uint64(low)) & (left <= np.uint64(high))).any()
