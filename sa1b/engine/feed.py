"""What a training step is fed with: micro-batches of the stream on the device, masks as pixels, keys.

feed = Feed(config.data, config.model.image_size, rank_info, view=config.data.view)
for micro in feed.step():
    module(micro.images, micro.targets, micro.image_keys)
state = feed.state_dict()
"""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sa1b.engine.ranks import RankInfo
from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.masks.raster_torch import framed_sizes
from sa1b.sam.interactive import Targets
from sa1b.sam.random_values import random_words
from sa1b.stream.batch import Batch
from sa1b.stream.dataset import Stream
from sa1b.stream.loader import Loader
from sa1b.stream.sample import Strategy


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which samples, and how many at a time.

    Attributes:
        root: Folder that tools/reshard.py made, or its URL (s3://...).
        view: Name, digest or path of the view to train on (tools/view.py makes them); by default all images.
        global_batch: Images of a step over all ranks.
        micro_batch: Images of a rank at a time; by default its whole share of a step. Less memory, same step.
        masks: At most so many masks an image.
        strategy: Which masks of an image: uniform; area: one of each class of sizes; quality: rather those
            with high scores; coverage: all of them within as few epochs as can be.
        flip: Probability of mirroring an image left and right.
        block_size: Images that lie together and are read together, for disks that dislike random reads.
        target_size: Pixels of the square in which losses and scores are computed; by default a quarter of
            the image size, as the decoder's masks.
        threads: That read and decode, in each rank; by default its part of the CPUs that the job may use.
        prefetch: Micro-batches prepared before they are needed.
        endpoint: URL of an object store other than Amazon's.
        deadline: Seconds that a read may take over all its attempts before training stops.
    """

    root: str = ""
    view: str | None = None
    global_batch: int = 256
    micro_batch: int | None = None
    masks: int = 64
    strategy: Strategy = "uniform"
    flip: float = 0.0
    block_size: int = 1
    target_size: int | None = None
    threads: int | None = None
    prefetch: int = 2
    endpoint: str | None = None
    deadline: float = 300.0

    def __post_init__(self) -> None:
        for flag in (
            "global_batch",
            "micro_batch",
            "masks",
            "block_size",
            "target_size",
            "threads",
            "prefetch",
        ):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UsageError(f"--data.{flag.replace('_', '-')} {value} must be at least 1")
        if not 0 <= self.flip <= 1:
            raise UsageError(f"--data.flip {self.flip} must be from 0 to 1")
        if not self.deadline > 0:
            raise UsageError(f"--data.deadline {self.deadline} must be more than 0 seconds")


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """A micro-batch of B images and M masks on the device.

    Attributes:
        images: uint8 [B, 3, S, S].
        targets: of the masks.
        image_keys: int64 [B], a hash for each visit of an image.
        areas: int64 [M], source pixels.
        ids: int64 [B], image ids; positions: int64 [B], in the order; source_sizes: int64 [B, 2].
        mask_ids: int64 [M].
        last: whether the step ends behind it.
    """

    images: Tensor
    targets: Targets
    image_keys: Tensor
    areas: Tensor
    ids: Tensor
    positions: Tensor
    source_sizes: Tensor
    mask_ids: Tensor
    last: bool


class Feed:
    """The micro-batches of one rank.

    Args:
        config: what to read.
        image_size: of the model, pixels.
        rank_info: of this rank.
        run: folder of the run; the damage_log of damaged samples lies there.
        seed: of the order and of every draw.
        view: to read instead of `config.view`.
        order: "sequential" for an evaluation.

    Raises:
        UsageError: what was asked for does not fit together; the message names the flag.
        ManifestError, StorageError: the data cannot be opened.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        rank_info: RankInfo,
        run: Path,
        seed: int,
        *,
        view: str | None = None,
        order: Literal["shuffle", "sequential"] = "shuffle",
    ) -> None:
        try:
            self.stream = Stream(
                config.root,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                view=view or config.view,
                order=order,
                seed=seed,
                block_size=config.block_size if order == "shuffle" else 1,
                damage_log=run / "damaged.jsonl",
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                deadline=config.deadline,
                storage_options={"endpoint_url": config.endpoint} if config.endpoint else None,
                image_size=image_size,
                masks=config.masks,
                strategy=config.strategy,
                flip=config.flip if order == "shuffle" else 0.0,
            )
        except ValueError as error:
            raise UsageError(f"--data: {error}") from None
        self.loader = Loader(
            self.stream,
            threads=config.threads,
            prefetch=config.prefetch,
            device=rank_info.device,
            dense=config.target_size or image_size // 4,
            quiet=True,
        )
        self.micro_batches = self.stream.plan.count
        self.waited = 0.0
        self._key = torch.tensor(seed, device=rank_info.device)
        self._batches: Generator[Batch, None, None] | None = None

    def step(self) -> Iterator[Micro]:
        """The micro-batches of the next step; a sequential feed that has ended gives none."""
        self._batches = self._batches or iter(self.loader)
        for number in range(self.micro_batches):
            began = time.perf_counter()
            batch = next(self._batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            yield self._prepare(batch, last=number + 1 == self.micro_batches)

    def steps(self) -> Iterator[list[Micro]]:
        """Steps until a sequential feed ends."""
        return iter(lambda: list(self.step()), [])

    def _prepare(self, batch: Batch, *, last: bool) -> Micro:
        image, dense = batch.masks.image, batch.dense
        assert dense is not None  # the loader was asked for it
        # What counts: masks of images that are no fill-up, with a pixel at this size.
        weights = (batch.valid[image] & dense.flatten(1).any(dim=1)).float()
        positions = batch.positions
        return Micro(
            images=batch.images,
            targets=Targets(
                masks=dense,
                boxes=batch.boxes,
                points=batch.points,
                image=image,
                weights=weights,
                # By the index, not the id: masks without an id all have -1.
                keys=random_words(self._key, int(Purpose.PROMPT), positions[image], batch.mask_index),
                sizes=framed_sizes(batch.source_sizes, batch.masks.image_size).to(image.device),
                counts=batch.masks.counts,
            ),
            image_keys=random_words(self._key, int(Purpose.VISIT), positions),
            areas=batch.areas,
            ids=batch.ids,
            positions=positions,
            source_sizes=batch.source_sizes,
            mask_ids=batch.mask_ids,
            last=last,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: behind the last step whose micro-batches were all taken."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken. Raises sa1b.stream.dataset.ResumeError."""
        self.close()
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """End the loader's threads."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()


def blank(image_size: int, target_size: int, device: torch.device) -> Micro:
    """One black image with one mask that does not count: something to run forward and backward on."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return Micro(
        images=torch.zeros((1, 3, image_size, image_size), dtype=torch.uint8, device=device),
        targets=Targets(
            masks=torch.zeros((1, target_size, target_size), dtype=torch.uint8, device=device),
            boxes=torch.zeros((1, 4), device=device),
            points=torch.zeros((1, 2), device=device),
            image=one,
            weights=torch.zeros(1, device=device),
            keys=one,
            sizes=torch.full((1, 2), image_size, device=device),
        ),
        image_keys=one,
        areas=one,
        ids=one,
        positions=one,
        source_sizes=torch.full((1, 2), image_size, device=device),
        mask_ids=one,
        last=True,
    )
