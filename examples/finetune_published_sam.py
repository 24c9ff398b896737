"""Fine-tune the prompt encoder and mask decoder of a published SAM, and predict with the result.

    curl -O https://dl.fbaipublicfiles.com/segment_anything/sam_vit_b_01ec64.pth
    python examples/finetune_published_sam.py shards --weights sam_vit_b_01ec64.pth --device cuda

Any .pth or .safetensors of a SAM can be used. --image-size 512 takes a quarter of the memory and time;
position embeddings are resized. The result is a file in the published format.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import sa1b
from sa1b.console import reported
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import Sam
from sa1b.sam.published import config_of, read_weights, write_weights
from sa1b.sam.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="folder that sa1b reshard made")
    parser.add_argument("--weights", type=Path, required=True, help="published file: .pth or .safetensors")
    parser.add_argument("--out", type=Path, default=Path("finetuned.pth"), help=".pth or .safetensors")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2, help="images of a step")
    parser.add_argument("--masks", type=int, default=16, help="largest number of masks of an image")
    parser.add_argument(
        "--image-size", type=int, help="pixels of the padded square; by default the size in the weights file"
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    weights = read_weights(args.weights)
    config = config_of(weights)
    size = args.image_size or config.image_size
    module = Interactive(Sam(replace(config, image_size=size)), Recipe(clicks=2, unprompted=1))
    print(module.load_weights(weights))
    module.to(args.device).train()
    module.model.image_encoder.requires_grad_(False)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, weight_decay=0.01)

    stream = sa1b.Stream(
        args.root, global_batch=args.batch, epochs=None, image_size=size, masks=args.masks, flip=0.5, seed=0
    )
    loader = sa1b.Loader(stream, device=args.device, dense=size // 4, quiet=True)
    for step, batch in enumerate(loader, 1):
        sums = module(*module.inputs(batch, seed=0))  # the sums of losses and IoU over all masks
        masks = sums["count"].clamp(min=1)
        (sums["loss"] / masks).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss, first, last = (float(sums[name].detach() / masks) for name in ("loss", "iou_first", "iou_last"))
        print(f"step {step}: loss {loss:.3f}, IoU {first:.3f}, after all clicks {last:.3f}")
        if step == args.steps:
            break
    write_weights(args.out, module.weights().state_dict())

    sample = stream.dataset[0]
    image = sample.image  # smaller than the frame of the points if the shards were made with --image-size
    points = sample.annotations.point_coords[:1] * (image.shape[1] / sample.annotations.width)
    found = sa1b.predict(sa1b.load_model(args.out, args.device), image, points=points)
    print(f"{args.out}: image {sample.image_id}, predicted IoU {found.predicted_iou[0]:.3f}")


if __name__ == "__main__":
    with reported():
        main()
