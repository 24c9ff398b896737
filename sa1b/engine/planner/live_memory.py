"""Bytes of the tensors that are alive while code runs, and their purposes at the peak.

    with FakeTensorMode(), LiveMemory() as memory:
        module, optimizer = ...
        memory.mark(module.parameters(), "parameters")
        memory.begin()
        ...                                    # a step
        memory.mark(gradients, "gradients")
    memory.at_peak()                           # {"parameters": 2_564_000_000, "gradients": ...}

Every operation is recorded, also those of autograd, of DDP's buckets and of FSDP. Memory of tensors is
counted, each storage once, as by `torch.cuda.max_memory_allocated`. Memory that a kernel allocates and frees
itself is not counted. With fake tensors, nothing is computed and no memory is allocated.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Purpose = Literal["parameters", "gradients", "optimizer", "batches", "communication", "activations"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

_DEVICE = torch.ops.prim.device.default
_SENDS = ("fsdp", "c10d", "_c10d_functional")  # namespaces of operations on buffers that ranks exchange


class _Stored:
    """Memory of a storage. Its purpose may become known after the peak."""

    __slots__ = ("bytes", "purpose")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.purpose: Purpose = "activations"


class LiveMemory(TorchDispatchMode):
    """Context, for one thread, that counts the bytes of live tensors created in it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._live: dict[int, _Stored] = {}
        self._references: dict[int, object] = {}
        # The storages of the peak with their sizes then: a gathered unit has none after it was used.
        self._largest: list[tuple[_Stored, int]] = []
        self._resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        memory = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = memory._resize(storage, size)
            memory._resized(storage)
            return found

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  a method of a C++ class
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        delattr(torch.UntypedStorage, "resize_")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
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
        found: dict[Purpose, int] = {}
        for stored, size in self._largest:
            found[stored.purpose] = found.get(stored.purpose, 0) + size
        return found

    def _set(self, tensor: Tensor, purpose: Purpose, only: Purpose | None = None) -> None:
        stored = self._live.get(_key(_local(tensor).untyped_storage()))
        if stored is not None and (only is None or stored.purpose == only):
            stored.purpose = purpose

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key not in self._live:
            self._live[key] = _Stored(storage.nbytes())
            self._references[key] = weakref.ref(storage, partial(self._remove, key))
            self.bytes += storage.nbytes()

    def _remove(self, key: int, reference: object) -> None:
        self.bytes -= self._live.pop(key).bytes
        del self._references[key]

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
            self._largest = [(one, one.bytes) for one in self._live.values()]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield _local(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)
