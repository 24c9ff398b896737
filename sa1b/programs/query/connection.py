"""A connection of DuckDB that Ctrl-C interrupts at any time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INTERRUPTED = "Query interrupted"  # DuckDB's message
_RETRY_SECONDS = 0.05


@contextmanager
def connected() -> Iterator[Any]:
    """A connection of DuckDB; at the end, a call of it in another thread is interrupted."""
    import duckdb

    connection = duckdb.connect()
    try:
        yield connection
    finally:
        while True:
            connection.interrupt()
            try:
                connection.close()
                break
            except duckdb.Error as error:
                if "busy" not in str(error):
                    raise
                time.sleep(_RETRY_SECONDS)


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C in a call of DuckDB, which itself raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from None
