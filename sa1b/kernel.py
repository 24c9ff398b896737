"""Loops over runs, compiled with numba where it is there.

Each kernel is plain Python over numpy arrays, so the same text runs uncompiled when numba cannot be imported
or SA1B_NO_NUMBA=1 is set before the import: same result, one to two orders of magnitude slower. Compiled
kernels release the GIL.

Machine code is cached in $XDG_CACHE_HOME/sa1b/kernels, by default ~/.cache/sa1b/kernels, and with
NUMBA_CACHE_DIR in the folder sa1b in there; never beside the source, where an installer would leave it. A
folder for each digest of the kernels' source keeps versions apart: numba itself does not notice that a
function which is called from another module has changed. Without a folder of its own that can be written a
process compiles for itself. The cache may be removed at any time.
"""

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# All modules with kernels. They import nothing else of the package, whose values would be compiled in.
SOURCES = ("hashing.py", "kernel.py", "masks/compiled/*.py", "stream/order_kernels.py")

numba: Any = None
if os.environ.get("SA1B_NO_NUMBA", "") in ("", "0"):
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        numba = None

COMPILED: bool = numba is not None


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a loop on its first call; without numba the function itself."""
    if numba is None:
        return function
    compiled: Any = numba.njit(nogil=True)(function)
    found: Callable[P, T] = compiled
    ours = function.__module__.startswith("sa1b.") and hasattr(compiled, "py_func")  # NUMBA_DISABLE_JIT=1
    if ours and cache_folder() is not None:
        compiled._cache = _cache_class()(function)
    return found


def plain(function: Callable[P, T]) -> Callable[P, T]:
    """The uncompiled form of a kernel."""
    uncompiled: Callable[P, T] = getattr(function, "py_func", function)
    return uncompiled


@cache
def cache_folder() -> Path | None:
    """Where this process keeps compiled kernels; None: nowhere."""
    package = Path(__file__).parent
    try:
        folder = _home() / source_digest(package)[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=folder).close()
        # What is read from it is run.
        return folder if folder.stat().st_uid == os.getuid() else None
    except (OSError, RuntimeError):  # the second: there is no home folder
        return None


def source_digest(package: Path) -> str:
    """sha256 of the text of all kernels."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(package.glob(pattern)):
            text = path.read_bytes()
            digest.update(b"%s %d\n" % (path.name.encode(), len(text)))
            digest.update(text)
    return digest.hexdigest()


def _home() -> Path:
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named) / "sa1b"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "sa1b" / "kernels"


@cache
def _cache_class() -> Any:
    """numba's cache of a function, in our folder. A file in it that cannot be read or written is no error."""
    caching = importlib.import_module("numba.core.caching")

    class Locator:
        def __init__(self, function: Callable[..., Any]) -> None:
            self._line = function.__code__.co_firstlineno

        @classmethod
        def from_function(cls, function: Callable[..., Any], path: str) -> "Locator":
            return cls(function)

        def ensure_cache_path(self) -> None:
            """The folder is there."""

        def get_cache_path(self) -> str:
            return str(cache_folder())

        def get_source_stamp(self) -> str:
            return "in the name of the folder"

        def get_disambiguator(self) -> str:
            return str(self._line)

    def load_overload(self: Any, *arguments: Any) -> Any:
        try:
            return caching.FunctionCache.load_overload(self, *arguments)
        except Exception:  # whatever unpickling a damaged file raises
            return None

    def save_overload(self: Any, *arguments: Any) -> None:
        try:
            caching.FunctionCache.save_overload(self, *arguments)
        except Exception:  # a full disk; or a damaged index, which another process can then make again
            with contextlib.suppress(OSError):
                self.flush()

    implementation = type("Files", (caching.CompileResultCacheImpl,), {"_locator_classes": (Locator,)})
    methods = {"_impl_class": implementation, "load_overload": load_overload, "save_overload": save_overload}
    return type("KernelCache", (caching.FunctionCache,), methods)
