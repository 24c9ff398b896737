"""One iteration of interactive training: the answer of the model to its prompts, and its losses."""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sa1b.hashing import Purpose
from sa1b.masks.raster_torch import inside_image
from sa1b.sam import clicks
from sa1b.sam.clicks import TOP_LEFT
from sa1b.sam.mask_decoder import ALL, AMBIGUOUS, SINGLE
from sa1b.sam.model import Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets, compared


class Scene(NamedTuple):
    """Inputs that are the same in all iterations."""

    embeddings: Tensor  # [B, C, h, w]
    image: Tensor  # [M]
    counts: Sequence[int] | None  # masks of each image
    masks: Tensor  # bool [M, R, R]
    inside: Tensor  # bool [M, R, R], pixels of the image


def iterate(
    model: Sam, recipe: Recipe, scene: Scene, points: Tensor, labels: Tensor, feedback: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The masks of one iteration compared with the targets; without feedback, it is the first one.

    The result: losses [3, M] (focal, dice, IoU); of the candidate with the highest predicted IoU its IoU [M],
    mask, bool [M, R, R], and logits [M, 1, 4h, 4w], the feedback for the next iteration.
    """
    allowed = None  # bool [M, 4]: all four candidates are computed, and these are compared
    if recipe.box_masks == "one" and feedback is None:
        boxed = labels[:, :1] == TOP_LEFT
        allowed = torch.cat((boxed, (~boxed).expand(-1, 3)), dim=1)
    logits, predicted = predict(model, scene, points, labels, feedback, allowed is not None)
    chosen = _only(predicted.detach(), allowed, -torch.inf).argmax(dim=1)
    focal, dice, actual, masks = compared(
        logits, scene.masks, scene.inside, recipe.focal_alpha, recipe.focal_gamma
    )
    wrong = predicted.float() - actual.detach()
    quality = wrong**2 if recipe.iou_loss == "squared" else wrong.abs()
    weighted = recipe.focal_weight * focal + recipe.dice_weight * dice
    best = _only(weighted.detach(), allowed, torch.inf).argmin(dim=1)
    losses = [pick(losses, best) for losses in (focal, dice)]
    if share := recipe.all_masks_share:
        means = (_mean(losses, allowed) for losses in (focal, dice))
        losses = [torch.lerp(one, mean, share) for one, mean in zip(losses, means, strict=True)]
    losses.append(pick(quality, best) if recipe.iou_masks == "best" else _mean(quality, allowed))
    following = pick(logits, chosen)[:, None]
    following = following if recipe.feedback_gradient else following.detach()
    return torch.stack(losses), pick(actual, chosen), pick(masks, chosen), following


def predict(
    model: Sam, scene: Scene, points: Tensor, labels: Tensor, feedback: Tensor | None, all_four: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits [M, K, 4h, 4w] and predicted IoU [M, K] of the candidates of an iteration: K is 3 in the first
    one, which has no feedback, later 1.
    """
    candidates = ALL if all_four else AMBIGUOUS if feedback is None else SINGLE
    return model.decode(
        scene.embeddings, scene.image, points, labels, feedback, counts=scene.counts, candidates=candidates
    )


def first_prompts(recipe: Recipe, targets: Targets, image_size: int) -> tuple[Tensor, Tensor]:
    """A point or a box for each mask, by its key: float32 [M, 2, 2] and labels int64 [M, 2]."""
    limit, sizes = recipe.box_noise_limit * image_size / 1024, targets.sizes[targets.image]
    uniform, keys = recipe.box_noise_kind == "uniform", targets.keys
    boxes = clicks.noised_boxes(targets.boxes, keys, sizes, recipe.box_noise, limit, uniform=uniform)
    chance = clicks.uniforms(clicks.random_words(keys, Purpose.FIRST_PROMPT))
    boxed = (chance < recipe.box_probability)[:, None]
    (near, near_labels), (corners, labels) = clicks.point_prompts(targets.points), clicks.box_prompts(boxes)
    return torch.where(boxed[..., None], corners, near), torch.where(boxed, labels, near_labels)


def scene_of(embeddings: Tensor, image_size: int, targets: Targets) -> Scene:
    """The scene of a micro-batch with these embeddings and targets."""
    size = targets.masks.shape[-1]
    inside = inside_image(targets.sizes, image_size, size)[targets.image]
    masks = targets.masks.bool() & inside
    return Scene(embeddings, targets.image, targets.counts, masks, inside)


def pick(values: Tensor, chosen: Tensor) -> Tensor:
    """The chosen candidate of each mask: [M, K, ...] -> [M, ...]; the others get a gradient of zeros."""
    if values.shape[1] == 1:  # a view in place of a copy
        return values[:, 0]
    return values[torch.arange(len(values), device=values.device), chosen]


def _mean(values: Tensor, allowed: Tensor | None) -> Tensor:
    """The mean over the allowed candidates: [M, K] -> [M]."""
    if allowed is None:
        return values.mean(dim=1)
    return (values * allowed).sum(dim=1) / allowed.sum(dim=1)


def _only(values: Tensor, allowed: Tensor | None, other: float) -> Tensor:
    return values if allowed is None else values.masked_fill(~allowed, other)


_log = logging.getLogger(__name__)
MOST = 16  # kinds of inputs; calls with others are not recorded


class Graphs:
    """Recordings of a function on a CUDA device, one for each kind of its inputs.

    The first call with inputs of a kind runs the function, the second one records it. All recordings use the
    same memory.
    """

    def __init__(self) -> None:
        # graph, inputs and outputs of each kind
        self._found: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Any] | None] = {}
        self._pool: Any = None
        self._fails = False

    def __deepcopy__(self, memo: object) -> "Graphs":
        return Graphs()

    def supports(self, x: Tensor) -> bool:
        """Whether functions of this tensor can be recorded."""
        return x.is_cuda

    def __call__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], fixed: Sequence[Tensor], kind: Hashable
    ) -> Any:
        """The result of `function(*inputs)`.

        Args:
            function: its result is any structure of tensors. It must not wait for the device, and all that it
                reads besides `inputs` and `fixed` must follow from `kind`.
            inputs: tensors on the device, without gradient.
            fixed: tensors that the function reads at their addresses, such as parameters.
        """
        formats = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        precision = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = kind, formats, precision, tuple(x.data_ptr() for x in fixed)
        if self._fails or key not in self._found:
            if len(self._found) < MOST:
                self._found[key] = None
            return function(*inputs)
        recording = self._found[key]
        if recording is None:
            try:
                recording = self._found[key] = self._record(function, inputs)
            except RuntimeError as error:
                self._fails = True
                _log.warning("no CUDA graphs are used: %s; pass --model.no-cuda-graphs", error)
                return function(*inputs)
        graph, copies, outputs = recording
        torch._foreach_copy_(copies, list(inputs))
        graph.replay()
        # The next replay, of another micro-batch, writes into the outputs, whose sums are still used.
        return tree_map_only(Tensor, torch.clone, outputs)

    def _record(
        self, function: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        graph, copies = torch.cuda.CUDAGraph(), [x.detach().clone() for x in inputs]
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # Weights that autocast has converted before would keep their values in all replays. Threads of the
        # loader go on, so only this thread's calls are checked.
        with (
            torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"),
            torch.autocast("cuda", dtype, enabled, cache_enabled=False),
        ):
            outputs = function(*copies)
        self._pool = graph.pool()
        return graph, copies, outputs


class EarlyGradients:
    """The gradients of losses with respect to `sources`, computed loss by loss.

    No gradient flows between the iterations of interactive training. So only the activations of one iteration
    are in memory, as with activation checkpointing, but nothing is computed twice.

    The losses are added without a loss scale, so this is not for number formats that underflow (float16).
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = sources
        # The gradient of each source so far; None: it is not trained or not used.
        self.sums: list[Tensor | None] = [None] * len(sources)

    def add(self, loss: Tensor) -> Tensor:
        """Compute and add the gradients of a scalar, free its graph, and return it without gradient."""
        trained = [place for place, x in enumerate(self._sources) if x.requires_grad]
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(loss, [self._sources[i] for i in trained], allow_unused=True)
        new = {place: x for place, x in zip(trained, found, strict=True) if x is not None}
        old = [x for x in self.sums if x is not None]  # all losses depend on the same sources
        sums = torch._foreach_add(old, list(new.values())) if old else new.values()
        for place, total in zip(new, sums, strict=True):
            self.sums[place] = total
        return loss.detach()


def with_gradients(loss: Tensor, gradients: Sequence[Tensor | None], sources: Sequence[Tensor]) -> Tensor:
    """The loss; its backward pass gives the sources these gradients times the incoming one."""
    pairs = [(x, source) for x, source in zip(gradients, sources, strict=True) if x is not None]
    total: Tensor = _total(loss, [x for x, _ in pairs], *(source for _, source in pairs))
    return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *sources: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch._foreach_mul(ctx.gradients, incoming)


_total: Any = _Total.apply
