"""Warnings about images that are readable but odd and therefore kept, by reason."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MAX_LISTED_MASKS = 1000  # of an image and reason; real images have 100 masks, an annotation file up to 90,000


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
    """Reason (a snake_case word) -> warning, in the order they are found."""

    def add(self, reason: str, message: str) -> None:
        """A warning about the image or its files; the first message of a reason stays."""
        self.setdefault(reason, ImageWarning(message))

    def add_masks(self, reason: str, masks: Iterable[int], message: Callable[[], str]) -> None:
        """A warning about masks by index; `message` is called for the first of them only."""
        for mask in masks:
            found = self.get(reason)
            if found is None:
                found = self[reason] = ImageWarning(message())
            found.mask_count += 1
            if len(found.masks) < MAX_LISTED_MASKS:
                found.masks.append(mask)
