"""The training step of SAM with the modules of segment_anything and of Hugging Face's transformers.

Prompts, losses and optimizer are those of `sa1b train --preset vit_b --parallel.precision bf16
--data.global-batch 8 --data.masks 64`, by operators of torch. The backward pass of an iteration follows its
forward pass, so that only the activations of one iteration are in memory. Differences to the command:

- Normalised pixels and masks are random and on the device before the step; nothing is loaded.
- Images are decoded one after the other, because the decoder of segment_anything takes one.
- Autocast also rounds positions of prompts and pixels to bfloat16, as in other loops with these packages.
- There is no drop path, which saves no work in the command. All layers have the same learning rate.
"""

from contextlib import suppress
from functools import partial
from importlib import import_module, util
from statistics import median_low
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting, Skipped
from sa1b.engine.precision import autocast, set_float32
from sa1b.engine.step.optim import make_optimizer
from sa1b.recipes.presets import SAM_PRESETS
from sa1b.sam.clicks import TOP_LEFT
from sa1b.sam.interactive import Interactive
from sa1b.sam.mask_decoder import HEAD_LENGTH, HIDDEN_RATIO
from sa1b.sam.model import ModelConfig
from sa1b.sam.other_forms import settings
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import Targets

PRESET, TWO, THREE = SAM_PRESETS["vit_b"], Recipe(clicks=1, unprompted=0), Recipe(clicks=1, unprompted=1)
SMALL = ModelConfig(64, width=32, depth=1, heads=2, global_blocks=(0,), window=2, channels=32)
TORCHVISION = ("", ".ops", ".ops.boxes", ".transforms", ".transforms.functional")


class Peer(nn.Module):
    """The modules of a package, with the method of `Sam` that training calls."""

    def decode(self, image: Tensor, _: Any, points: Tensor, labels: Tensor, before: Any, **__: Any) -> Any:
        """See `Sam.decode`; the first two points are the corners of a box, or a point and an empty one."""
        # All prompts of a call have a box or none has one, so both are computed; they have as many tokens.
        boxed = self.prompts(points[:, 2:], labels[:, 2:], points[:, :2].reshape(-1, 1, 4))
        clicked = self.prompts(*(torch.cat((x[:, :1], x[:, 2:]), dim=1) for x in (points, labels)), None)
        return self.masks(image, torch.where(labels[:, :1, None] == TOP_LEFT, boxed, clicked), before)


