"""The check of a whole dataset directory: its own files, then every shard, several at a time.

Worker processes take the shards in batches, because starting a process costs as much as reading 1 GB. If one
dies, only its current shard is affected; the others of its batch go to a new process.
"""

import atexit
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sa1b.console import command
from sa1b.errors import Sa1bError, UsageError
from sa1b.report import bar
from sa1b.shards.index_file import shard_files
from sa1b.shards.manifest import DATASET, TASKS, no_dataset
from sa1b.shards.staging import clean_scratch
from sa1b.storage.atomic import ResumeRecord
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.verify.layer_check import check_layers
from sa1b.verify.member_check import ExpectedShard, ShardResult
from sa1b.verify.report import Problem, VerifyRemedy, VerifyReport, short
from sa1b.verify.root_check import RootCheck
from sa1b.verify.shard_check import check_shard
from sa1b.verify.task_check import files_of_shards
from sa1b.workers import Failure, Supervise, supervise

BATCH = 16  # shards
_DEATHS = 2  # attempts at one shard whose process dies
_REPORT_SECONDS = 0.2


def verify(
    root: Root,
    *,
    deep: bool = False,
    workers: int = 1,
    state: Path | None = None,
    scratch: Path | None = None,
    quiet: bool = False,
    supervise: Supervise = supervise,
) -> VerifyReport:
    """Check everything in a dataset directory; damage is collected in the report, not raised.

    No file is changed or locked. Memory does not grow with the images of the dataset. With a URL, each
    process stores one shard and its index on the local disk at a time, in `scratch`.

    Args:
        deep: also decode every JPEG and every mask, and compare both copies of each.
        workers: processes at a time; 0 checks in the calling process, for debugging.
        state: file outside `root` that records finished shards. After an interruption, the same call resumes
            from it and returns the same report. It is removed at the end. Changed shards are checked again.

    Raises:
        ManifestError: `root` contains no dataset.
        UsageError: `state` cannot be used, or `scratch` has not enough space.
    """
    began = time.monotonic()
    store = open_store(root, scratch=scratch)
    check_is_dataset(store)
    if store.root.startswith(("http://", "https://")) and not store.names(TASKS):
        raise UsageError(
            f"{store.root}: the server lists no files, so that the directory cannot be checked; copy it to a "
            f"folder with `{command('copy')}` and check the copy"
        )
    where = store.identity
    if state is not None and state.resolve().is_relative_to(where):
        raise UsageError(
            f"--state {state}: is inside {store.root}, which a check does not change; name another folder"
        )
    report = VerifyReport(store.root, deep)
    with contextlib.ExitStack() as files:
        files.enter_context(clean_scratch(store))
        check = files.enter_context(RootCheck(store, report))
        expected = check.expected()
        store.check_scratch([shard.info.bytes + shard.info.index_bytes for shard in expected], workers)
        record = None
        if state is not None:
            record = files.enter_context(ResumeRecord(state, {"check": where, "deep": deep}))
        results = _check_shards(
            expected, check, deep=deep, workers=workers, record=record, quiet=quiet, supervise=supervise
        )
        for result in results.values():
            if result.unchecked is not None:
                report.unchecked[result.name] = result.unchecked
                continue
            report.shards += 1
            report.images += result.images
            report.masks += result.masks
            report.bytes += result.bytes
        check.conclude(results)
        check_layers(store, report, deep=deep, quiet=quiet)
        if record is not None:
            record.remove()
    report.seconds = time.monotonic() - began
    return report


def check_is_dataset(root: Root) -> None:
    """Raise ManifestError if a directory has none of the files of a dataset."""
    store = open_store(root)
    if store.is_local and not Path(store.root).is_dir():
        raise no_dataset(store.root)
    if not (
        store.exists(DATASET)
        or store.names(TASKS, ".json")
        or store.names(TASKS, ".claim")
        or next(files_of_shards(store), None)
    ):
        raise no_dataset(store.root)


def _check_shards(
    expected: list[ExpectedShard],
    check: RootCheck,
    deep: bool,
    workers: int,
    record: ResumeRecord | None,
    quiet: bool,
    supervise: Supervise,
) -> dict[str, ShardResult]:
    results: dict[str, ShardResult | None] = {shard.info.name: None for shard in expected}
    keys: dict[str, Any] = {}
    tasks = {}
    for shard in expected:
        name = shard.info.name
        if record is not None:
            keys[name] = [asdict(shard), *(check.store.version(file) for file in shard_files(name))]
            done = record.get(name, keys[name])
            if done is not None:
                results[name] = ShardResult.from_document(done)
                continue
        tasks[name] = (check.store, shard, check.remedy, check.table_path, deep)
    total = sum(shard.info.bytes for shard in expected)
    done_bytes = total - sum(shard.info.bytes for shard in expected if shard.info.name in tasks)
    findings = sum(len(result.findings) for result in results.values() if result is not None)
    with bar(total, "verify", "B", quiet) as progress:
        progress.update(done_bytes)
        done_shards = len(results) - len(tasks)
        checked = in_batches(_check, tasks, workers=workers, advance=progress.update, supervise=supervise)
        for name, value in checked:
            if isinstance(value, Died):
                result = _died(name, value.why)
            else:
                result = value
                if (
                    record is not None
                    and not result.unchecked
                    and "check_failed" not in result.findings.kinds()
                ):
                    record.add(name, keys[name], result.document())
            results[name] = result
            done_shards += 1
            findings += len(result.findings)
            progress.set_postfix(shards=done_shards, findings=findings, refresh=False)
    return {name: result for name, result in results.items() if result is not None}


