"""Which assemblers compile the kernels of attention correctly for this GPU, with tiles of 64 and of 32.

ptxas 12.8, which comes with Triton 3.6 and 3.7, miscompiles tiles of 32 for an H100 and an H200, so the
kernels have tiles of 64 there. Each case is a process, as in `sa1b.sam.kernel_proof`:

    python -m benchmarks.gpu.assemblers PTXAS FOLDER CASE

FOLDER has the kernels that this assembler compiled. CASE is what `sa1b.sam.kernel_comparison` takes, with the
tile. It compares results and gradients with operators of torch.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Record, Setting
from sa1b.sam.kernel_proof import Kind, Result, compare, sizes_of
from sa1b.sam.model import PRESETS

# Kernel and tile; the second kernel chooses its tiles by its number of rows.
CASES = (("image_to_tokens", 64), ("tokens_to_image", 64), ("image_to_tokens", 32))
_LIMIT = 100  # seconds of a case, which is compiled beside other parts


def assemblers() -> dict[str, Path]:
    """The programs `ptxas` of this machine, by where they come from."""
    triton, torch = (Path(find_spec(name).origin).parent for name in ("triton", "torch"))
    bundled = triton / "backends" / "nvidia" / "bin"
    found = {
        "Triton's": bundled / "ptxas",
        "Triton's for Blackwell": bundled / "ptxas-blackwell",
        "torch's": torch / "bin" / "ptxas",
        "CUDA's": Path("/usr/local/cuda/bin/ptxas"),
    }
    found |= {f"that of {path.parts[-3]}": path for path in torch.parent.glob("nvidia/*/bin/ptxas")}
    return {name: path for name, path in found.items() if os.access(path, os.X_OK)}


def work(setting: Setting, record: Record) -> None:
    """Compare the kernels of attention, in bfloat16, as each assembler compiles them."""
    tools = assemblers() if setting.on_gpu and find_spec("triton") else {}
    record.check("Triton has an assembler", "Triton's" in tools or not setting.on_gpu, sorted(tools))
    given = {"kind": Kind("bf16", sizes_of(PRESETS["vit_b"])), "limit": _LIMIT}
    cases = {case: {**given, "kernels": case[0], "tile": case[1]} for case in CASES}

    def compared(name: str) -> dict[Any, Result]:
        command = (sys.executable, "-m", "benchmarks.gpu.assemblers", tools[name], setting.folder / name)
        return compare(cases, [*map(str, command)], f"comparing kernels by {name} ptxas")

    with ThreadPoolExecutor(len(tools) or 1) as pool:
        for name, found in zip(tools, pool.map(compared, tools), strict=True):
            for (kernel, tile), result in found.items():
                case = f"{kernel}, tiles of {tile}, {name} ptxas {_version(tools[name])}"
                if tile == 64:
                    record.check(case, result["right"], result["why"])
                record.text(case, "right" if result["right"] else f"wrong: {result['why']}")


def _version(tool: Path) -> str:
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V([\d.]+)", done.stdout)
    return found[1] if found else "of an unknown version"


if __name__ == "__main__":
    *_, os.environ["TRITON_PTXAS_PATH"], os.environ["TRITON_CACHE_DIR"], text = sys.argv
    from sa1b.sam import image_to_tokens_triton as kernels
    from sa1b.sam import kernel_comparison

    places = kernels.FORWARD_PLACES._replace(tile=json.loads(text)["tile"])
    kernels.FORWARD_PLACES = kernels.BACKWARD_PLACES = places
    kernel_comparison.main(text)
