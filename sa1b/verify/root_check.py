"""Checks of the files that belong to the whole dataset directory: dataset.json, the sample table, the task
files, views and quarantine. They also give the expectations for every shard.

No file is locked: reshard may run at the same time. The sources that it is writing are noted and not checked.
The check is of one version of dataset.json: it starts again if another process writes it while the files
beside it are read. The shards of a version stay valid until their source is replaced or dropped; `conclude`
detects this.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sa1b.errors import ManifestError, TableError
from sa1b.names import shard_order, source_stem
from sa1b.shards import manifest
from sa1b.shards.documents import Options, ShardInfo
from sa1b.shards.manifest import DATASET, READING, TASKS, all_shards
from sa1b.shards.sample_table import SampleTable, TableFacts, open_table
from sa1b.storage.atomic import json_bytes
from sa1b.storage.claim import ENDING, live_holders
from sa1b.storage.open import open_store
from sa1b.storage.store import Root
from sa1b.verify.image_list_check import QuarantineCheck, check_views
from sa1b.verify.member_check import ExpectedShard, ShardResult
from sa1b.verify.report import Findings, Problem, VerifyRemedy, VerifyReport, short
from sa1b.verify.task_check import TaskCheck, leftover_notes, unlisted_notes, unlisted_shards

_TABLE_HEADER, _TABLE_HEADER_USED = 128, 88  # bytes, see sa1b.shards.sample_table
_TRIES = 10  # attempts to read all files of one version of dataset.json


class RootCheck:
    """Checks a dataset directory; its findings and notes go into `report`.

    Call `expected`, check the shards, then call `conclude`, all in the context of the object: the copy of the
    sample table of a bucket, `table_path`, exists until it ends; None: it cannot be compared with the shards.
    """

    def __init__(self, root: Root, report: VerifyReport) -> None:
        self.store, self.report = open_store(root), report
        self._files = contextlib.ExitStack()
        self._reset()

    def _reset(self) -> None:
        self._files.close()
        self.report.found, self.report.notes = Findings(), []
        self.remedy = VerifyRemedy(self.store.root)
        self.table_path: Path | None = None
        self.raw = b""
        self.dataset: dict[str, Any] | None = None
        self.listed: dict[str, ShardInfo] = {}  # shards of dataset.json
        self.shards: dict[str, ShardInfo] = {}  # all that are checked
        self.table: SampleTable | None = None
        self.active: dict[str, str] = {}  # source -> the process that works on it

    def __enter__(self) -> "RootCheck":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _find(self, kind: str, file: str, message: str, image_id: int | None = None) -> None:
        self.report.found.add(Problem(kind, file, message, self.remedy.tables(), image_id=image_id))

    def expected(self) -> list[ExpectedShard]:
        """Read and compare the files; return what is expected of every shard, as dataset.json orders them."""
        for _ in range(_TRIES):
            expected = self._expected()
            if self._is_current():
                break
            self._reset()
        else:
            expected = self._expected()
        return expected

    def _is_current(self) -> bool:
        try:
            return self.store.read(DATASET) == self.raw
        except OSError:
            return not self.raw

    def _expected(self) -> list[ExpectedShard]:
        self._read_dataset()
        self.active = self._active()
        sources = None if self.dataset is None else self.dataset["sources"]
        self.tasks = TaskCheck(self.store, self.remedy, sources, self.active)
        self.remedy = self.tasks.remedy
        self.report.found.merge(self.tasks.findings)
        self.tasks.findings = Findings()
        owners = {shard.name: task for task in self.tasks.tasks.values() for shard in task.shards}
        claimed = {shard.name: shard for task in self.tasks.tasks.values() for shard in task.shards}
        if self.dataset is None:
            self.shards = claimed
        else:
            intact = {name for name in claimed if owners[name].name in self.tasks.intact}
            self.shards = self.listed | {name: claimed[name] for name in intact & self.listed.keys()}
            self._compare_dataset(self.dataset)
        active = {source_stem(name) for name in self.active}
        for name in [name for name in self.shards if name not in owners and shard_order(name).stem in active]:
            del self.shards[name]
        numbers = {
            name: number for number, name in enumerate(self.listed or sorted(self.shards, key=shard_order))
        }
        table = self._check_table(len(numbers))
        expected = []
        for name in sorted(self.shards, key=shard_order):
            owner = owners.get(name)
            # Expectations for shards do not come from a damaged task file.
            options = self.remedy.options or (None if owner is None else owner.options)
            expected.append(
                ExpectedShard(
                    self.shards[name],
                    source=self._source_of(name) if owner is None else owner.name,
                    table=table if name in numbers else None,
                    number=numbers.get(name, 0),
                    keep_json=None if options is None else options.keep_json,
                    index_runs=None if options is None else options.index_runs,
                    annotations_only=None if options is None else options.annotations_only,
                )
            )
        return expected

    def _active(self) -> dict[str, str]:
        try:
            return {name: str(holder) for name, holder in live_holders(self.store, TASKS).items()}
        except OSError:
            # The age of a claim is measured with a new file. If none can be created, every claim counts.
            claims = self.store.names(TASKS, ENDING)
            return {name.removesuffix(ENDING): "another process" for name in claims}

    def _read_dataset(self) -> None:
        try:
            self.raw = self.store.read(DATASET)
            dataset = manifest.parse_dataset(self.raw, self.store.url(DATASET))
            self.listed = {shard["name"]: ShardInfo(**shard) for shard in dataset["shards"]}
            self.remedy = replace(
                self.remedy, options=Options(**dataset["options"]), readings=dataset.get(READING, {})
            )
        except (ManifestError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            missing = isinstance(error, FileNotFoundError)
            message = "not there: reshard was interrupted, --finish has not run, or it was removed"
            message = message if missing else short(error)
            self._find(f"dataset_{'missing' if missing else 'unreadable'}", DATASET, message)
            self.listed = {}
            return
        self.dataset = dataset
        if self.raw != json_bytes(dataset):
            self._find("dataset_form", DATASET, "not the bytes that are written for its content")
        if dataset["options"].get("annotations_only"):
            self.report.notes.append("annotations only; the shards contain no images to check")
        failed, pending = dataset.get("failed", {}), dataset.get("pending", [])
        if failed or pending:
            self.report.notes.append(
                f"partial: failed sources {len(failed):,}, pending {len(pending):,}; {DATASET} lists them"
            )

    def _compare_dataset(self, dataset: dict[str, Any]) -> None:
        tasks = {
            name: self.tasks.tasks[name] for name in sorted(self.tasks.intact & dataset["sources"].keys())
        }
        whole = tasks.keys() == dataset["sources"].keys()
        try:
            samples = dict(dataset["samples"])
            name = samples.pop("name")
            if whole:
                written = manifest.dataset_document(
                    tasks, name, TableFacts(**samples), dataset.get("failed"), dataset.get("pending", ())
                )
                expected, actual = json.loads(written), dataset
            else:  # those that could be read
                expected = {"shards": [asdict(shard) for shard in all_shards(tasks.values())]}
                names = {shard["name"] for shard in expected["shards"]}
                actual = {"shards": [shard for shard in dataset["shards"] if shard["name"] in names]}
        except Exception as error:
            # A damaged file may contain values of any type, so any error is possible here.
            self._find("dataset_differs", DATASET, f"cannot be compared with the task files: {short(error)}")
            return
        for path, value, other in _differences(_by_name(actual), _by_name(expected)):
            self._find("dataset_differs", DATASET, f"{path} is {value}; the task files give {other}")

    def _check_table(self, shards: int) -> str | None:
        """The file name of the sample table if its rows can be compared with the shards."""
        name = manifest.table_name(self.store)
        if name is None:
            self._find("table_missing", "samples-*.bin", "not there")
            return None
        (path,) = self._files.enter_context(self.store.files(name))
        try:
            table = open_table(path, self.store.root)
            with path.open("rb") as file:
                header = file.read(_TABLE_HEADER)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            self._find("table_missing", name, "not there")
            return None
        except (TableError, OSError) as error:
            self._find("table_unreadable", name, str(error).removeprefix(f"{path}: "))
            return None
        whole = True
        try:
            open_table(path, self.store.root, check=True)
        except TableError as error:
            whole = False
            self._find("table_digest", name, str(error).removeprefix(f"{path}: "))
        self.table = table if whole else None  # views and quarantine are compared with an intact table only
        if header[_TABLE_HEADER_USED:].strip(b"\0"):
            whole = False
            self._find("table_header", name, "unused bytes of the header are not zero")
        self._check_rows(name, table, shards)
        listed = {} if self.dataset is None else self.dataset["samples"]
        actual = {
            "columns_sha256": table.digest,
            "ids_sha256": table.ids_digest,
            "bytes": path.stat().st_size,
        }
        if whole:  # otherwise there is already a finding for the file
            actual["sha256"] = sha256
        if listed and any(listed.get(what) != value for what, value in actual.items()):
            self._find("table_of_another", name, f"not the one {DATASET} was written with")
            self.table = None
        if self.dataset is None and not self.tasks.whole:
            return None
        self.table_path = path
        return name

    def _check_rows(self, name: str, table: SampleTable, shards: int) -> None:
        ids = table.image_id
        if hashlib.sha256(ids.tobytes()).hexdigest() != table.ids_digest:
            self._find("table_ids_digest", name, "the image ids do not match their digest")
        for row in (ids[1:] <= ids[:-1]).nonzero()[0][:1].tolist():
            self._find(
                "table_order", name, f"row {row + 1:,} is not in the order of image ids", int(ids[row + 1])
            )
        for row in (table.shard >= shards).nonzero()[0].tolist():
            message = f"row {row:,} lists shard {table.shard[row]} of {shards:,}"
            self._find("table_shard", name, message, int(ids[row]))

    def conclude(self, results: dict[str, ShardResult]) -> None:
        """Run the checks that need the results of the shards, and the checks of views and quarantine."""
        names = self.store.names("")
        newest = RootCheck(self.store, VerifyReport(self.store.root, self.report.deep))
        newest.active = newest._active()
        newest._read_dataset()
        changed = self._changed(newest)
        gone = {
            name
            for name, result in results.items()
            if self._source_of(name) in changed
            or (self._source_of(name) in newest.active and (len(result.findings) or result.unchecked))
        }
        for name in gone:
            del results[name]
        if gone:
            self.report.notes.append(
                f"{len(gone):,} shards were replaced or dropped while they were checked: check again"
            )
        for result in results.values():
            self.report.found.merge(result.findings)
        self.tasks.counts(results, deep=self.report.deep)
        self.report.found.merge(self.tasks.findings)
        findings, notes = check_views(self.store, self.table if newest.raw == self.raw else None)
        self.report.found.merge(findings)
        self.report.notes += notes
        others = (newest.sources | newest.active.keys()) - self.sources
        beside = self.active.keys() | set(self.tasks.unlisted) | changed
        listed = {name: task for name, task in self.tasks.tasks.items() if name not in beside}
        quarantine = QuarantineCheck(self.store, self.remedy, listed, beside | others, self.table)
        self.report.found.merge(quarantine.findings)
        self.report.notes += quarantine.notes
        files = unlisted_shards(names, self.tasks, {*self.shards, *newest.listed}, others)
        images = None if self.table is None else self.table.image_id
        known = {*self.sources, *self.tasks.tasks, *newest.sources}
        notes, self.report.unlisted_images = unlisted_notes(self.store, files, images, known)
        self.report.notes += notes
        self.report.notes += leftover_notes(
            self.store,
            self.tasks,
            others,
            (newest.dataset or {}).get("failed", {}),
            damaged=bool(len(self.report.found)),
        )
        everything = self.remedy.everything()
        # --tables needs every task file
        if any(everything in problem.remedy for problem in self.report.found.kept):
            self.report.found.kept = [
                replace(problem, remedy=everything) if problem.remedy == self.remedy.tables() else problem
                for problem in self.report.found.kept
            ]
        self._misplaced(results)

    def _misplaced(self, results: dict[str, ShardResult]) -> None:
        """Replace all advice if shards have each other's content: `sa1b index` restores them from it."""
        by_digest = {info.sha256: name for name, info in self.shards.items()}
        misplaced = {}
        for name, result in results.items():
            other = by_digest.get(result.sha256, name)
            if other != name and other in results and results[other].sha256 != result.sha256:
                misplaced[name] = other
        for name, other in misplaced.items():
            message = f"has the content of {other}"
            self.report.found.add(Problem("tar_of_another", name, message, "", name))
        if misplaced:
            remedy = self.remedy.names(sorted(misplaced))
            self.report.found.kept = [replace(problem, remedy=remedy) for problem in self.report.found.kept]

    @property
    def sources(self) -> set[str]:
        """Names of the sources of dataset.json."""
        return set() if self.dataset is None else set(self.dataset["sources"])

    def _source_of(self, shard: str) -> str | None:
        stem = shard_order(shard).stem
        names = (*self.sources, *self.tasks.tasks, *self.active)
        return next((name for name in names if source_stem(name) == stem), None)

    def _changed(self, newest: "RootCheck") -> set[str]:
        """Sources of dataset.json that were replaced or dropped since."""
        if self.dataset is None or newest.dataset is None:
            return set()
        now = newest.dataset["sources"]
        return {name for name, digest in self.dataset["sources"].items() if now.get(name) != digest}


def _by_name(dataset: dict[str, Any]) -> dict[str, Any]:
    return {**dataset, "shards": {shard["name"]: shard for shard in dataset["shards"]}}


def _differences(value: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Differences of two JSON documents: path, first value, second value."""
    if isinstance(value, dict) and isinstance(other, dict):
        differences = []
        for key in dict.fromkeys([*value, *other]):
            below = f"{path}.{key}" if path else key
            differences += _differences(value.get(key, "missing"), other.get(key, "missing"), below)
        return differences
    return [] if value == other and type(value) is type(other) else [(path, value, other)]
