"""Stream batches of images and dense masks from a folder of shards, stop anywhere and resume exactly there.

    sa1b synthesize downloads --tars 1 --images-per-tar 20 --long-side 640
    sa1b reshard downloads --out shards
    python examples/stream_from_disk.py shards --steps 3

Run the last command again: it continues after step 3.
"""

import argparse
import json
import time
from pathlib import Path

import sa1b
from sa1b.console import reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--view", help="named subset that sa1b view made; by default all images")
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all ranks")
    parser.add_argument("--image-size", type=int, default=1024, help="pixels of the padded square")
    parser.add_argument("--masks", type=int, default=64, help="largest number of masks of an image")
    parser.add_argument("--steps", type=int, help="number of steps; by default to the end of the epoch")
    parser.add_argument("--device", default="cpu", help="cuda copies and rasterises on the GPU")
    parser.add_argument("--state", type=Path, default=Path("stream.json"), help="where to resume")
    args = parser.parse_args()

    stream = sa1b.Stream(
        args.root,
        view=args.view,
        global_batch=args.batch,
        image_size=args.image_size,
        masks=args.masks,
        flip=0.5,
        seed=0,
    )
    loader = sa1b.Loader(stream, device=args.device, dense=args.image_size // 4, read_only=True)
    if args.state.exists():
        loader.load_state_dict(json.loads(args.state.read_text()))
    print(loader)

    images = masks = 0
    began = time.perf_counter()
    for step, batch in enumerate(loader, 1):
        # batch.images: uint8 [B, 3, S, S]; batch.dense: uint8 [M, S/4, S/4], masks of batch.masks.image[m];
        # batch.boxes and batch.points: float32, in the padded square of S x S pixels.
        images, masks = images + len(batch), masks + len(batch.masks)
        print(f"step {step}: images {batch.ids.tolist()}, {len(batch.masks)} masks")
        if step == args.steps:
            break
    seconds = time.perf_counter() - began
    args.state.write_text(json.dumps(loader.state_dict()))
    print(f"{images} images with {masks} masks, {images / seconds:.1f} images/s")
    print(loader.stats())


if __name__ == "__main__":
    with reported():
        main()
