"""Print the hours, dollars, memory and reads of a training run on a cluster, without access to it.

Example: sa1b plan train --gpu H100 --nodes 2 --price 2.50
             --preset vit_h --parallel.mode fsdp --parallel.precision bf16 --data.micro-batch 4
         sa1b plan train --gpu A100 --preset vit_b --data.root shards --data.view train
             --parallel.mode ddp --parallel.precision bf16 --json

Flags that are not listed here are those of `sa1b train`, with the same defaults and checks. Without
--data.root, all of SA-1B is assumed. For a folder of sources named "train", write `sa1b plan ./train`.

Exit code 0: printed; 1: printed, and a step does not fit the memory of a GPU; 2: nothing was printed; 130:
interrupted.
"""

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from sa1b.console import command, counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import duration_text, rounded, size_text

TOUR = (30, "Make shards", "costs of a training run", "sa1b plan train --gpu H100 --nodes 2")

if TYPE_CHECKING:
    from sa1b.engine.planner import RunPlan

PCIE = 32.0  # GB per second of PCIe 4.0 x16 in one direction
CPUS_PER_GPU = 12  # as `sa1b slurm train` requests
_size = partial(size_text, digits=2)


def main(
    *,
    arguments: tyro.conf.Suppress[tuple[str, ...]] = (),
    gpu: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    nodes: int = 1,
    gpus: int = 8,
    price: Annotated[float | None, tyro.conf.arg(metavar="DOLLARS")] = None,
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

    Memory is measured: the real step, wrapped by the real DDP or FSDP, runs on tensors without contents and
    on ranks that do not exist. This takes 10 to 40 s and 0.5 GB. Time is estimated under assumptions, which
    are printed with the flags that change them.

    Args:
        arguments: The arguments of `sa1b train`.
        gpu: Type of GPU: H100, H100 PCIe, H200, B200, A100, A100-40GB, L40S, L4 or A10. For others, pass
            --tflops and --gpu-memory.
        nodes: Number of nodes.
        gpus: GPUs of a node, and ranks on it.
        price: Price of a GPU hour.
        mfu: Part of the GPUs' peak that the operations of a step reach, without communication and without
            recomputation (--model.checkpoint-blocks all costs a quarter of it). The default is assumed; a run
            writes its own as `mfu` to metrics.jsonl.
        tflops: Peak of a GPU in 10^12 operations per second at --parallel.precision, without sparsity. By
            default the value of the data sheet.
        gpu_memory: Memory of a GPU in 10^9 bytes. By default the value of the data sheet.
        link_rate: Rate between GPUs of a node, in one direction. By default the value of the data sheet; for
            other GPUs the rate of PCIe 4.0.
        network_gbit: Rate between nodes, of all network cards of a node together, in one direction. The
            default is assumed: one InfiniBand NDR port.
        exposed: At least this part of the communication makes the GPUs wait. The default is assumed.
        storage_rate: Rate at which all nodes together can read the storage. By default the storage is not a
            limit.
        cpus: CPU cores of a node for decoding. By default 12 for each GPU, as `sa1b slurm train` requests.
        decode_rate: Images per second that one core reads and decodes. By default the rates measured on one
            core of an Intel Xeon: 74 in original size, 220 at 1024 pixels; `sa1b bench` measures this
            machine.
        reserved: GPU memory that is not used by tensors: CUDA context and kernels, workspaces of cuBLAS,
            buffers of NCCL. The default is assumed.
        fragmentation: Part of the tensors' memory that the allocator adds, because it rounds sizes up (to 512
            bytes, above 1 MiB to 2 MiB) and cannot reuse every gap. The default is assumed.
        json_output: Print the estimates as JSON, in SI units.
    """
    if gpu is None and (tflops is None or gpu_memory is None):
        raise UsageError("--gpu: missing; pass the type of GPU, such as H100, or --tflops and --gpu-memory")
    with loading():
        from sa1b.engine import config as settings
        from sa1b.engine.planner import NO_ROOT, plan
        from sa1b.engine.watch.hardware import Cluster, Gpu, gpu_named
        from sa1b.recipes.presets import PRESETS
    known = (
        Gpu(name="other", bf16=0, tf32=0, fp32=0, memory=0, link=PCIE * 1e9)
        if gpu is None
        else gpu_named(gpu)
    )
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
    if not json_output:
        sys.stderr.write("measuring the memory of a step without computing it: 10 to 40 s\n")
    run_plan = plan(config, cluster)
    show(json.dumps(run_plan.document(), indent=1) if json_output else table(run_plan))
    return run_plan.exit_code()


def table(plan: "RunPlan") -> str:
    """The estimates as a table of text."""
    rows = [*_work(plan), *_time(plan), *_storage(plan), *_memory(plan)]
    lines = [f"{name:<14}{text}" for name, text in rows]
    lines.append("assumptions, each with the flag that changes it:")
    lines += [f"  {flag:<18}{text}" for flag, text in _assumptions(plan)]
    return "\n".join(lines)


def _work(plan: "RunPlan") -> list[tuple[str, str]]:
    cluster, data, config, parallel = plan.cluster, plan.data, plan.config, plan.config.parallel
    ranks, batch, steps = cluster.world_size, config.data.global_batch, config.optim.steps
    size, count = config.micro_batches(ranks)
    mode = f"{parallel.mode} {parallel.shard}" if parallel.mode == "fsdp" else parallel.mode
    nodes = f"{counted(cluster.nodes, 'node')} x {cluster.gpus} {cluster.gpu} = {counted(ranks, 'rank')}"
    model = f"{plan.parameters / 1e6:,.1f} M parameters, mode {mode}, precision {parallel.precision}"
    stored = f"{_size(data.bytes)} in {counted(data.files, data.kind)}"
    stored += f", {size_text(plan.image_bytes)} an image"
    share = (
        f"{data.images / ranks:,.0f} images an epoch, the number in {data.files / ranks:,.1f} {data.kind}s"
    )
    batches = f"{counted(batch, 'image')} = {counted(ranks, 'rank')} x {counted(count, 'micro-batch', 'es')}"
    epoch = counted(-(-data.images // batch), "step")
    return [
        ("cluster", nodes),
        ("model", model),
        ("data", f"{counted(data.images, 'image')} of {data.source}"),
        ("", stored),
        ("each rank", f"{share}; it reads from all {data.kind}s"),
        ("batch", f"{batches} of up to {size}"),
        ("run", f"{counted(steps, 'step')} = {rounded(plan.epochs)} epochs of {epoch}"),
    ]


def _time(plan: "RunPlan") -> list[tuple[str, str]]:
    cluster, masks = plan.cluster, plan.config.data.masks
    others = [f"{name} {_seconds(value)}" for name, value in plan.limits.items() if name != plan.limit]
    epoch = duration_text(3600 * plan.hours / plan.epochs)
    gpu_hours = plan.hours * cluster.world_size
    price = "" if cluster.price is None else f", {rounded(gpu_hours * cluster.price)} dollars"
    sent = f"{_seconds(plan.communication)} of communication, of which {_seconds(plan.exposed)} is not hidden"
    return [
        ("step", f"{_seconds(plan.seconds)}, limited by: {plan.limit} ({', '.join(others)})"),
        ("", f"{rounded(plan.step_flops / 1e12)} TFLOP for up to {masks} masks an image"),
        ("", f"{_seconds(plan.compute)} of computation; {sent}"),
        ("time", f"{epoch} an epoch, {duration_text(3600 * plan.hours)} the run"),
        ("cost", f"{rounded(gpu_hours)} GPU hours{price}"),
    ]


def _storage(plan: "RunPlan") -> list[tuple[str, str]]:
    cluster, node = plan.cluster, plan.read_rate / plan.cluster.nodes
    written, kept = plan.checkpoints
    disk = f"at most {kept} are kept, and one is being written: {_size((kept + 1) * plan.saved)}"
    return [
        ("reads", f"{_size(plan.read_rate)}/s of all nodes, {_size(node)}/s of each node"),
        ("decoding", f"{plan.cores:,.1f} of {counted(cluster.cpus, 'CPU core')} of each node"),
        ("checkpoints", f"{written:,} of {_size(plan.saved)}: {_size(written * plan.saved)} written"),
        ("", disk),
    ]


def _memory(plan: "RunPlan") -> list[tuple[str, str]]:
    memory, cluster = plan.memory, plan.cluster
    parts = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("batches", memory.batches),
        ("communication", memory.communication),
        ("in host memory", -memory.offloaded),
        ("allocator", memory.peak * cluster.fragmentation),
        ("reserved", cluster.reserved),
    ]
    verdict = "fits" if plan.fits else "does not fit"
    return [
        ("memory", f"{_size(memory.peak)} of tensors on each rank at the peak of a step, measured"),
        *[("", f"{name:<14}{_size(value):>10}") for name, value in parts if value],
        ("", f"{_size(plan.needed)} of {_size(cluster.gpu_memory)}: {verdict}"),
        *[("", line) for line in _ways_out(plan)],
    ]


def _ways_out(plan: "RunPlan") -> list[str]:
    if plan.fits:
        return []
    parallel = plan.config.parallel
    others = ["--model.checkpoint-blocks all"]
    if parallel.mode != "fsdp":
        others.append("--parallel.mode fsdp")
    elif parallel.shard != "full":
        others.append("--parallel.shard full")
    if parallel.precision in ("fp32", "tf32"):
        others.append("--parallel.precision bf16")
    lines = [f"pass {', '.join(others)}, or use a larger GPU"]
    if plan.fitting:
        lines.insert(0, f"pass --data.micro-batch {plan.fitting}, the largest that fits (measured)")
        lines[1] = f"or {lines[1]}"
    elif plan.fitting == 0:
        lines.insert(0, "no micro-batch fits with these settings")
    return lines


def _assumptions(plan: "RunPlan") -> list[tuple[str, str]]:
    cluster = plan.cluster
    storage = "not a limit" if cluster.storage is None else f"{_size(cluster.storage)}/s for all nodes"
    return [
        ("--mfu", f"{cluster.mfu:g} of the peak is reached"),
        ("--tflops", f"{cluster.flops / 1e12:,.0f} TFLOP/s is the peak of a GPU"),
        ("--exposed", f"{cluster.exposed:g} of the communication is not hidden by computation"),
        ("--network-gbit", f"{cluster.network * 8 / 1e9:,.0f} Gbit/s between nodes"),
        ("--link-rate", f"{cluster.link / 1e9:,.0f} GB/s between GPUs of a node"),
        ("--storage-rate", storage),
        ("--cpus", f"{counted(cluster.cpus, 'core')} of a node decode"),
        ("--decode-rate", f"{plan.decode_rate:,.0f} images per second are decoded by a core"),
        ("--gpu-memory", f"{_size(cluster.gpu_memory)} of a GPU"),
        ("--reserved", f"{_size(cluster.reserved)} of it for the CUDA context, cuBLAS and NCCL"),
        ("--fragmentation", f"{cluster.fragmentation:g} of the tensors' memory is lost in the allocator"),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.095 else f"{seconds * 1e3:,.1f} ms"
