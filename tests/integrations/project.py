"""The sources of other projects that a variable of the environment names, and samples that must be equal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


def folders(variable: str) -> list[str]:
    """The folders of a variable: the project's sources first, then the packages that it needs."""
    return list(filter(None, os.environ.get(variable, "").split(":")))


@contextmanager
def imported(variable: str, **packages: str) -> Iterator[None]:
    """A context in which the sources can be imported. `packages`: names of packages whose own module is not
    run, because it imports models, and their folders in the sources.
    """
    found = folders(variable)
    for name, folder in packages.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(found[0], folder))]
    with patch.object(sys, "path", [*found, *sys.path]):
        yield


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Values of a sample, tensors with their type."""
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == ours[name].dtype
            assert torch.equal(value, ours[name]), name
        else:
            assert value == ours[name]
