"""Print the bytes, disk space and hours that a conversion will take, and the links that do not work.

Example: sa1b plan downloads --out shards --workers 4
         sa1b plan --links links.txt --out s3://BUCKET/shards --nodes 8 --cpus 32 --workers 32 --rate 500
         sa1b plan --links links.txt --image-size 1024 --json

Writes no file. For a folder of sources that is named "train", write ./train. Exit code 0: printed; 1:
printed, and a link does not work or the disk is too small; 2: nothing was printed; 130: interrupted.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import counted, loading, show
from sa1b.errors import UsageError
from sa1b.report import bar, duration_text, fact_lines, failed_lines, size_text
from sa1b.sources.path_arguments import Endpoint, checked_quality, linked, paths_of, store_of
from sa1b.sources.stored_file import CONNECTIONS
from sa1b.storage.atomic import nearest_existing
from sa1b.workers import available_cpus

TOUR = (140, "Questions about both", "estimate disk and time", "sa1b plan downloads --out shards")

# Bytes of source per second, from benchmarks/results/intel-xeon-2-cores-parts.json, "reshard": of one worker,
# which uses more than one processor, and of one processor. With --image-size, processor time is multiplied:
# 7.1 s and 1.45 s for a tar of 192 synthetic images.
WORKER_RATE, PROCESSOR_RATE, RESIZING = 197e6, 146e6, 4.9


def main(
    source: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")
    ] = (),
    /,
    links: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    image_size: int | None = None,
    annotations_only: bool = False,
    nodes: Annotated[int, Range(1)] = 1,
    cpus: Annotated[int | None, Range(1)] = None,
    workers: Annotated[int, Range(1)] = 1,
    rate: Annotated[float | None, Range(above=0), tyro.conf.arg(metavar="MB/S")] = None,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    ignore: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the bytes, disk space and hours that a conversion will take, and the links that do not work.

    The smaller of two rates determines the time: that of reading (--rate), and that of the processors of all
    nodes, by measurement on an Intel Xeon: 146 MB/s of source for each processor, at most 197 MB/s for each
    worker, and a fifth of both with --image-size.

    Args:
        source: Tars, folders of extracted pairs, folders that contain these, or URLs of tars.
        links: Meta's list of links to the tars of SA-1B. The size of each tar is requested.
        out: Dataset directory or URL of the conversion. Sources that are finished there are not counted.
        image_size: Re-encode images so that the longer side has this many pixels. By default images keep
            their original bytes, and the estimate for 1024 is also printed.
        annotations_only: Store annotations and indexes without images.
        nodes: Machines that run the same `sa1b reshard` at the same time.
        cpus: Processors of a machine. By default those of this one, and the output says so.
        workers: Worker processes of each machine.
        rate: MB per second that the link or the store delivers to all machines together.
        scratch: With a URL as --out: local folder for the shards of a source until they are uploaded; by
            default sa1b-USERID in the system's folder for temporary files.
        ignore: Ignore files and folders whose name, or path below SOURCE, matches this pattern. May be
            repeated.
        json_output: Print the estimates as JSON, without progress.
    """
    if not source and links is None:
        raise UsageError("SOURCE or --links: missing; add tars, folders or a list of links")
    checked_quality(image_size, None, annotations_only=annotations_only)
    store = None if out is None else store_of(out, scratch, endpoint, source)
    with loading():
        from sa1b.ingest.ingest import is_partial, is_unchanged
        from sa1b.ingest.start_checks import admitted, by_name, check_options, needed_space
        from sa1b.shards.documents import Options
        from sa1b.shards.manifest import known_tasks
        from sa1b.sources.discovery import Discovered
        from sa1b.sources.remote_sources import remote_sources
    paths, scratched = paths_of(source), [] if store is None else [store.scratch]
    discovered = admitted(paths, {}, scratched, ignore) if paths else Discovered()
    local, remote = by_name(discovered, linked(source, links, CONNECTIONS, None, endpoint))
    tasks = {} if store is None else known_tasks(store)
    if store is not None and tasks:
        used = next(iter(tasks.values())).options
        check_options(store, tasks, replace(used, image_size=image_size, annotations_only=annotations_only))
    whole = {name: task.source for name, task in tasks.items() if not is_partial(task)}
    known = {name: (int(task["size"]), int(task["mtime_ns"])) for name, task in whole.items()}
    with bar(len(remote), "sizes", " links", json_output or not remote) as progress:
        sized, failed = remote_sources(remote, known, progress=progress.update)
    left, finished = sorted([*local.values(), *sized], key=lambda one: one.name), list[str]()
    if store is not None:
        kept, listed = [one for one in left if one.name in tasks], store.listed_size()
        finished = [one.name for one in kept if is_unchanged(tasks[one.name], one, store, listed)]
        left = [one for one in left if one.name not in finished]

    is_local, total = store is None or store.is_local, sum(one.size for one in left)
    of_node = cpus or available_cpus()
    at_once = workers * nodes if is_local else workers  # sources on the same disk
    size, options = image_size or 1024, Options(annotations_only=annotations_only)
    original = needed_space(left, options, at_once)
    resized = needed_space(left, replace(options, image_size=size, quality=95), at_once)
    space = original if image_size is None else resized
    needed = space.spill + (space.shards if is_local else space.staged)
    free = None if store is None else shutil.disk_usage(nearest_existing(store.scratch)).free
    is_small = free is not None and free < needed
    processors = nodes * min(workers * WORKER_RATE, of_node * PROCESSOR_RATE)
    rates = {"the processors": processors / (1 if image_size is None else RESIZING)}
    rates |= {} if rate is None else {"reading": rate * 1e6}
    hours = total / min(rates.values()) / 3600
    document = {
        "exit_code": int(bool(failed) or is_small),
        "sources": len(local) + len(remote),
        "finished": finished,
        "failed": failed,
        "not_taken": len(discovered.not_taken),
        "bytes_to_read": total,
        "annotations_only": annotations_only,
        "shard_bytes": original.shards,
        "image_size": size,
        "shard_bytes_with_image_size": resized.shards,
        "spill_bytes": original.spill,
        "staged_bytes": 0 if is_local else space.staged,
        "needed_bytes": needed,
        "free_bytes": free,
        "cpus": of_node,
        "bytes_per_second": {"processor": rates["the processors"], "reading": rates.get("reading")},
        "hours": hours,
    }
    state = [f"{len(left):,} to convert", f"{len(finished):,} finished in {store}" if out else ""]
    state += [f"{len(failed):,} whose link does not work" if failed else ""]
    other = (
        " without images" if annotations_only else f"; with --image-size {size} {size_text(resized.shards)}"
    )
    machine = f"{cpus} CPUs" if cpus else f"the {of_node} CPUs of this machine (--cpus: others)"
    slower, *faster = sorted(rates, key=lambda name: rates[name])
    others = [f" ({name}: {rates[name] / 1e6:,.0f} MB/s)" for name in faster]
    more = "".join(others) or "; pass --rate for the time of reading"
    rows = {
        "sources": f"{document['sources']:,}: {', '.join(filter(None, state))}",
        "to read": size_text(total),
        "shards": f"{size_text(original.shards)}{other}",
        "spill": f"{size_text(space.spill)} for {counted(at_once, 'worker')}",
        "machines": f"{counted(nodes, 'node')} with {counted(workers, 'worker')} on {machine}",
        "scratch": "" if is_local else f"{size_text(space.staged)} until the shards are uploaded",
        "free": "" if store is None or free is None else f"{size_text(free)} in {store.scratch}",
        "time": f"{duration_text(3600 * hours)}, limited by {slower}: {rates[slower] / 1e6:,.0f} MB/s{more}",
    }
    rows["free"] += f", too little: {size_text(needed)} needed" if is_small else ""
    lines = fact_lines([row for row in rows.items() if row[1]])
    if discovered.not_taken:
        lines.append(f"not taken: {counted(len(discovered.not_taken), 'path')}; reshard lists them")
    show(json.dumps(document, indent=1) if json_output else "\n".join([*lines, *failed_lines(failed)]))
    return int(bool(failed) or is_small)
