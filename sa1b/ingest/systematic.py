"""Detection of a systematic problem: if many pairs of a source have the same problem, the run stops."""

from sa1b.errors import SystematicError
from sa1b.ingest.quarantine import Quarantine

# A reason is systematic if it applies to more pairs than both limits.
MIN_SYSTEMATIC = 20  # pairs
SYSTEMATIC_FRACTION = 0.01  # of the pairs of a source
_EARLY_PAIRS = 1000  # pairs that are read before the first check
_EARLY_FACTOR = 2  # the limit before the end of the source is this factor times SYSTEMATIC_FRACTION


class SystematicCheck:
    """Counts the pairs of a source by reason, and raises an error if a reason is too frequent.

    At the end of the source (`check`) the limit is more than 20 pairs and more than 1 % of the pairs. Before
    the end (`check_early`), from 1,000 pairs on, it is more than 20 pairs and more than 2 % of the estimated
    number of pairs in the source. The estimate assumes that the unread part has the same density of pairs as
    the part read so far. The early result equals the result at the end, unless the unread part is more than
    twice as dense. A source with only bad pairs is stopped after 2 % of its bytes if the two members of a
    pair are adjacent, and after 14 % if the members are in random order.

    Args:
        path: path of the source, for messages.
        total_bytes: size of the source file in bytes.
        accept: reasons that may be frequent.
    """

    def __init__(self, path: object, total_bytes: int, accept: frozenset[str]) -> None:
        self._path, self._total_bytes, self._accept = path, total_bytes, accept

    def check(self, quarantine: Quarantine, images: int) -> None:
        """Check at the end of the source.

        Args:
            quarantine: refusals and warnings of the source.
            images: number of stored pairs.

        Raises:
            SystematicError: a reason is too frequent; the message has examples and the flag that accepts it.
        """
        self._raise_over(quarantine, images, SYSTEMATIC_FRACTION * _pairs(quarantine, images))

    def check_early(self, quarantine: Quarantine, images: int, members: int, stored_bytes: int) -> None:
        """Check while the source is read: `members` members are in its first `stored_bytes` bytes.

        Raises:
            SystematicError: as `check`.
        """
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
