"""The Triton kernels compared with torch's operators on the user's GPU: once, each in a process of its own.

Triton compiles the kernels for each kind of GPU. There, one may be wrong, hang, or end all work of its
process on the GPU. So none is compared in the process that trains, and torch's operators replace those that
are not right. Those of the decoder that are right are compared once more, together, as a run uses them.
Results are kept in the user's file, see `sa1b.masks.proved`, and in kernels.json in the folder of a run.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sa1b.limit import Limited, OverdueError
from sa1b.masks.proved import COMMAND, FORMAT, MASKS, RASTER, RASTER_IN_USE, cache_file, keys, recorded
from sa1b.sam.image_tokens import IN_USE
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from sa1b.storage.atomic import json_bytes, lock, write_whole
from sa1b.workers import available_cpus

Result = dict[str, Any]
# Modules sa1b.sam.<name>_triton.
KERNELS = ("norm", "downscale", "image_to_tokens", "tokens_to_image", "upscale", "losses")
FILE = "kernels.json"  # in the folder of a run
LIMIT, TOGETHER = 60.0, 30.0  # seconds of a comparison of one kernel and of several, with CPUS or more
CPUS, SLOWER = 16, 4.0  # with fewer, kernels are compiled in turn: up to SLOWER times as long
DISK = 20.0  # seconds in which the user's file is written
CHILD = (sys.executable, "-m", "sa1b.sam.kernel_comparison")

_log = logging.getLogger(__name__)
_UNKNOWN: Result = {"right": None, "why": "not compared"}


class Kind(NamedTuple):
    """What decides, with a kernel, how Triton compiles it: the raster's kernels compute with integers."""

    number_format: str  # fp32, tf32, bf16, fp16 or MASKS
    sizes: tuple[int, ...]  # of a decoder: channels, pixel features, tokens of the image per axis
    device: int = 0  # index of the GPU

    def keys(self, *joined: str) -> dict[str, str]:
        """The names of the results by kernel, or for kernels joined by "+"; none without Triton."""
        names = joined or (RASTER if self.number_format == MASKS else KERNELS)
        return keys(names, torch.device("cuda", self.device), self.number_format, self.sizes)

    def found(self, results: Mapping[str, Result]) -> dict[str, Result]:
        """The results by kernel; several of a decoder that are right also have one together, under "a+b"."""
        found = {name: results[key] for name, key in self.keys().items() if key in results}
        joined = "+".join(name for name, result in found.items() if result["right"])
        if "+" in joined and self.number_format != MASKS:
            found[joined] = results.get(self.keys(joined)[joined], _UNKNOWN)
        return found

    def name_wrong(self, results: Mapping[str, Result]) -> None:
        """A line for each kernel that is not right."""
        for name, result in self.found(results).items():
            if not result["right"] and result is not _UNKNOWN:
                _log.warning(
                    "kernel %s is not used on this %s in %s: %s; torch's operators take its place; please "
                    "report the table of `sa1b doctor --kernels`, which compares again",
                    *(name, torch.cuda.get_device_name(self.device), self.number_format, result["why"]),
                )


def right(found: Mapping[str, Result]) -> set[str]:
    """The kernels that are right, alone and together."""
    together = all(result["right"] for name, result in found.items() if "+" in name)
    return {name for name, result in found.items() if together and result["right"] and "+" not in name}


_kinds: dict[Kind, set[str]] = {}  # the kernels that this process uses


def use_kernels(model: Sam) -> None:
    """From now on use the kernels that are right for this model on its device, by `prove_for_run`, else by
    the user's file. Each forward pass calls it: models of a process differ in sizes and number formats.
    """
    weight = model.mask_decoder.mask_tokens.weight
    if not weight.is_cuda or isinstance(weight, FakeTensor) or torch.compiler.is_compiling():
        return
    kind = Kind(number_format(weight), sizes_of(model.config), weight.device.index)
    if kind not in _kinds:
        used = _by_flag(model.config.kernels)
        if used is None:
            found = kind.found(results := recorded())
            used = right(found)
            if os.environ.get("RANK", "0") == "0":
                kind.name_wrong(results)
                if not found.keys() >= kind.keys().keys():
                    gpu = f"{torch.cuda.get_device_name(weight.device)} in {kind.number_format}"
                    _log.warning("torch's operators take the place of kernels on this %s: %s", gpu, COMMAND)
        _kinds[kind] = used & {*KERNELS}
    if _kinds[kind] != IN_USE:
        IN_USE.clear()
        IN_USE.update(_kinds[kind])


def number_format(weight: Tensor) -> str:
    """The number format of a model's products on a CUDA device: fp32, tf32, bf16 or fp16."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    exact = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, exact)


def sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The sizes of a decoder on which its kernels depend."""
    return config.channels, config.pixel_features, config.side


def prove_for_run(config: Any, device: torch.device, local_rank: int) -> None:
    """Choose the kernels of a run by its settings, and compare them unless that was done before; collective.

    The first rank of each machine compares, and the others wait. A kernel is used if it is right on the
    machines of all ranks.
    """
    if device.type != "cuda":
        return
    model, kinds = getattr(config, "model", None), [Kind(MASKS, (), device.index)]
    if isinstance(model, ModelConfig) and isinstance(getattr(config, "recipe", None), Recipe):
        kinds.append(Kind(config.parallel.precision, sizes_of(model), device.index))
    used = _by_flag(model.kernels) if isinstance(model, ModelConfig) else None
    if used is None:
        used = _agreed(kinds, local_rank, config.folder / FILE)
    elif used and local_rank == 0:
        _log.warning("--model.kernels all: all kernels are used, whether they are right on this GPU or not")
    RASTER_IN_USE[MASKS] = used.issuperset(RASTER)
    _kinds.update({kind: used & {*KERNELS} for kind in kinds})


