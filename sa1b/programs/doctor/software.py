"""Versions and builds of Python, sa1b, torch and the packages that sa1b needs."""

import hashlib
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding
from sa1b.storage.protocols import kind_of
from sa1b.version import __version__

OPTIONAL = ("gcs", "azure", "text", "ray", "tensorboard", "kernels")  # extras for users
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?(?:>=([\d.]+))?.*?(?:extra == ['\"]([\w-]+)['\"])?$")


def versions(process: RankProcess) -> Iterator[Finding]:
    """Versions and builds; the ranks compare them."""
    values = {
        "python": platform.python_version(),
        "sa1b": __version__,
        "code": _code(),
        "machine": boot_id(process),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "driver": driver(process),
    }
    builds = [
        f"CUDA {values['cuda'] or 'none'}",
        f"NCCL {values['nccl'] or 'none'}",
        "gloo" if values["gloo"] else "no gloo",
    ]
    figure = (
        f"Python {values['python']}, sa1b {__version__}, torch {values['torch']} ({', '.join(builds)}), "
        f"NVIDIA driver {values['driver'] or 'none'}"
    )
    remedy = lacking(values)
    yield Finding("versions", "failed" if remedy else "ok", figure, remedy, values=values)


def lacking(build: dict[str, Any]) -> str:
    """The remedy for a part that the build of torch lacks; empty if it lacks none."""
    if not build["gloo"]:
        return "Install a torch with gloo: checkpoints and figures of several ranks need it"
    if build["cuda"] and not build["nccl"]:
        return "Install a CUDA build of torch with NCCL: several GPUs need it"
    return ""


def _code() -> str:
    """A digest of the package's files: machines may have different code of one version."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def boot_id(process: RankProcess) -> str:
    """A random value of the running kernel, which two machines of one name do not share; empty: unknown."""
    try:
        return (process.system / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _nccl() -> str | None:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def driver(process: RankProcess) -> str | None:
    """The version of NVIDIA's kernel driver; None: it is not loaded or not visible in this container."""
    try:
        text = (process.system / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def packages(
    process: RankProcess,
    requirements: Sequence[str] | None = None,
    version_of: Callable[[str], str] = metadata.version,
) -> Iterator[Finding]:
    """The packages that sa1b requires, and those that ROOT requires.

    Args:
        requirements: as in the metadata of a package; by default those of sa1b.
        version_of: the installed version of a package; raises PackageNotFoundError.
    """
    if requirements is None:
        try:
            requirements = metadata.requires("sa1b") or ()
        except metadata.PackageNotFoundError:
            yield Finding(
                "packages",
                "skipped",
                "sa1b runs from a folder and is not installed, so its requirements are unknown",
                "Install it: pip install --editable .",
            )
            return
    extra_of_root = kind_of(process.root or "").extra
    wrong: list[str] = []
    good: dict[str, str] = {}
    absent: dict[str, str] = {}
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is None or match[1].lower() == "sa1b":
            continue
        name, least, extra = match.groups()
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            if extra in (None, extra_of_root):
                wrong.append(f"{name} is missing" + (f" ({process.root} needs it)" if extra else ""))
            else:
                absent[name] = extra
            continue
        if least is not None and _release(version) < _release(least):
            if extra in (None, extra_of_root):
                wrong.append(f"{name} {version} is older than {least}")
            continue
        if extra in (None, extra_of_root):
            good[name] = version
    values = {"installed": good, "not_installed": sorted(absent)}
    if wrong:
        what = f"sa1b[{extra_of_root}]" if extra_of_root else "sa1b"
        remedy = f"pip install --upgrade '{what}'"
        yield Finding("packages", "failed", "; ".join(wrong), remedy, values=values)
    else:
        optional = [f"{name} ({extra})" for name, extra in sorted(absent.items()) if extra in OPTIONAL]
        figure = f"{len(good)} required packages are installed"
        figure += f"; not installed, and optional: {', '.join(optional)}" if optional else ""
        yield Finding("packages", "ok", figure, values=values)
    yield from _slow_parts()


def _slow_parts() -> Iterator[Finding]:
    """Packages that work without their compiled part, only slowly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import google_crc32c
    if google_crc32c.implementation != "c":
        yield Finding(
            "packages",
            "warning",
            "google-crc32c has no compiled part here: every read is verified by Python code",
            "pip install --force-reinstall google-crc32c, or a Python version with a wheel of it",
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