class Published(Peer):
    """Those of segment_anything."""

    def __init__(self, sizes: ModelConfig) -> None:
        super().__init__()
        channels, pixels = sizes.channels, sizes.image_size
        # For functions that are not used here, the package imports torchvision, which may be missing.
        with patch.dict("sys.modules", {f"torchvision{name}": MagicMock() for name in TORCHVISION}):
            modeling = import_module("segment_anything.modeling")
        encoder = modeling.ImageEncoderViT(
            pixels, sizes.patch_size, embed_dim=sizes.width, depth=sizes.depth, num_heads=sizes.heads,
            out_chans=channels, norm_layer=partial(nn.LayerNorm, eps=1e-6), use_rel_pos=True,
            window_size=sizes.window, global_attn_indexes=sizes.global_blocks,
        )  # fmt: skip
        prompts = modeling.PromptEncoder(channels, (sizes.side,) * 2, (pixels,) * 2, mask_in_chans=16)
        layers = modeling.TwoWayTransformer(2, channels, channels // HEAD_LENGTH, HIDDEN_RATIO * channels)
        decoder = modeling.MaskDecoder(transformer_dim=channels, transformer=layers)
        self.model, self.embed = modeling.Sam(encoder, prompts, decoder), encoder

    def prompts(self, points: Tensor, labels: Tensor, boxes: Tensor | None) -> Tensor:
        return self.model.prompt_encoder((points, labels), boxes, None)[0]

    def masks(self, image: Tensor, tokens: Tensor, before: Tensor | None) -> Any:
        """Logits and predicted IoU of three masks for each prompt, or of one with earlier logits."""
        encoder = self.model.prompt_encoder
        dense = encoder(None, None, before)[1]
        return self.model.mask_decoder(image, encoder.get_dense_pe(), tokens, dense, before is None)


class HuggingFace(Peer):
    """Those of SamModel, with the interface of `Published`."""

    def __init__(self, sizes: ModelConfig) -> None:
        super().__init__()
        package: Any = import_module("transformers")
        self.model = package.SamModel(package.SamConfig.from_dict(settings(sizes)))
        for name, parameter in self.model.named_parameters():  # a constant in the published code
            parameter.requires_grad_(not name.endswith("positional_embedding"))
        self.embed = lambda pixels, encode=self.model.vision_encoder: encode(pixels).last_hidden_state

    def prompts(self, points: Tensor, labels: Tensor, boxes: Tensor | None) -> Tensor:
        return self.model.prompt_encoder(points[:, None], labels[:, None], boxes, None)[0][:, 0]

    def masks(self, image: Tensor, tokens: Tensor, before: Tensor | None) -> Any:
        # Their decoder takes earlier logits for each image, not for each prompt: the image is repeated.
        images, first = image.expand(len(tokens), -1, -1, -1), before is None
        dense = self.model.prompt_encoder(None, None, None, before)[1]
        position = self.model.get_image_wide_positional_embeddings()
        return [x[:, 0] for x in self.model.mask_decoder(images, position, tokens[:, None], dense, first)]


class Loop:
    """Training steps of a peer from random weights, with the same random pixels and masks in each step."""

    def __init__(self, peer: Any, sizes: ModelConfig, masks: int, batch: int) -> None:
        self.peer, self.size, self.count, self.losses = peer.train(), sizes.image_size, batch * masks, []
        self.pixels = torch.randn(batch, 3, self.size, self.size)
        self.targets = [rectangles(masks, sizes) for _ in range(batch)]
        self.optimizer = make_optimizer(Interactive(peer, PRESET.recipe), PRESET.optim, batch)

    def step(self, recipe: Recipe | None) -> None:
        """A training step; without a recipe, a forward and backward pass of the image encoder."""
        with autocast("bf16", self.pixels.device):
            embeddings = self.peer.embed(self.pixels)
        self.gradient = torch.randn_like(embeddings) if recipe is None else self.decode(embeddings, recipe)
        embeddings.backward(self.gradient)
        if recipe is not None:
            self.unused = [n for n, x in self.peer.named_parameters() if x.requires_grad and x.grad is None]
            nn.utils.clip_grad_norm_(self.peer.parameters(), PRESET.optim.grad_clip)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def decode(self, embeddings: Tensor, recipe: Recipe) -> Tensor:
        """The gradient of embeddings from all iterations, with those of the decoder's parameters."""
        interactive, losses = Interactive(self.peer, recipe), []
        images = [image.detach().requires_grad_() for image in embeddings.split(1)]
        for image, targets in zip(images, self.targets, strict=True):
            with autocast("bf16", image.device):
                losses.append(interactive._sums(image, self.size, targets, self)["loss"])
        self.losses.append(torch.stack(losses).sum() / self.count)
        return torch.cat([image.grad for image in images])

    def add(self, loss: Tensor) -> Tensor:
        """The backward pass of an iteration, in place of `sa1b.sam.iteration.EarlyGradients`."""
        with torch.autocast(loss.device.type, enabled=False):
            (loss / self.count).backward()
        return loss.detach()


def rectangles(masks: int, sizes: ModelConfig) -> Targets:
    """Random rectangles as the targets of an image."""
    low, size = 4 * sizes.side, sizes.image_size
    corners = torch.randint(low, (masks, 2, 2)).sort(dim=1).values
    pixels, (first, last) = torch.arange(low), corners[..., None].unbind(dim=1)
    x, y = ((first <= pixels) & (pixels <= last)).unbind(dim=1)
    boxes, points = ((one + 0.5) * (size / low) for one in (corners.flatten(1), corners[:, 0]))
    image, keys, whole = torch.zeros(masks).long(), torch.randint(1 << 62, (masks,)), torch.full((1, 2), size)
    return Targets(x[:, None] & y[..., None], boxes, points, image, torch.ones(masks), keys, whole)


def measure(setting: Setting, record: Record, name: str, kind: type[Peer], batch: int) -> None:
    """The encoder alone, and the training step."""
    sizes, recipe, masks = setting.pick((PRESET.model, PRESET.recipe, 64), (SMALL, THREE, 2))
    torch.manual_seed(0)
    with torch.device(setting.device):
        loop = Loop(kind(sizes), sizes, masks, batch)
    rows = (("encoder, forward and backward", None, None, 3), ("full recipe", TWO, recipe, 2))
    for label, first, then, count in rows:
        loop.step(first)
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        took = [timing.between(partial(loop.step, then), setting.device) for _ in range(count)]
        record.figure(f"{name}: {label}", 1e3 * batch / median_low(took), "images/s")
        if setting.on_gpu:
            record.figure(f"{name}: {label}, peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    record.text(
        f"{name}: steps", f"{batch} images; encoder: median of 3; recipe: faster of 2 after a short one"
    )
    losses, norm = torch.stack(loop.losses[1:]), float(loop.gradient.norm())
    record.check(f"{name}: losses are finite", losses.isfinite().all(), losses.tolist())
    record.check(f"{name}: the second loss is another", losses[0] != losses[1], losses.tolist())
    record.check(f"{name}: the embeddings have a gradient", 0 < norm < float("inf"), norm)
    record.check(f"{name}: all trained parameters have a gradient", not loop.unused, ", ".join(loop.unused))


def work(setting: Setting, record: Record) -> None:
    """All peers that are installed, with half of the images if they need too much memory."""
    set_float32("bf16", torch.device(setting.device))
    peers = {"segment_anything": Published, "transformers": HuggingFace}
    missing = [name for name in peers if util.find_spec(name) is None]
    record.text("not installed", ", ".join(missing) or "none")
    if len(missing) == len(peers):
        raise Skipped("neither segment_anything nor transformers is installed")
    for name in [name for name in peers if name not in missing]:
        with record.attempt(name):
            with suppress(torch.OutOfMemoryError):
                measure(setting, record, name, peers[name], setting.pick(8, 2))
                continue
            measure(setting, record, name, peers[name], setting.pick(4, 1))
