"""The collectives of a block of code: what each one sends, counted at torch's dispatcher."""

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sa1b.engine.settings import ParallelConfig
from tests.engine.launch import group
from tests.engine.training import begin


class Traffic(TorchDispatchMode):
    """Records the collectives of this thread, also those that DDP and FSDP start.

    Attributes:
        sent: for each kind of collective, the bytes of the tensors that are reduced, gathered or sent; one
            number for each call. A scalar or a short description, below 1 kB, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            # A gather or scatter has the complete tensor and one rank's part of it.
            size = max((tensor.nbytes for tensor in tensors), default=0)
            if size >= 1000:
                self.sent[function._opname.strip("_").removesuffix("_base")].append(size)
        return function(*args, **(kwargs or {}))


def of_steps(configs: dict[str, tuple[ParallelConfig, int]]) -> dict[str, dict[str, list[int]]]:
    """The collectives of the second step of short runs, by name: mode and micro-batches of each."""
    found = {}
    for name, (config, accumulation) in configs.items():
        with group(config) as rank_info:
            run = begin(rank_info, config, accumulation, second=True)
            run.step(0)
            with Traffic() as traffic:
                run.step(1)
            found[name] = dict(traffic.sent)
    return found
