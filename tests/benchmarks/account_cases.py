"""What the programs of a decoder's kernels load and store, counted in Triton's interpreter and by the account:

TRITON_INTERPRET=1 python -m tests.benchmarks.account_cases
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from benchmarks.account import as_on_a_gpu, through_cache
from sa1b.sam import kernel_comparison, tokens_to_image_triton
from sa1b.sam.kernel_comparison import results_of
from sa1b.sam.model import Sam
from tests.sam.decoder_cases import CONFIG
from tests.sam.kernel_proof_cases import PASSES

TOLERANCE = 0.1  # the account leaves out biases, parameters of norms, and sums of parameters


def counted() -> dict[str, tuple[float, float]]:
    """Kernel -> bytes in the interpreter, and by the account."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    running: list[str] = []
    execute, load, store = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def count(ptrs: Any, mask: Any) -> None:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        found[running[-1]][0] += int(mask.data.sum()) * size

    def executed(executor: Any, *arguments: Any, **options: Any) -> None:
        name = executor.fn.__name__
        given = dict(zip(executor.arg_names, arguments, strict=False))
        found[name][1] += through_cache(name, given, executor.grid)
        running.append(name)
        execute(executor, *arguments, **options)
        running.pop()

    def loaded(builder: Any, ptrs: Any, mask: Any, *more: Any) -> Any:
        count(ptrs, mask)
        return load(builder, ptrs, mask, *more)

    def stored(builder: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        count(ptrs, mask)
        return store(builder, ptrs, value, mask, *more)

    torch.manual_seed(0)
    model = Sam(replace(CONFIG, channels=64))
    with (
        as_on_a_gpu(None),
        torch.autocast("cpu", dtype=torch.float16),
        mock.patch.object(kernel_comparison, "PASSES", PASSES),
        # As with many masks: no program writes a summand in float32.
        mock.patch.multiple(tokens_to_image_triton, PROGRAMS=1, SHARED_PROGRAMS=1),
        mock.patch.object(GridExecutor, "__call__", executed),
        mock.patch.object(InterpreterBuilder, "create_masked_load", loaded),
        mock.patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        results_of(model)
    return {name: (bytes_, predicted) for name, (bytes_, predicted) in found.items() if predicted}


def check() -> int:
    """The account differs little from the interpreter; returns the number of kernels."""
    compared = counted()
    for name, (bytes_, predicted) in compared.items():
        assert abs(predicted / bytes_ - 1) < TOLERANCE, (name, bytes_, predicted, compared)
    return len(compared)


if __name__ == "__main__":
    print(f"{check()} kernels")
