"""What the gallery shows, gathered from any input: a survey of all, and the chosen images."""

from collections.abc import Callable
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.gallery.indexes import read_indexes
from sa1b.gallery.members import read_members
from sa1b.gallery.selection import Choice, Gathered
from sa1b.shards import manifest
from sa1b.shards.shard import index_path
from sa1b.sources.discovery import discover
from sa1b.sources.source import Source
from sa1b.sources.tar_reader import is_tar


def gather(path: Path, choice: Choice, progress: Callable[[int], None]) -> Gathered:
    """Read an input once.

    Args:
        path: root, shard, source tar, folder of pairs or of tars.
        progress: called with the number of bytes done, of `total_bytes`.

    Raises:
        SourceError, ManifestError, ShardError: nothing there that can be shown.
        UsageError: an image asked for is not there.
    """
    if path.is_dir() and ((path / manifest.DATASET).exists() or (path / manifest.TASKS).is_dir()):
        gathered = _root(path, choice, progress)
    elif path.is_file() and index_path(path).exists():
        gathered = Gathered("Shard", path.name)
        read_indexes([path], choice, gathered, progress)
    else:
        gathered = Gathered("Source tar" if path.is_file() else "Folder", path.resolve().name)
        if read_members(sources(path), choice, gathered, progress) and path.is_file():
            gathered.kind = "Shard without index"
    missing = [image_id for image_id in choice.ids if image_id not in gathered.found]
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
        raise UsageError(f"--id: not in {path}: {listed}; it holds {gathered.survey.images:,} images")
    return gathered


def sources(path: Path) -> list[Source]:
    """The tars and folders behind a path; unlike for ingest, a single tar may have any name."""
    if path.is_file() and is_tar(path):
        stat = path.stat()
        return [Source(path.name, path, "tar", stat.st_size, stat.st_mtime_ns)]
    return discover([path]).sources


def total_bytes(path: Path) -> int:
    """What `gather` will report as progress, in bytes."""
    if path.is_dir() and (path / manifest.DATASET).exists():
        return sum(int(shard["index_bytes"]) for shard in manifest.read_dataset(path)["shards"])
    if path.is_file() and index_path(path).exists():
        return index_path(path).stat().st_size
    return sum(source.size for source in sources(path)) if path.exists() else 0


def _root(root: Path, choice: Choice, progress: Callable[[int], None]) -> Gathered:
    document = manifest.read_dataset(root)
    totals, options = document["totals"], document["options"]
    gathered = Gathered("Sharded dataset", root.resolve().name)
    names = [str(shard["name"]) for shard in document["shards"]]
    read_indexes([root / name for name in names], choice, gathered, progress)
    gathered.parts = [
        (name, shard["images"], shard["masks"], shard["bytes"] + shard["index_bytes"])
        for name, shard in zip(names, document["shards"], strict=True)
    ]
    made_from = [str(source) for source in document["sources"]]
    listed = ", ".join(made_from[:6]) + (f" … {made_from[-1]}" if len(made_from) > 6 else "")
    gathered.facts.append(("Sources", f"{len(made_from):,} ({listed})"))
    if options["image_size"] is not None:
        gathered.facts.append(("Stored pictures", f"longer side at most {options['image_size']:,} px"))
    gathered.facts.append(("Quarantined, doubtful", f"{totals['refused']:,}, {totals['doubtful']:,}"))
    return gathered
