"""Measure how many images per second this machine reads from a dataset directory, and the limiting stage.

Example: sa1b bench shards
         sa1b bench s3://bucket/shards --threads 8 --dense 256 --seconds 60
         sa1b bench shards --device cuda --decode gpu --batch 16

Measures storage alone, the JPEG decoder alone and the complete loader, on random images. Writes no files
except those of --cache.
Exit code 0: measured; 2: not measured; 130: interrupted.
"""

import os
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range, check_cache_flags
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import takes_endpoint

TOUR = (170, "Questions about both", "measure images per second", "sa1b bench shards")


@takes_endpoint
def main(
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    /,
    image_size: Annotated[int, Range(1)] = 1024,
    masks: Annotated[int, Range(0)] = 64,
    dense: Annotated[int | None, Range(1)] = None,
    batch: Annotated[int, Range(1)] = 8,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    threads: Annotated[int | None, Range(1)] = None,
    processes: Annotated[int | None, Range(1)] = None,
    device: str = "cpu",
    decode: Literal["auto", "cpu", "gpu"] = "auto",
    seconds: Annotated[float, Range(1, 3600)] = 15.0,
    cache: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    cache_bytes: Annotated[int | None, Range(1)] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure how many images per second this machine reads from a dataset directory, and the limiting stage.

    Args:
        root: Dataset directory that `sa1b reshard` made, or its URL (s3://...).
        image_size: Side of the padded square images, in pixels.
        masks: Largest number of masks that are sampled per image.
        dense: Also make dense masks with this side in pixels, for example 256. By default masks stay runs.
        batch: Images in a batch.
        view: Only images of this view: its name, digest or path.
        threads: Threads of each process of the loader; by default 2, and with one process one for each CPU of
            this job, at most 8.
        processes: Processes of the loader; by default 1 below 4 CPUs of this job, else as many as occupy
            them with their threads.
        device: Device of the batches: cpu or cuda.
        decode: Where JPEG files are decoded: cpu, or gpu with --device cuda. auto: on the CPU.
        seconds: Duration of the three measurements together, 1 to 3600.
        cache: Folder on a local disk that caches the data read from a URL, as in training; a first
            run fills it.
        cache_bytes: Limit of the cache, in bytes; required with --cache.
        json_output: Print the result as JSON, without progress.
    """
    check_cache_flags("--cache", cache, cache_bytes)
    if device != "cpu" and not device.startswith("cuda"):
        raise UsageError(f"--device {device}: must be cpu or cuda")
    with loading():
        from sa1b.stream.dataset import Stream
        from sa1b.stream.throughput import measure
    stream = Stream(
        root,
        global_batch=batch,
        epochs=None,
        view=view,
        image_size=image_size,
        masks=masks,
        rank=0,
        world_size=1,
        damage_log=os.devnull,
        cache=cache,
        cache_bytes=cache_bytes,
    )
    try:
        of_loader = {"threads": threads, "processes": processes, "dense": dense, "device": device}
        measured = measure(stream, seconds=seconds, quiet=json_output, decode=decode, **of_loader)
    except ValueError as error:  # no GPU, or no library for it
        raise UsageError(str(error).replace("decode=", "--decode ").replace("device=", "--device ")) from None
    present(measured, json_output)
    return 0
