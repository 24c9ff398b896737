"""Account of a training step on a GPU: launches, blocks, bytes and operations, counted without a GPU.

    python -m benchmarks.account                           ViT-B, 8 images of 64 masks, bfloat16
    python -m benchmarks.account --without norm            without the kernels of this module
    python -m benchmarks.account --images 1 --top 40

The real step runs on fake tensors, which have shapes and formats but no memory, with the operators and
kernels of a CUDA device. An operator that is more than a view counts as one launch. It moves the bytes of its
inputs and outputs once; those that an expanded tensor repeats count once. Operations are those of matrix
products, convolutions and attention, also inside the project's own kernels. Blocks, and what all blocks
together load and store through the cache, are known for these kernels only.

The shortest time of an operator is the longest of those of its bytes, of its bytes through the cache, of its
operations and of a launch. The rates --bandwidth and --flops are by default those measured on an H100; the
one of --cache and the 2 microseconds of a launch in a CUDA graph are assumed. CUDA graphs replay the launches
of the iterations, so the host makes only the other ones. The optimizer already has its state.

`compared` sets an account beside a trace of `sa1b train --logging.profile`. Kernels of a CUDA graph belong to
no operator there; with --model.no-cuda-graphs, all do.
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from sa1b.engine.config import build
from sa1b.engine.planner import blank_batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.gradients import TrainStep
from sa1b.recipes.presets import PRESETS
from sa1b.sam import image_encoder
from sa1b.sam.interactive import Interactive
from sa1b.sam.kernel_proof import KERNELS

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
_ATTENTION = "_scaled_dot_product"
_VIEWS = {
    *("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select"),
    *("unsqueeze", "squeeze", "detach", "alias", "split", "split_with_sizes", "unbind", "as_strided"),
    *("unfold", "diagonal", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("lift_fresh", "device", "_record_function_enter_new", "_record_function_exit"),
}
# Kernel -> one of its arguments, and its matrix products of this tensor with N or 4 C rows or columns.
_PRODUCTS_OF = {
    "image_to_tokens_forward": ("keys", 2),
    "image_to_tokens_backward": ("keys", 4),
    "image_to_tokens_rows": ("keys", 5),
    "read_forward": ("rows", 2),
    "read_of_rows": ("rows", 3),
    "read_of_own": ("rows", 4),
    "read_of_shared": ("rows", 4),
    "upscale_forward": ("image", 1.625),
    "upscale_backward": ("image", 2.875),
}
BYTES = 2  # of a number in bfloat16
_FILLED = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}  # read no input
_WRITTEN = {"copy_", "fill_", "zero_"}  # in place, without reading


@dataclass(slots=True)
class Sum:
    """Of the calls of an operator; `cached`: bytes through the cache; `seconds`: at least."""

    launches: int = 0
    blocks: int = 0
    bytes: float = 0
    cached: float = 0
    flop: float = 0
    seconds: float = 0

    def __iadd__(self, other: "Sum") -> "Sum":
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True)
class Account(TorchDispatchMode):
    """Context that counts the operators and kernels in it.

    Attributes:
        bandwidth: bytes a second.
        flops: operations a second.
        cache: bytes a second between the cache of the device and its processors.
        launch: seconds of a launch in a CUDA graph, at least.
        inside: whether the iterations of interactive training are computed now.
        kept: tensors that the iterations keep for their backward pass, by storage.
        sums: (iterations, operator) -> their sum; kernels of the project have their names.
    """

    bandwidth: float = 3.02e12
    flops: float = 790e12
    cache: float = 5.5e12
    launch: float = 2e-6
    inside: bool = False
    kept: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[tuple[bool, str], Sum] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(Account, self).__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in _VIEWS:
            flop = 0.0
            if name.startswith(_ATTENTION):
                shapes = [x.shape for x in args[:4] if isinstance(x, Tensor)]
                if "backward" in name:  # the gradient comes first
                    flop = sdpa_backward_flop_count(*shapes)
                else:
                    flop = sdpa_flop_count(*shapes[:3])
            elif (count := flop_registry.get(func._overloadpacket)) is not None:
                flop = count(*args, **(kwargs or {}), out_val=out)
            both = args[:1] if name.endswith("_") and name not in _WRITTEN else ()
            self.add(name, out if name in _FILLED else (args, kwargs, out), both, flop=flop)
        return out

    def add(
        self, name: str, tensors: Any, both: Any = (), *, flop: float = 0, blocks: int = 0, cached: float = 0
    ) -> None:
        """Count a launch that reads or writes these tensors; `both`: those that it reads and writes."""
        stored = {_key(x): _stored(x) for x in tree_leaves(tensors) if isinstance(x, Tensor)}
        moved = sum(stored.values()) + sum(_stored(x) for x in tree_leaves(both) if isinstance(x, Tensor))
        cached = max(cached, moved)
        seconds = max(self.launch, moved / self.bandwidth, cached / self.cache, flop / self.flops)
        total = self.sums.setdefault((self.inside, name), Sum())
        total += Sum(1, blocks, moved, cached, flop, seconds)

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved for the backward pass."""
        if self.inside:
            self.kept.setdefault(_key(tensor)[0], tensor)
        return tensor

    def total(self, of: Callable[[bool, str], bool] = lambda inside, name: True) -> Sum:
        """The sum of all operators of which `of` holds."""
        total = Sum()
        for (inside, name), one in self.sums.items():
            if of(inside, name):
                total += one
        return total


