"""The losses of grounding."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroundingRecipe:
    """Losses of a mask and its phrase.

    Attributes:
        mask_weight: Weight of the binary cross entropy of the mask that is predicted for the phrase.
        contrastive_weight: Weight of the contrastive loss of regions and phrases.
        temperature: Temperature of the contrastive loss at the start; it is learned.
        least_temperature: The temperature does not fall below this.
        features: Length of the vectors in which regions and phrases are compared.
        negatives: Phrases and regions that a pair is compared with. step: those of the whole step, over all
            ranks, which needs one micro-batch. micro-batch: those of the micro-batches that all ranks compute
            at the same time; with a smaller micro-batch, the loss is different.
    """

    mask_weight: float = 1.0
    contrastive_weight: float = 0.1
    temperature: float = 0.07
    least_temperature: float = 0.01
    features: int = 256
    negatives: Literal["step", "micro-batch"] = "step"

    def __post_init__(self) -> None:
        for name in ("mask_weight", "contrastive_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: must not be negative")
        if self.features < 1:
            raise ValueError(f"{_flag('features')} {self.features}: must be at least 1")
        if not 0 < self.least_temperature <= self.temperature:
            raise ValueError(
                f"{_flag('temperature')} {self.temperature}: must be at least "
                f"{_flag('least_temperature')} {self.least_temperature}, and that more than 0"
            )


def _flag(name: str) -> str:
    return f"--recipe.{name.replace('_', '-')}"
