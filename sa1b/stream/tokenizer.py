"""Tokenizers by name: a byte-level one, a file of the library `tokenizers`, or any function.

    open_tokenizer("bytes").encode("Grüße")        # the bytes of UTF-8, numbers from 0 to 255
    open_tokenizer("bpe.json")                     # tokenizers.Tokenizer.from_file("bpe.json")
    open_tokenizer("my_package.words:encode")      # my_package.words.encode(text) -> list of int

The numbers of a function are from 0 to its attribute `vocabulary` - 1.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from sa1b.errors import UsageError

BYTES = "bytes"
_FORMS = f"{BYTES!r}, the path of a .json file of the library tokenizers, or MODULE:FUNCTION"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer."""

    name: str  # the name or path that it was opened with
    encode: Callable[[str], Sequence[int]]  # text -> tokens, integers from 0 to vocabulary - 1
    vocabulary: int | None  # number of different tokens; None if a function does not state it


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer by its name, see the module; UsageError if there is none, or no library tokenizers."""
    name = os.fspath(name)
    if name == BYTES:
        return Tokenizer(name, lambda text: bytearray(text.encode()), 256)
    if name.endswith(".json"):
        return _of_library(name)
    if ":" not in name:
        raise UsageError(f"tokenizer {name!r}: must be {_FORMS}")
    try:
        called: Any = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        way = f"set PYTHONPATH to the folder of the module, or pass {_FORMS}"
        raise UsageError(f"tokenizer {name!r}: cannot be imported ({error}); {way}") from error
    return Tokenizer(name, called, getattr(called, "vocabulary", None))


def _of_library(path: str) -> Tokenizer:
    if not Path(path).is_file():
        raise UsageError(f"tokenizer {path!r}: there is no such file; pass {_FORMS}")
    try:
        library: Any = import_module("tokenizers")
        opened = library.Tokenizer.from_file(path)
    except ImportError:
        way = "install it with: pip install 'sa1b[text]'"
        raise UsageError(f"tokenizer {path!r}: the package tokenizers is missing; {way}") from None
    except Exception as error:  # the library raises Exception itself
        why = f"is no file of the library tokenizers ({error}); write it with Tokenizer.save"
        raise UsageError(f"tokenizer {path!r}: {why}") from error
    opened.no_padding()
    opened.no_truncation()
    return Tokenizer(path, lambda text: opened.encode(text).ids, opened.get_vocab_size())
