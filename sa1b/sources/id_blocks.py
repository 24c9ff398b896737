"""Blocks of image ids: each tar of SA-1B contains a contiguous block of ids, in the order of the tars.

The blocks that were measured on real tars:

    sa_000014  156625 to 167810        sa_000017  190188 to 201375
    sa_000016  179000 to 190187        sa_000019  212562 to 223749, and sa_000020 begins at 223750

So image i is in tar i // 11187 or in the one before. This is an estimate: no list of the images of each tar
is published.
"""

import re

import numpy as np
import numpy.typing as npt

from sa1b.names import source_name

IDS_PER_TAR = 11187
TARS = 1000
_NUMBERED = re.compile(r"sa_([0-9]{1,9})")


def tar_number(source: str) -> int | None:
    """The number in the name of a source, such as 20 of sa_000020; None if the name has another form."""
    found = _NUMBERED.fullmatch(source)
    return int(found[1]) if found else None


def estimated_numbers(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The estimated number of each image's tar."""
    return (ids // np.uint64(IDS_PER_TAR)).astype(np.int64)


def estimated_source(number: int) -> str:
    """The name of the tar with a number."""
    return source_name(f"{number:06d}")
