"""Validation of arguments: the message names the argument, its value and the accepted values.

Integers of numpy are accepted as integers; True and 1.0 are not.
"""

import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import signature
from math import inf
from numbers import Real
from operator import index
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import urlsplit

from sa1b.errors import UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BadValue(UsageError, ValueError):
    """The value of an argument of a Python function is not valid."""


class BadType(UsageError, TypeError):
    """A Python function has no such argument, or one of another type."""


def flag_types(main: Callable[..., int]) -> dict[str, Any]:
    """The types of the arguments of a command for tyro. Descriptions say what happens without a flag, and the
    help has no "{None}|INT" and "(default: None)".
    """
    import tyro

    kinds: dict[Any, str] = {int | None: "INT", float | None: "FLOAT", str | None: "STR", Path | None: "PATH"}
    types = get_type_hints(main, include_extras=True)
    for name, parameter in signature(main).parameters.items():
        if parameter.default is None:
            bare, *notes = get_args(types[name]) if get_origin(types[name]) is Annotated else (types[name],)
            given = next((note.metavar for note in notes if getattr(note, "metavar", None)), kinds.get(bare))
            types[name] = Annotated[types[name], tyro.conf.arg(metavar=given, help_behavior_hint="")]
    return types


def share_of(flag: str, text: str | None) -> tuple[int, int] | None:
    """I and N of a flag I/N: part I, from 0 to N - 1, of the work of N processes; None without the flag."""
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UsageError(f"{flag} {text}: must have the form I/N with I from 0 to N - 1, such as 0/8")
    return int(number), int(count)


# Arguments of PyTorch's DataLoader and of the segment-anything package -> what has their meaning here.
_ELSEWHERE = {
    "batch_size": "pass global_batch, the images of a step on all ranks, or micro_batch, those of one batch, "
    "to Stream",
    "num_workers": "pass Loader(stream, threads=...), or DataLoader(stream, num_workers=...)",
    "shuffle": "pass order='shuffle' or order='sequential' to Stream",
    "drop_last": "drop it; every image is used once in each epoch",
    "pin_memory": "drop it; copies to a GPU are from pinned memory",
    "device": "pass the device to Loader or load_model",
    "endpoint": "pass storage_options={'endpoint_url': ...}, or set AWS_ENDPOINT_URL",
    "size": "pass image_size, the side of the padded square, to Stream",
    "point_coords": "pass points",
    "point_labels": "pass labels",
    "box": "pass boxes",
    "return_logits": "drop it; the result has logits",
    "checkpoint": "pass source",
    "multimask_output": "pass all_candidates=True for the three masks of a prompt",
    "pred_iou_thresh": "pass min_predicted_iou",
    "stability_score_thresh": "pass min_stability",
    "stability_score_offset": "pass stability_offset",
    "box_nms_thresh": "pass max_box_iou",
    "crop_n_layers": "pass crop_layers",
    "crop_nms_thresh": "pass crop_max_box_iou",
    "crop_overlap_ratio": "pass crop_overlap",
    "crop_n_points_downscale_factor": "pass crop_points_divisor",
}


def own_name(name: str) -> str:
    """The argument with the meaning of that of another library; "" if there is none of one name."""
    return _ELSEWHERE.get(name, "").removeprefix("pass ")


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise BadType for an argument that a function does not have, naming what is meant, or all."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
            raise BadType(f"{function}({name}=...): no such argument; {_ELSEWHERE.get(name, hint)}")


def check_arguments(
    function: Callable[_P, _R], options: type | None = None, name: str | None = None
) -> Callable[_P, _R]:
    """Decorate a public function with `check_names`; `options`: dataclass of its further arguments; `name`:
    its public name, if that is another one.
    """
    known = [
        parameter for parameter in signature(function).parameters if parameter not in ("self", "options")
    ]
    known += [] if options is None else options.__annotations__

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_names(name or function.__qualname__.removesuffix(".__init__"), kwargs, known)
        return function(*args, **kwargs)

    return checked


