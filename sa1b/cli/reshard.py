"""Turn SA-1B tars as downloaded into indexed shards.

Example: sa1b reshard sa_000020.tar sa_000021.tar --out shards --workers 4
         sa1b reshard downloads --out shards --task 3/8     on each of 8 machines, then
         sa1b reshard --out shards --finish

Run the same command again after any interruption: finished sources are recognised and only what is missing
is done. Exit code 0: every source named is in the dataset; 1: a source is missing; 2: nothing was done;
3: finished, but something was refused, is damaged, or was found beside the sources and not taken;
130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.shards.limits import MAX_IMAGE_PIXELS, MAX_STORED_PIXELS
from sa1b.storage.claim import LONGEST, TIMEOUT


def main(
    source: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="SOURCE...")],
    /,
    out: Path,
    images_per_shard: int = 1024,
    image_size: int | None = None,
    quality: int | None = None,
    keep_json: bool = False,
    no_index_runs: bool = False,
    decode_images: bool = False,
    max_pixels: int = MAX_IMAGE_PIXELS,
    workers: int = 1,
    spill: Path | None = None,
    md5: Path | None = None,
    on_error: Literal["quarantine", "stop"] = "quarantine",
    accept: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="REASON")] = (),
    recheck: bool = False,
    replace: bool = False,
    redo: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = (),
    ignore: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = (),
    rename: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATH=NAME")] = (),
    drop: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE")] = (),
    task: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None,
    finish: bool = False,
    claim_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = TIMEOUT,
    stall_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600,
    no_space_check: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Turn SA-1B tars as downloaded into indexed shards.

    Args:
        source: Tars (gzip or plain, detected by content), folders of extracted pairs (flat, or images/ beside
            annotations/), or folders that hold any of these at any depth.
        out: Folder for the shards, made if need be. Run again with more sources to add them.
        images_per_shard: Images in a shard; 1024 make about 1 GB.
        image_size: Re-encode images so that the longer side has this many pixels; masks stay at source
            resolution. Without it the original bytes are kept.
        quality: JPEG quality of re-encoded images, 1 to 100 (95 if not given). Only with --image-size.
        keep_json: Store the annotation files verbatim too. Not needed to get them back exactly.
        no_index_runs: Leave the decoded masks out of the index, about 26 kB an image. With them, the index
            files alone are the annotations of the dataset.
        decode_images: Decode every JPEG and refuse those that fail. Slower by 10 ms an image; without it,
            only damage that the file's markers show is found.
        max_pixels: Refuse images of more pixels than this; at most 268435456. Decoding takes 3 bytes a pixel,
            of progressive files 9: with --image-size and --decode-images here, later in training and gallery.
        workers: Sources worked on at a time, each by a process of its own with up to 600 MB of memory.
        spill: Folder for images that wait for their annotation, about a third of a tar per worker.
            Inside --out if not given.
        md5: List of expected digests, `<md5>  <file name>` a line. A source that differs is not taken.
        on_error: What to do with a pair that cannot be used: quarantine it with the reason, or stop.
        accept: A reason that may be frequent. Without it, one reason for more than 1 % of a source's pairs
            (and more than 20) stops the run. May be given several times.
        recheck: Recognise finished sources by the digest of their content instead of size and time.
        replace: Take a source that has the name of a finished one and other content in its place. Without it,
            such a source is refused.
        redo: Do the source of this name again although it is finished, also where its task file is damaged.
            Its SOURCE must be given. May be given several times.
        ignore: Leave out files and folders whose name, or path below SOURCE, matches. What is found in a
            folder and is no source is listed and makes the exit code 3 otherwise. May be given several times.
        rename: Take the source at PATH under another name. May be given several times.
        drop: Remove a finished source and its shards. May be given several times, without SOURCE.
        task: Work on a part of the sources: those at I, I + N, I + 2 N, ... in the order of their names, I
            from 0 to N - 1. For N processes on any number of machines that share --out. The dataset is not
            finished then: run --finish when all have ended.
        finish: Make a dataset of all finished sources. With SOURCE, those that are missing are reported.
        claim_timeout: Seconds without a heartbeat after which other machines may take over a source that this
            run works on. The claims of other runs count by their own timeout. On one machine a process keeps
            its source until it ends, and one that has died is noticed at once.
        stall_timeout: Seconds without progress after which a worker is killed and its source tried once more.
            Progress is data read from the source or an image stored; without any for a second time, the
            source has failed.
        no_space_check: Start although the disk seems too small.
        json_output: Print the summary as JSON, without progress.
    """
    if drop or finish:
        return _without_ingest(source, out, drop, finish, task, json_output)
    if not source:
        raise UsageError("no SOURCE given; see --help")
    if images_per_shard < 1 or workers < 1:
        raise UsageError("--images-per-shard and --workers must be at least 1")
    for flag, seconds in (("--claim-timeout", claim_timeout), ("--stall-timeout", stall_timeout)):
        if not 0 < seconds <= LONGEST:
            raise UsageError(f"{flag} {seconds:g}: timeouts above 0 and up to {LONGEST:,.0f} seconds")
    if not 1 <= max_pixels <= MAX_STORED_PIXELS:
        raise UsageError(f"--max-pixels is from 1 to {MAX_STORED_PIXELS}")
    if quality is not None and (image_size is None or not 1 <= quality <= 100):
        raise UsageError("--quality is from 1 to 100 and goes with --image-size")
    if image_size is not None:
        if not 16 <= image_size <= 65500:
            raise UsageError("--image-size is from 16 to 65500 pixels")
        quality = quality or 95
    with loading():
        from sa1b.ingest.ingest import Policy
        from sa1b.ingest.reshard import reshard
        from sa1b.ingest.worker import Run
        from sa1b.shards.manifest import Options
    summary = reshard(
        source,
        out,
        Options(images_per_shard, image_size, quality, keep_json, not no_index_runs, decode_images),
        Policy(on_error == "stop", frozenset(accept), None, spill, max_pixels=max_pixels),
        Run(
            workers=workers,
            checklist=md5,
            recheck=recheck,
            replace=replace,
            redo=redo,
            rename=_renamed(rename),
            ignore=ignore,
            task=_part(task),
            claim_timeout=claim_timeout,
            stall_timeout=stall_timeout,
            space_check=not no_space_check,
            quiet=json_output,
        ),
    )
    print(json.dumps(summary.document(), indent=1) if json_output else summary.table(out))
    return summary.exit_code()


