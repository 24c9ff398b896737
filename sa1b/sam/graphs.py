"""CUDA graphs: the kernels of a function, recorded once and then launched by one call of the host."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_log = logging.getLogger(__name__)
MOST = 16  # kinds of inputs; calls with others are not recorded


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any


class Graphs:
    """Recordings of a function on a CUDA device, one for each kind of its inputs.

    The first call with inputs of a kind runs the function, the second one records it. All recordings use the
    same memory.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, _Recording | None] = {}
        self._pool: Any = None
        self._fails = False

    def __deepcopy__(self, memo: object) -> "Graphs":
        return Graphs()

    def supports(self, x: Tensor) -> bool:
        """Whether functions of this tensor can be recorded."""
        return x.is_cuda

    def __call__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], fixed: Sequence[Tensor], kind: Hashable
    ) -> Any:
        """The result of `function(*inputs)`.

        Args:
            function: its result is any structure of tensors. It must not wait for the device, and all that it
                reads besides `inputs` and `fixed` must follow from `kind`.
            inputs: tensors on the device, without gradient.
            fixed: tensors that the function reads at their addresses, such as parameters.
        """
        formats = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        precision = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = kind, formats, precision, tuple(x.data_ptr() for x in fixed)
        if self._fails or key not in self._found:
            if len(self._found) < MOST:
                self._found[key] = None
            return function(*inputs)
        recording = self._found[key]
        if recording is None:
            try:
                recording = self._found[key] = self._record(function, inputs)
            except RuntimeError as error:
                self._fails = True
                _log.warning("no CUDA graphs are used: %s; pass --model.no-cuda-graphs", error)
                return function(*inputs)
        torch._foreach_copy_(recording.inputs, list(inputs))
        recording.graph.replay()
        # A pipeline computes several micro-batches before their backward passes.
        return tree_map_only(Tensor, torch.clone, recording.outputs)

    def _record(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> _Recording:
        graph, own = torch.cuda.CUDAGraph(), [x.detach().clone() for x in inputs]
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # Weights that autocast has converted before would keep their values in all replays. Threads of the
        # loader go on, so only this thread's calls are checked.
        with (
            torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"),
            torch.autocast("cuda", dtype, enabled, cache_enabled=False),
        ):
            outputs = function(*own)
        self._pool = graph.pool()
        return _Recording(graph, own, outputs)
