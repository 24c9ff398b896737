"""One reason for many pairs of a source: a misunderstanding, not damage; the run stops and asks."""

from sa1b.errors import SystematicError
from sa1b.ingest.quarantine import Quarantine

MIN_SYSTEMATIC = 20  # so many bad pairs for one reason, and
SYSTEMATIC_FRACTION = 0.01  # this part of a source, look like a misunderstanding rather than damage
_EARLY_PAIRS = 1000  # read before a source may be stopped before its end
_EARLY_FACTOR = 2  # times SYSTEMATIC_FRACTION of the pairs that the whole source will hold


class SystematicCheck:
    """Counts the pairs of a source by reason, and raises when one of them is too frequent.

    At the end of the source (`check`): more than 20 pairs and more than 1 % of them. Before its end
    (`check_early`), from 1,000 pairs on: more than 20 pairs and more than 2 % of all that the source will
    hold if the rest of it is as dense as what was read. The verdict at the end would then be the same, unless
    the rest holds pairs at more than twice the density. A source in which every pair is bad ends after 2 % of
    it if pairs lie together, after 14 % of it if their halves lie in random order.

    Args:
        path: of the source, for messages.
        total_bytes: its size as stored.
        accept: reasons that may be frequent.
    """

    def __init__(self, path: object, total_bytes: int, accept: frozenset[str]) -> None:
        self._path, self._total_bytes, self._accept = path, total_bytes, accept

    def check(self, quarantine: Quarantine, images: int) -> None:
        """At the end of the source; `images`: pairs that were stored.

        Raises:
            SystematicError: names the reason, examples, and the flag that accepts it.
        """
        self._raise_over(quarantine, images, SYSTEMATIC_FRACTION * _pairs(quarantine, images))

    def check_early(self, quarantine: Quarantine, images: int, members: int, stored_bytes: int) -> None:
        """While the source is read: `members` members in its first `stored_bytes` bytes.

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
            # A damaged archive has lost partners by the thousand; the damage itself is what is reported.
            if frequent and reason not in self._accept and not reason.endswith("_partner_lost"):
                examples = "".join(f"\n  {example}" for example in quarantine.examples[reason])
                raise SystematicError(
                    f"{self._path}: {count:,} of {_pairs(quarantine, images):,} pairs have the problem "
                    f"{reason!r}, too many to be chance:{examples}\n"
                    f"If that is to be expected, run again with --accept {reason}"
                )


def _pairs(quarantine: Quarantine, images: int) -> int:
    return images + sum(quarantine.refused.values())
