"""Interactive training: all iterations of one micro-batch in one forward pass, wrapped by DDP or FSDP.

    interactive = Interactive(Sam(PRESETS["vit_b"]), Recipe())
    sums = interactive(images, targets, image_keys)
    (sums["loss"] / masks_of_all_ranks).backward()

The image encoder runs once, the mask decoder once per iteration. All shapes depend only on the recipe and the
micro-batch, so that ranks exchange no numbers and the host does not wait for the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sa1b.sam import clicks, iteration
from sa1b.sam.embedding_cache import EmbeddingCache
from sa1b.sam.image_encoder import WithImageEncoder
from sa1b.sam.kernel_proof import use_kernels
from sa1b.sam.model import Sam
from sa1b.sam.published import fit_weights, read_tensors, weights_digest
from sa1b.sam.recipe import Recipe, encoder_flops, is_frozen, step_flops
from sa1b.sam.targets import Targets, at_size, by_image, inputs_of, overlaps, rounded_up, with_equal_counts

SCORED_CLICKS = (1, 3, 5)  # clicks after which an evaluation scores the masks; the box is the last prompt

EvaluationProtocol = Callable[[Sam, Tensor, Tensor], dict[str, Tensor]]  # see sa1b.sam.protocol


class Interactive(WithImageEncoder):
    """A model in training, together with the simulated user of the recipe.

    The rules are those of "Segment Anything" (2023); exceptions are stated:

    - The first prompt is a point or a box. One prompt may mean several objects, so the model predicts three
      masks. The best mask has the lowest weighted sum of focal and dice loss. The loss is a weighted mean of
      the loss of the best mask and the mean loss of all three; the latter has the weight
      `recipe.all_masks_share`. As in the paper, a box gets three masks too, unless `recipe.box_masks` is
      "one". In later iterations the prediction is the single mask, number 0.
    - The mask with the highest predicted IoU is the input of the next iteration: its logits are the mask
      prompt, and the next click is on one of its errors. The logits are detached unless
      `recipe.feedback_gradient` is set. (The paper does not specify this; SAM 2's code does not detach them.)
    - In an iteration without a new prompt, an empty token replaces the click.
    - Predictions outside the image count in focal and dice loss, but not in IoU, clicks or scores.

    With `traced`, a training pass also returns its prompts, "points" float32 [M, P, 2] and "labels" int64
    [M, P], and of each mask "losses", float32 [M], and "ious", float32 [M, I], after each iteration.

    `open_cache` is for a frozen image encoder: it makes a cache of embeddings from a digest of the encoder's
    weights, at the first training step. Evaluations compute embeddings.
    """

    traced = False

    def __init__(
        self, model: Sam, recipe: Recipe, open_cache: Callable[[str], EmbeddingCache] | None = None
    ) -> None:
        super().__init__()
        self.model, self.recipe, self._open_cache = model, recipe, open_cache
        self._cache: EmbeddingCache | None = None
        self._graphs = iteration.Graphs()

    # The model contract: see sa1b.engine.model.
    figures: tuple[str, ...] = ("loss", "focal", "dice", "iou_loss", "iou_first", "iou_last")
    image_figures: tuple[str, ...] = ("loss", "iou_last", "count")
    shown: Mapping[str, str] = {"IoU": "iou_last"}

    def inputs(self, batch: Any, seed: int) -> tuple[Tensor, Targets, Tensor]:
        """The arguments of `forward`: images, targets and image keys; see `inputs_of`."""
        return inputs_of(batch, seed)

    def weights(self) -> Sam:
        """The module that checkpoints contain, with the published names."""
        return self.model

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a SAM or of a plain ViT: see `sa1b.sam.published`."""
        return read_tensors(path)

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Load weights of a SAM, or of a ViT for the image encoder; return a line that describes them.

        Position embeddings are resized to the model's image size. Other sizes: UsageError.
        """
        fitted, line = fit_weights(weights, self.model.config)
        self.model.load_state_dict(fitted, strict=False)  # a ViT and a model with LoRA leave some out
        return line

    def flops(self, images: float, masks: float) -> float:
        """With a cache, without the image encoder, which later epochs do not run."""
        parts = {"encoder": self.model.image_encoder, "decoder": self.model.mask_decoder}
        frozen = [name for name, part in parts.items() if is_frozen(part)]
        cached = images * encoder_flops(self.model.config) if self._open_cache is not None else 0.0
        return step_flops(self.model.config, self.recipe, images, masks, frozen) - cached

    def forward(
        self,
        images: Tensor,
        targets: Targets,
        image_keys: Tensor,
        *,
        evaluate: bool = False,
        protocol: EvaluationProtocol | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a micro-batch, or its scores.

        Args:
            images: uint8 [B, 3, S, S]; B may be 0.
            targets: targets of M masks; M may be 0.
            image_keys: int64 [B], a hash for each image and visit; drop path depends on it.
            evaluate: score the masks without gradient and without noise; the first click is the target's
                point, and the other clicks are chosen as in training. The module must be in evaluation mode.
            protocol: evaluate with this function instead, whose result is returned. For FSDP, it must call
                `embed` once on every rank.

        Returns:
            Training: sums over masks, weighted by targets.weights, float32 scalars; divide by the count over
            all ranks. "loss" has the gradient; "focal", "dice" and "iou_loss" are its parts before their
            weights, "iou_first" and "iou_last" the chosen mask's IoU after the first and the last iteration,
            "count" the sum of the weights; "of_images" the sums of loss, last IoU and weights of each image,
            float32 [B, 3]. All parameters always get a gradient; it is 0 if the count is 0.
            Evaluation: "intersections" and "unions", int64 [M, 4], in pixels of the dense masks inside the
            image, after 1, 3 and 5 clicks and for the exact box alone; "logits", float32 [M, R, R] of the
            padded square, and "predicted_iou", float32 [M], of the answer to the first click. With one
            prompt, the mask is the candidate with the highest predicted IoU of three; later it is number 0.
        """
        use_kernels(self.model)
        if protocol is not None or evaluate:
            with torch.no_grad():
                if protocol is not None:
                    return protocol(self.model, images, targets.sizes)
                return self._evaluate(images, targets)
        embeddings = self._embeddings(images, targets.sizes, image_keys)
        return self._iterate(embeddings, images.shape[-1], targets)

    def _embeddings(self, images: Tensor, sizes: Tensor, image_keys: Tensor) -> Tensor:
        """Those of a training step."""
        if self._open_cache is None or len(images) == 0 or isinstance(images, FakeTensor):  # a plan's
            return self.model.embed(images, self.kept(image_keys, self.model.config), sizes)
        if self._cache is None:
            self._cache = self._open_cache(weights_digest(self.model.image_encoder.state_dict())[:16])
        embeddings = self._cache.embeddings(images, sizes, self._computed)
        return self.model.with_features(self.model.pixels(images, sizes), embeddings)

    @torch.no_grad()
    def _computed(self, images: Tensor, sizes: Tensor) -> Tensor:
        """The embeddings that a cache lacks."""
        embeddings: Tensor = self.model.image_encoder(self.model.pixels(images, sizes))
        return embeddings

    def _iterate(self, embeddings: Tensor, image_size: int, targets: Targets) -> dict[str, Tensor]:
        """All iterations of training, from the embeddings of the images."""
        if not self._iterations_are_independent(embeddings.device):
            return self._sums(embeddings, image_size, targets, None)
        graphs, most = None, max(targets.counts or (0,))
        if most and self.model.config.cuda_graphs and self._graphs.supports(embeddings):
            graphs, targets = self._graphs, with_equal_counts(targets, rounded_up(most))
        names = [field.name for field in fields(Targets) if field.name != "counts"]
        outer = {
            name: x for name, x in self.model.named_parameters() if not name.startswith("image_encoder.")
        }

        def work(*given: Tensor) -> tuple[dict[str, Tensor], list[Tensor | None]]:
            # Other leaves in place of the parameters: their gradients belong to this stream.
            leaves = [given[0].detach().requires_grad_(embeddings.requires_grad)]
            leaves += [nn.Parameter(x.detach(), x.requires_grad) for x in outer.values()]
            early = iteration.EarlyGradients(leaves)
            changed: Any = dict(zip(names, given[1:], strict=True))
            arguments = leaves[0], image_size, replace(targets, **changed), early
            inner = {f"model.{name}": x for name, x in zip(outer, leaves[1:], strict=True)}
            return functional_call(_Calls(self.model, self._sums), inner, arguments), early.sums

        inputs = [embeddings.detach(), *(getattr(targets, name) for name in names)]
        if graphs is None:
            sums, gradients = work(*inputs)
        else:
            fixed = [*outer.values(), *self.model.buffers()]
            kind = image_size, embeddings.requires_grad, tuple(x.requires_grad for x in outer.values())
            sums, gradients = graphs(work, inputs, fixed, kind)
        sources = (embeddings, *outer.values())
        return sums | {"loss": iteration.with_gradients(sums["loss"], gradients, sources)}

    def _sums(
        self, embeddings: Tensor, image_size: int, targets: Targets, early: iteration.EarlyGradients | None
    ) -> dict[str, Tensor]:
        """The sums of `forward`, from embeddings; `early` gets the loss of each iteration."""
        recipe, keys = self.recipe, targets.keys
        scene = iteration.scene_of(embeddings, image_size, targets)
        points, labels = iteration.first_prompts(recipe, targets, image_size)
        rests = clicks.unprompted_iterations(keys, recipe.clicks, recipe.unprompted)
        share = 1.0 if recipe.iteration_loss == "sum" else 1 / (1 + rests.shape[1])
        function: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = iteration.iterate
        if torch.is_grad_enabled() and early is None:
            # An iteration uses no generator, so the state of the generator is not saved.
            function = partial(checkpoint, iteration.iterate, use_reentrant=False, preserve_rng_state=False)
        losses, parts, ious, of_masks = [], [], [], torch.zeros_like(targets.weights)
        mask, feedback = scene.masks, None
        for number in range(1 + rests.shape[1]):
            if number > 0 and (recipe.unprompted == 0 or number < rests.shape[1]):
                click, label = clicks.corrective_clicks(mask, scene.masks, keys, number - 1, image_size)
                label = torch.where(rests[:, number - 1], clicks.NOTHING, label)
                points, labels = _with_click(points, labels, click, label)
            of_parts, iou, mask, feedback = function(self.model, recipe, scene, points, labels, feedback)
            weighted = of_parts * targets.weights
            sums = share * weighted.sum(dim=1)
            loss = self._weighted(sums)
            losses.append(loss if early is None else early.add(loss))
            parts.append(sums.detach())
            of_masks = of_masks + share * self._weighted(weighted.detach())
            ious.append((targets.weights * iou).detach())
        focal, dice, quality = torch.stack(parts).sum(dim=0).unbind()
        trace = {}
        if self.traced:
            trace = {"points": points, "labels": labels, "ious": torch.stack(ious, 1), "losses": of_masks}
        return trace | {
            "loss": torch.stack(losses).sum(),
            "focal": focal,
            "dice": dice,
            "iou_loss": quality,
            "iou_first": ious[0].sum(),
            "iou_last": ious[-1].sum(),
            "count": targets.weights.sum(),
            "of_images": by_image(torch.stack((of_masks, ious[-1], targets.weights)), targets),
        }

    def _weighted(self, parts: Tensor) -> Tensor:
        """The loss of its parts, [3, ...]."""
        recipe, (focal, dice, quality) = self.recipe, parts.unbind()
        return recipe.focal_weight * focal + recipe.dice_weight * dice + recipe.iou_weight * quality

    def _iterations_are_independent(self, device: torch.device) -> bool:
        """Whether the backward pass of an iteration can follow its forward pass at once."""
        # Not if gradients flow between iterations, nor in float16, where they would underflow without the
        # loss scale, which is applied to the sum.
        if not torch.is_grad_enabled() or self.recipe.feedback_gradient:
            return False
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return autocast is not torch.float16

    def _evaluate(self, images: Tensor, targets: Targets) -> dict[str, Tensor]:
        image_size, scores = images.shape[-1], list[tuple[Tensor, Tensor]]()
        scene = iteration.scene_of(self.model.embed(images, None, targets.sizes), image_size, targets)

        def answer(points: Tensor, labels: Tensor, before: Tensor | None) -> tuple[Tensor, ...]:
            # Of the best candidate: logits, these at the size of the targets, mask and predicted IoU.
            logits, predicted = iteration.predict(self.model, scene, points, labels, before)
            chosen = predicted.argmax(dim=1)
            low = iteration.pick(logits, chosen)[:, None]
            large, masks = at_size(low, scene.inside)
            return low, large[:, 0], masks[:, 0], iteration.pick(predicted, chosen).float()

        points, labels = clicks.point_prompts(targets.points)
        feedback, first_logits, mask, first_iou = answer(points, labels, None)
        for clicked in range(1, max(SCORED_CLICKS) + 1):
            if clicked > 1:
                click, label = clicks.corrective_clicks(mask, scene.masks, targets.keys, clicked, image_size)
                points, labels = _with_click(points, labels, click, label)
                feedback, _, mask, _ = answer(points, labels, feedback)
            if clicked in SCORED_CLICKS:
                scores.append(overlaps(mask, scene.masks))
        scores.append(overlaps(answer(*clicks.box_prompts(targets.boxes), None)[2], scene.masks))
        intersections, unions = (torch.stack(each, dim=1) for each in zip(*scores, strict=True))
        first = {"logits": first_logits, "predicted_iou": first_iou}
        return {"intersections": intersections, "unions": unions, **first}


def _with_click(points: Tensor, labels: Tensor, click: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((points, click[:, None]), dim=1), torch.cat((labels, label[:, None]), dim=1)


class _Calls(nn.Module):
    """A function of a model, for `torch.func.functional_call`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.forward = model, function
