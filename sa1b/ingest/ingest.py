"""One task of ingest: one source in, its shards, indexes, quarantine and task file out.

A pass over the source writes everything into `.partial/<source>/`; only when the source has ended and every
shard has been read back do the files get their names, the task file last.
"""

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import pyarrow as pa

from sa1b.errors import OutOfMemoryError, SourceError, SystematicError
from sa1b.ingest.source_pass import Counts, Policy, SourcePass
from sa1b.ingest.staging import make_staging, remove_staging
from sa1b.shards.commit import check_clash, commit_quarantine, commit_task
from sa1b.shards.manifest import PARTIAL, Options, Task, task_path
from sa1b.sources.source import Source
from sa1b.storage.atomic import naming_path

__all__ = ["Counts", "Policy", "ingest", "limit_threads"]


_M_ARENA_MAX = -8  # of mallopt, malloc.h of glibc


def limit_threads() -> None:
    """Settings of a worker process, which has a core or two of its own, not all of them.

    One thread for OpenCV and for Arrow; one arena of glibc's malloc for all threads, because what one of them
    allocates another one frees.
    """
    cv2.setNumThreads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def ingest(
    source: Source,
    root: Path,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None] = lambda counts: None,
    check: Callable[[Task], None] = lambda task: None,
) -> Task:
    """Turn one source into shards of `root` and return its task, already written.

    Running it again gives the same bytes. An interruption at any point leaves the dataset as it was, or with
    files that no task file claims; the next run replaces them.

    Args:
        report: called with what has been done so far.
        check: called before the first file is committed; what it raises ends the ingest without a trace.

    Raises:
        SourceError: the md5 differs from the checklist's, or nothing in the source can be used.
        SystematicError, RefusedError: see there.
        OutOfMemoryError: the process may not take the memory it needs, up to 600 MB.
        OSError: the disk is full or fails; the message names the path.
    """
    parents = dict.fromkeys((root / PARTIAL, policy.spill or root / PARTIAL))
    folders = [make_staging(folder) for folder in parents]
    staged, spill = folders[0] / source.name, folders[-1] / f"{source.name}.spill"
    staged.mkdir()
    try:
        with naming_path(root), ThreadPoolExecutor(1) as sealer:
            task = SourcePass(source, staged, spill, options, policy, report, sealer).run()
        check(task)
        check_clash(task, staged, root)
        with naming_path(root):
            task = commit_task(task, staged, root)
    except MemoryError:
        raise OutOfMemoryError(
            f"{source.path}: out of memory; ingest of a source takes up to 600 MB: use fewer --workers, or "
            "raise the limit (ulimit -v, the job's memory)"
        ) from None
    except (SourceError, SystematicError):
        # What was refused, with reasons and offsets, is what a person looks at now; but never in place of
        # what an earlier run refused of a source whose shards stay.
        if not task_path(root, source.name).exists():
            commit_quarantine(source.name, staged, root)
        raise
    finally:
        for folder in folders:
            remove_staging(folder)
    return task
