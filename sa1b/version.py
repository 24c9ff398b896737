"""The version of this package."""

import hashlib
from pathlib import Path

_DECIDING = ("hashing.py", "masks/*.py", "sam/*.py", "shards/*.py", "stream/*.py", "views/*.py")

__version__ = "0.1.0"


def code_digest() -> str:
    """SHA-256 of the modules that decide the samples and prompts of a training step; 16 characters of it."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(path for pattern in _DECIDING for path in package.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