def _key(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), tensor.storage_offset()


def _stored(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@contextmanager
def as_on_a_gpu(launch: Callable[..., None] | None, kernels: Collection[str] = KERNELS) -> Iterator[None]:
    """Context in which the decoder has its form for a CUDA device.

    In place of a kernel's start, `launch(kernel, *arguments, grid=grid, **options)` is called; None: kernels
    start.
    """
    from triton.runtime.jit import JITFunction

    def kernels_of(name: str, x: Tensor) -> ModuleType | None:
        return import_module(f"sa1b.sam.{name}_triton") if name in kernels else None

    def run(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        assert launch is not None
        launch(kernel, *arguments, **options)

    with ExitStack() as stack:
        for module in ("transformer", "image_tokens", "targets", "mask_decoder"):
            stack.enter_context(mock.patch(f"sa1b.sam.{module}.kernels_of", kernels_of))
        if launch is not None:
            stack.enter_context(mock.patch.object(JITFunction, "run", run))
        yield


def through_cache(name: str, given: Mapping[str, Any], grid: Sequence[int]) -> float:
    """Bytes that all programs of a kernel load and store, with these arguments by name; 0: not known."""
    n, c, rank, programs = given.get("N", 0), given.get("CHANNELS", 0), given.get("RANK", 0), math.prod(grid)
    numbers = 0
    match name:
        case "read_forward" | "read_of_rows":
            rows = 2 if name == "read_forward" else 3
            numbers = programs * rows * given["ROWS"] * (c + rank) + grid[0] * (2 * c + rank) * n
        case "read_of_own":
            numbers = programs * (2 + given["FEW"]) * given["ROWS"] * c
            numbers += grid[0] * (3 + given["OTHER"]) * n * c
        case "read_of_shared":
            of_mask = grid[0] * 2 * given["BLOCKS"] * given["BLOCK"] * (c + rank)
            of_mask += (2 * rank + given["OTHER"] * c) * n
            numbers = grid[2] * (given["masks"] * of_mask + 3 * grid[1] * n * c)
        case "image_to_tokens_forward" | "image_to_tokens_backward":
            rows, tiles = given["HEADS"] * given["SIZE"], programs * given["STEPS"]
            images = 3 if name == "image_to_tokens_forward" else 5
            of_tile = given["TILE"] * (images * c + rank) + rank * c
            numbers = programs * 2 * rows * c + tiles * of_tile
        case "image_to_tokens_rows":
            rows, tiles = given["HEADS"] * given["SIZE"], programs * given["STEPS"]
            images = 2 if given["SHARED"] else 3
            numbers = programs * 2.5 * rows * c + tiles * given["TILE"] * (images * c + rank)
        case "upscale_forward" | "upscale_backward":
            n, c, width = given["count"], given["C"], given["WIDTH"]
            matrices, of_token = (1, 0) if name == "upscale_forward" else (3, 4 * c)
            of_token += width + 16 * given["K"]
            numbers = grid[0] * (n * of_token + n // given["TILE"] * 4 * c * width)
            numbers += programs * matrices * 2 * c * c
    return BYTES * numbers


def of_step(preset: str, images: int, masks: int, account: Account, kernels: Sequence[str] = KERNELS) -> int:
    """Count a step of one micro-batch in bfloat16; returns its number of iterations."""
    config = PRESETS[preset]
    model = replace(config.model, cuda_graphs=False)
    parallel = replace(config.parallel, precision="bf16")
    data = replace(config.data, global_batch=images, masks=masks)
    config = replace(config, model=model, parallel=parallel, data=data)
    with torch.device("meta"):
        module = build(config, None)
    plain = Interactive._iterate

    def iterate(*args: Any) -> dict[str, Tensor]:
        account.inside = True
        try:
            return plain(*args)
        finally:
            account.inside = False

    def launch(kernel: Any, *args: Any, grid: Sequence[int], **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=True))
        factor, products = _PRODUCTS_OF.get(kernel.__name__, ("", 0))
        products += given.get("FEW", False)  # the gradient of the rows too
        flop = 2 * products * given[factor].numel() * (given.get("N") or 4 * given["C"]) if products else 0
        cached = through_cache(kernel.__name__, given, grid)
        account.add(kernel.__name__, args, flop=flop, blocks=math.prod(grid), cached=cached)

    with (
        as_on_a_gpu(launch, kernels),
        mock.patch.object(Interactive, "_iterate", iterate),
        mock.patch.object(image_encoder, "attended", _attended),
        FakeTensorMode(),
    ):
        module._apply(lambda x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu"))
        step = TrainStep(module, config, RankInfo(0, 1, 0, torch.device("cpu")))
        batch = blank_batch(images, masks, config.image_size, config.image_size // 4)
        for parameter in module.parameters():  # so that the optimizer has its state, as after the first step
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        step.optimizer.step()
        step.optimizer.zero_grad()
        with account, saved_tensors_hooks(account.keep, lambda tensor: tensor):
            sums = step.forward_backward(batch)
            step.finish(sums["count"])
            step.scaler.step(step.optimizer)
    return 1 + config.recipe.clicks + config.recipe.unprompted


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`sa1b.sam.image_encoder.attended` by cuDNN, as on an H100."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=1.0)[0]
    return out


def document(account: Account, step: str, images: int, masks: int) -> dict[str, Any]:
    """The account as JSON values; `masks`: of all images and iterations."""

    def element_wise(inside: bool, name: str) -> bool:
        return inside and name not in PRODUCTS and not name.startswith(_ATTENTION) and name not in own

    own = {name for (_, name), one in account.sums.items() if one.blocks}
    kept = sum(tensor.untyped_storage().nbytes() for tensor in account.kept.values())
    every, inner = account.total(), account.total(lambda inside, _: inside)
    return {
        "step": step,
        "launches": every.launches,
        "launches of the host with CUDA graphs": every.launches - inner.launches,
        "blocks of kernels": every.blocks,
        "GB": every.bytes / 1e9,
        "GB through the cache": every.cached / 1e9,
        "TFLOP": every.flop / 1e12,
        "ms at least": 1e3 * every.seconds,
        "ms at least, iterations": 1e3 * inner.seconds,
        "images/s at most": images / every.seconds,
        (of_mask := "MB of a mask and iteration"): inner.bytes / 1e6 / masks,
        f"{of_mask}, kept for the backward pass": kept / 1e6 / masks,
        f"{of_mask}, neither products nor kernels": account.total(element_wise).bytes / 1e6 / masks,
    }


@dataclass(frozen=True, slots=True)
class Row:
    """An operator or kernel in an account and in a step of a trace, or a sum of these; see `compared`."""

    name: str
    predicted_launches: int = 0
    launches: float = 0
    predicted_ms: float = 0
    measured_ms: float = 0
    busy_ms: float = 0

    @property
    def difference(self) -> float:
        return self.measured_ms - self.predicted_ms

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.predicted_ms if self.predicted_ms else math.inf


def profiled_steps(events: Iterable[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], float, float]:
    """The steps of a trace, the begin of the first and the end of the last one."""
    annotations = (event for event in events if event.get("cat") == "user_annotation")
    steps = [event for event in annotations if event["name"].startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("the trace has no step")
    return steps, min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)


def compared(events: Iterable[Mapping[str, Any]], counted: Account) -> list[Row]:
    """An account beside the events of a trace: first the rows that take longer than predicted by most.

    What the GPU did in the profiled steps counts for the operator that launched it. Kernels of the project,
    and what no operator launched, have their own names. `busy_ms` leaves out the time in which an earlier
    kernel or copy still ran, so that its sum is the time in which any runs.
    """
    events = [event for event in events if "cat" in event and "dur" in event]
    steps, begin, end = profiled_steps(events)
    until = begin
    predicted: defaultdict[str, Sum] = defaultdict(Sum)
    for (_, name), one in counted.sums.items():
        predicted[name] += one
    own = {name for name, one in predicted.items() if one.blocks}
    operators = _launched_by(events, predicted.keys() - own)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in predicted}
    ran = [x for x in events if x["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and begin <= x["ts"] < end]
    for event in sorted(ran, key=lambda event: float(event["ts"])):
        name, took, before = event["name"], event["dur"], until
        if name not in own:
            name = operators.get(event.get("args", {}).get("correlation"), name)
        until = max(until, event["ts"] + took)
        times.setdefault(name, []).append((took, min(took, until - before)))
    rows, ms = [], 1e3 * len(steps)
    for name, of in times.items():
        took, busy = (sum(column) / ms for column in zip((0, 0), *of, strict=True))
        one = predicted[name]
        rows.append(Row(name, one.launches, len(of) / len(steps), 1e3 * one.seconds, took, busy))
    return sorted(rows, key=lambda row: -row.difference)


def _launched_by(events: Iterable[Mapping[str, Any]], known: Collection[str]) -> dict[int, str]:
    """Correlation of a launch -> the outermost operator of `known` around it, else the innermost operator."""
    # The "External id" of a kernel is that of the innermost operator, and the account has the outermost one:
    # clone, but not copy_, which clone calls. Times of a thread nest and tell both.
    found: dict[int, str] = {}
    threads: defaultdict[tuple[Any, Any], list[tuple[float, str]]] = defaultdict(list)  # end, name
    ran = [event for event in events if event["cat"] in ("cpu_op", "cuda_runtime", "cuda_driver")]
    # Of operators that begin together, the longest is around the others.
    for event in sorted(ran, key=lambda x: (x["ts"], -x["dur"], x["cat"] != "cpu_op")):
        around = threads[event["pid"], event["tid"]]
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        if event["cat"] != "cpu_op":
            if around and "GraphLaunch" not in event["name"]:  # which all kernels of a graph share
                found[event.get("args", {}).get("correlation", -1)] = around[-1][1]
        elif not around or around[-1][1] not in known:
            around.append((event["ts"] + event["dur"], event["name"].removeprefix("aten::")))
    return found


def table_of(rows: Sequence[Row], most: int = 22) -> str:
    """The sums of the rows of `compared`, and the first ones."""
    lines = ["of a step".ljust(44) + "  launches    measured        ms  measured      more   ratio"]
    unknown = [row for row in rows if not row.predicted_launches]
    groups = [("all", rows), ("not in the account", unknown), *((row.name, [row]) for row in rows[:most])]
    for title, of in groups:
        name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", title)[:44]
        row = Row(name, *map(sum, zip(*(astuple(row)[1:] for row in of), strict=True)))
        lines.append(
            f"{name:44} {row.predicted_launches:9,} {row.launches:11,.1f} {row.predicted_ms:9.2f}"
            f" {row.measured_ms:9.2f} {row.difference:+9.2f} {row.ratio:7.2f}"
        )
    return "\n".join([*lines, f"ms in which any runs: {sum(row.busy_ms for row in rows):.2f}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.account", description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", choices=("tiny", "vit_t", "vit_b", "vit_l", "vit_h"), default="vit_b")
    parser.add_argument("--images", type=int, default=8, help="of the micro-batch (%(default)s)")
    parser.add_argument("--masks", type=int, default=64, help="of an image (%(default)s)")
    parser.add_argument("--without", nargs="*", choices=KERNELS, default=[], help="kernels that are not used")
    parser.add_argument("--bandwidth", type=float, default=3.02e12, help="bytes a second (%(default)g)")
    parser.add_argument("--cache", type=float, default=5.5e12, help="bytes a second (%(default)g)")
    parser.add_argument("--flops", type=float, default=790e12, help="operations a second (%(default)g)")
    parser.add_argument("--top", type=int, default=25, help="operators that are listed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the totals as JSON")
    given = parser.parse_args(arguments)
    for name in ("images", "masks", "bandwidth", "cache", "flops"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name} {getattr(given, name)}: must be positive")
    account = Account(given.bandwidth, given.flops, given.cache)
    kernels = [name for name in KERNELS if name not in given.without]
    iterations = of_step(given.preset, given.images, given.masks, account, kernels)
    step = f"{given.preset}, {given.images} images of {given.masks} masks, {iterations} iterations, bfloat16"
    totals = document(account, step, given.images, given.images * given.masks * iterations)
    if given.json:
        print(json.dumps(totals))
        return 0
    for name, value in totals.items():
        print(f"{name:58} {value if isinstance(value, str) else format(value, ',.1f').removesuffix('.0')}")
    print(f"\n{'operator':44} {'launches':>8} {'blocks':>9} {'GB':>7} {'cache':>7} {'TFLOP':>6} {'ms':>6}")
    rows = sorted(account.sums.items(), key=lambda row: -row[1].seconds)
    for (inside, name), one in rows[: given.top]:
        place = "iterations" if inside else "rest"
        print(
            f"{name[:32]:32} {place:11} {one.launches:8,} {one.blocks:9,} {one.bytes / 1e9:7.1f}"
            f" {one.cached / 1e9:7.1f} {one.flop / 1e12:6.2f} {1e3 * one.seconds:6.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
