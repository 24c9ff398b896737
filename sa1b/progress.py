"""The progress bar of all commands, on stderr. In a log, it prints a new line every ten seconds."""

import sys
from typing import Any, TypeAlias

from tqdm import tqdm

Bar: TypeAlias = "tqdm[Any]"  # tqdm is generic only in its type stubs


def bar(total: int, desc: str, unit: str, quiet: bool, *, delay: float = 0.0) -> Bar:
    """A progress bar; a context manager with `update(n)` and `set_postfix(...)`. The unit "B" is shown with
    prefixes (kB, MB, ...). `delay`: seconds until the bar is shown, for work that usually takes less.
    """
    return tqdm(
        total=total,
        desc=desc,
        unit=unit,
        unit_scale=unit == "B",
        disable=quiet,
        delay=delay,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        dynamic_ncols=True,
    )
