"""Memory of a training step, measured without computing it: the real step on fake tensors.

    memory = measure(config, world_size=16)
    memory.peak                                # bytes on each rank

A fake tensor (`torch._subclasses.fake_tensor`) has a shape, a dtype and a storage of a size, but no memory.
The model of the settings, wrapped by the real DDP or FSDP, runs one step with it: forward and backward of a
micro-batch, and the optimizer's update. The other ranks do not exist: collectives of torch's process group
"fake" return at once. So the memory for any model and any number of ranks is known before there is a GPU.

The peak is within 0.1 % of the one that torch's profiler measures in real steps on CPUs, in all modes, in
fp32 and bf16 (tests/engine/test_fake_step.py). With FSDP, two real ranks take up to 5 % more, because gloo
copies the gradients that it sends. The peak has not been compared with that of a GPU.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sa1b.engine.config import Config, build
from sa1b.engine.data_config import DataConfig
from sa1b.engine.ranks.parallel import COMPRESSION, check_ranks, mode_of
from sa1b.engine.ranks.process_group import mesh_of, replicas_on
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import clear, micro_batch
from sa1b.engine.step.optim import of_rank, update_ema
from sa1b.engine.step.run import TrainStep
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import RaggedMasks
from sa1b.stream.text import Texts

Purpose = Literal["parameters", "gradients", "optimizer", "batches", "communication", "activations"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

_DEVICE = torch.ops.prim.device.default
_SENDS = ("fsdp", "c10d", "_c10d_functional")  # namespaces of operations on buffers that ranks exchange


@dataclass(slots=True, eq=False)
class _Stored:
    """Memory of a storage. Its purpose may become known after the peak."""

    bytes: int
    reference: object  # weak, to the storage
    purpose: Purpose = "activations"


class LiveMemory(TorchDispatchMode):
    """Context, for one thread, that counts the bytes of live tensors created in it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._live: dict[int, _Stored] = {}
        # Storages and sizes at the peak; FSDP resizes a gathered unit to 0 after its use.
        self._largest: list[tuple[_Stored, int]] = []
        self._resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        memory = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = memory._resize(storage, size)
            memory._resized(storage)
            return resized

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  a method of a C++ class
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        delattr(torch.UntypedStorage, "resize_")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operation on local tensors, which come here
        if func is _DEVICE and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # most calls; the mode's own way is slower
        result = func(*args, **(kwargs or {}))
        before = self.bytes
        for tensor in _tensors(result):
            self._add(tensor)
        if self.bytes > before:
            self._look()
        if func.namespace in _SENDS:
            if func.name() == "fsdp::chunk_cat":  # copies unsharded gradients into the buffer that is sent
                self.mark(_tensors(args), "gradients")
            for tensor in _tensors((args, kwargs, result)):
                self._set(tensor, "communication", only="activations")
        return result

    def begin(self) -> None:
        """Record the peak from now on."""
        self.peak = 0
        self._look()

    def mark(self, tensors: Iterable[Tensor | None], purpose: Purpose) -> None:
        """Set the purpose of tensors, also for the peak before this call. A later purpose replaces it."""
        for tensor in tensors:
            if tensor is not None:
                self._set(tensor, purpose)

    def at_peak(self) -> dict[Purpose, int]:
        """Bytes of each purpose at the peak; their sum is `peak`."""
        sizes: dict[Purpose, int] = {}
        for stored, size in self._largest:
            sizes[stored.purpose] = sizes.get(stored.purpose, 0) + size
        return sizes

    def _set(self, tensor: Tensor, purpose: Purpose, only: Purpose | None = None) -> None:
        stored = self._live.get(_key(_local(tensor).untyped_storage()))
        if stored is not None and (only is None or stored.purpose == only):
            stored.purpose = purpose

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key not in self._live:
            reference = weakref.ref(storage, partial(self._remove, key))
            self._live[key] = _Stored(storage.nbytes(), reference)
            self.bytes += storage.nbytes()

    def _remove(self, key: int, reference: object) -> None:
        self.bytes -= self._live.pop(key).bytes

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees and allocates a gathered parameter by resizing its storage; nothing else does."""
        stored = self._live.get(_key(storage))
        if stored is not None:
            self.bytes += storage.nbytes() - stored.bytes
            stored.bytes = storage.nbytes()
            stored.purpose = "communication"
            self._look()

    def _look(self) -> None:
        if self.bytes > self.peak:
            self.peak = self.bytes
            self._largest = [(stored, stored.bytes) for stored in self._live.values()]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield _local(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)


RUNS_PER_MASK = 300  # mean of synthetic images with the statistics of SA-1B
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of each rank at the peak of a step."""

    parameters: int  # weights and buffers of the model (or of this rank's shard) and of a teacher
    gradients: int  # of this rank, sharded or not, and DDP's buckets
    optimizer: int  # AdamW's two moments, and the running mean of the weights
    batches: int  # micro-batches on the device: in use, complete and in flight
    communication: int  # parameters that FSDP has gathered, and its buffers
    activations: int  # all other tensors: for the backward pass, and intermediate results
    offloaded: int = 0  # part of the first three that --parallel.offload keeps in host memory

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        tensors = self.parameters + self.gradients + self.optimizer + self.batches
        return tensors + self.communication + self.activations - self.offloaded


