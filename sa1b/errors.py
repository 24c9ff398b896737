"""Expected errors: one family, distinguished by what the user has to do."""


class Sa1bError(Exception):
    """Base of every expected error.

    The message names what failed (file, shard, image, flag), why, and the way out. A command prints it in one
    line and exits with code 2; anything else is a bug and keeps its traceback.
    """


class UsageError(Sa1bError):
    """A flag or argument that does not fit; the message names it."""


class SourceError(Sa1bError):
    """A source that cannot be read at all."""


class ManifestError(Sa1bError):
    """dataset.json, a task file or a view is missing, damaged, or does not belong to its dataset."""


class TableError(Sa1bError):
    """The sample table is damaged or of another version."""


class ShardError(Sa1bError):
    """A shard that does not hold what its index says; the message names shard, offset and image."""


class CheckpointError(Sa1bError):
    """A checkpoint that cannot be written or must not be used; the message names the file."""


class LockedError(Sa1bError):
    """Another process holds the lock."""


class SystematicError(Sa1bError):
    """So many pairs of a source are bad for one reason that the run must stop and ask."""


class RefusedError(Sa1bError):
    """With --on-error stop: the first pair that cannot be used."""


class OutOfMemoryError(Sa1bError):
    """The process reached its memory limit; the message names the source."""


class BadSample(ValueError):
    """A pair that cannot be used: a verdict on input, which ingest and readers handle.

    Attributes:
        reason: short snake_case word; the message says what is wrong.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