def _without_ingest(
    source: tuple[Path, ...], out: Path, drop: tuple[str, ...], finish: bool, task: str | None, as_json: bool
) -> int:
    """--drop and --finish."""
    if (drop and (source or finish)) or task is not None:
        raise UsageError("--drop and --finish each stand alone; only --finish takes SOURCE")
    if not out.is_dir():
        raise UsageError(f"--out {out}: no such folder")
    with loading():
        from sa1b.ingest.admission import admitted
        from sa1b.ingest.finish import drop_source
        from sa1b.ingest.finish import finish as finish_dataset
    for name in drop:
        finished = drop_source(out, name)
    if finish:
        finished = finish_dataset(out, [one.name for one in admitted(source, {}).sources])
    document = {"sources": len(finished.tasks), "failed": finished.failed, "pending": finished.pending}
    code = 1 if finished.is_partial or (finish and not finished.tasks) else 0
    if as_json:
        print(json.dumps({"exit_code": code, "complete": code == 0, **document}, indent=1))
    else:
        print(finished.line(out))
    return code


def _renamed(pairs: tuple[str, ...]) -> dict[Path, str]:
    found = {}
    for pair in pairs:
        path, equals, name = pair.rpartition("=")
        if not equals or not path or not name:
            raise UsageError(f"--rename {pair!r}: expected PATH=NAME")
        found[Path(path)] = name
    return found


def _part(text: str | None) -> tuple[int, int] | None:
    """`I/N` as numbers."""
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UsageError(f"--task {text!r}: expected I/N with I from 0 to N - 1, such as 0/8")
    return int(number), int(count)
