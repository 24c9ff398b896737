"""Checks of this machine: versions, memory, limits."""

import platform
from collections.abc import Iterator

import torch

from sa1b import __version__
from sa1b.doctor.check import Subject
from sa1b.doctor.report import Finding


def versions(subject: Subject) -> Iterator[Finding]:
    """The versions that all ranks must share."""
    python = platform.python_version()
    yield Finding(
        "versions",
        "ok",
        f"Python {python}, sa1b {__version__}, torch {torch.__version__}",
        values={"python": python, "sa1b": __version__, "torch": torch.__version__},
    )
