"""Loops over runs, compiled with numba where it is there.

Each kernel is plain Python over numpy arrays, so the same text runs uncompiled when numba cannot be imported
or SA1B_NO_NUMBA=1 is set before the import: same result, one to two orders of magnitude slower. Compiled
kernels release the GIL and are cached on disk, beside the source or in the user's cache folder.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

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
    try:
        compiled: Callable[P, T] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in: neither the package's nor the user's can be written
        compiled = numba.njit(nogil=True)(function)
    return compiled


def plain(function: Callable[P, T]) -> Callable[P, T]:
    """The uncompiled form of a kernel."""
    uncompiled: Callable[P, T] = getattr(function, "py_func", function)
    return uncompiled