def _by_flag(kernels: str) -> set[str] | None:
    """The kernels that --model.kernels asks for; None: those that are right."""
    return {"all": {*KERNELS, *RASTER}, "none": set[str]()}.get(kernels)


def _agreed(kinds: Sequence[Kind], local_rank: int, file: Path) -> set[str]:
    mine, used, results = {key for kind in kinds for key in kind.keys().values()}, None, dict[str, Result]()
    if local_rank == 0:
        used = set[str]()
        try:
            results = prove(kinds, recorded(file) | recorded())
            for kind in kinds:
                kind.name_wrong(results)
            used.update(*(right(kind.found(results)) for kind in kinds))
        except Exception as error:  # the other ranks wait for this one
            _log.warning("no kernel is used, because they cannot be compared with torch: %s", error)
    everyone = [(mine, used, results)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, (mine, used, results))
    leaders = [one for one in everyone if one[1] is not None]
    if set().union(*(one[0] for one in everyone)) != set().union(*(one[0] for one in leaders)):
        _log.warning("no kernel is used, because the GPUs of a machine differ, of which one was compared")
        leaders.append((mine, set(), {}))
    if not dist.is_initialized() or dist.get_rank() == 0:
        _keep({key: result for one in leaders for key, result in one[2].items()}, lambda: file)
    return set.intersection(*(one[1] for one in leaders if one[1] is not None))


def prove(
    kinds: Sequence[Kind],
    known: Mapping[str, Result],
    command: Sequence[str] = (),
    limits: Sequence[float] = (LIMIT, TOGETHER),
) -> dict[str, Result]:
    """The results for these kinds: known ones, and those of new comparisons, which are added to the user's
    file. `command` starts a comparison, by default CHILD; `limits`: its seconds.
    """
    slower = min(SLOWER, max(1.0, CPUS / available_cpus()))
    results, new = dict(known), set[str]()
    titles = "comparing {} kernels with torch on this GPU, once", "comparing those that are right together"
    for limit, title in zip(limits, titles, strict=True):
        cases = {
            key: {"kernels": name, "kind": kind, "limit": limit * slower}
            for kind in kinds
            for name, key in (kind.keys() | kind.keys(*kind.found(results))).items()
            if key not in results
        }
        results |= compare(cases, command or CHILD, title.format(len(cases)))
        new |= cases.keys()
    if new:
        _keep({key: results[key] for key in new})
    return results


def _keep(new: Mapping[str, Result], path: Callable[[], Path] = cache_file) -> None:
    """Add results to a file, by default the user's, which other processes may write too."""

    def write() -> None:
        file, kept = path(), {key: result for key, result in new.items() if result["right"] is not None}
        file.parent.mkdir(parents=True, exist_ok=True)
        with lock(file.parent, wait=True):
            write_whole(file, json_bytes({"format": FORMAT, "kernels": recorded(file) | kept}))

    try:
        Limited().call(write, DISK)
    except (OSError, RuntimeError, OverdueError) as error:
        _log.warning("the kernels may be compared again, because the results cannot be kept: %s", error)


def compare(cases: Mapping[str, Any], command: Sequence[str], title: str) -> dict[str, Result]:
    """The result of each case, from a process of its own; all run at the same time, with progress on stderr.

    A case is what `main` takes. A process that ends without a result, or takes longer than its limit, gives
    one that is not right. "right" is None if the kernel has no part in that, as with too little memory.
    """
    results: dict[str, Result] = {}
    children: dict[str, tuple[Any, subprocess.Popen[bytes]]] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    begun, shown, (start, end) = time.monotonic(), -1, ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    try:
        for key, case in cases.items():
            output = os.fdopen(os.memfd_create("sa1b"), "w+b")  # needs no disk, and takes any number of bytes
            files: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            started = subprocess.Popen([*command, json.dumps(case)], env=environment, **files)
            children[key] = output, started
        while len(results) < len(cases):
            seconds = time.monotonic() - begun
            for key, (output, child) in children.items():
                late = child.poll() is None and seconds > cases[key]["limit"]
                if key not in results and (child.returncode is not None or late):
                    results[key] = {"seconds": round(seconds, 2)} | _result(output, child.returncode)
            if len(results) != shown and (start or shown < 0 or len(results) == len(cases)):
                shown = len(results)
                sys.stderr.write(f"{start}{title}: {shown} of {len(cases)}{end}")
                sys.stderr.flush()
            time.sleep(0.05)
        sys.stderr.write(start if cases else "")
    finally:
        for output, child in children.values():
            child.kill()  # nothing if it has ended
            output.close()
    if all(result["seconds"] > cases[key]["limit"] for key, result in results.items()):
        for result in results.values():  # the machine is too busy
            result["right"] = None
    return results


def _result(output: Any, code: int | None) -> Result:
    """What a process has found; `code`: its exit code, None if it has not ended in time."""
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    found: list[Result] = [json.loads(line) for line in lines if line.startswith('{"right"')]
    if code is None:
        return {"right": False, "why": "the comparison did not end in time"}
    if code < 0:  # the system ends processes by SIGKILL if memory is short
        return {"right": None if code == -9 else False, "why": f"ended by {signal.Signals(-code).name}"}
    last = f"ended with exit code {code}: {lines[-1][:200] if lines else ''}"
    return {"right": False, "why": last} if code or not found else found[-1]
