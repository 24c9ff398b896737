"""Convert downloaded SA-1B tars to indexed shards.

Example: sa1b reshard sa_000020.tar sa_000021.tar --out shards --workers 4
         sa1b reshard downloads --out shards --task 3/8     on each of 8 machines, then
         sa1b reshard --out shards --finish
         sa1b reshard downloads --out s3://BUCKET/shards --scratch /nvme/scratch
         sa1b reshard --links links.txt --out shards --workers 8
         sa1b reshard my_masks.json --images photos --out shards       your own masks, in COCO's format
         sa1b reshard photos --images-only --out shards                images without annotations

After an interruption, run the same command again: finished sources are skipped. Exit code 0: every source is
in the dataset; 1: a source is missing, or the store of --out failed; 2: nothing was done; 3: every source is
in the dataset, but a pair was refused, a source is damaged, or a file in a SOURCE folder was not taken; 130:
interrupted.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b import ray_tasks as engines
from sa1b.arguments import Range, check_names, check_values, of_type, share_of
from sa1b.console import loading, show
from sa1b.errors import UsageError
from sa1b.ray_tasks import Address, Engine
from sa1b.report import failed_lines
from sa1b.shards import MAX_IMAGE_PIXELS, MAX_STORED_PIXELS
from sa1b.sources.path_arguments import Endpoint, check_rate, checked_quality, linked, paths_of, store_of
from sa1b.sources.stored_file import CONNECTIONS
from sa1b.storage.claim import LONGEST, TIMEOUT
from sa1b.storage.store import Store

TOUR = (20, "Data", "convert source tars", "sa1b reshard downloads --out shards --workers 4")

TIMEOUTS = Range(above=0, most=LONGEST, unit=" seconds")


@dataclass(frozen=True, slots=True)
class Resharded:
    """What `sa1b.reshard` did.

    Attributes:
        exit_code: that of the command, 0, 1 or 3; see `sa1b reshard --help`.
        images: images of the sources of this run, also of skipped ones; with `finish` or `drop`, of the
            dataset.
        masks: their masks.
        shards: their shards.
        done: sources that this run finished.
        skipped: sources that were finished before it.
        failed: source -> the error.
        document: all figures, as `--json` prints them.
        text: the table that the command prints.
    """

    exit_code: int
    images: int
    masks: int
    shards: int
    done: list[str]
    skipped: list[str]
    failed: dict[str, str]
    document: dict[str, Any]
    text: str


def reshard(
    sources: "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]",
    out: str | os.PathLike[str],
    *,
    quiet: bool = False,
    **options: Any,
) -> Resharded:
    """Convert sources to indexed shards: the command `sa1b reshard` as a function.

    After an interruption, call it again: finished sources are skipped.

    Args:
        sources: tars, folders or URLs, one or several; see `sa1b reshard --help`. () with `finish` or `drop`.
        out: dataset directory: a folder, created if it is missing, or a URL.
        quiet: print no progress and no notes.
        options: those of the command, with `_` for `-`: `workers=8`, `image_size=1024`, `keep_json=True`,
            `accept=["unreadable_json"]`.

    Raises:
        sa1b.errors.Sa1bError: an option, `sources` or `out` is wrong. The errors of single sources are in the
            result.
    """
    hints = get_type_hints(_converted)
    known = [name for name in hints if name not in ("source", "out", "json_output", "return")]
    check_names("reshard", options, ["quiet", *known])
    paths = (sources,) if isinstance(sources, str | os.PathLike) else sources
    values = {name: of_type(name, value, hints[name]) for name, value in options.items()}
    check_values(get_type_hints(_converted, include_extras=True), values)
    result = _converted(tuple(os.fspath(path) for path in paths), os.fspath(out), json_output=quiet, **values)
    if result.exit_code == 130:  # Ctrl-C ends the caller too
        raise KeyboardInterrupt
    return result


def _converted(
    source: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")],
    /,
    out: Annotated[str, tyro.conf.arg(metavar="PATH")],
    images_per_shard: Annotated[int, Range(1)] = 1024,
    image_size: int | None = None,
    quality: int | None = None,
    keep_json: bool = False,
    no_index_runs: bool = False,
    decode_images: bool = False,
    annotations_only: bool = False,
    max_pixels: Annotated[int, Range(1, MAX_STORED_PIXELS)] = MAX_IMAGE_PIXELS,
    workers: int | None = None,
    engine: Engine = "processes",
    address: Address = None,
    spill: Path | None = None,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    links: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    connections: Annotated[int, Range(1)] = CONNECTIONS,
    max_rate: Annotated[float | None, tyro.conf.arg(metavar="MB/S")] = None,
    images: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    image_ids: Literal["keep", "hash"] = "keep",
    images_only: bool = False,
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
    claim_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS"), TIMEOUTS] = TIMEOUT,
    stall_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS"), TIMEOUTS] = 600,
    no_space_check: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> Resharded:
    """Convert downloaded SA-1B tars to indexed shards.

    Args:
        source: Tars (gzip or plain, detected by content), folders of extracted pairs (flat, or with the
            subfolders images/ and annotations/), Parquet files with the bytes of images and their
            annotations, folders that contain any of these at any depth, or URLs of tars and of folders of
            tars (https://, s3://, ...), which are read without storing them. Or files of your own masks in
            COCO's format (x.json), with --images.
        out: Folder for the shards, created if it is missing, or a URL such as s3://BUCKET/FOLDER. To add
            sources later, run the command again with them.
        images_per_shard: Images in a shard; 1024 images take about 1 GB.
        image_size: Re-encode images so that the longer side has this many pixels, 16 to 65500; masks stay at
            source resolution. By default images keep their original bytes.
        quality: JPEG quality of re-encoded images, 1 to 100, by default 95. Only with --image-size.
        keep_json: Also store the annotation files verbatim. Exports have the original values without it.
        no_index_runs: Omit the decoded masks from the index, which saves about 26 kB per image. With the
            masks, the index files contain all annotations of the dataset.
        decode_images: Decode every JPEG and refuse those that fail, which takes 10 ms per image. By default
            only damage in the markers of the file is detected.
        annotations_only: Store annotations and indexes without images: 4 % of the size of the sources, and
            2 % with --no-index-runs. Images are checked and not stored. What needs no pixels works: view,
            query, locate, verify, index, copy, export --to coco and folders, and sa1b.open.
        max_pixels: Largest accepted image in pixels, at most 268435456. Decoding takes 3 bytes per pixel,
            and 9 for progressive JPEGs: here with --image-size or --decode-images, later in training and
            gallery.
        workers: Workers, each with one source at a time and up to 600 MB of memory. By default 1; with Ray
            one for each CPU of the cluster.
        spill: Folder for images that wait for their annotation, about a third of a tar per worker; by default
            inside --out, or inside --scratch if --out is a URL.
        scratch: With a URL as --out: local folder for the shards of a source until they are uploaded at its
            end, about 12 GB per worker for the tars of SA-1B. By default sa1b-USERID in the system's folder
            for temporary files.
        links: Meta's list of links to the tars of SA-1B (file_name, tab, cdn_link). The tars are read from
            these links without storing them. Links expire: a later run may use a newer list.
        connections: Requests at the same time for each tar that is read from a URL.
        max_rate: Limit of the bytes read from URLs, in MB per second, over all workers.
        images: With files in COCO's format: folder that contains the images, by their file_name. By default
            the folder of the file. JPEGs keep their bytes; other formats become JPEGs of quality 95.
        image_ids: With files in COCO's format: keep takes the ids of the images in the file; hash takes
            hashes of source and file_name, for several files whose ids are the same numbers. Finished sources
            keep their ids; see --redo.
        images_only: Take images alone: of a folder and all its subfolders, of tars such as those of
            webdataset, and of Parquet files with a column of image bytes. sa_<id>.jpg keeps its id; other
            ids are hashes of source and name. JPEGs keep their bytes; other formats become JPEGs of quality
            95. Texts beside an image are stored with it; annotations are left out.
        md5: File with expected digests, one `<md5>  <file name>` per line. Sources with other digests fail.
        on_error: For a pair that cannot be used: quarantine it with the reason, or stop the run.
        accept: A reason that may be frequent. By default, a reason for more than 1 % of a source's pairs (and
            more than 20) stops the run. May be repeated.
        recheck: Recognise finished sources by the digest of their content instead of size and time.
        replace: Replace a finished source by a source with the same name and other content. By default such a
            source is refused.
        redo: Convert the finished source of this name again, even if its task file is damaged. SOURCE must
            include it. May be repeated.
        ignore: Ignore files and folders whose name, or path below SOURCE, matches this pattern. Other files
            that are not sources are listed and cause exit code 3. May be repeated.
        rename: Give the source at PATH another name. May be repeated.
        drop: Remove a finished source and its shards. May be repeated; without SOURCE.
        task: Process only the sources I, I + N, I + 2 N, ... in the order of their names, with I from 0 to
            N - 1, for N processes on any number of machines that share --out.
            The dataset is not finished: run --finish after all N, or add --finish to each of them.
        finish: Make a dataset of all finished sources. With SOURCE, also report the missing sources. With
            --task, convert the sources of the task first; the process that ends last makes the dataset.
        claim_timeout: Seconds without a heartbeat after which other machines may take over a source of this
            run. The claims of other runs have their own timeouts. On one machine, the claim of a live process
            never times out, and the claim of a dead process ends at once.
        stall_timeout: Seconds without progress after which a worker is killed and its source is retried once.
            Progress is data read from the source, an image stored, or data uploaded. If the retry stalls
            too, the source has failed.
        no_space_check: Start even if the disk seems too small.
        json_output: Print the summary as JSON, without progress.
    """
    from sa1b.sources.mirror import formats_of

    if drop or (finish and task is None):
        store = store_of(out, scratch, endpoint, source)
        all_links = linked(source, links, CONNECTIONS, None, endpoint)
        from sa1b.ingest.start_checks import source_names

        formats = formats_of(images, image_ids, MAX_IMAGE_PIXELS, images_only=images_only)
        named = partial(
            source_names,
            paths_of(source),
            all_links,
            store,
            rename=_renamed(rename),
            ignore=ignore,
            formats=formats,
        )
        has_sources = bool(source or all_links or rename)
        return _without_ingest(has_sources, named, store, drop=drop, finish=finish, task=task)
    if not source and links is None and not rename:
        raise UsageError(f"--out {out}: no SOURCE to convert; add tars, folders or --links, see --help")
    _check_images(images, image_ids, images_only, paths_of((*source, *map(str, _renamed(rename)))))
    quality = checked_quality(image_size, quality, annotations_only=annotations_only)
    check_rate("--max-rate", max_rate)
    store = store_of(out, scratch, endpoint, source)
    from sa1b.ingest.policy import IngestRun, Policy
    from sa1b.ingest.reshard import reshard as convert
    from sa1b.shards.documents import Options

    with engines.engine(engine, address, workers) as (count, supervise):
        rate = None if max_rate is None else max_rate * 1e6 / count
        summary = convert(
            paths_of(source),
            store,
            options=Options(
                images_per_shard=images_per_shard,
                image_size=image_size,
                quality=quality,
                keep_json=keep_json,
                index_runs=not no_index_runs,
                decode_images=decode_images,
                annotations_only=annotations_only,
            ),
            policy=Policy(on_error == "stop", frozenset(accept), None, spill, max_pixels=max_pixels),
            run=IngestRun(
                workers=count,
                checklist=md5,
                recheck=recheck,
                replace=replace,
                redo=redo,
                rename=_renamed(rename),
                ignore=ignore,
                formats=formats_of(images, image_ids, max_pixels, images_only=images_only),
                links=linked(source, links, connections, rate, endpoint),
                task=share_of("--task", task),
                finish=finish,
                claim_timeout=claim_timeout,
                stall_timeout=stall_timeout,
                space_check=not no_space_check,
                quiet=json_output,
            ),
            supervise=supervise,
        )
    totals = summary.totals()
    return Resharded(
        exit_code=summary.exit_code(),
        **{name: totals[name] for name in ("images", "masks", "shards")},
        **{name: getattr(summary, name) for name in ("done", "skipped", "failed")},
        document=summary.document(),
        text=summary.table(store),
    )


@wraps(_converted)
def main(*arguments: Any, **options: Any) -> int:
    with loading():
        importlib.import_module("sa1b.ingest.reshard")
    result = _converted(*arguments, **options)
    show(json.dumps(result.document, indent=1) if options.get("json_output") else result.text)
    return result.exit_code


def _without_ingest(
    has_sources: bool,
    names: Callable[[], list[str]],
    store: Store,
    drop: tuple[str, ...],
    finish: bool,
    task: str | None,
) -> Resharded:
    """The command with --drop or --finish."""
    if drop and (has_sources or finish or task is not None):
        raise UsageError("--drop: cannot be combined with --finish, --task, SOURCE or --links; use it alone")
    if store.is_local and not store.scratch.is_dir():
        raise UsageError(f"--out {store}: no such folder; check the path")
    if not store.is_local and not store.names("tasks") and not store.names(""):
        raise UsageError(f"--out {store}: is empty; check the URL")
    from sa1b.ingest.finish import drop_source, stored_source
    from sa1b.ingest.finish import finish as finish_dataset
    from sa1b.shards.staging import remove_leftovers

    # All are checked before the first goes.
    dropped = dict.fromkeys(stored_source(store, name) for name in drop)
    remove_leftovers(store)
    for name in dropped:
        finished = drop_source(store, name)
    if finish:
        finished = finish_dataset(store, names() if has_sources else ())
    document = {"sources": len(finished.tasks), "failed": finished.failed, "pending": finished.pending}
    code = 1 if finished.is_partial or (finish and not finished.tasks) else 0
    shown = failed_lines(dict(sorted(finished.failed.items())))
    return Resharded(
        exit_code=code,
        **{
            name: sum(source.counts[name] for source in finished.tasks.values())
            for name in ("images", "masks")
        },
        shards=sum(len(source.shards) for source in finished.tasks.values()),
        done=[],
        skipped=sorted(finished.tasks),
        failed=finished.failed,
        document={"exit_code": code, "complete": code == 0, **document},
        text="\n".join([*shown, finished.line(store)]),
    )


def _check_images(images: Path | None, image_ids: str, images_only: bool, paths: tuple[Path, ...]) -> None:
    coco = next((path for path in paths if path.suffix.lower() == ".json"), None)
    if images_only and coco is not None:
        raise UsageError(f"--images-only: {coco} has annotations; pass the folder of its images instead")
    if images is None and image_ids == "keep":
        return
    if coco is None:
        flag = f"--image-ids {image_ids}" if images is None else f"--images {images}"
        raise UsageError(f"{flag}: only with a file in COCO's format as SOURCE, such as my.json; omit it")
    if images is not None and not images.is_dir():
        raise UsageError(f"--images {images}: no such folder; name the folder of the images")


def _renamed(pairs: tuple[str, ...]) -> dict[Path, str]:
    names = {}
    for pair in pairs:
        path, equals, name = pair.rpartition("=")
        if not equals or not path or not name:
            raise UsageError(f"--rename {pair}: must have the form PATH=NAME")
        names[Path(path)] = name
    return names
