"""The device of this rank: visible, healthy, with a fast link; model and batch on it."""

import csv
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sa1b.console import counted
from sa1b.hashing import Purpose
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.machine import driver
from sa1b.programs.doctor.report import Finding
from sa1b.recipes.presets import PRESETS, SamConfig
from sa1b.report import first_names
from sa1b.sam.clicks import random_words
from sa1b.sam.targets import Targets

# Oldest driver of each major version of CUDA on Linux, by the table "CUDA Toolkit and Minimum Required Driver
# Version" of the CUDA Toolkit release notes.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
LINK = 6e9  # bytes per second: half of what PCIe 3.0 x16 transfers; PCIe 4.0 has 24e9, 5.0 has 50e9
LINK_LEAST = 1e9  # an image of 1024 x 1024 pixels has 3 MB, and a GPU trains ViT-B with 100 of them a second
_COPIED = 256 << 20  # bytes
_IN_USE = 2048  # MiB of a GPU's memory that the contexts of the ranks themselves may take
_QUERY = (
    "index,uuid,name,ecc.errors.uncorrected.volatile.total,persistence_mode,mig.mode.current,compute_mode,"
    "{reasons}.hw_slowdown,memory.used"
)
_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # the second one before driver 535


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this machine as torch, the driver and the environment report them."""

    build: str | None  # version of CUDA for which torch was built; None: a CPU build
    driver: str | None  # version of the kernel driver; None: no driver is visible
    nodes: int  # GPUs of this machine, by their files in /dev
    visible: int
    error: str = ""  # torch's reason for not seeing a GPU

    @classmethod
    def of_this_process(cls, process: RankProcess) -> "Gpus":
        nodes = sum(
            re.fullmatch(r"nvidia\d+", path.name) is not None
            for path in (process.system / "dev").glob("nvidia*")
        )
        error, visible = "", 0
        if torch.version.cuda is not None:
            try:
                start: Callable[[], None] = torch.cuda.init
                start()
                visible = torch.cuda.device_count()
            except (RuntimeError, AssertionError) as raised:
                error = str(raised).splitlines()[0]
        return cls(torch.version.cuda, driver(process), nodes, visible, error)


def visible_device(process: RankProcess, gpus: Gpus | None = None) -> Iterator[Finding]:
    """Whether this rank has a device, and the reason if it should have a GPU and has none."""
    gpus = gpus or Gpus.of_this_process(process)
    wrong = hidden(gpus, process.environment)
    needed = process.local_rank + 1
    if not wrong and 1 < gpus.visible < needed:
        wrong = (
            f"local rank {process.local_rank} has no GPU: this process sees {gpus.visible}",
            f"Start {gpus.visible} ranks on this machine, or ask for {needed} GPUs",
        )
    values = {
        "cuda_visible_devices": process.environment.get("CUDA_VISIBLE_DEVICES"),
        "visible": gpus.visible,
    }
    if wrong:
        yield Finding("device", "failed", *wrong, values=values)
        return
    if not gpus.visible:
        figure = "CPU: no NVIDIA driver is visible"
        if gpus.build is None:
            yield Finding("device", "ok", f"{figure}, and torch is a CPU build", values=values)
            return
        remedy = "On a machine with GPUs: docker run --gpus all, or sbatch --gpus-per-node"
        yield Finding(
            "device", "warning", f"{figure}, torch is built for CUDA {gpus.build}", remedy, values=values
        )
        return
    yield from _usable(process, gpus, values)


def hidden(gpus: Gpus, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Why the GPUs of a machine are not visible, or not all, with the remedy; None if nothing is wrong."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = [] if listed is None else [name.strip() for name in listed.split(",")]
    installed = counted(gpus.nodes, "GPU") if gpus.nodes else f"NVIDIA driver {gpus.driver}"
    if gpus.driver is None and not gpus.nodes:
        return None
    if gpus.build is None:
        return (
            f"torch is a CPU build, and this machine has {installed}",
            "Install a CUDA build of torch: the selector on pytorch.org has the command",
        )
    if listed is not None and (names[0] in ("", "-1") or not gpus.visible):
        return (
            f"CUDA_VISIBLE_DEVICES={listed!r} hides all of {installed}",
            "Unset CUDA_VISIBLE_DEVICES, or list GPUs of `nvidia-smi -L`",
        )
    if len(set(names)) < len(names):
        return (
            f"CUDA_VISIBLE_DEVICES={listed} lists a GPU twice, so torch sees {gpus.visible}",
            "List each GPU once; torchrun chooses one of them for each rank",
        )
    if listed is not None and gpus.visible < len(names):
        return (
            f"CUDA_VISIBLE_DEVICES={listed} lists {len(names)} GPUs, and torch sees {gpus.visible}",
            "Remove the GPUs that `nvidia-smi -L` does not list: CUDA ignores all after the first of them",
        )
    oldest = OLDEST_DRIVER.get(int(gpus.build.partition(".")[0]))
    if gpus.driver is not None and oldest and int(gpus.driver.partition(".")[0]) < oldest:
        return (
            f"driver {gpus.driver} is too old for CUDA {gpus.build}, which needs {oldest} or later",
            f"Update the driver to {oldest} or later, or install a torch build for an older CUDA",
        )
    if not gpus.visible:
        return (
            f"torch sees none of {installed}{f': {gpus.error}' if gpus.error else ''}",
            "Check `nvidia-smi`, the permissions of /dev/nvidia*, and `dmesg | grep -i nvrm`",
        )
    return None


def _usable(process: RankProcess, gpus: Gpus, values: dict[str, Any]) -> Iterator[Finding]:
    device = process.device
    try:
        properties = torch.cuda.get_device_properties(device)
        a = torch.arange(64 * 64, dtype=torch.float64).reshape(64, 64)
        right = torch.equal((a.to(device) @ a.to(device)).cpu(), a @ a)
    except RuntimeError as error:  # such as "no kernel image is available for execution on the device"
        text = str(error).splitlines()[0]
        remedy = "Install a torch build for this GPU, or drain the node if `nvidia-smi` fails too"
        yield Finding("device", "failed", f"{device} does not compute: {text}", remedy, values=values)
        return
    values |= {"gpu": properties.name, "uuid": str(properties.uuid), "bytes": properties.total_memory}
    figure = f"{device} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {gpus.visible} visible"
    if right:
        yield Finding("device", "ok", figure, values=values)
    else:
        yield Finding(
            "device", "failed", f"{figure}: computes wrong results", "Drain this node", values=values
        )


def gpu_state(process: RankProcess) -> Iterator[Finding]:
    """Errors, modes and use of the GPUs of this machine; one rank of each machine runs nvidia-smi."""
    program = shutil.which("nvidia-smi", path=process.environment.get("PATH"))
    if program is None:
        why = "no GPU" if process.device.type == "cpu" else "nvidia-smi is not in PATH"
        yield Finding("GPU state", "skipped", why, "Add the folder of nvidia-smi to PATH if there are GPUs")
        return
    if process.local_rank > 0:
        return
    failed, done = "", None
    for reasons in _REASONS:
        query = _QUERY.format(reasons=reasons)
        command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            failed = (done.stderr or done.stdout).strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failed, done = str(error), None
        if "not a valid field" not in failed:
            break
    if failed or done is None:
        figure = f"nvidia-smi fails: {failed.splitlines()[0]}"
        remedy = "Reboot the node, or drain it: the driver or a GPU does not answer (dmesg | grep -i xid)"
        yield Finding("GPU state", "failed", figure, remedy)
        return
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]
    chosen = process.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if chosen != [""]:
        rows = [
            row
            for row in rows
            if row[0] in chosen or any(row[1].startswith(prefix) for prefix in chosen if prefix)
        ]
    problems = [problem for row in rows for problem in _problems(row)]
    for state, figure, remedy in problems:
        yield Finding("GPU state", "failed" if state else "warning", figure, remedy)
    if not problems:
        yield Finding("GPU state", "ok", f"{counted(len(rows), 'GPU')}, no errors, no other users")


def _problems(row: list[str]) -> Iterator[tuple[bool, str, str]]:
    index, uuid, name, errors, persistence, mig, mode, slowdown, used = row
    gpu = f"GPU {index} ({name}, {uuid})"
    if errors.isdecimal() and int(errors):
        yield True, f"{gpu}: {errors} uncorrected memory errors", "Reset or replace this GPU; drain the node"
    if mode == "Prohibited":
        yield True, f"{gpu}: compute mode Prohibited", f"nvidia-smi -i {index} -c DEFAULT"
    if slowdown == "Active":
        yield (
            False,
            f"{gpu}: slowed down by hardware",
            "Check temperature, fans and power: nvidia-smi -q -d PERFORMANCE",
        )
    if mig == "Enabled":
        yield (
            False,
            f"{gpu}: MIG splits it",
            f"Disable MIG to use the whole GPU: nvidia-smi -i {index} -mig 0",
        )
    if persistence == "Disabled":
        yield False, f"{gpu}: persistence mode is off, so the first use takes seconds", "nvidia-smi -pm 1"
    if used.isdecimal() and int(used) > _IN_USE:
        yield False, f"{gpu}: {used} MiB are in use", "End the other processes that `nvidia-smi` lists"


def pinned_copy(process: RankProcess) -> Iterator[Finding]:
    """Rate of copies from pinned memory to the GPU, as the loader makes them."""
    if process.device.type != "cuda":
        yield Finding("host-to-device copy", "skipped", "no GPU", "Run this on a machine with a GPU")
        return
    source = torch.empty(_COPIED, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=process.device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(process.device)
    began, copies = time.perf_counter(), 0
    while time.perf_counter() - began < min(process.seconds, 1.0):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(process.device)
        copies += 1
    yield copy_finding(copies * _COPIED / (time.perf_counter() - began))


def copy_finding(rate: float) -> Finding:
    values = {"bytes_per_second": rate}
    figure = f"{rate / 1e9:.1f} GB/s from pinned memory"
    if rate >= LINK:
        return Finding("host-to-device copy", "ok", figure, values=values)
    return Finding(
        "host-to-device copy",
        "failed" if rate < LINK_LEAST else "warning",
        f"{figure}, PCIe 3.0 x16 transfers 12",
        "Check the width of the link (nvidia-smi -q, `Link Width`), and bind each rank to the CPUs of its "
        "GPU: torchrun --numa-binding=node",
        values=values,
    )


def placement(process: RankProcess) -> Iterator[Finding]:
    """Train one step of the small model on the device; parameters, gradients and results must be on it."""
    module, others = small_step(process.device)
    yield placed(process.device, {"model": module, **others})


def placed(device: torch.device, things: Mapping[str, Any]) -> Finding:
    """The finding that all tensors in `things` are on a device, or the names of those that are not.

    `things`: name -> module, tensor, dataclass, or mapping or sequence of these.
    """
    tensors = [pair for name, thing in things.items() for pair in tensors_of(name, thing)]
    wrong = [f"{name} is on {tensor.device}" for name, tensor in tensors if tensor.device != device]
    figure = f"{counted(len(tensors), 'tensor')} on {device}"
    values = {"tensors": len(tensors), "misplaced": wrong[:20]}
    if not wrong:
        return Finding("placement", "ok", figure, values=values)
    return Finding(
        "placement",
        "failed",
        f"{first_names(wrong, 3, '; ')}, not on {device}",
        "Move it: register the tensor as a parameter or buffer, or create it with device=",
        values=values,
    )


def tensors_of(name: str, thing: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a module with its gradients, of a dataclass, or of nested containers."""
    if isinstance(thing, nn.Module):
        for part, parameter in thing.named_parameters():
            yield f"{name}.{part}", parameter
            if parameter.grad is not None:
                yield f"{name}.{part}.grad", parameter.grad
        yield from ((f"{name}.{part}", buffer) for part, buffer in thing.named_buffers())
    elif isinstance(thing, Tensor):
        yield name, thing
    else:
        yield from (pair for part, inner in _parts(thing) for pair in tensors_of(f"{name}.{part}", inner))


