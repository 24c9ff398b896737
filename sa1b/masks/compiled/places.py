"""Point-in-mask test, and positions of foreground pixels by number."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def contains(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[np.bool_],
) -> None:
    """Write into out [N] whether pixel places[i] (column-major; -1: no pixel) is foreground of mask i."""
    for mask in range(len(places)):
        place = places[mask]
        end = np.int64(0)
        inside = False
        if place >= 0:
            for index in range(offsets[mask], offsets[mask + 1]):
                end += np.int64(runs[index])
                if end > place:
                    inside = (index - offsets[mask]) & 1 == 1
                    break
        out[mask] = inside


@kernel
def nth_foreground(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Write into out [N] the position (column-major) of foreground pixel ranks[i] of mask i; -1 if none."""
    for mask in range(len(ranks)):
        left = ranks[mask]
        position = np.int64(0)
        place = np.int64(-1)
        for index in range(offsets[mask], offsets[mask + 1]):
            run = np.int64(runs[index])
            if (index - offsets[mask]) & 1:
                if left >= 0 and left < run:
                    place = position + left
                    break
                left -= run
            position += run
        out[mask] = place