def whole_number(name: str, value: object, least: int | None = 0, most: int | None = None) -> int:
    """The value as an int; ValueError if it is not an integer, or out of range. `least` None: any integer."""
    whole = "a whole number" if least is None else f"a whole number, at least {least}"
    if most is not None:
        whole = f"a whole number from {least} to {most}"
    try:
        if isinstance(value, bool):
            raise TypeError
        integer = index(cast(SupportsIndex, value))
    except TypeError:
        raise _wrong(name, value, whole) from None
    if least is None:
        return integer
    if most is not None and not least <= integer <= most:
        raise _wrong(name, integer, whole)
    if integer < least:
        raise _wrong(name, integer, f"at least {least}")
    return integer


def number(
    name: str, value: object, least: float = 0.0, most: float = float("inf"), *, above: float = -float("inf")
) -> float:
    """The value as a float from `least` to `most`, and above `above`; ValueError for others and NaN."""
    what = f"a number above {above:g}" if above >= least else f"a number, at least {least:g}"
    if least == above == -inf:
        what = "a number"
    if most < float("inf"):
        what = (
            f"a number above {above:g}, up to {most:g}" if above >= least else f"from {least:g} to {most:g}"
        )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, value, what)
    as_float = float(value)
    if not (least <= as_float <= most and as_float > above):
        raise _wrong(name, value, what)
    return as_float


def numbers(name: str, value: object, count: int, *, above: float = -inf) -> list[float]:
    """The value as `count` finite floats above `above`; ValueError for others."""
    try:
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise ValueError
        floats = [number(name, item, -inf, above=above) for item in value]
        if len(floats) != count or inf in map(abs, floats):
            raise ValueError
    except ValueError:
        limit = "" if above == -inf else f", each above {above:g}"
        raise _wrong(name, value, f"{count} finite numbers{limit}") from None
    return floats


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a flag accepts, beside its field: `steps: Annotated[int, Range(1)] = 90_000`."""

    least: float = 0
    most: float | None = None
    above: float | None = None  # not accepted itself, in place of `least`
    below: float | None = None  # not accepted itself
    unit: str = ""  # for the message

    def __str__(self) -> str:
        first = f"at least {self.least}" if self.above is None else f"more than {self.above}"
        begin = f"from {self.least} to" if self.above is None else f"{first} and"
        if self.most is not None:
            first = f"{begin} {'' if self.above is None else 'at most '}{self.most}"
        elif self.below is not None:
            first = f"{first} and finite" if self.below == inf else f"{begin} below {self.below}"
        return first + self.unit

    def check(self, flag: str, *values: float | None) -> None:
        """Raise BadValue for a number that is not accepted; None is."""
        for value in values:
            if value is None:
                continue
            fits = value >= self.least if self.above is None else value > self.above
            fits &= (self.most is None or value <= self.most) and (self.below is None or value < self.below)
            if not fits:
                shown = value if isinstance(value, int) else f"{value:g}"
                raise BadValue(f"{flag} {shown}: must be {self}")


_hints = cache(get_type_hints)


def check_fields(settings: Any, group: str) -> None:
    """Check the fields of a dataclass, whose flags are --<group>.<field>; see `check_values`."""
    hints = _hints(settings.__class__, include_extras=True)
    check_values(hints, {name: getattr(settings, name) for name in hints}, f"{group}.")


def check_values(hints: Mapping[str, Any], values: Mapping[str, Any], group: str = "") -> None:
    """Raise BadValue for a number outside its `Range`, or a value that is none of its Literal."""
    for name, value in values.items():
        hint, flag = hints[name], f"--{group}{name.replace('_', '-')}"
        for limit in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(limit, Range):
                limit.check(flag, *(value if isinstance(value, tuple) else (value,)))
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise BadValue(f"{flag} {value!r}: must be {' or '.join(map(str, get_args(hint)))}")


def check_cache_flags(flag: str, cache: object, limit: int | None) -> None:
    """Raise UsageError for a cache without a limit, and for a limit without a cache."""
    if cache is not None and limit is None:
        raise UsageError(f"{flag} {cache}: needs a limit; also pass {flag}-bytes")
    if cache is None and limit is not None:
        raise UsageError(f"{flag}-bytes {limit}: is the limit of a cache; also pass {flag}")


def path(name: str, value: object, what: str = "a path") -> str | os.PathLike[str]:
    """The value, if it is a string or a path; ValueError for another type, or an empty one."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise _wrong(name, value, what)
    return value


