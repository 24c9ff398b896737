"""What a root says of itself, checked: dataset.json, the task files and samples.bin against each other, and
against what the shards turn out to hold."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sa1b.errors import ManifestError, TableError
from sa1b.names import SHARD_PREFIX, parse_shard_name, shard_order
from sa1b.shards import manifest
from sa1b.shards.manifest import DATASET, TASKS, ShardInfo, Task
from sa1b.shards.sample_table import SampleTable, open_table, read_facts
from sa1b.shards.shard import index_path
from sa1b.storage.publish import json_bytes
from sa1b.verify.places import Claim
from sa1b.verify.report import Finding, Report, ShardResult, remake, short

_TABLE_HEADER, _TABLE_HEADER_USED = 128, 88  # bytes, see sa1b.shards.sample_table


class RootCheck:
    """Checks the files of a root that are not of one shard; its findings and notes go into `report`.

    First `claims`, then the shards, then `sums` and `leftovers`.
    """

    def __init__(self, root: Path, report: Report) -> None:
        self.root, self.report = root, report
        self.remake = remake(root)
        self.tasks: dict[str, Task] = {}
        self.tasks_whole = True
        self.dataset: dict[str, Any] | None = None
        self.shards: dict[str, ShardInfo] = {}
        self.samples = manifest.table_name(root)

    def _find(self, kind: str, file: str, message: str, remedy: str, image_id: int | None = None) -> None:
        self.report.findings.append(Finding(kind, file, message, remedy, image_id=image_id))

    def claims(self) -> list[Claim]:
        """Read and compare the files; what they say of every shard."""
        self._read_tasks()
        self._read_dataset()
        owners = {shard.name: task for task in self.tasks.values() for shard in task.shards}
        for name in [name for name in self.shards if not parse_shard_name(name)]:
            self._find("shard_name", DATASET, f"{name!r} is no name of a shard", self.remake)
            del self.shards[name]
        numbers = self._numbers()
        comparable = self._check_table(len(numbers))
        claims = []
        for name, info in sorted(self.shards.items()):
            number = numbers.get(name) if comparable else None
            owner = owners.get(name)
            if owner is None:
                claims.append(Claim(info, number=number))
            else:
                options = owner.options
                claims.append(Claim(info, owner.name, number, options.keep_json, options.index_runs))
        return claims

    def _read_tasks(self) -> None:
        for path in sorted((self.root / TASKS).glob("*.json")):
            try:
                task = manifest.read_task(path)
            except (ManifestError, OSError, ValueError) as error:
                self.tasks_whole = False
                message = str(error).removeprefix(f"{path}: ")
                self._find("task_unreadable", f"{TASKS}/{path.name}", message, _again(path))
                continue
            self.shards |= {shard.name: shard for shard in task.shards}
            problem = _task_problem(path, task)
            if problem is None:
                self.tasks[path.stem] = task
            else:
                self.tasks_whole = False
                self._find("task_damaged", f"{TASKS}/{path.name}", problem, _again(path))
        if not self.tasks and self.tasks_whole:
            self.tasks_whole = False
            message = "no task file is there: which source each shard came from is unknown"
            remedy = f"restore {self.root / TASKS} from a copy; or `python tools/index.py {self.root}`"
            self._find("tasks_missing", TASKS, message, remedy)

    def _read_dataset(self) -> None:
        try:
            raw = (self.root / DATASET).read_bytes()
            self.dataset = manifest.read_dataset(self.root)
            listed = {shard["name"]: ShardInfo(**shard) for shard in self.dataset["shards"]}
        except (ManifestError, OSError, KeyError, TypeError, ValueError) as error:
            missing = not (self.root / DATASET).exists()
            message = "not there; reshard was interrupted, or it was removed" if missing else short(error)
            self._find(f"dataset_{'missing' if missing else 'unreadable'}", DATASET, message, self.remake)
            self.dataset = None
            return
        if raw != json_bytes(self.dataset):
            self._find("dataset_form", DATASET, "not the bytes that are written for its content", self.remake)
        if self.tasks_whole:
            self._compare_dataset(self.dataset)
        self.shards = listed | self.shards

    def _compare_dataset(self, dataset: dict[str, Any]) -> None:
        """Against what the task files and samples.bin give."""
        try:
            with (self.root / self.samples).open("rb") as file:
                facts = read_facts(file)
            said = dataset["samples"].get("sha256")  # see _check_table
            expected = json.loads(
                manifest.dataset_document(
                    self.tasks,
                    self.samples,
                    replace(facts, sha256=said),
                    dataset.get("failed"),
                    dataset.get("pending", ()),
                )
            )
        except FileNotFoundError:
            return  # named by the check of the table
        except Exception as error:
            # Whatever a damaged task file or table holds.
            message = f"cannot be compared with the task files: {short(error)}"
            self._find("dataset_differs", DATASET, message, self.remake)
            return
        for path, one, other in _differences(_by_name(dataset), _by_name(expected)):
            message = f"{path} is {one}; the task files and {self.samples} give {other}"
            self._find("dataset_differs", DATASET, message, self.remake)

    def _numbers(self) -> dict[str, int]:
        """Shard -> its number in samples.bin."""
        names = (
            [shard["name"] for shard in self.dataset["shards"]]
            if self.dataset
            else sorted(self.shards, key=shard_order)
        )
        return {name: number for number, name in enumerate(names)}

    def _check_table(self, shards: int) -> bool:
        """Whether the rows of samples.bin can be held against the shards."""
        path = self.root / self.samples
        try:
            table = open_table(path)
        except FileNotFoundError:
            self._find("table_missing", self.samples, "not there", self.remake)
            return False
        except (TableError, OSError) as error:
            self._find("table_unreadable", self.samples, str(error).removeprefix(f"{path}: "), self.remake)
            return False
        whole = True
        try:
            open_table(path, check=True)
        except TableError as error:
            whole = False
            self._find("table_digest", self.samples, str(error).removeprefix(f"{path}: "), self.remake)
        with path.open("rb") as file:
            if file.read(_TABLE_HEADER)[_TABLE_HEADER_USED:].strip(b"\0"):
                whole = False
                self._find(
                    "table_header",
                    self.samples,
                    "unused bytes of the header are not zero",
                    self.remake,
                )
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self._check_rows(table, shards)
        said = self.dataset.get("samples") if self.dataset is not None else None
        if isinstance(said, dict) and (
            said.get("columns_sha256") != table.digest or (whole and said.get("sha256") != sha256)
        ):
            self._find("table_of_another", self.samples, f"not the one that {DATASET} names", self.remake)
        return self.dataset is not None or self.tasks_whole

    def _check_rows(self, table: SampleTable, shards: int) -> None:
        ids = table.image_id
        if hashlib.sha256(ids.tobytes()).hexdigest() != table.ids_digest:
            self._find("table_ids_digest", self.samples, "the image ids do not fit their digest", self.remake)
        for row in (ids[1:] <= ids[:-1]).nonzero()[0][:1].tolist():
            message = f"row {row + 1:,} is not in the order of image ids"
            self._find("table_order", self.samples, message, self.remake, int(ids[row + 1]))
        for row in (table.shard >= shards).nonzero()[0].tolist():
            message = f"row {row:,} names shard {table.shard[row]} of {shards:,}"
            self._find("table_shard", self.samples, message, self.remake, int(ids[row]))

    def sums(self, results: dict[str, ShardResult]) -> None:
        """What a task file counted against what its shards hold, unless these are damaged anyway."""
        for name, task in self.tasks.items():
            parts = [results[shard.name] for shard in task.shards if shard.name in results]
            if len(parts) == len(task.shards) and not any(part.findings for part in parts):
                self._sum(f"{TASKS}/{name}.json", task, parts)

    def _sum(self, file: str, task: Task, parts: list[ShardResult]) -> None:
        remedy = (
            f"restore {self.root / file} from a copy; or remove it and run tools/reshard.py with that source"
        )
        found: dict[str, int] = {
            "images": sum(part.images for part in parts),
            "masks": sum(part.masks for part in parts),
            "jpg_bytes": sum(part.jpg_bytes for part in parts),
        }
        for part in parts:
            for what, value in part.largest.items():
                found[f"largest {what}"] = max(value, found.get(f"largest {what}", 0))
        recorded = {**task.counts, **{f"largest {what}": value for what, value in task.largest.items()}}
        for what, value in found.items():
            if recorded.get(what, value) != value:
                message = f"{what}: {recorded[what]} recorded, {value:,} in the shards"
                self._find("task_counts", file, message, remedy)
        if task.source.get("sha256") is None or not self.report.deep:
            return  # made again without its source: what ingest doubted is not known
        for reason in ("area", "bbox", "empty_mask"):
            odd = [(part.name, *place) for part in parts for place in part.odd.get(reason, [])]
            known = task.counts["doubtful"].get(reason, 0)
            if len(odd) == known:
                continue
            for shard, offset, image_id in odd:
                message = f"{reason} is not that of the mask; reshard counted {known}, now {len(odd)}"
                self.report.findings.append(
                    Finding(f"odd_{reason}", shard, message, remedy, shard, offset, image_id)
                )

    def leftovers(self) -> None:
        """Files that nothing claims: an interrupted run leaves them, the next one replaces them."""
        claimed = set(self.shards) | {index_path(Path(name)).name for name in self.shards}
        found = sorted(name for name in shards_on_disk(self.root) if name not in claimed)
        if found:
            shown = ", ".join(found[:5]) + (f" and {len(found) - 5:,} more" if len(found) > 5 else "")
            self.report.notes.append(
                f"{len(found):,} files that no task file claims, as an interrupted run leaves them: {shown}; "
                "finish that run with tools/reshard.py, or remove them"
            )
        partial = sorted(path.name for path in self.root.glob(".*partial"))
        if partial:
            self.report.notes.append(
                f"unfinished files of an interrupted run, to be removed: {', '.join(partial)}"
            )


def shards_on_disk(root: Path) -> Iterator[str]:
    """Names of all tars and indexes there, whether or not anything claims them."""
    return (path.name for path in root.glob(f"{SHARD_PREFIX}*") if path.suffix in (".tar", ".parquet"))


def _by_name(dataset: dict[str, Any]) -> dict[str, Any]:
    return {**dataset, "shards": {shard["name"]: shard for shard in dataset["shards"]}}


def _differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Where two JSON documents differ: path, one value, the other."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in dict.fromkeys([*one, *other]):
            below = f"{path}.{key}" if path else key
            found += _differences(one.get(key, "missing"), other.get(key, "missing"), below)
        return found
    return [] if one == other and type(one) is type(other) else [(path, one, other)]


def _again(task_file: Path) -> str:
    return (
        f"{task_file}: restore it from a copy; or remove it and run tools/reshard.py again with that source"
    )


def _task_problem(path: Path, task: Task) -> str | None:
    """What is wrong with a task file that can be read: anything that is not as it is written."""
    raw = path.read_bytes()
    document = json.loads(raw)
    if raw != json_bytes(document):
        return "not the bytes that are written for its content"
    if task.name != path.stem:
        return f"is of the source {task.name!r}"
    if not document["versions"].keys() >= manifest.versions().keys():
        return f"versions are those of {', '.join(document['versions'])}"
    sha256 = task.source["sha256"]
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", str(sha256)):
        return f"sha256 of the source is {sha256!r}"
    return None
