"""The checkpoints of a run in a folder that all ranks share.

    RUN/checkpoints/step-00000100/
        __0_0.distcp ...   tensors, by torch.distributed.checkpoint, one file a rank
        .metadata          which tensor is in which file
        state.json         everything else: the caller's state, step, world size, version of torch
        manifest.sha256    sha256 of every other file (sha256sum -c), written last

`write_data` runs on all ranks; its results, with digests, go to rank 0, where `finish` runs if all ranks have
succeeded. Until then the folder has another name.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from sa1b.engine.checkpoint.tensors import ALONE, METADATA, read_table
from sa1b.engine.ranks.rank_info import Ranks, ranks
from sa1b.errors import CheckpointError, LockedError, UsageError
from sa1b.report import first_names
from sa1b.storage.atomic import commit, flush, lock, naming_path, sha256_of
from sa1b.storage.store import FolderStore, Store

CHECKPOINTS, MANIFEST, STATE = "checkpoints", "manifest.sha256", "state.json"
OLD_MANIFEST = "manifest.json"  # of earlier versions, whose weights can be read: the digests as JSON
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial-[0-9a-f]{8}")
_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.json|manifest\.sha256(\.damaged)?")
_INSIDE = re.compile(r"(.+)/checkpoints(/step-\d{8,}(?:/.*)?)?")
_PATIENCE = 60.0  # seconds to wait for processes of a killed run to end
_POLL, _QUIET = 0.5, 5.0  # seconds between two looks at a claim, and before a wait is reported
# Files that a run replaces -> first bytes of a file that a run wrote
_REPLACED = {
    "config.json": b'{\n "preset": ',
    "metrics.jsonl": b'{"run": {',
    "predictions.jsonl": b'{"image_id": ',
}
AGAIN = "then start the same command again: it resumes from the newest checkpoint"
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class RetrievalError(CheckpointError):
    """A checkpoint that may be good cannot be copied from its bucket: the store or the local disk failed."""


def run_around(path: str) -> str | None:
    match = _INSIDE.fullmatch(path)
    return match[1] if match and (match[2] or steps(Path(path))) else None


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in RUN/checkpoints, good or damaged, oldest first."""
    numbers = map(step_of, _names(folder)) if folder.is_dir() else ()
    return sorted(step for step in numbers if step is not None)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_own(name: str) -> bool:
    return _OWN.fullmatch(name) is not None


def check_files(store: Store, out: str, *only: str) -> None:
    """UsageError for a folder that is not of a run and has a file that one would replace; `only`: which."""
    for name, begins in _REPLACED.items():
        beginning = store.read(name)[: len(begins)] if store.exists(name) else b""
        if name == "config.json" and beginning == begins:
            return
        if not begins.startswith(beginning) and (not only or name in only):
            why = f"{name} in it is not of a run of this program, and would be replaced"
            raise UsageError(f"--out {out}: {why}; pass another folder")


def manifest_of(files: dict[str, str]) -> bytes:
    return "".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()


def is_old(folder: Path) -> bool:
    return (folder / OLD_MANIFEST).exists() and not (folder / MANIFEST).exists()


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of each other file by the manifest; CheckpointError: that is not as it was written."""
    name = OLD_MANIFEST if is_old(folder) else MANIFEST
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        data = (folder / name).read_bytes()
        if name == OLD_MANIFEST:
            data = manifest_of({file: one["sha256"] for file, one in json.loads(data)["files"].items()})
        lines = [line.partition("  ") for line in data.decode().splitlines()]
        files = {file: digest for digest, _, file in lines}
        if data == manifest_of(files) and {METADATA, STATE} <= files.keys() and all(map(is_own, files)):
            return files
    raise _damaged(folder, [name])


def checked(root: Path, step: int, ranks: Ranks = ALONE) -> Path:
    """The folder of a checkpoint whose digests the ranks have verified; CheckpointError names wrong files."""
    folder = root / folder_name(step)

    def differing() -> set[str]:
        files = digests(folder)
        found = files.keys() ^ (_names(folder) - {MANIFEST, OLD_MANIFEST})
        shared = sorted(files.keys() - found)[ranks.rank :: ranks.world_size]
        return found | {name for name in shared if sha256_of(folder / name) != files[name]}

    if names := set[str]().union(*ranks.on_all(differing)):
        raise _damaged(folder, sorted(names))
    return folder


def _damaged(folder: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(f"{folder}/{first_names(names)}: not as written; use an older checkpoint")


def read_state(folder: Path) -> dict[str, Any]:
    """The state that was saved in a checkpoint, whose digests are right; CheckpointError: it is no state."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        document = json.loads((folder / STATE).read_bytes())
        if document["step"] == step_of(folder.name) and isinstance(document["state"], dict):
            state: dict[str, Any] = document["state"]
            return state
    raise CheckpointError(f"{folder / STATE}: not the state of this step; use an older checkpoint")


class _HashedFile(io.FileIO):
    """A file with the digest of what it was given, which reading it again may not return."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.sha256.update(memoryview(data).cast("B")[:count])
        return count


class _DurableFiles(FileSystem):
    """Files on a disk; `digests` are those of the files that were written, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with naming_path(file := Path(path)):
            raw = _HashedFile(file, "wb")
            with io.BufferedWriter(raw, 1 << 20) as stream:
                yield stream
            flush(file)  # torch calls fsync on .metadata before its buffer is flushed
        self.digests[file.name] = raw.sha256.hexdigest()


