"""FSDP2: which parameters are gathered together, and in which number formats.

Each group of parameters is gathered before its forward and backward pass. Large groups need fewer and longer
transfers; small groups need less memory, because one group is computed while the next one is gathered.
"""

import re
import warnings
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from sa1b.engine.model import declared
from sa1b.errors import UsageError

_SIZE = re.compile(r"size:(\d+(?:\.\d+)?)([KMG]?)")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh | None,
    *,
    groups: str,
    reshard: bool,
    offload: Literal["none", "cpu", "pinned"],
    compute: torch.dtype | None,
    reduce: torch.dtype,
) -> nn.Module:
    """Shard the parameters of a model over the ranks, in place.

    The units of the model are gathered in the number format of the matrix products; all other parameters are
    one group in float32. Inputs are never cast, because they may be coordinates.

    Args:
        module: a model (`sa1b.engine.model`).
        groups: --parallel.wrap; see `units`.
        reshard: release the parameters of a group between its forward and backward pass.
        compute: dtype of the gathered parameters; None: float32.
        reduce: dtype in which gradients are summed over the ranks.
    """
    # A unit may return a view of a matrix product. Torch warns that changing such a result in place removes
    # the hook that gathers weights for the backward pass. Models add the result to a residual instead.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kept = OffloadPolicy() if offload == "none" else CPUOffloadPolicy(pin_memory=offload == "pinned")
    formats = MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False)
    for group in units(declared(module).fsdp_units(), groups):
        members = [part for unit in group for part in unit]
        fully_shard(members, mesh=mesh, reshard_after_forward=reshard, mp_policy=formats, offload_policy=kept)
        if hasattr(group[0][0], "gathered"):
            _gather_group(group[0][0], group[-1][0])
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(None, reduce, cast_forward_inputs=False),
        offload_policy=kept,
    )
    return module


def units(found: list[list[nn.Module]], groups: str) -> list[list[list[nn.Module]]]:
    """Join consecutive units of a model to groups.

    Args:
        found: the units of the model, in the order of execution.
        groups: "block": one group for each unit. "size:100M": units are joined until a group has at least
            100 million parameters. "none": no groups.

    Raises:
        UsageError: `groups` has another form.
    """
    least = least_size(groups)
    if least is None:
        return []
    joined: list[list[list[nn.Module]]] = []
    size = least
    for unit in found:
        if size >= least:
            joined.append([])
            size = 0
        joined[-1].append(unit)
        size += sum(parameter.numel() for part in unit for parameter in part.parameters())
    return joined


def least_size(groups: str) -> int | None:
    """The least number of parameters of a group; None: there are no groups.

    Raises:
        UsageError: the value of --parallel.wrap is not valid.
    """
    if groups == "none":
        return None
    size = _SIZE.fullmatch(groups)
    if groups != "block" and (size is None or not float(size[1]) > 0):
        raise UsageError(
            f"--parallel.wrap {groups}: not a kind of group; pass block, none, or a size such as size:100M"
        )
    return 1 if size is None else max(round(float(size[1]) * _FACTORS[size[2]]), 1)


def _gather_group(first: Any, last: Any) -> None:
    """Gather a group at the method `gathered` of its first unit, and release it after that of its last one.

    Torch's function supports only one method, which must run the complete group.
    """
    if first is last:
        register_fsdp_forward_method(first, "gathered")
        return
    begin, end, state = first.gathered, last.gathered, first._get_fsdp_state()

    def gather(*inputs: Any) -> Any:
        inputs, _ = state._pre_forward(first, inputs, {})
        return begin(*inputs)

    def release(*inputs: Any) -> Any:
        return state._post_forward(last, inputs, end(*inputs))

    first.gathered, last.gathered = gather, release
