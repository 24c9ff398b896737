"""Expected errors: one family, with a class for each action that the user must take."""


class Sa1bError(Exception):
    """Base of every expected error.

    The message has the form "what failed: why; what to do" and names the file, shard, image or flag. A
    command prints it on one line and exits with code 2. Any other exception is a bug and is shown with its
    traceback.
    """


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


class BadSample(ValueError):
    """A pair of the input cannot be used. Ingest and readers handle this error.

    Attributes:
        reason: name of the problem in snake_case; the message has the details.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
