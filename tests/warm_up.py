"""Importing this module loads what a worker of ingest or verify needs, compiled kernels included."""

import gc
import tempfile
from pathlib import Path

import sa1b.stream.preload
import sa1b.verify.verify  # noqa: F401
from tests.ingest import inside
from tests.shards import tiny


def _ingest() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.make_tar(Path(folder) / "sa_000000.tar", range(2))
        inside.ingest_tar(Path(folder) / "sa_000000.tar", Path(folder) / "root")


_ingest()
gc.collect()
gc.freeze()  # a fork's collections do not copy the memory of these modules
