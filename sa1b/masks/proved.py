"""Which Triton kernels a process uses: those that were right on its GPU when they were compared with torch.

`sa1b.sam.kernel_proof` makes the comparison. Its results are in $XDG_CACHE_HOME/sa1b/kernels.json, by default
in ~/.cache/sa1b, under the keys of `keys`:

    {"format": "sa1b-kernels-1", "kernels": {
     "fill, NVIDIA H200 sm_90, Triton 3.6.0, ptxas 12.8.93, masks, any size, 4f1c...": {"right": true, ...}}}
"""

import ast
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sa1b.kernel import user_folder

FORMAT = "sa1b-kernels-1"
RASTER = ("measure_masks", "fill")  # always used together
MASKS = "masks"  # in place of a number format: kernels of the raster, which compute with integers
COMMAND = "`sa1b doctor --kernels` compares them with torch, once"
RASTER_IN_USE: dict[str, bool] = {}  # MASKS -> whether this process uses these kernels; see `raster_in_use`


def cache_file() -> Path:
    return user_folder() / "kernels.json"


def recorded(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """The results in a file, by default the user's; none if it is missing or damaged."""
    try:
        document = json.loads((path or cache_file()).read_bytes())
        results: dict[str, dict[str, Any]] = document["kernels"] if document["format"] == FORMAT else {}
        return {name: result for name, result in results.items() if isinstance(result["right"], bool)}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@cache
def _assembled_by(major: int, minor: int) -> str:
    """Triton's release and the assembler that it calls for this compute capability."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version

    found = re.search(r"V([\d.]+)", version := get_ptxas_version(10 * major + minor))
    ptxas = found[1] if found else " ".join(version.split())
    return f"sm_{major}{minor}, Triton {triton.__version__}, ptxas {ptxas}"


@cache
def digest(pattern: str) -> str:
    """A digest of the code of modules of this package, without comments, docstrings and layout."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].glob(pattern)):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""  # of no effect: a docstring
        code.update(f"{path.name} {ast.unparse(tree)}\n".encode())
    return code.hexdigest()[:16]


def keys(
    kernels: Iterable[str], device: torch.device, number_format: str, sizes: Iterable[int] = ()
) -> dict[str, str]:
    """The names of the results of kernels, by kernel; several that are used together have a name such as
    "norm+losses". Without Triton or its assembler, there are none.
    """
    source = digest("masks/raster_t*.py" if number_format == MASKS else "sam/*_triton.py")
    try:
        assembled = _assembled_by(*torch.cuda.get_device_capability(device))
    except (ImportError, RuntimeError, OSError):
        return {}
    where = f"{torch.cuda.get_device_name(device)} {assembled}"
    on = f"{where}, {number_format}, {' '.join(map(str, sizes)) or 'any size'}, {source}"
    return {kernel: f"{kernel}, {on}" for kernel in kernels}


def raster_in_use() -> bool:
    """Whether the kernels of the raster are used on CUDA devices; by default as in the user's file."""
    if MASKS not in RASTER_IN_USE:
        device, results = torch.device("cuda", torch.cuda.current_device()), recorded()
        found = [results.get(key) for key in keys(RASTER, device, MASKS).values()]
        RASTER_IN_USE[MASKS] = bool(found) and all(result is not None and result["right"] for result in found)
        if None in found and os.environ.get("RANK", "0") == "0":
            gpu = torch.cuda.get_device_name(device)
            logging.getLogger(__name__).warning(
                "on this %s torch's operators take the place of the kernels for masks: %s", gpu, COMMAND
            )
    return RASTER_IN_USE[MASKS]
