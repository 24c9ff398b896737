"""Dataset directories without images, which `sa1b reshard --annotations-only` makes."""

from pathlib import Path
from typing import Any, Protocol

from sa1b.console import command
from sa1b.errors import UsageError


class _Dataset(Protocol):
    """What this module needs of `sa1b.shards.dataset.Dataset`, which imports it."""

    manifest: dict[str, Any]

    @property
    def root(self) -> Path | str: ...


def annotations_only(dataset: _Dataset) -> bool:
    """Whether the shards contain no images."""
    return bool(dataset.manifest.get("options", {}).get("annotations_only", False))


def check_images(dataset: _Dataset, use: str, instead: str = "") -> None:
    """Refuse a use that needs images if there are none.

    Args:
        dataset: the dataset directory.
        use: what needs images.
        instead: another way out, such as "run B, or ".

    Raises:
        UsageError: the directory has annotations only; the message names the use.
    """
    if annotations_only(dataset):
        raise UsageError(
            f"{dataset.root}: {use} needs images, and this directory has annotations only "
            f"(--annotations-only); {instead}convert the sources with `{command('reshard')}` to another "
            "--out, without that flag"
        )
