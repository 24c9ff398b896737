"""What a person asked for, and cannot have as asked."""


class UsageError(Exception):
    """A flag or argument that does not fit; the message names it and the way out."""
