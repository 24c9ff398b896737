"""Expected errors, with a class for each action that the user must take, and which text may be printed."""

import re
import sys
from importlib.util import find_spec

# Of a URL, also as a path, which has one slash: up to the last "@" before the path. A password may contain
# any character but "/".
_USER = re.compile(r"\b([A-Za-z][\w+.-]+:/{1,2})[^\s/]*@")
# From the first sign of a query to the last character before the punctuation of a sentence.
_END = r"(?=['\"<>)\]},;:.]*(?:\s|$))"
_QUERY = re.compile(r"(\b[A-Za-z][\w+.-]+:/{1,2}[^\s?]*?)(?:\?|%3[fF])(?=[^\s])\S*?" + _END)
# In a key of a bucket, "#" and ";" are characters like others.
_PART = re.compile(r"((?i:https?):/{1,2}[^\s#;]*)[#;](?=['\"<>)\]},;:.]*[^\s'\"<>)\]},;:.])\S*?" + _END)
_SIGNATURE = re.compile(r"\b(X-(?:Amz|Goog)-[A-Za-z-]+=)[^\s&'\"]+", re.IGNORECASE)
# Characters that control a terminal or change the order of the others; not line breaks and tabs.
_CONTROL = re.compile("[\ud800-\udfff\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text for terminals, logs and documents: URLs without user, password, query and fragment, which are
    secrets, and control characters escaped."""
    if ":/" in text:
        text = _PART.sub(r"\1", _QUERY.sub(r"\1", _USER.sub(r"\1", text)))
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _SIGNATURE.sub(r"\1...", text))


def check_installed() -> None:
    """End this process with one line if what all commands import is missing: in a clone before its set-up."""
    if missing := [name for name in ("torch", "numba", "tyro") if find_spec(name) is None]:
        way = "in a clone, run `make demo` and `source .venv/bin/activate`"
        sys.stderr.write(f"error: the package {missing[0]} is missing; {way}\n")
        sys.exit(2)


class Sa1bError(Exception):
    """Base of every expected error.

    The message has the form "what failed: why; what to do" and names the file, shard, image or flag. A
    command prints it on one line and exits with code 2. Any other exception is a bug and is shown with its
    traceback. `printable` has been applied to it.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(printable(argument) if isinstance(argument, str) else argument for argument in arguments)
        )


class UsageError(Sa1bError):
    """A flag or argument is not valid; the message names it."""


class SourceError(Sa1bError):
    """A source cannot be read at all."""


class NoPairError(SourceError):
    """A source has no usable pair, or none of the wanted ones."""


class ManifestError(Sa1bError):
    """dataset.json, a task file or a view is missing, damaged, or does not belong to its dataset."""


class TableError(Sa1bError):
    """The sample table is damaged or of another version."""


class ShardError(Sa1bError):
    """The contents of a shard differ from its index; the message names shard, offset and image."""


class CheckpointError(Sa1bError):
    """A checkpoint cannot be written or must not be used; the message names the file."""


class LockedError(Sa1bError):
    """Another process holds the lock."""


class SystematicError(Sa1bError):
    """Too many pairs of a source have the same problem, so that the user has to decide how to continue."""


class RefusedError(Sa1bError):
    """A pair cannot be used, and the run has --on-error stop."""


class OutOfMemoryError(Sa1bError):
    """The process reached its memory limit; the message names the source."""


class BadSample(Sa1bError, ValueError):
    """A pair of the input cannot be used. Ingest and readers handle this error.

    Attributes:
        reason: name of the problem in snake_case; the message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
