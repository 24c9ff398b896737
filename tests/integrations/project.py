"""The sources of another project, and a comparison of its dataset on exported files with shards."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

Read = Callable[[int], Any]
Kind = Callable[[str, str], tuple[int, Read]]  # ROOT and EXPORT to a number of images, and one by position


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


def compare(files: Kind, shards: Kind, repeats: int = 3) -> None:
    """Print images for each second of processor time, and the memory of the process at most, of both kinds:
    medians of processes that alternate. `python -m MODULE ROOT EXPORT` calls this.
    """
    kinds = {"files": files, "shards": shards}
    if len(sys.argv) == 4:
        count, read = kinds[sys.argv[3]](*sys.argv[1:3])
        for position in range(count):  # compiled kernels are loaded, files are in memory
            read(position)
        began, cpu = time.perf_counter(), time.process_time()
        for position in range(count):
            read(position)
        rates = [count / (time.perf_counter() - began), count / (time.process_time() - cpu)]
        print(json.dumps([*rates, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
        return
    module = sys.modules["__main__"].__spec__
    assert module is not None
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, lines in found.items():
            command = [sys.executable, "-m", module.name, *sys.argv[1:3], kind]
            lines.append(
                json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
                )
            )
    for kind, lines in found.items():
        wall, cpu, memory = map(statistics.median, zip(*lines, strict=True))
        print(f"{kind}: {wall:.2f} images/s, {cpu:.2f} for each CPU second, {memory:,.0f} MiB at most")
