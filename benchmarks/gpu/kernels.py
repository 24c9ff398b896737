"""The comparisons of `sa1b doctor --kernels`, of all number formats at once; training uses what is right."""

import json

from benchmarks.gpu.part import Record, Setting, Skipped
from sa1b.masks.proved import MASKS
from sa1b.sam.kernel_proof import Kind, prove, sizes_of
from sa1b.sam.model import PRESETS


def work(setting: Setting, record: Record) -> None:
    """Compare each kernel with torch."""
    if not setting.on_gpu:
        raise Skipped("no GPU")
    kinds = [Kind(MASKS, ()), *(Kind(name, sizes_of(PRESETS["vit_b"])) for name in ("bf16", "fp16", "fp32"))]
    results = prove(kinds, {}, limits=(70, 35))
    for kind in kinds:
        for name, result in kind.found(results).items():
            one = f"{kind.number_format}, {'together' if '+' in name else name}"
            record.check(one, result["right"], result["why"])
            record.text(one, json.dumps(result))