def of_type(name: str, value: Any, hint: Any) -> Any:
    """The value of a flag that Python passes: a path or tuple of a text; ValueError: of another type."""
    if get_origin(hint) is tuple:
        values = (value,) if isinstance(value, str | os.PathLike) else value
        return tuple(of_type(name, item, get_args(hint)[0]) for item in values)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType, Literal) else (hint,)
    if get_origin(hint) is Literal:
        if value not in kinds:
            raise _wrong(name, value, " or ".join(map(repr, kinds)))
        return value
    if isinstance(value, os.PathLike | str) and {Path, str} & {*kinds}:
        return Path(value) if Path in kinds else os.fspath(value)
    if isinstance(value, int) and float in kinds and not isinstance(value, bool):
        return float(value)
    if type(value) not in kinds:
        raise _wrong(name, value, " or ".join(kind.__name__ for kind in kinds))
    return value


def _wrong(name: str, value: object, what: str) -> ValueError:
    return BadValue(f"{name}={reprlib.repr(value)} must be {what}")


def plain_root(value: Path | str) -> str:
    """A path, or a URL with its scheme in lower case; a URL of a local file as its path.

    "S3://BUCKET" is "s3://BUCKET", and "file:/x", "file:///x" and "file://localhost/x" are "/x". UsageError:
    a URL names no host or bucket, or a file of another host.
    """
    text = os.fspath(value)
    scheme, _, rest = text.partition(":")
    if not rest.startswith("/") or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return text
    scheme, is_url = scheme.lower(), rest.startswith("//")
    if scheme == "file" and not is_url:
        return text if Path(text).exists() else rest
    if scheme == "file":
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost") or not slash:
            raise UsageError(f"{text}: names no file of this machine; pass its path")
        return f"/{path}"
    if is_url and not rest.strip("/"):
        if scheme.startswith("http"):
            raise UsageError(f"{text}: names no host; pass a URL such as https://HOST/FOLDER")
        raise UsageError(f"{text}: names no bucket; pass a URL such as {scheme}://BUCKET/FOLDER")
    if is_url and (why := fault_of_url(text)):
        raise UsageError(f"{text}: no valid URL ({why}); check it")
    return f"{scheme}:{rest}" if is_url else text


def fault_of_url(url: str) -> str:
    """Why a URL has no valid form, such as a bracket that is not closed; empty if it has."""
    try:
        parts = urlsplit(url)
        is_wrong = parts.scheme in ("http", "https") and parts.port == 0
        if parts.scheme in ("s3", "s3a", "gs", "gcs") and "@" in parts.netloc:
            return "a bucket has no user; pass credentials in the environment"
    except ValueError as error:
        return str(error)
    return "its port must be from 1 to 65535" if is_wrong else ""


def was_url(value: Path | str) -> bool:
    """Whether a path was a URL before `Path` removed one of its slashes: "s3:/BUCKET/FOLDER"."""
    return re.match(r"[a-z][a-z0-9+.-]+:/", str(value)) is not None


def is_url(text: str) -> bool:
    """Whether a text is a URL and not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def plain_words(words: Iterable[str]) -> list[str]:
    """The words of a command line, with URLs in them as `plain_root` returns them. UsageError: --out or a
    word that follows no flag is empty, as after an unset variable, or a path begins with a `~` that no shell
    has replaced.
    """
    plain: list[str] = []
    for word in words:
        flag, mark, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if word == "--out=" or (not word and plain[-1:] == ["--out"]):
            raise UsageError("--out: is empty; name a folder, or a URL (is a variable of the shell not set?)")
        if not word and not "".join(plain[-1:]).startswith("-"):
            raise UsageError(
                f"argument {len(plain) + 1}: is empty; give it a value (is a variable of the shell not set?)"
            )
        if value == "~" or value.startswith("~/"):
            raise UsageError(
                f"{word}: the shell replaces ~ at the start of an unquoted word only; write $HOME{value[1:]}"
            )
        plain.append(f"{flag}{mark}{plain_root(value)}")
    return plain