def _check(
    store: Store, expected: ExpectedShard, remedy: VerifyRemedy, table: Path | None, deep: bool, progress: Any
) -> ShardResult:
    """Run check_shard; an unexpected error is also a finding."""
    try:
        if table is not None and not table.exists():  # on another machine than the caller's copy
            table = None if store.is_local else _table_copy(store, table.name)
            if table is None:  # replaced meanwhile
                expected = replace(expected, table=None)
        with store.files(*shard_files(expected.info.name)) as (tar, index):
            result = check_shard(expected, remedy, tar, index, table, deep=deep, progress=progress)
        if store.is_local or not len(result.findings):
            return result
        # The bytes may have been damaged in transit: only what a second copy shows too is reported.
        with store.files(*shard_files(expected.info.name)) as (tar, index):
            return check_shard(expected, remedy, tar, index, table, deep=deep)
    except StorageError as error:
        return ShardResult(expected.info.name, unchecked=short(error))
    except MemoryError:
        return ShardResult(expected.info.name, unchecked="not enough memory to check it")
    except Exception as error:
        if "can't start new thread" in str(error):
            return ShardResult(expected.info.name, unchecked=short(error))
        return _unfinished(expected.info.name, "check_failed", f"the check ended with {short(error)}")


_copies: dict[tuple[str, str], Path] = {}  # copies of sample tables that this process keeps until it ends


def _table_copy(store: Store, name: str) -> Path:
    if (store.root, name) not in _copies:
        files = contextlib.ExitStack()
        (_copies[store.root, name],) = files.enter_context(store.files(name))
        atexit.register(files.close)
    return _copies[store.root, name]


def _died(name: str, why: str) -> ShardResult:
    """The result for a shard whose processes died: damage, or unchecked if memory or threads were short."""
    # Without memory or threads a process is killed, aborts, or ends before it can answer. Another signal
    # comes from code that read the shard. A worker of Ray does not tell its signal.
    if any(sign in why for sign in ("out of memory", "without an answer", "the machine was lost")):
        return ShardResult(name, unchecked=why)
    return _unfinished(name, "check_died", why)


def _unfinished(name: str, kind: str, message: str) -> ShardResult:
    remedy = f"check again; if that fails too, restore {name} and its index from a copy"
    result = ShardResult(name)
    result.findings.add(Problem(kind, name, message, remedy, name))
    return result


@dataclass(frozen=True, slots=True)
class Died:
    """Result of a shard if every process that worked on it died; `why` describes the last death."""

    why: str


@dataclass(frozen=True, slots=True)
class _Begin:
    name: str


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    value: Any


def in_batches(
    function: Callable[..., Any],
    tasks: Mapping[str, tuple[Any, ...]],
    *,
    workers: int,
    advance: Callable[[int], object],
    supervise: Supervise = supervise,
) -> Iterator[tuple[str, Any]]:
    """Call function(*tasks[name], progress) for every shard; yield its name with the result or `Died`.

    The function is importable; `progress` takes a number of bytes, which is passed to `advance`. `workers` is
    the processes at a time; 0: in this process. An error of `function` is raised as Sa1bError or RuntimeError
    with its message; the other processes are ended.
    """
    if workers == 0:
        for name, arguments in tasks.items():
            yield name, function(*arguments, advance)
        return
    left = dict(tasks)
    deaths: Counter[str] = Counter()
    while left:
        size = max(1, min(BATCH, -(-len(left) // workers)))
        names = list(left)
        batches = [names[i : i + size] for i in range(0, len(names), size)]
        now = {number: batch[0] for number, batch in enumerate(batches)}
        work = [(function, [(name, left[name]) for name in batch]) for batch in batches]
        with contextlib.closing(supervise(_batch, work, workers=workers, retries=0)) as events:
            for event in events:
                value = event.value
                if isinstance(value, _Result):
                    del left[value.name]
                    yield value.name, value.value
                elif isinstance(value, _Begin):
                    now[event.task] = value.name
                elif isinstance(value, int):
                    advance(value)
                elif isinstance(value, Failure):
                    if value.expected or "can't start new thread" in value.message:
                        raise Sa1bError(value.message)
                    raise RuntimeError(f"{now[event.task]}: {value.message}\n{value.trace}")
                elif event.kind != "done":
                    # A process that dies between two shards has not started the next one.
                    rest = [name for name in (now[event.task], *batches[event.task]) if name in left]
                    if not rest:
                        continue
                    name = rest[0]
                    deaths[name] += 1
                    if deaths[name] >= _DEATHS:
                        del left[name]
                        yield name, Died(f"{_DEATHS} processes died while working on it: {value}")


def _batch(
    function: Callable[..., Any], batch: list[tuple[str, tuple[Any, ...]]], report: Callable[[Any], None]
) -> None:
    for name, arguments in batch:
        report(_Begin(name))
        read, last = 0, time.monotonic()

        def progress(count: int) -> None:
            nonlocal read, last
            read += count
            if time.monotonic() - last >= _REPORT_SECONDS:
                report(read)
                read, last = 0, time.monotonic()

        value = function(*arguments, progress)
        report(read)
        report(_Result(name, value))
