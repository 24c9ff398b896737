"""Names of image files, and the ids of images that are hashes of their names."""

import hashlib

ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff")


def is_image_name(name: str) -> bool:
    """Whether a file of this name is taken as an image."""
    return name.lower().endswith(ENDINGS) and not name.rpartition("/")[2].startswith(".")


def hashed_id(source: str, name: str) -> int:
    """The id of an image by its name in a source: 53 bits of the SHA-256 of `<source>/<name>`."""
    digest = hashlib.sha256(f"{source}/{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 11  # JSON has integers of 53 bits exactly for every reader
