"""A plain training loop for the preset tiny, fed by this package's loader or by extracted files.

Model, losses, optimizer, schedule, batch and number of masks are the same; only the loader differs. The
time budget is that of training: it includes the start of the loader and excludes evaluations. The learning
rate follows the elapsed part of the budget, so that both loaders get the complete schedule.

`benchmarks/test_time_to_score.py` runs this module in a process of its own:

    python -m benchmarks.plain_loop files FOLDER HELD_OUT SECONDS SEED SCORES
    python -m benchmarks.plain_loop shards ROOT HELD_OUT SECONDS SEED SCORES
"""

import json
import math
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import sa1b
from benchmarks.peers import pixels
from benchmarks.peers.task import Task
from sa1b.masks.grid import framed_size
from sa1b.recipes.presets import SAM_PRESETS
from sa1b.recipes.scorer import ClickScorer
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.targets import Targets, inputs_of

PRESET = SAM_PRESETS["tiny"]
SIZE, TARGET = PRESET.image_size, PRESET.image_size // 4
BATCH, MASKS = PRESET.data.global_batch, PRESET.data.masks
WORKERS = 2
SCORED_MASKS = 16  # of each held-out image
POINTS = 8  # scores of a run, after equal parts of the budget

Inputs = tuple[Tensor, Targets, Tensor]  # the arguments of `Interactive.forward`


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a model after a number of seconds of training."""

    seconds: float
    images: int
    scores: dict[str, float]


class ExtractedFiles(Dataset[tuple[Any, ...]]):
    """Images and random masks of extracted files, as in SAM-like training code.

    Only the chosen masks are decoded, by pycocotools, and resized by OpenCV.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(torch.randint(2**62, ()).item())
        path, task = self.paths[i], Task(size=TARGET, image_size=SIZE)
        document = json.loads(path.with_suffix(".json").read_bytes())
        height, width = document["image"]["height"], document["image"]["width"]
        rows, columns = framed_size(height, width, SIZE)
        image = np.empty((SIZE, SIZE, 3), np.uint8)
        pixels.draw(path.read_bytes(), image, height, width)
        number = len(document["annotations"])
        annotations = [document["annotations"][j] for j in rng.permutation(number)[:MASKS]]
        masks = np.empty((len(annotations), TARGET, TARGET), np.uint8)
        boxes, points = np.empty((len(masks), 4), np.float32), np.zeros((len(masks), 2), np.float32)
        for mask, box, point, annotation in zip(masks, boxes, points, annotations, strict=True):
            pixels.resize(annotation["segmentation"], mask, task)
            x, y, w, h = annotation["bbox"]
            box[:] = np.array((x, y, x + w, y + h)) * columns / width
            foreground = np.argwhere(mask)
            if len(foreground):
                point[:] = (rng.choice(foreground)[::-1] + 0.5) * SIZE / TARGET - 0.5
        keys = rng.integers(2**62, size=len(masks) + 1)
        return image, masks, boxes, points, keys, (rows, columns)


def collate(samples: list[tuple[Any, ...]]) -> Inputs:
    images, masks, boxes, points, keys, sizes = zip(*samples, strict=True)
    counts = [len(each) for each in masks]
    of_masks = torch.from_numpy(np.concatenate(masks))
    targets = Targets(
        masks=of_masks,
        boxes=torch.from_numpy(np.concatenate(boxes)),
        points=torch.from_numpy(np.concatenate(points)),
        image=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        weights=of_masks.flatten(1).any(dim=1).float(),
        keys=torch.from_numpy(np.concatenate([each[1:] for each in keys])),
        sizes=torch.tensor(sizes),
        counts=counts,
    )
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return stacked, targets, torch.tensor([int(each[0]) for each in keys])


def from_files(folder: Path, seed: int) -> Generator[Inputs, None, None]:
    """Batches of all epochs. The worker processes continue from epoch to epoch."""
    loader = DataLoader(
        ExtractedFiles(folder), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        persistent_workers=True, collate_fn=collate, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    while True:
        yield from loader


def from_shards(root: Path, seed: int) -> Generator[Inputs, None, None]:
    """Batches of all epochs."""
    stream = sa1b.Stream(
        root, global_batch=BATCH, epochs=None, image_size=SIZE, masks=MASKS, seed=seed,
        damage_log=root / "damaged.jsonl",
    )  # fmt: skip
    for batch in sa1b.Loader(stream, threads=WORKERS, dense=TARGET, read_only=True, quiet=True):
        yield inputs_of(batch, seed)


@torch.no_grad()
def score(module: Interactive, held_out: Path) -> dict[str, float]:
    """Mean IoU on held-out images after 1, 3 and 5 clicks and by box, as `sa1b train` measures it."""
    stream = sa1b.Stream(
        held_out, global_batch=1, epochs=1, image_size=SIZE, masks=SCORED_MASKS, order="sequential", seed=0,
        damage_log=held_out / "damaged.jsonl",
    )  # fmt: skip
    scorer = ClickScorer(published=False, device=torch.device("cpu"))
    module.eval()
    for batch in sa1b.Loader(stream, dense=TARGET, read_only=True, quiet=True):
        scorer.add(module, inputs_of(batch, 0), batch)
    module.train()
    return scorer.result()


def train(batches: Iterator[Inputs], held_out: Path, seconds: float, seed: int) -> Iterator[Scored]:
    """Train for a number of seconds; yield the scores after equal parts of them."""
    torch.manual_seed(seed)
    module, optim = Interactive(Sam(PRESET.model), PRESET.recipe), PRESET.optim
    decaying = [p for n, p in module.named_parameters() if module.decays(n, p)]
    others = [p for n, p in module.named_parameters() if not module.decays(n, p)]
    groups = [{"params": decaying, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    trained, steps, scored = 0.0, 0, 0
    while trained < seconds:
        began = time.perf_counter()
        images, targets, image_keys = next(batches)
        cosine = 0.5 * (1 + math.cos(math.pi * trained / seconds))
        rate = max(cosine, optim.min_lr_ratio) * min(1.0, (steps + 1) / optim.warmup)
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * rate
        loss = module(images, targets, image_keys)["loss"] / targets.weights.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), optim.grad_clip)
        optimizer.step()
        trained, steps = trained + time.perf_counter() - began, steps + 1
        if trained * POINTS >= seconds * (scored + 1):
            scored = int(trained * POINTS / seconds)
            yield Scored(trained, steps * BATCH, score(module, held_out))


def main() -> None:
    kind, source, held_out, seconds, seed, out = sys.argv[1:]
    cv2.setNumThreads(1)
    batches = (from_files if kind == "files" else from_shards)(Path(source), int(seed))
    with Path(out).open("w") as file:
        for scored in train(batches, Path(held_out), float(seconds), int(seed)):
            file.write(json.dumps(asdict(scored)) + "\n")
            file.flush()
            print(kind, seed, scored, flush=True)


if __name__ == "__main__":
    main()
