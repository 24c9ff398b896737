"""Print the hours, dollars, memory and reads of a training run on a cluster, without access to it.

Example: sa1b plan train --gpu H100 --nodes 2 --price 2.50
             --preset vit_h --parallel.mode fsdp --parallel.precision bf16 --data.micro-batch 4
         sa1b plan train --gpu A100 --images-per-second 9 --data.root shards --data.view train --json

Flags that are not listed here are those of `sa1b train`, with the same defaults and checks. Without
--data.root, all of SA-1B is assumed. For a folder of sources named "train", write `sa1b plan ./train`.

Exit code 0: printed; 1: printed, and a step does not fit the memory of a GPU; 2: nothing was printed; 130:
interrupted.
"""

import json
from typing import Annotated, Any

import tyro

from sa1b.arguments import Range
from sa1b.console import command, counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import duration_text, rounded, size_text

TOUR = (150, "Questions about both", "costs of a training run", "sa1b plan train --gpu H100 --nodes 2")

PCIE = 32e9  # bytes per second of PCIe 4.0 x16 in one direction, for other types of GPU
CPUS_PER_GPU = 12  # as `sa1b slurm train` requests
EXPOSED = 0.2  # of the communication, that makes the GPUs wait, at least
FRAGMENTATION = 0.05  # of the tensors' memory, that the allocator adds


