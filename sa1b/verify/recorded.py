"""Records about the shards in the files of a dataset directory, as input of a rebuild."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sa1b.console import command
from sa1b.errors import ManifestError
from sa1b.names import SHARD_PREFIX
from sa1b.shards import manifest
from sa1b.shards.commit import shard_files
from sa1b.shards.index_reader import UNREADABLE, IndexReader
from sa1b.shards.manifest import DATASET, Options, ShardInfo, Task
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.verify.index_rebuild import RebuiltIndex


@dataclass(slots=True)
class Recorded:
    """Records about shards in the files of a folder.

    Attributes:
        infos: shard -> its entry in the task file or dataset.json.
        versions: shard -> versions of the libraries that wrote it.
        index_runs: True if indexes contain the decoded masks.
    """

    tasks: dict[str, Task]
    dataset: dict[str, Any] | None
    infos: dict[str, ShardInfo]
    versions: dict[str, dict[str, str]]
    index_runs: bool

    @classmethod
    def read(cls, root: Root) -> "Recorded":
        """Read the records. A damaged task file counts as lost."""
        store = open_store(root)
        tasks = manifest.readable_tasks(store)[0]  # the others are rebuilt from the shards
        try:
            dataset = manifest.read_dataset(store)
            infos = {shard["name"]: ShardInfo(**shard) for shard in dataset["shards"]}
            versions = {name: dict(dataset["versions"]) for name in infos}
            index_runs = Options(**dataset["options"]).index_runs
        except (ManifestError, OSError, TypeError):
            dataset, infos, versions, index_runs = None, {}, {}, _indexes_hold_runs(store)
        for task in tasks.values():
            infos |= {shard.name: shard for shard in task.shards}
            versions |= {shard.name: task.versions for shard in task.shards}
            index_runs = task.options.index_runs
        return cls(tasks, dataset, infos, versions, index_runs)


def check_digests(root: Root, recorded: Recorded, rewritten: Mapping[str, str]) -> None:
    """Refuse to write dataset.json over task files that the present one lists with other digests.

    Args:
        rewritten: source -> digest of the task file that an interrupted rebuild wrote.

    Raises:
        ManifestError: a task file has another digest; the message names it.
    """
    sources = (recorded.dataset or {}).get("sources", {})
    for name, task in recorded.tasks.items():
        digest = manifest.task_digest(task)
        if name in sources and digest not in (sources[name], rewritten.get(name)):
            path = open_store(root).url(manifest.task_name(name))
            raise ManifestError(
                f"{path}: not the one that {DATASET} lists; restore it from a copy, or run "
                f"`{command('reshard')}` again with that source and --redo {name}; if {DATASET} is damaged "
                "instead, remove it"
            )


def _indexes_hold_runs(store: Store) -> bool:
    for name in store.names("", ".parquet"):
        if name.startswith(SHARD_PREFIX):
            with contextlib.suppress(*UNREADABLE), store.files(name) as (path,):
                reader = IndexReader(path)
                reader.close()
                return reader.with_runs
    return True


def differs(built: RebuiltIndex, recorded: Recorded) -> bool:
    """Whether an index has other bytes than recorded."""
    info = recorded.infos.get(built.info.name)
    return info is not None and built.info.index_sha256 != info.index_sha256


def why_differs(shard: str, recorded: Recorded) -> str:
    """A note on a shard whose index has other bytes than recorded."""
    now = manifest.versions()
    then = now | recorded.versions[shard]
    changed = [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]]
    why = f"it was written with {', '.join(changed)}" if changed else "the task file may have been changed"
    return f"{shard_files(shard)[1]}: its bytes differ from the recorded ones: {why}"
