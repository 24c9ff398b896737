"""Dataset directories without images, which `sa1b reshard --annotations-only` makes."""

from typing import TYPE_CHECKING

from sa1b.console import command
from sa1b.errors import UsageError

if TYPE_CHECKING:
    from sa1b.shards.dataset import Dataset


def annotations_only(dataset: "Dataset") -> bool:
    """Whether the shards contain no images."""
    return bool(dataset.manifest.get("options", {}).get("annotations_only", False))


def check_images(dataset: "Dataset", use: str, instead: str = "") -> None:
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
