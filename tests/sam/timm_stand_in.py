"""A stand-in for the package timm, which the suite does not install: feature pyramids with BatchNorm layers."""

from collections.abc import Sequence

from torch import Tensor, nn

CHANNELS = {4: 4, 8: 6, 16: 8, 32: 12}


class FeatureInfo:
    def __init__(self, reductions: Sequence[int]) -> None:
        self._reductions = list(reductions)

    def reduction(self) -> list[int]:
        return self._reductions

    def channels(self) -> list[int]:
        return [CHANNELS[one] for one in self._reductions]


class Pyramid(nn.Module):
    """Features at the pixels of `reductions`: a list of [B, channels, S / reduction, S / reduction]."""

    def __init__(self, reductions: Sequence[int]) -> None:
        super().__init__()
        self.feature_info = FeatureInfo(reductions)
        widths = [3, *CHANNELS.values()]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(
                    widths[i], widths[i + 1], kernel_size=4 if i == 0 else 2, stride=4 if i == 0 else 2
                ),
                nn.BatchNorm2d(widths[i + 1]),
                nn.GELU(),
            )
            for i in range(len(CHANNELS))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        found = {}
        for reduction, stage in zip(CHANNELS, self.stages, strict=True):
            x = found[reduction] = stage(x)
        return [found[one] for one in self.feature_info.reduction()]


def create_model(
    name: str, *, pretrained: bool, features_only: bool, out_indices: Sequence[int] = (0, 1, 2, 3)
) -> Pyramid:
    if not name.startswith(("tiny_vit", "repvit")):
        raise RuntimeError(f"Unknown model ({name})")
    assert (pretrained, features_only) == (False, True)
    return Pyramid([list(CHANNELS)[place] for place in out_indices])