def main(
    *,
    arguments: tyro.conf.Suppress[tuple[str, ...]] = (),
    gpu: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    nodes: Annotated[int, Range(1)] = 1,
    gpus: Annotated[int, Range(1)] = 8,
    price: Annotated[float | None, Range(0), tyro.conf.arg(metavar="DOLLARS")] = None,
    images_per_second: Annotated[float | None, Range(above=0)] = None,
    mfu: Annotated[float, tyro.conf.arg(metavar="FRACTION")] = 0.2,
    tflops: Annotated[float | None, Range(above=0)] = None,
    gpu_memory: Annotated[float | None, Range(above=0), tyro.conf.arg(metavar="GB")] = None,
    network_gbit: Annotated[float, Range(above=0), tyro.conf.arg(metavar="GBIT/S")] = 400.0,
    storage_rate: Annotated[float | None, Range(above=0), tyro.conf.arg(metavar="GB/S")] = None,
    cpus: Annotated[int | None, Range(1)] = None,
    decode_rate: Annotated[float | None, Range(above=0), tyro.conf.arg(metavar="IMAGES/S")] = None,
    reserved: Annotated[float, Range(0), tyro.conf.arg(metavar="GB")] = 2.0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the hours, dollars, memory and reads of a training run on a cluster, without access to it.

    Activations are measured on tensors without contents, in 5 to 20 s. Time rests on assumptions, which are
    printed with the flags that change them, or on a measured rate.

    Args:
        arguments: The arguments of `sa1b train`.
        gpu: Type of GPU: H100, H100 PCIe, H200, B200, A100, A100-40GB, L40S, L4 or A10. For others, pass
            --tflops and --gpu-memory.
        nodes: Number of nodes.
        gpus: GPUs of a node, and ranks on it.
        price: Price of a GPU hour.
        images_per_second: Measured rate of one GPU, in place of --mfu: `images_per_s` in the metrics.jsonl
            of a run, divided by its GPUs.
        mfu: Part of the GPUs' peak that a step reaches without communication, assumed by default; a run
            writes its own to metrics.jsonl.
        tflops: Peak of a GPU in 10^12 operations per second at --parallel.precision, by default that of the
            data sheet, without sparsity.
        gpu_memory: Memory of a GPU in 10^9 bytes, by default that of the data sheet.
        network_gbit: Rate of a node to others, of all its network cards together, in one direction.
        storage_rate: Rate at which all nodes together can read the storage. By default it is not a limit.
        cpus: CPU cores of a node for decoding. By default 12 for each GPU, as `sa1b slurm train` requests.
        decode_rate: Images per second that one core reads and decodes; `sa1b bench` measures this machine.
            By default 74 in original size, 220 at 1024 pixels, as on an Intel Xeon.
        reserved: GPU memory that tensors cannot use: CUDA context, workspaces of cuBLAS, buffers of NCCL.
        json_output: Print the estimates as JSON, in SI units.
    """
    if gpu is None and (tflops is None or gpu_memory is None):
        raise UsageError("--gpu: missing; pass the type of GPU, such as H100, or --tflops and --gpu-memory")
    with loading():
        from sa1b.engine import config as settings
        from sa1b.engine.planner import NO_ROOT, Cluster, plan
        from sa1b.engine.watch.hardware import Gpu, gpu_named
        from sa1b.recipes.presets import PRESETS
    other = Gpu(name="other", bf16=0, tf32=0, fp32=0, memory=0, link=PCIE)
    known = other if gpu is None else gpu_named(gpu)
    config = settings.parse(arguments, None, PRESETS, command("train"), root=NO_ROOT, world_size=nodes * gpus)
    if config.data.root == NO_ROOT and (config.data.view or config.evaluation.view):
        raise UsageError("--data.view, --evaluation.view: need the directory of the view; pass --data.root")
    cluster = Cluster(  # in operations and bytes per second, of one direction, and bytes
        gpu=known.name, nodes=nodes, gpus=gpus,
        flops=known.peak(config.parallel.precision) if tflops is None else tflops * 1e12,
        gpu_memory=known.memory if gpu_memory is None else gpu_memory * 1e9,
        link=known.link, network=network_gbit * 1e9 / 8, mfu=mfu, exposed=EXPOSED,
        cpus=CPUS_PER_GPU * gpus if cpus is None else cpus, decode_rate=decode_rate,
        storage=None if storage_rate is None else storage_rate * 1e9,
        reserved=reserved * 1e9, fragmentation=FRAGMENTATION, price=price,
    )  # fmt: skip
    found = plan(config, cluster, images_per_second)
    show(json.dumps(found, indent=1) if json_output else table(found, config))
    return int(found["exit_code"])


def table(found: dict[str, Any], config: Any) -> str:
    """The estimates as text."""
    cluster, data, times = found["cluster"], found["data"], found["seconds"]
    memory, step, kept = found["memory_bytes"], found["seconds_per_step"], found["checkpoints_kept"]
    ranks, each, kind = counted(found["ranks"], "rank"), data["bytes"] / data["images"], data["kind"]
    read, busy = found["global_batch"] * each / step, times["decoding"] / step * cluster["cpus"]
    count, hours = counted(found["micro_batches"], "micro-batch", "es"), found["hours"]
    storage = "no limit" if cluster["storage"] is None else f"{cluster['storage'] / 1e9:g}"
    parts = {name: size for name, size in memory.items() if size and name not in ("peak", "needed")}
    fits, memory_of_gpu = "fits", size_text(cluster["gpu_memory"])
    if not found["fits"]:
        fits = "does not fit: --model.checkpoint-blocks all, --parallel.mode fsdp, --parallel.precision bf16"
        if (largest := found["largest_micro_batch"]) is not None:
            fits += f", --data.micro-batch {largest}" if largest else "; no micro-batch fits"
    return f"""\
cluster       {counted(cluster["nodes"], "node")} x {cluster["gpus"]} {cluster["gpu"]} = {ranks}, \
mode {config.parallel.mode}, precision {config.parallel.precision}
model         {found["parameters"] / 1e6:,.1f} M parameters
data          {counted(data["images"], "image")} of {data["source"]}
              {size_text(data["bytes"])} in {counted(data["files"], kind)}, {size_text(each)} an image
each rank     {found["images_per_rank"]:,.0f} images an epoch, the number in \
{found["files_per_rank"]:,.1f} {kind}s; it reads from all {kind}s
batch         {counted(found["global_batch"], "image")} = {ranks} x {count} of up to {found["micro_batch"]}
run           {counted(found["steps"], "step")} = {rounded(found["epochs"])} epochs of \
{counted(found["steps_per_epoch"], "step")}
step          {duration_text(step)}, limited by: {found["limited_by"]}
              {rounded(found["flops_per_step"] / 1e12)} TFLOP for up to {config.data.masks} masks an image: \
{duration_text(times["compute"])}
              {duration_text(times["communication"])} of communication, of which \
{duration_text(times["exposed_communication"])} is not hidden
              {duration_text(times["decoding"])} of decoding, by {busy:,.1f} of {cluster["cpus"]} cores a node
time          {duration_text(3600 * hours / found["epochs"])} an epoch, {duration_text(3600 * hours)} the run
cost          {rounded(found["gpu_hours"])} GPU hours\
{"" if found["dollars"] is None else f", {rounded(found['dollars'])} dollars"}
reads         {size_text(read)}/s of all nodes, {size_text(read / cluster["nodes"])}/s of each
checkpoints   {found["checkpoints_written"]:,} of {size_text(found["checkpoint_bytes"])}; at most {kept} are \
kept, and one is being written: {size_text((kept + 1) * found["checkpoint_bytes"])}
memory        {size_text(memory["peak"])} of tensors on each rank:
{"".join(f"{'':14}{name:<14}{size_text(size):>10}{chr(10)}" for name, size in parts.items())}\
              {size_text(memory["needed"])} of {memory_of_gpu} with allocator and reserve: {fits}
assumed       --mfu {cluster["mfu"]:.3g}, --tflops {cluster["flops"] / 1e12:,.0f}, \
--network-gbit {cluster["network"] * 8 / 1e9:,.0f}, --storage-rate {storage}, --cpus {cluster["cpus"]}, \
--decode-rate {cluster["decode_rate"]:g}, --gpu-memory {cluster["gpu_memory"] / 1e9:g}, \
--reserved {cluster["reserved"] / 1e9:g}"""
