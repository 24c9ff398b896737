"""What can go wrong, told apart by what a person has to do."""


class UsageError(Exception):
    """A flag or argument that does not fit; the message names it and the way out."""


class SourceError(Exception):
    """A source that cannot be read at all; the message names it and the way out."""


class ShardError(Exception):
    """A shard that does not hold what its index says; the message names shard, offset and image."""


class BadSample(ValueError):
    """A pair that cannot be used: `reason` is a short snake_case word, the message says what is wrong."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SystematicError(Exception):
    """So many pairs of a source are bad for one reason that the run must stop and ask."""


class RefusedError(Exception):
    """With --on-error stop: the first pair that cannot be used."""