def measure(config: Config, world_size: int) -> StepMemory:
    """Measure the memory of a step of each rank. No process group may exist; none exists afterwards.

    Not for a pipeline, whose stages need unequal memory. Takes 10 s for vit_h on one CPU core, and 0.5 GB.
    UsageError names the flag that does not fit this number of ranks.
    """
    # The tensors are fake tensors of the CPU, because FSDP on fake tensors of a GPU needs CUDA streams. A GPU
    # stores the same shapes and dtypes: autocast uses the same format for matrix products, norms keep the
    # format of their input, and attention is a fused kernel without a matrix of tokens x tokens. A compiled
    # model runs uncompiled here, and usually stores less, as do the fused kernels of the mask decoder. Memory
    # outside of tensors is not measured: the context of CUDA, workspaces of kernels, buffers of NCCL, gaps
    # between tensors.
    parallel = replace(config.parallel, offload="none", static_graph=False, find_unused=False)
    parallel = replace(parallel, compress="none", compress_after=ParallelConfig().compress_after)
    with ExitStack() as stack:
        rank_info = stack.enter_context(_pretended_rank(parallel, world_size))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            module = build(config, None)
        stack.enter_context(FakeTensorMode())
        memory = stack.enter_context(LiveMemory())
        step_memory = _step(config, parallel, module, rank_info, memory)
    # PowerSGD keeps the errors of the last two steps, because the last one may be skipped.
    errors, factors = kept_numbers(module, config.parallel)
    step_memory = replace(step_memory, gradients=step_memory.gradients + 4 * (2 * errors + 3 * factors))
    offloaded = step_memory.parameters + step_memory.gradients + step_memory.optimizer
    return replace(step_memory, offloaded=offloaded if config.parallel.offload != "none" else 0)


def _step(
    config: Config, parallel: ParallelConfig, module: nn.Module, rank_info: RankInfo, memory: LiveMemory
) -> StepMemory:
    def empty(old: Tensor) -> Tensor:
        new = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=_CPU)
        memory.mark([new], "parameters")  # also of a teacher, which is not in module.parameters()
        return new

    module._apply(empty)
    step = TrainStep(module, replace(config, parallel=parallel), rank_info, mode_of(parallel).wrap)
    step.scaler = GradScaler(_CPU.type, enabled=False)  # fp16's has two numbers
    module, optimizer = step.module, step.optimizer
    if isinstance(module, DistributedDataParallel):
        _send_nothing(module)
    data = config.data
    micro, count = config.micro_batches(rank_info.world_size)
    target = data.target_size or config.image_size // 4
    # See sa1b.stream.loader: the batch in use, the complete ones, and one in flight.
    batches = [blank_batch(micro, data.masks, config.image_size, target) for _ in range(data.prefetch + 2)]
    if data.text is not None:
        batches = [replace(batch, texts=_blank_texts(micro * data.masks, data)) for batch in batches]
    for batch in batches:
        parts = (batch, batch.masks, *([] if batch.texts is None else [batch.texts]))
        tensors = [getattr(part, name.name) for part in parts for name in fields(part)]
        memory.mark((tensor for tensor in tensors if isinstance(tensor, Tensor)), "batches")
    memory.mark([*module.parameters(), *module.buffers()], "parameters")

    def run() -> Tensor:
        sums = step.forward_backward(batches[0])
        memory.mark((parameter.grad for parameter in module.parameters()), "gradients")
        return sums["count"]

    def update(masks: Tensor) -> None:
        step.finish(masks)
        step.scaler.step(optimizer)
        update_ema(optimizer, config.optim, 0)
        clear(module, optimizer)

    def accumulated() -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        memory.mark((parameter.grad for parameter in module.parameters()), "gradients")

    accumulated()
    optimizer.step()  # creates its state, which the first step of a run does not have in its backward pass
    update_ema(optimizer, config.optim, 0)
    optimizer.zero_grad()
    for state in of_rank(optimizer).state.values():
        memory.mark((value for value in state.values() if isinstance(value, Tensor)), "optimizer")
    # From the second one on, micro-batches add to gradients. FSDP keeps those of a first one in its own form.
    passes = 2 if count > 1 and parallel.mode == "fsdp" else 1
    # DDP accumulates in its buckets, which exist already.
    if count > 1 and parallel.mode == "none":
        accumulated()
    memory.begin()
    masks = torch.zeros(())
    for number in range(passes):
        with micro_batch(module, last=number + 1 == passes):
            masks = run()
    update(masks)
    peak = memory.at_peak()
    return StepMemory(**{name: peak.get(name, 0) for name in PURPOSES})