class _Written(list[Any]):
    digests: dict[str, str]


class CommitWriter(FileSystemWriter):
    """Writes a checkpoint to the local folder `partial`; its place commits it when all ranks have written."""

    fs: _DurableFiles

    def __init__(self, place: "Folder", step: int, state: bytes) -> None:
        self.place, self.step, self.state, self.final = place, step, state, place.path(step)
        self.partial = self.final.with_name(f"{self.final.name}.partial-{place.token}")
        # One thread, because torch loses errors of other threads. No prefetching of copies, because every
        # rank would create streams on the first GPU.
        super().__init__(self.partial, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.fs = _DurableFiles()

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        try:
            results = _Written(super().write_data(plan, planner).value())
        except Exception as error:  # torch's zip writer replaces the error of a full disk by its own
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
        results.digests = dict(self.fs.digests)
        self.place.push(self, results.digests)
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        read_table(self.partial)  # so that an invalid one is not found at the next start only
        self.write(STATE, self.state)
        own = {METADATA: self.fs.digests[f"{METADATA}.tmp"], STATE: self.fs.digests[STATE]}
        self.place.push(self, own)
        files = own | {name: digest for part in results for name, digest in part.digests.items()}
        self.place.commit(self, files)

    def write(self, name: str, data: bytes) -> None:
        with self.fs.create_stream(self.partial / name, "wb") as file:
            file.write(data)


def remove(folder: Path) -> None:
    """Remove a checkpoint, under another name, so that an interrupted removal leaves no part of one."""
    aside = folder
    if not _PARTIAL.fullmatch(folder.name):
        aside = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
        commit(folder, aside)
    FolderStore(aside.parent).remove_folder(aside.name, is_own)
    if aside.exists() and aside != folder:  # said once
        _LOG.warning("%s stays: no run wrote %s", aside, first_names(sorted(_names(aside))))


def wait_for_claim(out: str, take: Callable[[], T | None], holder: Callable[[float], str | None]) -> T:
    """What `take` returns, after the end of a killed run. LockedError: `holder` is still alive."""
    began, is_logged = time.monotonic(), False
    while (taken := take()) is None:
        waited = time.monotonic() - began
        other = holder(waited)
        if other is not None and waited > _PATIENCE:
            raise LockedError(f"--out {out}: in use by another run, process {other}; pass another --out")
        if waited > _QUIET and not is_logged:
            is_logged = True
            _LOG.warning("waiting for the end of another run with this --out, process %s", other or "unknown")
        time.sleep(_POLL)
    return taken


class Folder:
    """The checkpoints of a run in a folder. All ranks call `proved` and `push`, only rank 0 other methods."""

    remedy = "free space or repair the disk"

    def __init__(self, folder: Path, limit: float = 1800.0) -> None:
        self.folder, self.ranks, self.root = folder, ranks(limit), str(folder / CHECKPOINTS)
        self.leads = self.ranks.rank == 0  # this rank removes files that several ranks have written
        self._held = contextlib.ExitStack()
        # With a token of its own, a writer of a killed run and this run never share a folder.
        self.token: str = self.ranks.on_first(self._begin)

    def _begin(self) -> str:
        folder, process = self.folder / CHECKPOINTS, self.folder / ".process"
        folder.mkdir(parents=True, exist_ok=True)

        def take() -> bool | None:
            with contextlib.suppress(LockedError):
                self._held.enter_context(lock(folder))
                return True
            return None

        def holder(_: float) -> str:
            return process.read_text() if process.exists() else "which has just begun"

        wait_for_claim(str(self.folder), take, holder)
        process.write_text(f"{socket.gethostname()}:{os.getpid()}")
        self.sweep()
        return secrets.token_hex(4)

    def path(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / folder_name(step)

    def steps(self) -> list[int]:
        return steps(self.folder / CHECKPOINTS)

    @contextlib.contextmanager
    def proved(self, step: int) -> Iterator[Path]:
        """The local folder of a checkpoint whose digests are right; CheckpointError: it is damaged."""
        yield checked(self.folder / CHECKPOINTS, step, self.ranks)

    def push(self, writer: CommitWriter, names: Iterable[str]) -> None:
        """Make files that this rank has written durable, as they are in a folder."""

    def commit(self, writer: CommitWriter, files: dict[str, str]) -> None:
        if others := sorted(files.keys() ^ _names(writer.partial)):
            raise CheckpointError(f"{others[0]}: not seen by rank 0, or of another run; share --out")
        writer.write(MANIFEST, manifest_of(files))
        flush(writer.partial)
        if writer.final.exists():  # of a killed run whose writer went on
            remove(writer.final)
        commit(writer.partial, writer.final)

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it counts no more."""
        aside = Path(f"{self.path(step)}.damaged-{secrets.token_hex(4)}")
        commit(self.path(step), aside)
        return str(aside)

    def remove(self, step: int) -> None:
        remove(self.path(step))

    def sweep(self, step: int | None = None) -> None:
        """Remove what was not committed; `step`: which is written next."""
        for name in filter(_PARTIAL.fullmatch, _names(self.folder / CHECKPOINTS)):
            remove(self.folder / CHECKPOINTS / name)

    def release(self) -> None:
        """Let another run use the folder or URL; on rank 0, once no rank writes any more."""
        self._held.close()

    close = release
