"""Checks a whole root: what it says of itself, then every shard, several at a time."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sa1b.errors import ManifestError
from sa1b.progress import bar
from sa1b.shards.manifest import DATASET, TASKS
from sa1b.storage.publish import lock
from sa1b.verify.places import Claim
from sa1b.verify.report import Finding, Report, ShardResult, short
from sa1b.verify.root_check import RootCheck, shards_on_disk
from sa1b.verify.shard_check import check_shard
from sa1b.workers import Failure, supervise

_BATCH_SHARDS = 16  # checked by one process: starting it costs as much as checking 1 GB
_DEATHS = 2  # so often a process may die at one shard
_REPORT_SECONDS = 0.2


def verify(root: Path, *, deep: bool = False, workers: int = 1, quiet: bool = False) -> Report:
    """Check everything in `root`; damage is collected in the report, not raised.

    Args:
        deep: also decode every JPEG and every mask, and compare both copies of each.
        workers: processes at a time; 0: no process of its own, for debugging.
        quiet: no progress bar.

    Raises:
        ManifestError: no dataset there.
        LockedError: reshard or index is at work there.
    """
    began = time.monotonic()
    if not root.is_dir() or not (
        (root / DATASET).exists() or (root / TASKS).is_dir() or next(shards_on_disk(root), None)
    ):
        raise ManifestError(f"{root}: no dataset there; is this the --out folder of tools/reshard.py?")
    with lock(root):
        pass  # whoever writes there holds it; other checks need not wait for this one
    report = Report(root, deep)
    check = RootCheck(root, report)
    claims = check.claims()
    results = (
        {claim.info.name: _guarded(root, claim, deep, None) for claim in claims}
        if workers == 0
        else _supervised(root, claims, deep, workers, quiet)
    )
    for claim in claims:
        result = results[claim.info.name]
        report.shards += 1
        report.images += result.images
        report.masks += result.masks
        report.bytes += result.bytes
        report.findings += result.findings
    check.sums(results)
    check.leftovers()
    report.seconds = time.monotonic() - began
    return report


def _guarded(root: Path, claim: Claim, deep: bool, progress: Callable[[int], None] | None) -> ShardResult:
    """check_shard; what it does not foresee is a finding too."""
    try:
        return check_shard(root, claim, deep=deep, progress=progress)
    except Exception as error:
        return _unfinished(claim.info.name, "check_failed", f"the check ended with {short(error)}")


def _unfinished(name: str, kind: str, message: str) -> ShardResult:
    remedy = f"run the check again; if it ends so again, restore {name} and its index from a copy"
    return ShardResult(name, [Finding(kind, name, message, remedy, name)])


def _batch(root: Path, claims: list[Claim], deep: bool, report: Callable[[Any], None]) -> None:
    """What a worker process runs: tells the shard it begins, bytes read, and each shard's result."""
    for claim in claims:
        report(claim.info.name)
        read, told = 0, time.monotonic()

        def progress(count: int) -> None:
            nonlocal read, told
            read += count
            if time.monotonic() - told >= _REPORT_SECONDS:
                report(read)
                read, told = 0, time.monotonic()

        result = _guarded(root, claim, deep, progress)
        report(read)
        report(result)


def _supervised(
    root: Path, claims: list[Claim], deep: bool, workers: int, quiet: bool
) -> dict[str, ShardResult]:
    results: dict[str, ShardResult] = {}
    deaths: Counter[str] = Counter()
    findings = 0
    total = sum(claim.info.bytes for claim in claims)
    with bar(total, "verify", "B", quiet) as shown:
        while waiting := [claim for claim in claims if claim.info.name not in results]:
            size = max(1, min(_BATCH_SHARDS, -(-len(waiting) // workers)))
            batches = [waiting[i : i + size] for i in range(0, len(waiting), size)]
            at = {number: batch[0].info.name for number, batch in enumerate(batches)}
            tasks = [(root, batch, deep) for batch in batches]
            for event in supervise(_batch, tasks, workers=workers, retries=0):
                value = event.value
                if isinstance(value, ShardResult):
                    results[value.name] = value
                    findings += len(value.findings)
                elif isinstance(value, str) and event.kind == "progress":
                    at[event.task] = value
                elif isinstance(value, int):
                    shown.update(value)
                elif event.kind != "done":
                    name = at[event.task]
                    if name in results:  # it died on its way to the next one
                        left = [claim.info.name for claim in batches[event.task]]
                        name = next((name for name in left if name not in results), name)
                    deaths[name] += 1
                    if deaths[name] >= _DEATHS:
                        why = value.message if isinstance(value, Failure) else value
                        message = f"the process that checked it died {_DEATHS} times: {why}"
                        results[name] = _unfinished(name, "check_died", message)
                shown.set_postfix(shards=len(results), findings=findings, refresh=False)
    return results
