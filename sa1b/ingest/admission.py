"""What a run of ingest may take: its sources, and the checks made before anything is written."""

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.names import is_source_name, source_stem
from sa1b.shards.manifest import FORMAT, TASKS, Options, Task
from sa1b.sources.discovery import Discovered, discover
from sa1b.sources.source import Source
from sa1b.storage.atomic import json_bytes
from sa1b.storage.claim import ENDING
from sa1b.storage.store import Store

OPTIONS = ".options.json"  # options of the first run, until a source is finished
_OUT_FACTOR, _SPILL_FACTOR = 1.1, 0.3  # of a source's size: its shards; what waits when the order is random
_NAME_LENGTH = 150  # files are named after the source, and a file name has at most 255 bytes
_LONGER_SIDE = 2250  # pixels of most images
_ANNOTATIONS = 0.1  # of a source's size, at most: what --image-size leaves as it is


def admitted(
    paths: Sequence[Path],
    rename: Mapping[Path, str],
    skip: Sequence[Path] = (),
    ignore: Sequence[str] = (),
) -> Discovered:
    """All sources, in the order of their names, and what is not taken; see `discover` for the arguments."""
    for path, name in rename.items():
        if not is_source_name(name):
            raise UsageError(
                f"--rename {path}={name}: the name goes into the shards' names; use letters, digits, '_', "
                "'-' and '.'"
            )
        if len(name) > _NAME_LENGTH:
            raise UsageError(f"--rename {path}={name}: a name has at most {_NAME_LENGTH} characters")
    return discover([*rename, *paths], ignore, skip=skip, rename=rename)


def check_options(root: Path, tasks: Mapping[str, Task], options: Options) -> None:
    for task in tasks.values():
        if (differs := task.options.difference(options)) is not None:
            raise UsageError(
                f"{root} was made with {differs[0]}, this run says {differs[1]}; "
                "all shards of a dataset are alike: use the same flags or another --out"
            )


def fix_options(root: Path, tasks: Mapping[str, Task], options: Options) -> None:
    """Record the options of the first run in a new dataset directory, before any source is worked on.

    Of several runs that start at once the first one decides. Where sources are finished, their task files
    decide, see `check_options`.

    Raises:
        UsageError: another run has recorded other options.
    """
    store = Store(root)
    data = json_bytes({"format": FORMAT, "options": asdict(options)})
    if tasks or store.put_if_absent(OPTIONS, data):
        return
    path = store.path(OPTIONS)
    try:
        recorded = Options(**json.loads(path.read_bytes())["options"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: damaged; remove it if no other run works in {root}") from None
    if (differs := recorded.difference(options)) is not None:
        raise UsageError(
            f"{root}: a run that started before has {differs[0]}, this run says {differs[1]}; all shards of "
            f"a dataset are alike: use the same flags or another --out, or remove {path} if no other run "
            "works there"
        )


def release_options(root: Path) -> None:
    """Forget the recorded options where no source is finished and no run works: others may be chosen."""
    store = Store(root)
    if not store.names(TASKS, ".json") and not store.names(TASKS, ENDING):
        store.remove(OPTIONS)


def check_names(root: Path, tasks: Mapping[str, Task], sources: list[Source]) -> None:
    taken = {source_stem(name): name for name in tasks}
    for source in sources:
        other = taken.get(source_stem(source.name), source.name)
        if other != source.name:
            raise UsageError(
                f"{source.path}: {root} holds a source named {other!r} already, and the shards of both would "
                f"have the same names; add --rename {shlex.quote(f'{source.path}=NEW_NAME')}, or use another "
                "--out"
            )


def check_space(sources: list[Source], root: Path, options: Options, spill: Path, workers: int) -> None:
    """Refuse before starting what cannot fit."""
    if not sources:
        return
    spill.mkdir(parents=True, exist_ok=True)
    factor = _OUT_FACTOR
    if options.image_size is not None:
        factor = min(factor, _ANNOTATIONS + (options.image_size / _LONGER_SIDE) ** 2)
    out = int(factor * sum(source.size for source in sources))
    largest = sorted((one.size for one in sources if one.kind == "tar"), reverse=True)[:workers]
    waits = int(_SPILL_FACTOR * sum(largest))
    same = root.stat().st_dev == spill.stat().st_dev
    for folder, need, flag in ((root, out + waits * same, "--out"), (spill, waits, "--spill")):
        free = shutil.disk_usage(folder).free
        if free < need:
            raise UsageError(
                f"{folder}: {free / 1e6:,.0f} MB free, about {need / 1e6:,.1f} MB needed; name a larger disk "
                f"with {flag}, or fewer sources at a time, or start all the same with --no-space-check"
            )
