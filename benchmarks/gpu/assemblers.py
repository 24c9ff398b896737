"""Which assemblers compile the kernels of attention correctly for this GPU, with tiles of 64 and of 32.

ptxas 12.8, which comes with Triton 3.6 and 3.7, miscompiles tiles of 32 for an H100 and an H200, so the
kernels have tiles of 64 there. Each case is a process, with compiled kernels of its own:

    TRITON_PTXAS_PATH=PTXAS TRITON_CACHE_DIR=FOLDER python -m benchmarks.gpu.assemblers TILE CASE

CASE is what `sa1b.sam.kernel_comparison` takes. It compares results and gradients with operators of torch.
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
from sa1b.sam.kernel_proof import Kind, sizes_of
from sa1b.sam.model import PRESETS

KERNELS = ("image_to_tokens", "tokens_to_image")
TILES = (64, 32)
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
    tools = assemblers() if find_spec("triton") else {}
    record.check("Triton has an assembler", "Triton's" in tools or not setting.on_gpu, sorted(tools))
    cases = [(kernel, tile, name) for tile in TILES for name in tools for kernel in KERNELS]
    # The other kernel chooses its tiles by its number of rows.
    cases = [case for case in cases if setting.on_gpu and case[:2] != ("tokens_to_image", 32)]
    with ThreadPoolExecutor(len(cases) or 1) as pool:
        found = pool.map(lambda case: _compared(setting, tools[case[2]], *case[:2]), cases)
        for (kernel, tile, name), result in zip(cases, found, strict=True):
            case = f"{kernel}, tiles of {tile}, {name} ptxas {_version(tools[name])}"
            if tile == TILES[0]:
                record.check(case, result["right"], result["why"])
            record.text(case, "right" if result["right"] else f"wrong: {result['why']}")


def _compared(setting: Setting, tool: Path, kernel: str, tile: int) -> dict[str, Any]:
    kind = Kind("bf16", sizes_of(PRESETS["vit_b"]))
    case = json.dumps({"kernels": kernel, "kind": kind, "limit": _LIMIT})
    name = f"{kernel} {tile} {tool.parent.parent.name} {tool.name}"
    folders = {"TRITON_PTXAS_PATH": str(tool), "TRITON_CACHE_DIR": str(setting.folder / "triton" / name)}
    environment = os.environ | folders | {"OMP_NUM_THREADS": "1"}
    done = setting.run(name, "-m", "benchmarks.gpu.assemblers", tile, case, env=environment)
    *_, last = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode or not last.startswith('{"right"'):
        return {"right": False, "why": f"exit code {done.returncode}: {last[:200]}"}
    found: dict[str, Any] = json.loads(last)
    return found


def _version(tool: Path) -> str:
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V([\d.]+)", done.stdout)
    return found[1] if found else "of an unknown version"


if __name__ == "__main__":
    from sa1b.sam import image_to_tokens_triton as kernels
    from sa1b.sam import kernel_comparison

    places = kernels.FORWARD_PLACES._replace(tile=int(sys.argv[1]))
    kernels.FORWARD_PLACES = kernels.BACKWARD_PLACES = places
    kernel_comparison.main(sys.argv[2])
