"""Results of commands: their interface, and figures, lists and columns as text."""

import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sa1b.console import show
from sa1b.errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm  # slow; commands import this module for --help

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class Result(Protocol):
    """What a command found or did, for the terminal and for scripts."""

    def document(self) -> dict[str, Any]:
        """JSON values, for --json."""
        ...

    def table(self) -> str:
        """Text for the terminal."""
        ...


def present(result: Result, json_output: bool) -> None:
    """Print a result on stdout."""
    show(json.dumps(result.document(), indent=1) if json_output else result.table())


def rounded(number: float) -> str:
    """A number of at least 0, with two significant digits or more: "1,060", "2.1", "0.034", "0"."""
    if number == 0:
        return "0"
    digits = 1 - math.floor(math.log10(number))
    return f"{number:,.{0 if number >= 100 else max(digits, 1)}f}"


def size_text(count: float, digits: int = 1) -> str:
    """Bytes in the largest decimal unit of which there is at least one: "1.5 GB", "120 bytes"."""
    for unit, factor in _DECIMAL:
        if count >= factor:
            return f"{count / factor:,.{digits}f} {unit}"
    return f"{count:,.0f} bytes"


def memory_text(count: float) -> str:
    """Bytes in binary units, as memory is sold: "64 MiB", "1.5 GiB"."""
    for unit, factor in _BINARY:
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 10 and value != int(value) else f"{value:,.0f} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Seconds in a unit that suits them: "2.5 hours", "3.0 minutes", "12.0 s", "1.5 ms", "20 us"."""
    for unit, factor in (("hours", 3600.0), ("minutes", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def rate_text(count: int, seconds: float) -> str:
    """Bytes per second and the seconds that they took: "12.5 MB/s, 4.0 s"."""
    return f"{count / 1e6 / seconds if seconds else 0.0:,.1f} MB/s, {seconds:,.1f} s"


def first_names(names: Sequence[object], limit: int = 5, separator: str = ", ") -> str:
    """The first names and the number of the others: "a, b and 1,200 more"."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return separator.join(map(str, names[:limit])) + more


def first_lines(
    lines: Sequence[str], limit: int = 10, rest: str = "and {:,} more, all printed with --json"
) -> list[str]:
    """The first lines, and a line with the number of the others; `rest` is its format."""
    return [*lines[:limit], *([rest.format(len(lines) - limit)] if len(lines) > limit else [])]


def failed_lines(failed: Mapping[str, str]) -> list[str]:
    """Lines for the sources that failed: name -> reason."""
    lines = [f"FAILED {name}: {why}" for name, why in failed.items()]
    return first_lines(lines, rest="and {:,} more failed, all printed with --json")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "0-3, 7"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in groups)


def fact_lines(rows: Sequence[tuple[str, str]], indent: str = "  ") -> list[str]:
    """One line for each name and value; the values start in the same column."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{indent}{name:<{width}}  {value}" for name, value in rows]


def aligned(rows: Iterable[Sequence[str]], right: Sequence[bool] = (), indent: str = "") -> list[str]:
    """Rows of cells as lines with aligned columns; a row may end early. `right`: these align to the right."""
    rows = list(rows)
    count = max(map(len, rows), default=0)
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(count)]
    sides = [">" if is_right else "<" for is_right in right or [False] * count]
    return [indent + "  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


Bar: TypeAlias = "tqdm[Any]"  # tqdm is generic only in its type stubs


class AboveBar(logging.Handler):
    """Writes log records to stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(printable(self.format(record)), file=sys.stderr)


def bar(total: int, desc: str, unit: str, quiet: bool, *, delay: float = 0.0) -> Bar:
    """A progress bar; a context manager with `update(n)` and `set_postfix(...)`. The unit "B" is shown with
    prefixes (kB, MB, ...). `delay`: seconds until the bar is shown, for work that usually takes less.
    """
    from tqdm import tqdm

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
