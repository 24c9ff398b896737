"""Ingest of one source: writes its shards, indexes, quarantine and task file.

One pass over the source writes all files below `.partial/`. The files are committed after the end of the
source, once every shard has been read back and verified. The task file is committed last.
"""

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cv2
import pyarrow as pa

from sa1b.errors import OutOfMemoryError, SourceError, SystematicError
from sa1b.ingest.policy import Policy
from sa1b.ingest.source_pass import Counts, SourcePass
from sa1b.shards.commit import check_clash, commit_quarantine, commit_task
from sa1b.shards.documents import Options, Task
from sa1b.shards.manifest import task_name
from sa1b.shards.staging import make_staging, remove_staging, staging_place
from sa1b.sources.source import Source
from sa1b.storage.atomic import naming_path
from sa1b.storage.open import open_store
from sa1b.storage.store import Root

__all__ = ["Counts", "Policy", "ingest", "limit_threads"]


_M_ARENA_MAX = -8  # parameter of mallopt, from glibc's malloc.h


def limit_threads() -> None:
    """Limit the threads of OpenCV and Arrow to one: a worker process uses one or two cores."""
    # All threads share one arena of glibc's malloc, because one thread frees the memory of another one.
    cv2.setNumThreads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def ingest(
    source: Source,
    root: Root,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None] = lambda counts: None,
    check: Callable[[Task], None] = lambda task: None,
    *,
    replace_images: bool = False,
) -> Task:
    """Convert one source to shards of `root`, write its task file and return the task.

    A second ingest of the same source writes the same bytes. An interruption at any point leaves the dataset
    unchanged, or with files that no task file lists; the next run replaces such files.

    `report` is called with the current counts. `check` is called before the first file is committed; an
    exception from it ends the ingest, and no file is written. `replace_images`: see `commit_task`.

    Raises:
        SourceError: the md5 differs from the one in the checklist, or the source has no usable pair; or an
            image is in another source, or stored and missing now: see `check_clash` and `check_kept`.
        SystematicError: too many pairs have the same problem.
        RefusedError: a pair cannot be used, and the policy is to stop.
        OutOfMemoryError: memory is exhausted; ingest of a source takes up to 600 MB.
        OSError: the disk is full or fails; the message names the path.
    """
    # The upload of a shard to a bucket also starts after the end of the source, not when the shard is sealed.
    # Only then is it known that the source is intact (its md5 or digest), has few bad pairs, has no image of
    # another source, and is still claimed by this process. So a source that fails or is refused uploads
    # nothing, and no finished object has to be replaced or removed. The price is scratch space for all shards
    # of a source. Other workers continue to convert during the upload.
    store = open_store(root)
    parents = dict.fromkeys((staging_place(store), staging_place(store, policy.spill)))
    folders = [make_staging(folder) for folder in parents]
    staged, spill = folders[0] / source.name, folders[-1] / f"{source.name}.spill"
    staged.mkdir()
    try:
        with naming_path(store.scratch), ThreadPoolExecutor(1) as sealer:
            ingestion = SourcePass(source, staged, spill, options, policy, report, sealer)
            task = ingestion.run()
        check(task)
        check_clash(task, staged, store)
        with naming_path(store.scratch):
            task = commit_task(
                task, staged, store, lambda size: report(ingestion.counts), replace_images=replace_images
            )
    except MemoryError:
        raise OutOfMemoryError(
            f"{source.label}: out of memory: ingest of a source takes up to 600 MB; use fewer --workers, or "
            "raise the memory limit (ulimit -v, or the limit of the job)"
        ) from None
    except (SourceError, SystematicError):
        # The quarantine shows the user what was refused, and why. It must not replace the quarantine of an
        # earlier run whose shards are still in the dataset.
        if not store.exists(task_name(source.name)):
            commit_quarantine(source.name, staged, store)
        raise
    finally:
        for folder in folders:
            remove_staging(folder)
    return task