@contextmanager
def _pretended_rank(config: ParallelConfig, world_size: int) -> Iterator[RankInfo]:
    """Rank 0 of a group whose other ranks do not exist."""
    check_ranks(config, world_size)
    if config.mode == "none":
        yield RankInfo(0, 1, 0, _CPU)
        return
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the back end
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world_size)
    try:
        mesh = (
            mesh_of(_CPU, world_size, replicas_on(world_size, config.replicas))
            if config.mode == "fsdp"
            else None
        )
        yield RankInfo(0, world_size, 0, _CPU, mesh)
    finally:
        dist.destroy_process_group()


class _FixedBuckets:
    """DDP's reducer without the second choice of buckets, which reads values that fake tensors lack."""

    # Other buckets have the same number of bytes.

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> object:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _send_nothing(module: DistributedDataParallel) -> None:
    """Replace DDP's all-reduce, which works in the bucket, by nothing."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, hook)
    module.reducer = cast(Any, _FixedBuckets(module.reducer))


class _BlankMasks(RaggedMasks):
    """Masks of zeros; their runs have no values from which pixels could be computed."""

    def dense(self, size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        size = size or self.image_size
        return torch.zeros(len(self), size, size, dtype=torch.uint8)


def _blank_texts(count: int, data: DataConfig) -> Texts:
    length = 0 if data.text_width else data.text_tokens
    return Texts(
        tokens=torch.zeros(count * length, dtype=torch.int32),
        offsets=torch.zeros(count + 1, dtype=torch.int64),
        vectors=torch.zeros(count, data.text_width),
        keys=torch.zeros(count, dtype=torch.int64),
        key="mask_id",
        length=data.text_tokens,
    )


def blank_batch(images: int, masks: int, image_size: int, target_size: int) -> Batch:
    """A micro-batch with the shapes and dtypes of the loader's, of zeros."""
    total = images * masks

    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    return Batch(
        images=torch.zeros(images, image_size, image_size, 3, dtype=torch.uint8).permute(0, 3, 1, 2),
        masks=_BlankMasks(
            runs=torch.zeros(total * RUNS_PER_MASK, dtype=torch.int32),
            offsets=whole(total + 1),
            image=whole(total),
            counts=(masks,) * images,
            sizes=whole(total, 2),
            taken=whole(total, 2),
            image_size=image_size,
        ),
        boxes=torch.zeros(total, 4),
        points=torch.zeros(total, 2),
        areas=whole(total),
        predicted_iou=torch.zeros(total),
        stability_score=torch.zeros(total),
        mask_ids=whole(total),
        mask_index=whole(total),
        ids=whole(images),
        source_sizes=whole(images, 2),
        framed_sizes=whole(images, 2),
        windows=whole(images, 4),
        flipped=torch.zeros(images, dtype=torch.bool),
        positions=whole(images),
        valid=torch.zeros(images, dtype=torch.bool),
        position=0,
        dense=torch.zeros(total, target_size, target_size, dtype=torch.uint8),
    )


def kept_numbers(module: nn.Module, config: ParallelConfig) -> tuple[int, int]:
    """See `GradientHook.kept`; zeros without compression."""
    return (0, 0) if config.compress == "none" else COMPRESSION.load()(config).kept(module)
