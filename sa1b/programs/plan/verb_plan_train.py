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

PCIE = 32.0  # GB per second of PCIe 4.0 x16 in one direction
CPUS_PER_GPU = 12  # as `sa1b slurm train` requests


def main(
    *,
    arguments: tyro.conf.Suppress[tuple[str, ...]] = (),
    gpu: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    nodes: int = 1,
    gpus: int = 8,
    price: Annotated[float | None, tyro.conf.arg(metavar="DOLLARS")] = None,
    images_per_second: Annotated[float | None, Range(above=0)] = None,
    mfu: Annotated[float, tyro.conf.arg(metavar="FRACTION")] = 0.2,
    tflops: float | None = None,
    gpu_memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None,
    link_rate: Annotated[float | None, tyro.conf.arg(metavar="GB/S")] = None,
    network_gbit: Annotated[float, tyro.conf.arg(metavar="GBIT/S")] = 400.0,
    exposed: Annotated[float, tyro.conf.arg(metavar="FRACTION")] = 0.2,
    storage_rate: Annotated[float | None, tyro.conf.arg(metavar="GB/S")] = None,
    cpus: int | None = None,
    decode_rate: Annotated[float | None, tyro.conf.arg(metavar="IMAGES/S")] = None,
    reserved: Annotated[float, tyro.conf.arg(metavar="GB")] = 2.0,
    fragmentation: Annotated[float, tyro.conf.arg(metavar="FRACTION")] = 0.05,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the hours, dollars, memory and reads of a training run on a cluster, without access to it.

    Activations are measured: a micro-batch runs on tensors without contents, in 5 to 20 s. Time rests on
    assumptions, which are printed with the flags that change them, or on a measured rate.

    Args:
        arguments: The arguments of `sa1b train`.
        gpu: Type of GPU: H100, H100 PCIe, H200, B200, A100, A100-40GB, L40S, L4 or A10. For others, pass
            --tflops and --gpu-memory.
        nodes: Number of nodes.
        gpus: GPUs of a node, and ranks on it.
        price: Price of a GPU hour.
        images_per_second: Measured rate of one GPU, in place of --mfu: `images_per_s` in the metrics.jsonl
            of a run, divided by its GPUs.
        mfu: Part of the GPUs' peak that a step reaches without communication and recomputation. The default
            is assumed; a run writes its own as `mfu` to metrics.jsonl.
        tflops: Peak of a GPU in 10^12 operations per second at --parallel.precision, without sparsity. By
            default the value of the data sheet, as for the next two.
        gpu_memory: Memory of a GPU in 10^9 bytes.
        link_rate: Rate between GPUs of a node, in one direction; for other GPUs that of PCIe 4.0.
        network_gbit: Rate between nodes, of all network cards of a node together, in one direction.
        exposed: At least this part of the communication makes the GPUs wait.
        storage_rate: Rate at which all nodes together can read the storage. By default it is not a limit.
        cpus: CPU cores of a node for decoding. By default 12 for each GPU, as `sa1b slurm train` requests.
        decode_rate: Images per second that one core reads and decodes. By default the rates measured on one
            core of an Intel Xeon: 74 in original size, 220 at 1024 pixels; `sa1b bench` measures this
            machine.
        reserved: GPU memory that tensors cannot use: CUDA context, workspaces of cuBLAS, buffers of NCCL.
        fragmentation: Part of the tensors' memory that the allocator adds by rounding and gaps.
        json_output: Print the estimates as JSON, in SI units.
    """
    if gpu is None and (tflops is None or gpu_memory is None):
        raise UsageError("--gpu: missing; pass the type of GPU, such as H100, or --tflops and --gpu-memory")
    with loading():
        from sa1b.engine import config as settings
        from sa1b.engine.planner import NO_ROOT, plan
        from sa1b.engine.watch.hardware import Cluster, Gpu, gpu_named
        from sa1b.recipes.presets import PRESETS
    other = Gpu(name="other", bf16=0, tf32=0, fp32=0, memory=0, link=PCIE * 1e9)
    known = other if gpu is None else gpu_named(gpu)
    config = settings.parse(arguments, None, PRESETS, command("train"), root=NO_ROOT, world_size=nodes * gpus)
    if config.data.root == NO_ROOT and (config.data.view or config.evaluation.view):
        flag = "--data.view" if config.data.view else "--evaluation.view"
        raise UsageError(f"{flag}: needs the dataset directory of the view; also pass --data.root")
    cluster = Cluster(
        gpu=known.name,
        nodes=nodes,
        gpus=gpus,
        flops=known.peak(config.parallel.precision) if tflops is None else tflops * 1e12,
        gpu_memory=known.memory if gpu_memory is None else gpu_memory * 1e9,
        link=known.link if link_rate is None else link_rate * 1e9,
        network=network_gbit * 1e9 / 8,
        mfu=mfu,
        exposed=exposed,
        cpus=CPUS_PER_GPU * gpus if cpus is None else cpus,
        decode_rate=decode_rate,
        storage=None if storage_rate is None else storage_rate * 1e9,
        reserved=reserved * 1e9,
        fragmentation=fragmentation,
        price=price,
    )
    found = plan(config, cluster, images_per_second)
    masks = f"up to {config.data.masks} masks an image"
    show(json.dumps(found, indent=1) if json_output else table(found, masks))
    return int(found["exit_code"])


def table(found: dict[str, Any], masks: str) -> str:
    """The estimates as text."""
    cluster, data, ranks, steps = found["cluster"], found["data"], found["ranks"], found["steps"]
    times, read, memory = found["seconds"], found["read_bytes_per_second"], found["memory_bytes"]
    kind, room, saved = data["kind"], size_text(cluster["gpu_memory"], 2), found["checkpoint_bytes"]
    sent = f"{_seconds(times['communication'])} of communication, of which"
    price = "" if found["dollars"] is None else f", {rounded(found['dollars'])} dollars"
    share = f"{found['images_per_rank']:,.0f} images an epoch, the number in {found['files_per_rank']:,.1f}"
    held = f"{size_text(data['bytes'], 2)} in {counted(data['files'], kind)}"
    batch = f"{counted(ranks, 'rank')} x {counted(found['micro_batches'], 'micro-batch', 'es')}"
    rows = [
        ("cluster", f"{counted(cluster['nodes'], 'node')} x {cluster['gpus']} {cluster['gpu']} = "
                    f"{counted(ranks, 'rank')}, mode {found['mode']}, precision {found['precision']}"),
        ("model", f"{found['parameters'] / 1e6:,.1f} M parameters"),
        ("data", f"{counted(data['images'], 'image')} of {data['source']}"),
        ("", f"{held}, {size_text(data['bytes_per_image'])} an image"),
        ("each rank", f"{share} {kind}s; it reads from all {kind}s"),
        ("batch", f"{counted(found['global_batch'], 'image')} = {batch} of up to {found['micro_batch']}"),
        ("run", f"{counted(steps, 'step')} = {rounded(found['epochs'])} epochs of "
                f"{counted(found['steps_per_epoch'], 'step')}"),
        ("step", f"{_seconds(found['seconds_per_step'])}, limited by: {found['limited_by']}"),
        ("", f"{rounded(found['flops_per_step'] / 1e12)} TFLOP for {masks}: {_seconds(times['compute'])}"),
        ("", f"{sent} {_seconds(times['exposed_communication'])} is not hidden"),
        ("", f"{_seconds(times['decoding'])} of decoding; {found['decoding_cores_per_node']:,.1f} of "
             f"{counted(cluster['cpus'], 'core')} of each node are busy"),
        ("time", f"{duration_text(3600 * found['hours_per_epoch'])} an epoch, "
                 f"{duration_text(3600 * found['hours'])} the run"),
        ("cost", f"{rounded(found['gpu_hours'])} GPU hours{price}"),
        ("reads", f"{size_text(read['all'], 2)}/s of all nodes, {size_text(read['per_node'], 2)}/s of each"),
        ("checkpoints", f"{found['checkpoints_written']:,} of {size_text(saved, 2)}; at most "
                        f"{found['checkpoints_kept']} are kept, and one is being written: "
                        f"{size_text((found['checkpoints_kept'] + 1) * saved, 2)}"),
        ("memory", f"{size_text(memory['peak'], 2)} of tensors on each rank:"),
        *(("", f"{name:<14}{size_text(size, 2):>10}") for name, size in memory.items()
          if size and name not in ("peak", "needed")),
        ("", f"{size_text(memory['needed'], 2)} of {room} with allocator and reserve: "
             f"{'fits' if found['fits'] else 'does not fit'}"),
    ]  # fmt: skip
    if not found["fits"]:
        size = found["largest_micro_batch"]
        first = f"--data.micro-batch {size} (the largest that fits), " if size else ""
        none = "no micro-batch fits; " if size == 0 else ""
        rows.append(("", f"{none}pass {first}--model.checkpoint-blocks all, --parallel.mode fsdp, "
                         "--parallel.precision bf16, or use a larger GPU"))  # fmt: skip
    limits = {
        "--mfu": f"{cluster['mfu']:.3g}",
        "--tflops": f"{cluster['flops'] / 1e12:,.0f}",
        "--exposed": f"{cluster['exposed']:g}",
        "--network-gbit": f"{cluster['network'] * 8 / 1e9:,.0f}",
        "--link-rate": f"{cluster['link'] / 1e9:,.0f}",
        "--storage-rate": "no limit" if cluster["storage"] is None else f"{cluster['storage'] / 1e9:g}",
        "--cpus": cluster["cpus"],
        "--decode-rate": f"{found['decode_rate']:g}",
        "--gpu-memory": f"{cluster['gpu_memory'] / 1e9:g}",
        "--reserved": f"{cluster['reserved'] / 1e9:g}",
        "--fragmentation": f"{cluster['fragmentation']:g}",
    }
    rows.append(("assumed", ", ".join(f"{flag} {value}" for flag, value in limits.items())))
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.095 else f"{seconds * 1e3:,.1f} ms"
