"""Cases of the fused losses: `TRITON_INTERPRET=1 python -m tests.sam.loss_cases` runs them on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional

from sa1b.sam.losses_triton import PART, Comparison
from sa1b.sam.targets import iou, overlaps

# Of the gradient, which has the format of the logits, relative to its largest number.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.01}
Case = tuple[int, int, tuple[int, int], torch.dtype, float, float]
CASES: list[Case] = [
    (1, 1, (256, 256), torch.float32, 0.25, 2.0),  # the largest sums
    (2, 3, (32, 72), torch.bfloat16, 0.25, 2.0),  # whole and incomplete parts
    (3, 1, (7, 9), torch.float32, 0.5, 0.0),
    (1, 4, (5, 1), torch.float16, 0.9, 3.0),
    (2, 2, (16, 16), torch.float32, 0.3, 0.5),
    (0, 3, (8, 8), torch.bfloat16, 0.25, 2.0),
]


def draw(masks: int, candidates: int, size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits, targets and pixels of the image; the last mask is empty with logits that are sure of it."""
    generator = torch.Generator().manual_seed(masks + candidates + size[0])
    logits = (4 * torch.randn(masks, candidates, *size, generator=generator)).to(dtype)
    targets, inside = (torch.rand(masks, *size, generator=generator) < part for part in (0.3, 0.8))
    if masks > 1:
        targets[-1], logits[-1] = False, -12
        logits[0, :, 0, :2] = torch.tensor([-100.0, 100.0])
    return logits, targets & inside, inside


def losses(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Focal and dice loss in the format of the logits."""
    true = targets[:, None].to(logits.dtype)
    wrong, probability, sums = logits * (1 - 2 * true), logits.sigmoid(), (-2, -1)
    weights = alpha * true + (1 - alpha) * (1 - true)
    focal = (weights * wrong.sigmoid() ** gamma * -functional.logsigmoid(-wrong)).mean(sums)
    overlap, total = (probability * true).sum(sums), probability.sum(sums) + true.sum(sums)
    return focal, 1 - (2 * overlap + 1) / (total + 1)


def check(device: str, case: Case) -> None:
    """Losses and gradient equal those in float64; masks and IoU are equal."""
    masks, candidates, size, dtype, alpha, gamma = case
    logits, targets, inside = (one.to(device) for one in draw(masks, candidates, size, dtype))
    *found, actual, pixels = Comparison.apply(logits.requires_grad_(), targets, inside, alpha, gamma)
    weights = torch.linspace(1, 2, 2 * masks * candidates, device=device).view(2, masks, candidates)
    found += torch.autograd.grad(found, logits, tuple(weights))
    exact = logits.detach().double().requires_grad_()
    wanted = [*losses(exact, targets, alpha, gamma)]
    wanted += torch.autograd.grad(wanted, exact, tuple(weights.double()))
    assert (found[-1].dtype, pixels.dtype) == (dtype, torch.bool)
    assert torch.equal(pixels, (logits > 0) & inside[:, None]), case
    assert torch.equal(actual, iou(*overlaps(pixels, targets[:, None]))), case
    # An exponential of float32 has an error of 1e-6 for the sure logits of `draw`, and dice is 1 minus a ratio.
    near = 1e-6 if masks == 1 else 5e-6
    tolerances = ((near, 1e-9), (near, 1e-7), (TOLERANCE[dtype], 1e-9))
    for one, other, (relative, absolute) in zip(found, wanted, tolerances, strict=True):
        # Of each candidate: those of a mask with sure logits are small.
        error, scale = ((x.flatten(2) if x.ndim > 2 else x[..., None]).abs() for x in (one - other, other))
        assert (error <= relative * scale.amax(-1, keepdim=True) + absolute).all(), case


def check_all(device: str) -> int:
    """All cases; their number."""
    assert any(size[0] * size[1] > PART for _, _, size, *_ in CASES)
    for case in CASES:
        check(device, case)
    return len(CASES)


if __name__ == "__main__":
    print(f"{check_all('cpu')} kinds of losses")
