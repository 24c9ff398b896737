"""Make a dataset directory of some images only, from links to the tars that contain them.

Example: sa1b fetch --ids ids.txt --links links.txt --out some --workers 4
         sa1b fetch downloads --ids ids.csv:image_id --out some
         sa1b fetch photos --images-only --ids captions.json --out some
         sa1b fetch --ids ids.txt --links links.txt --out some --index s3://BUCKET/small-shards

After an interruption, run the same command again. To add images later, run it with another list. Exit code 0:
every image of --ids is stored; 1: a source could not be read, or the store of --out failed; 2: nothing was
done; 3: every source that may contain an image was read, and an image is missing or was refused; 130:
interrupted.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from sa1b.arguments import Range
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.shards import MAX_IMAGE_PIXELS, MAX_STORED_PIXELS
from sa1b.sources.path_arguments import Endpoint, check_rate, checked_quality, linked, paths_of, store_of
from sa1b.sources.stored_file import CONNECTIONS

TOUR = (30, "Data", "convert some images only", "sa1b fetch downloads --ids ids.txt --out some")


def main(
    source: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")
    ] = (),
    /,
    *,
    ids: Annotated[str, tyro.conf.arg(metavar="FILE[:COLUMN]")],
    out: Annotated[str, tyro.conf.arg(metavar="PATH")],
    links: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    index: Annotated[str | None, tyro.conf.arg(metavar="ROOT")] = None,
    search_all: bool = False,
    images_per_shard: Annotated[int, Range(1)] = 1024,
    image_size: int | None = None,
    quality: int | None = None,
    keep_json: bool = False,
    no_index_runs: bool = False,
    decode_images: bool = False,
    annotations_only: bool = False,
    images_only: bool = False,
    max_pixels: Annotated[int, Range(1, MAX_STORED_PIXELS)] = MAX_IMAGE_PIXELS,
    workers: Annotated[int, Range(1)] = 1,
    connections: Annotated[int, Range(1)] = CONNECTIONS,
    max_rate: Annotated[float | None, tyro.conf.arg(metavar="MB/S")] = None,
    spill: Path | None = None,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    redo: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = (),
    on_error: Literal["quarantine", "stop"] = "quarantine",
    accept: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="REASON")] = (),
    ignore: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = (),
    no_space_check: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Make a dataset directory of some images only, from links to the tars that contain them.

    Each tar of SA-1B contains a contiguous block of image ids, in random order. The tar of an image is
    estimated from its id, and the tars beside it are read if the image is not in it. A tar is read only until
    all of its wanted images are found, and an image is excluded by the range of the ids read so far. The task
    files record that the sources are not complete: `sa1b reshard` converts them completely.

    Args:
        source: Tars, folders of extracted pairs, folders that contain these, or URLs of tars, as for
            `sa1b reshard`.
        ids: The wanted images: a text file with one id per line (223750, sa_223750 or sa_223750.jpg), a CSV,
            TSV, Parquet or JSON file with a column of ids or names (image_id, file_name, image, img_path,
            image_path or id, or the column after a colon), such as a list of captions, or the .ids file of a
            view. Rows that name images of other datasets are left out. With --images-only also names of
            files: cats/1.jpg, in any source, or SOURCE/cats/1.jpg.
        out: Folder for the shards, created if it is missing, or a URL such as s3://BUCKET/FOLDER.
        links: Meta's list of links to the tars of SA-1B (file_name, tab, cdn_link). Links expire: a later
            run may use a newer list.
        index: Dataset directory, index or task file of the same tars, such as one with small images: it
            determines the tar of each image that it contains.
        search_all: Read tars to their end, and all tars for an image that is not in the expected ones: for
            tars with other blocks of ids than those of SA-1B.
        images_per_shard: Images in a shard; 1024 images take about 1 GB.
        image_size: Re-encode images so that the longer side has this many pixels, 16 to 65500; masks stay at
            source resolution. By default images keep their original bytes.
        quality: JPEG quality of re-encoded images, 1 to 100, by default 95. Only with --image-size.
        keep_json: Also store the annotation files verbatim. Exports have the original values without it.
        no_index_runs: Omit the decoded masks from the index, which saves about 26 kB per image.
        decode_images: Decode every JPEG and refuse those that fail.
        annotations_only: Store annotations and indexes without images, as in `sa1b reshard`.
        images_only: The sources are images without annotations, as for `sa1b reshard`: tars, folders and
            Parquet files. Each is read until its last wanted image. An image that cannot be read counts as
            missing.
        max_pixels: Largest accepted image in pixels, at most 268435456.
        workers: Worker processes, each with one source at a time and up to 600 MB of memory.
        connections: Requests at the same time for each tar that is read from a URL.
        max_rate: Limit of the bytes read from URLs, in MB per second, over all workers.
        spill: Folder for images that wait for their annotation; by default inside --out or --scratch.
        scratch: With a URL as --out: local folder for the shards of a source until they are uploaded; by
            default sa1b-USERID in the system's folder for temporary files.
        redo: Read the images again that OUT has of the source of this name, even if its task file is damaged.
            SOURCE must contain it. May be repeated.
        on_error: For a pair that cannot be used: quarantine it with the reason, or stop the run.
        accept: A reason that may be frequent, see `sa1b reshard`. May be repeated.
        ignore: Ignore files and folders whose name, or path below SOURCE, matches this pattern. May be
            repeated.
        no_space_check: Start even if the disk seems too small.
        json_output: Print the summary as JSON, without progress.
    """
    if not source and links is None:
        raise UsageError(f"--out {out}: no SOURCE to read; add tars, folders or --links, see --help")
    quality = checked_quality(image_size, quality, annotations_only=annotations_only)
    check_rate("--max-rate", max_rate)
    store = store_of(out, scratch, endpoint, source)
    with loading():
        from sa1b.ingest.fetch import fetch
        from sa1b.ingest.policy import IngestRun, Policy
        from sa1b.ingest.start_checks import source_names
        from sa1b.shards.documents import Options
        from sa1b.shards.file_names import SoughtNames
        from sa1b.shards.image_ids import read_image_ids
        from sa1b.sources.mirror import formats_of
    rate = None if max_rate is None else max_rate * 1e6 / workers
    formats = formats_of(max_pixels=max_pixels, images_only=images_only)
    all_links = linked(source, links, connections, rate, endpoint)
    names = None
    if images_only:
        sources = source_names(paths_of(source), all_links, store, rename={}, ignore=ignore, formats=formats)
        names = SoughtNames(frozenset(sources))
    summary = fetch(
        read_image_ids(ids, names),
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
            workers=workers,
            redo=redo,
            ignore=ignore,
            formats=formats,
            links=all_links,
            space_check=not no_space_check,
            quiet=json_output,
        ),
        index=index,
        everywhere=search_all or images_only,
        names=names,
    )
    present(summary, json_output)
    return summary.exit_code()
