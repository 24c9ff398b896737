"""Loops over runs, compiled with numba.

Each kernel is plain Python over numpy arrays. Compiled kernels release the GIL.

Machine code is cached in $XDG_CACHE_HOME/sa1b/kernels (by default ~/.cache/sa1b/kernels), or in
$NUMBA_CACHE_DIR/sa1b if this variable is set. It is never stored next to the source, because uninstalling
would not remove it. The cache has a folder for each digest of the kernels' source, because numba does not
detect changes of a function in another module. If the cache is not writable or belongs to another user, each
process compiles the kernels again. The cache may be removed at any time.
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

import numba
import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
T = TypeVar("T")

# Arrays, arguments of kernels.
Bools = npt.NDArray[np.bool_]
Uint8s = npt.NDArray[np.uint8]
Uint32s = npt.NDArray[np.uint32]
Uint64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

# All modules with kernels. They import no other module of the package, because numba would compile the
# values of that module into the kernels.
SOURCES = ("hashing.py", "kernel.py", "masks/*_kernels.py", "stream/order_kernels.py")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that compiles a loop on its first call."""
    compiled: Any = numba.njit(nogil=True)(function)
    loop: Callable[P, T] = compiled
    ours = function.__module__.startswith("sa1b.") and hasattr(compiled, "py_func")  # NUMBA_DISABLE_JIT=1
    if ours and cache_folder() is not None:
        compiled._cache = _cache_class()(function)
    return loop


def plain(function: Callable[P, T]) -> Callable[P, T]:
    """The uncompiled form of a kernel."""
    uncompiled: Callable[P, T] = getattr(function, "py_func", function)
    return uncompiled


@cache
def cache_folder() -> Path | None:
    """The folder of compiled kernels; None if this process cannot use a cache."""
    package = Path(__file__).parent
    try:
        named = os.environ.get("NUMBA_CACHE_DIR")
        folder = (Path(named) / "sa1b" if named else user_folder() / "kernels") / source_digest(package)[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=folder).close()
        # The process runs code from this folder, which therefore must belong to the user.
        return folder if folder.stat().st_uid == os.getuid() else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None


def source_digest(package: Path) -> str:
    """sha256 of the source of all kernels."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(package.glob(pattern)):
            text = path.read_bytes()
            digest.update(b"%s %d\n" % (path.name.encode(), len(text)))
            digest.update(text)
    return digest.hexdigest()


def user_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME/sa1b, else ~/.cache/sa1b; RuntimeError: no home folder."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "sa1b"


@cache
def _cache_class() -> Any:
    """numba's cache with the folder of this package; unreadable and unwritable cache files are no errors."""
    caching = importlib.import_module("numba.core.caching")

    class Locator:
        def __init__(self, function: Callable[..., Any]) -> None:
            self._line = function.__code__.co_firstlineno

        @classmethod
        def from_function(cls, function: Callable[..., Any], path: str) -> "Locator":
            return cls(function)

        def ensure_cache_path(self) -> None:
            """The folder exists already."""

        def get_cache_path(self) -> str:
            return str(cache_folder())

        def get_source_stamp(self) -> str:
            return "the name of the folder depends on the source"

        def get_disambiguator(self) -> str:
            return str(self._line)

    def load_overload(self: Any, *arguments: Any) -> Any:
        try:
            return caching.FunctionCache.load_overload(self, *arguments)
        except Exception:  # unpickling a damaged file may raise any exception
            return None

    def save_overload(self: Any, *arguments: Any) -> None:
        try:
            caching.FunctionCache.save_overload(self, *arguments)
        except Exception:  # a full disk, or a damaged index file, which `flush` resets
            with contextlib.suppress(OSError):
                self.flush()

    implementation = type("Files", (caching.CompileResultCacheImpl,), {"_locator_classes": (Locator,)})
    methods = {"_impl_class": implementation, "load_overload": load_overload, "save_overload": save_overload}
    return type("KernelCache", (caching.FunctionCache,), methods)
