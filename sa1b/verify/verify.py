"""The check of a whole dataset directory: its own files, then every shard, several at a time."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sa1b.errors import UsageError
from sa1b.progress import bar
from sa1b.shards.manifest import DATASET, TASKS, no_dataset
from sa1b.shards.shard import index_path
from sa1b.verify.batches import Died, in_batches
from sa1b.verify.leftovers import shards_on_disk
from sa1b.verify.member_check import ExpectedShard, ShardResult
from sa1b.verify.remedy import Remedy
from sa1b.verify.report import Finding, Report, short
from sa1b.verify.resume import ResumeRecord, file_key
from sa1b.verify.root_check import RootCheck
from sa1b.verify.shard_check import check_shard


def verify(
    root: Path, *, deep: bool = False, workers: int = 1, state: Path | None = None, quiet: bool = False
) -> Report:
    """Check everything in a dataset directory; damage is collected in the report, not raised.

    No file is changed or locked. Memory does not grow with the images of the dataset.

    Args:
        deep: also decode every JPEG and every mask, and compare both copies of each.
        workers: processes at a time; 0 checks in the calling process, for debugging.
        state: file outside `root` that records finished shards. After an interruption, the same call resumes
            from it and returns the same report. It is removed at the end. Changed shards are checked again.
        quiet: no progress bar.

    Raises:
        ManifestError: `root` contains no dataset.
        UsageError: `state` cannot be used.
    """
    began = time.monotonic()
    check_is_dataset(root)
    if state is not None and state.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"--state {state}: is inside {root}, which a check does not change; name another folder"
        )
    report = Report(root, deep)
    check = RootCheck(root, report)
    expected = check.expected()
    if state is None:
        results = _check_shards(expected, check.remedy, deep, workers, None, quiet)
    else:
        with ResumeRecord(state, {"check": str(root.resolve()), "deep": deep}) as record:
            results = _check_shards(expected, check.remedy, deep, workers, record, quiet)
    for result in results.values():
        if result.unchecked is not None:
            report.unchecked[result.name] = result.unchecked
            continue
        report.shards += 1
        report.images += result.images
        report.masks += result.masks
        report.bytes += result.bytes
    check.conclude(results)
    if state is not None:
        state.unlink(missing_ok=True)
    report.seconds = time.monotonic() - began
    return report


def check_is_dataset(root: Path) -> None:
    """Raise ManifestError if a folder has none of the files of a dataset."""
    if not root.is_dir() or not (
        (root / DATASET).exists()
        or next((root / TASKS).glob("*.json"), None)
        or next((root / TASKS).glob("*.claim"), None)
        or next(shards_on_disk(root), None)
    ):
        raise no_dataset(root)


def _check_shards(
    expected: list[ExpectedShard],
    remedy: Remedy,
    deep: bool,
    workers: int,
    record: ResumeRecord | None,
    quiet: bool,
) -> dict[str, ShardResult]:
    """The results in the order of `expected`."""
    results: dict[str, ShardResult | None] = {one.info.name: None for one in expected}
    keys: dict[str, Any] = {}
    tasks = {}
    for one in expected:
        name = one.info.name
        if record is not None:
            tar = remedy.root / name
            keys[name] = [asdict(one), file_key(tar), file_key(index_path(tar))]
            done = record.get(name, keys[name])
            if done is not None:
                results[name] = ShardResult.from_document(done)
                continue
        tasks[name] = (one, remedy, deep)
    total = sum(one.info.bytes for one in expected)
    done_bytes = total - sum(one.info.bytes for one, _, _ in tasks.values())
    findings = sum(len(result.findings) for result in results.values() if result is not None)
    with bar(total, "verify", "B", quiet) as progress:
        progress.update(done_bytes)
        done_shards = len(results) - len(tasks)
        for name, value in in_batches(_check, tasks, workers=workers, advance=progress.update):
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


def _check(expected: ExpectedShard, remedy: Remedy, deep: bool, progress: Any) -> ShardResult:
    """Run check_shard; an unexpected error is also a finding."""
    try:
        return check_shard(expected, remedy, deep=deep, progress=progress)
    except MemoryError:
        return ShardResult(expected.info.name, unchecked="not enough memory to check it")
    except Exception as error:
        if "can't start new thread" in str(error):
            return ShardResult(expected.info.name, unchecked=short(error))
        return _unfinished(expected.info.name, "check_failed", f"the check ended with {short(error)}")


def _died(name: str, why: str) -> ShardResult:
    """The result for a shard whose processes died: damage, or unchecked if memory or threads were short.

    Without memory or threads a process is killed, aborts, or ends before it can answer. Another signal comes
    from code that read the shard.
    """
    if any(sign in why for sign in ("SIGKILL", "SIGABRT", "without an answer")):
        return ShardResult(name, unchecked=why)
    return _unfinished(name, "check_died", why)


def _unfinished(name: str, kind: str, message: str) -> ShardResult:
    remedy = f"check again; if that fails too, restore {name} and its index from a copy"
    result = ShardResult(name)
    result.findings.add(Finding(kind, name, message, remedy, name))
    return result
