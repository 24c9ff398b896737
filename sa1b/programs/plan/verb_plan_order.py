"""Simulate what an order reads: requests, bytes, cache hits, shuffle quality and the time of an epoch.

Example: sa1b plan order shards --ranks 256 --global-batch 4096 --block-size 1,8,32 --cache-gb 0,500
         sa1b plan order s3://bucket/shards --ranks 64 --global-batch 1024 --node-rate 2.5 --train-rate 12
         sa1b plan order shards --mix mix.yaml --ranks 8 --report order.html

The order is a formula, so that its reads follow from the sample table. No image is read. Cases are compared
side by side: each block size with each cache, and the mixture. For a folder of sources with the name "order",
write `sa1b plan ./order`.

Exit code 0: printed; 2: nothing was printed; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range, numbers_of
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.programs.plan.verb_plan_train import CPUS_PER_GPU
from sa1b.report import bar, present
from sa1b.sources.path_arguments import check_report, takes_endpoint
from sa1b.storage.atomic import write_whole

TOUR = (35, "Make shards", "simulate reads and cache", "sa1b plan order shards --ranks 64 --block-size 1,8")


@takes_endpoint
def main(
    root: Annotated[Positional[str | None], tyro.conf.arg(metavar="ROOT")] = None,
    /,
    mix: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    view: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None,
    ranks: Annotated[int, Range(1)] = 8,
    gpus: Annotated[int, Range(1)] = 8,
    global_batch: Annotated[int, Range(1)] = 256,
    micro_batch: Annotated[int | None, Range(1)] = None,
    block_size: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = "1",
    cache_gb: Annotated[str, tyro.conf.arg(metavar="GB,GB,...")] = "0",
    epochs: Annotated[int, Range(1, 100)] = 3,
    seed: Annotated[int, Range(0)] = 0,
    node_rate: Annotated[float | None, tyro.conf.arg(metavar="GB/S"), Range(above=0)] = None,
    node_requests: Annotated[float | None, tyro.conf.arg(metavar="N/S"), Range(above=0)] = None,
    cpus: Annotated[int | None, Range(1)] = None,
    decode_rate: Annotated[float | None, tyro.conf.arg(metavar="IMAGES/S"), Range(above=0)] = None,
    train_rate: Annotated[float | None, tyro.conf.arg(metavar="IMAGES/S"), Range(above=0)] = None,
    report: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Simulate what an order reads: requests, bytes, cache hits, shuffle quality and the time of an epoch.

    The reads of the first node are reported; those of other nodes differ by chance only. Nodes prefetch, so a
    step takes as long as the slowest of the given limits allows.

    Args:
        root: Dataset directory that `sa1b reshard` made, or its URL (s3://...). Only its manifest and sample
            table are read.
        mix: File of `sa1b train --data.mix`: its mixture is one more case. Block sizes are those of the file.
        view: Only images of this view of ROOT.
        ranks: Ranks of the training, all nodes together.
        gpus: GPUs of a node, and ranks on it.
        global_batch: Images of a step over all ranks.
        micro_batch: Images that a rank reads at a time; by default its complete share of a step.
        block_size: Block sizes to compare: neighbouring images that are read together.
        cache_gb: Cache sizes to compare, in 10^9 bytes on each node, as --data.cache-bytes; 0: no cache.
        epochs: Epochs to simulate. The first one fills the cache.
        seed: Seed of the order.
        node_rate: Rate at which a node can read the store or the disk. By default it is not a limit.
        node_requests: Requests of a node that the store or the disk answers in a second. By default it is not
            a limit.
        cpus: CPU cores of a node for decoding. By default 12 for each GPU, as `sa1b slurm train` requests.
        decode_rate: Images per second that a core reads and decodes; `sa1b bench` measures this machine. By
            default decoding is not a limit.
        train_rate: Images per second that a GPU trains on. By default it is not a limit.
        report: Write a page with charts.
        json_output: Print the figures as JSON, without progress.
    """
    if root is None and mix is None:
        raise UsageError("ROOT or --mix: missing; add a dataset directory or a file of sources and weights")
    if root is None and view is not None:
        raise UsageError("--view: needs the dataset directory of the view; add ROOT")
    blocks = numbers_of("--block-size", block_size, int, 1)
    caches = numbers_of("--cache-gb", cache_gb, float, 0)
    check_report(report)
    with loading():
        from sa1b.programs.plan.order_plan import Limits, OrderCase, OrderPlan
        from sa1b.programs.plan.order_reads import batch_figures, mixture, simulate, streams
    node = min(gpus, ranks)
    cores = CPUS_PER_GPU * node if cpus is None else cpus
    limits = Limits(
        gpus=node,
        bytes=None if node_rate is None else node_rate * 1e9,
        requests=node_requests,
        decoded=None if decode_rate is None else decode_rate * cores,
        trained=None if train_rate is None else train_rate * node,
    )
    settings = {"global_batch": global_batch, "micro_batch": micro_batch, "world_size": ranks, "seed": seed}
    made = {} if root is None else streams(root, view, blocks, settings)
    if mix is not None:
        made[Path(mix).name] = mixture(mix, settings)
    total = sum(stream.plan.steps_per_epoch for stream in made.values()) * epochs * len(caches)
    figures = []
    with bar(total, "simulating", "step", json_output, delay=1.0) as progress:
        for name, stream in made.items():
            batch = batch_figures(stream)
            for size in caches:
                case = OrderCase(name, stream, batch, int(size * 1e9))
                figures.append(simulate(case, epochs, limits, progress))
    order_plan = OrderPlan(root or str(mix), ranks, global_batch, limits, figures)
    if report is not None:
        write_whole(report, order_plan.page().encode())
    present(order_plan, json_output)
    if report is not None and not json_output:
        print(f"\ncharts: {report}")
    return 0
