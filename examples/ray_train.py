"""Train SAM with Ray Train: each of its workers is a rank of sa1b's training loop.

    python examples/ray_train.py shards --out runs/ray --workers 2
    python examples/ray_train.py shards --out runs/ray --workers 3 -- --optim.steps 40 --optim.lr 1e-3

What follows -- are flags of `sa1b train`. The same command resumes a run, with any number of workers. On
several machines, all of them must reach the data and --out under the same paths or URLs.

If a worker dies, Ray ends the others, or, with --max-failures, starts all of them again, and they
resume from the newest checkpoint.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from sa1b import train
from sa1b.console import reported
from sa1b.engine import config
from sa1b.errors import Sa1bError
from sa1b.recipes.presets import PRESETS

with reported("ray"):
    import ray.train
    from ray.train.torch import TorchTrainer


def train_rank(settings: dict[str, Any]) -> None:
    """One rank: Ray has started the process group and set RANK, WORLD_SIZE and LOCAL_RANK."""
    if train.run(config.parse(settings["flags"], None, PRESETS, "ray_train.py")):
        raise RuntimeError("the training failed; its reason is in the output above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", help="dataset directory: a folder or a URL that all machines reach")
    parser.add_argument("--out", required=True, help="folder or URL of the run")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--max-failures", type=int, default=0, help="how often failed workers start again")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank; otherwise a CPU")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, others = parser.parse_args(words[:end]), words[end + 1 :]

    def absolute(path: str) -> str:
        return path if "://" in path else str(Path(path).absolute())  # workers have another working directory

    flags = ["--data.root", absolute(args.root), "--out", absolute(args.out), "--parallel.mode", "ddp"]
    flags += ["--preset", "tiny", "--parallel.device", "cuda" if args.gpu else "cpu", *others]
    config.parse(flags, None, PRESETS, "ray_train.py")  # a wrong flag ends it here
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"flags": flags},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(args.max_failures)),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError:
        raise Sa1bError(
            "a worker failed or was killed, see the output above; the same command resumes from the newest "
            "checkpoint"
        ) from None
    print(f"the run is in {args.out}; sa1b convert {args.out} --out sam.safetensors writes its weights")


if __name__ == "__main__":
    with reported():
        main()
