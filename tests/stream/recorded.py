"""A small dataset, digests of batches, and the expected sequence of a rank, computed without a stream."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

import sa1b
from sa1b import Batch
from sa1b.stream.batch import collate
from sa1b.stream.decode import decode
from sa1b.stream.order import Order
from sa1b.stream.ragged import RaggedMasks
from sa1b.stream.sample import SampleOptions, pick_masks
from tests.shards import tiny

RECIPE: dict[str, Any] = {"image_size": 32, "masks": 4, "flip": 0.5}
FIRST_ID = 500


def make_root(folder: Path, images: int, per_shard: int = 5, **options: Any) -> Path:
    """Images of many sizes with 2 to 8 overlapping masks each, ids from FIRST_ID on; not in order of ids."""
    members = []
    for image_id in range(FIRST_ID, FIRST_ID + images):
        size = (36 + image_id * 7 % 30, 40 + image_id * 11 % 30)
        pixels = tiny.picture(image_id, size=size)
        text = tiny.encode(tiny.document(image_id, size=size, masks=2 + image_id % 7))
        members += tiny.pair_members(image_id, simplejpeg.encode_jpeg(pixels, 75, "RGB", "420"), text)
    pairs = [members[i : i + 2] for i in range(0, len(members), 2)]
    mixed = [member for i in np.random.default_rng(1).permutation(images) for member in pairs[i]]
    root = folder / "root"
    tiny.ingest_tar(
        tiny.write_tar(folder / "sa_000001.tar", mixed), root, images_per_shard=per_shard, **options
    )
    return root


def digest(batch: Batch) -> str:
    """A digest of a batch: its position, and type, shape, strides and bytes of each tensor."""
    total = hashlib.sha256(str(batch.position).encode())
    for record in (batch, batch.masks):
        for name in record.__slots__ if isinstance(record, RaggedMasks) else Batch.__slots__:
            tensor = getattr(record, name)
            if isinstance(tensor, torch.Tensor):
                total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
                total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def batch_of(dataset: sa1b.Dataset, positions: Sequence[int], position: int, seed: int = 0) -> Batch:
    """The samples at these positions as a batch, after which the stream is at `position`."""
    order = Order(len(dataset), dataset.table.ids_digest, seed)
    recipe = SampleOptions(**RECIPE)
    images = torch.zeros((len(positions), recipe.image_size, recipe.image_size, 3), dtype=torch.uint8)
    made = []
    for slot, at in zip(images.numpy(), positions, strict=True):
        sample = dataset[int(order.rows(np.array([at]))[0])]
        epoch = at // len(dataset)
        made.append(pick_masks(sample.annotations, recipe, seed, epoch))
        decode(sample.jpeg, made[-1].frame, slot)
    return collate(images, made, positions, [True] * len(positions), position)


def sequence(
    root: Path, steps: int, *, global_batch: int, micro_batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """A rank's batches by the formula: rank r of W takes [p + r*G//W, p + (r+1)*G//W)."""
    dataset = sa1b.open(root)
    pieces = math.ceil(math.ceil(global_batch / world_size) / micro_batch)
    for p in range(0, steps * global_batch, global_batch):
        mine = list(range(p + rank * global_batch // world_size, p + (rank + 1) * global_batch // world_size))
        for i in range(pieces):
            after = p + global_batch if i == pieces - 1 else p
            yield batch_of(dataset, mine[i * micro_batch : (i + 1) * micro_batch], after)
