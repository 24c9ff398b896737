"""Warnings about images that are readable but odd and therefore kept, by reason."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MAX_LISTED_MASKS = 1000  # for an image and a reason; real images have 100 masks, files can have 90,000


@dataclass(slots=True)
class ImageWarning:
    """A warning about an image.

    Attributes:
        message: what is odd; the first example if several masks are concerned.
        masks: indices of the first MAX_LISTED_MASKS masks concerned; empty if the warning is not about masks.
        mask_count: number of masks concerned.
    """

    message: str
    masks: list[int] = field(default_factory=list)
    mask_count: int = 0


class ImageWarnings(dict[str, ImageWarning]):
    """Warnings by reason (a snake_case word), in the order in which they are found."""

    def add(self, reason: str, message: str) -> None:
        """Add a warning about the image or its files; the first message of each reason is kept."""
        self.setdefault(reason, ImageWarning(message))

    def add_masks(self, reason: str, masks: Iterable[int], message: Callable[[], str]) -> None:
        """Add a warning about the masks with these indices; `message` is called for the first mask only."""
        for mask in masks:
            found = self.get(reason)
            if found is None:
                found = self[reason] = ImageWarning(message())
            found.mask_count += 1
            if len(found.masks) < MAX_LISTED_MASKS:
                found.masks.append(mask)
