"""A connection of DuckDB that Ctrl-C ends at any moment."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INTERRUPTED = "Query interrupted"  # DuckDB's message
_RETRY_SECONDS = 0.05


@contextmanager
def connected() -> Iterator[Any]:
    """A connection of DuckDB. At the end, its call in another thread is interrupted."""
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
    """Raise KeyboardInterrupt after Ctrl-C in a call of DuckDB, which raises RuntimeError itself."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from None