def _parts(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        return ((str(key), value) for key, value in thing.items())
    if isinstance(thing, list | tuple):
        return ((str(number), value) for number, value in enumerate(thing))
    if is_dataclass(thing) and not isinstance(thing, type):
        return ((field.name, getattr(thing, field.name)) for field in fields(thing))
    return ()


_SIDE = 64  # pixels of an image
_IMAGES, _MASKS = 2, 4


def small_config() -> SamConfig:
    """The preset tiny with a model of some 100,000 parameters."""
    tiny = PRESETS["tiny"]
    assert isinstance(tiny, SamConfig)
    sizes: dict[str, Any] = {"image_size": _SIDE, "width": 32, "depth": 2, "heads": 2, "global_blocks": (1,)}
    model = replace(tiny.model, **sizes, window=2, channels=32, pixel_features=8, drop_path=0.0)
    return replace(tiny, model=model)


def small_model() -> nn.Module:
    """The model on the CPU, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return small_config().build()


def small_inputs(device: torch.device, number: int = 0) -> tuple[Tensor, Targets, Tensor]:
    """The arguments of the model's forward pass: 2 images with 4 masks, other ones for another `number`."""
    key = torch.full((), number, dtype=torch.int64)
    pixels = torch.arange(_IMAGES * 3 * _SIDE**2)
    words = random_words(key, int(Purpose.PROMPT), pixels, torch.zeros_like(pixels))
    images = (words & 255).to(torch.uint8).reshape(_IMAGES, 3, _SIDE, _SIDE)
    corners = torch.arange(_MASKS) * 4 + 8  # squares of 16 pixels on the diagonal
    rows = torch.arange(_SIDE)
    within = (rows >= corners[:, None]) & (rows < corners[:, None] + 16)
    image = torch.arange(_MASKS) * _IMAGES // _MASKS
    targets = Targets(
        masks=(within[:, :, None] & within[:, None, :]).to(torch.uint8).to(device),
        boxes=torch.stack((corners, corners, corners + 15, corners + 15), dim=1).float().to(device),
        points=torch.stack((corners + 8, corners + 8), dim=1).float().to(device),
        image=image.to(device),
        weights=torch.ones(_MASKS, device=device),
        keys=random_words(key, int(Purpose.PROMPT), torch.arange(_MASKS), image).to(device),
        sizes=torch.full((_IMAGES, 2), _SIDE, device=device),
        counts=[_MASKS // _IMAGES] * _IMAGES,
    )
    return images.to(device), targets, random_words(key, int(Purpose.VISIT), image[::2]).to(device)


def small_step(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model with gradients after one backward pass on the device, and its inputs and results."""
    module = small_model().to(device)
    inputs = small_inputs(device)
    sums: dict[str, Tensor] = module(*inputs)
    torch.autograd.backward(sums["loss"])
    return module, {"inputs": inputs, "results": sums}
