"""The checkpoints of a run in a folder that all ranks share.

    RUN/checkpoints/step-00000100/
        __0_0.distcp ...   tensors, by torch.distributed.checkpoint, one file a rank
        .metadata          which tensor is in which file
        state.json         everything else: the caller's state, step, world size, version of torch
        manifest.sha256    sha256 of every other file (sha256sum -c), written last

The commit is a part of torch's own protocol: `write_data` runs on all ranks, and its results, with digests,
go to rank 0, where `finish` runs if all ranks have succeeded. Until then the folder has another name.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from sa1b.engine.checkpoint.tensors import METADATA, read_table
from sa1b.engine.ranks.rank_info import Ranks
from sa1b.errors import CheckpointError, LockedError
from sa1b.report import first_names
from sa1b.storage.atomic import commit, flush, lock, naming_path, sha256_of

CHECKPOINTS, MANIFEST, STATE = "checkpoints", "manifest.sha256", "state.json"
OLD_MANIFEST = "manifest.json"  # of earlier versions, whose weights can be read: the digests as JSON
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial-[0-9a-f]{8}")
_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.json|manifest\.sha256(\.damaged)?")
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")
_INSIDE = re.compile(r"(.+)/checkpoints/step-\d{8,}(?:/.*)?")
_HOLDER = ".process"  # file in RUN with the process that has locked its checkpoints, or had
_LOCK_PATIENCE = 60.0  # seconds to wait for processes of a killed run to end
_LOG = logging.getLogger(__name__)


class RetrievalError(CheckpointError):
    """A checkpoint that may be good cannot be copied from its bucket: the store or the local disk failed."""


def run_around(path: str) -> str | None:
    """The run in whose checkpoints an absolute path or URL is; None if it is in no checkpoint."""
    match = _INSIDE.fullmatch(path)
    if match is None and path.endswith("/checkpoints") and steps(Path(path)):
        return path.removesuffix("/checkpoints")
    return match and match[1]


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in RUN/checkpoints, good or damaged, oldest first."""
    numbers = (step_of(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(step for step in numbers if step is not None)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def folder_name(step: int) -> str:
    """Name of the folder of a committed checkpoint."""
    return f"step-{step:08d}"


def is_own(name: str) -> bool:
    """Whether a file in the folder of a checkpoint has a name that a run gives."""
    return _OWN.fullmatch(name) is not None


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of each other file by the manifest; empty: that is not as it was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if is_old(folder):
            files = json.loads((folder / OLD_MANIFEST).read_bytes())["files"]
            text = manifest_of({name: file["sha256"] for name, file in files.items()})
        else:
            text = (folder / MANIFEST).read_text()
        found = {name: digest for digest, name in _LINE.findall(text)}
        if text == manifest_of(found) and {METADATA, STATE} <= found.keys() and all(map(is_own, found)):
            return found
    return {}


def manifest_of(files: dict[str, str]) -> str:
    return "".join(f"{files[name]}  {name}\n" for name in sorted(files))


def is_old(folder: Path) -> bool:
    """Whether an earlier version of this program wrote a checkpoint."""
    return (folder / OLD_MANIFEST).exists() and not (folder / MANIFEST).exists()


def damaged(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """Files of a checkpoint that differ from its manifest, are missing or not in it; each rank reads its
    share of them.
    """
    files = digests(folder)
    manifest = OLD_MANIFEST if is_old(folder) else MANIFEST
    if not files:
        return [manifest]
    wrong = files.keys() ^ {path.name for path in folder.iterdir() if path.name != manifest}
    for name in sorted(files.keys() - wrong)[rank::world_size]:
        if (folder / name).is_symlink() or sha256_of(folder / name) != files[name]:
            wrong.add(name)
    return sorted(wrong)


def as_error(folder: Path | str, wrong: list[str]) -> CheckpointError:
    return CheckpointError(f"{folder}/{first_names(wrong)}: not as written; use an older checkpoint")


def read_state(folder: Path) -> dict[str, Any]:
    """The state that was saved in a checkpoint, whose digests are right; CheckpointError: it is no state."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        document = json.loads((folder / STATE).read_bytes())
        if document["step"] == step_of(folder.name) and isinstance(document["state"], dict):
            state: dict[str, Any] = document["state"]
            return state
    raise CheckpointError(f"{folder / STATE}: not the state of this step; use an older checkpoint")


def check(folder: Path) -> None:
    """Verify a checkpoint in one process: reads every byte. CheckpointError names what is damaged."""
    if step_of(folder.name) is None or not folder.is_dir():
        raise CheckpointError(f"{folder}: not a checkpoint; pass a folder with a name such as step-00000100")
    if wrong := damaged(folder):
        raise as_error(folder, wrong)
    read_state(folder)
    read_table(folder)


def none_good(folder: Path | str, refused: list[str]) -> CheckpointError:
    """The error if there are checkpoints but none can be used."""
    listed = "\n  ".join(refused)
    return CheckpointError(
        f"{folder}: none of its {len(refused)} checkpoints can be used; restore one from a copy, or move the "
        f"folder away to start again from step 0:\n  {listed}"
    )


class _DurableFile(io.FileIO):
    """A file that is on the disk once it is closed, with the digest of what it was given."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.digest.update(memoryview(data).cast("B")[:count])
        return count

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())  # torch calls fsync on .metadata before it has flushed its buffer
        super().close()


class _DurableFiles(FileSystem):
    """Files on a disk; `digests` are those of the files that were written, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with naming_path(Path(path)):
            file = _DurableFile(Path(path))
            with io.BufferedWriter(file, 1 << 20) as stream:
                yield stream
        self.digests[Path(path).name] = file.digest.hexdigest()


class _Written(list[Any]):
    """Torch's results of a rank, which it passes to `finish`, and the digests of the files of the rank."""

    digests: dict[str, str]


class CommitWriter(FileSystemWriter):
    """Writes a checkpoint to `partial`, and renames it to `final` when all ranks have written."""

    fs: _DurableFiles

    def __init__(self, partial: Path, final: Path, state: bytes) -> None:
        # One thread, because torch loses errors of other threads. No prefetching of copies, because every
        # rank would create streams on the first GPU.
        super().__init__(partial, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.fs, self.partial, self.final, self.state = _DurableFiles(), partial, final, state

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Write the files of this rank, flushed to the disk."""
        try:
            results = _Written(super().write_data(plan, planner).value())
        except Exception as error:  # torch's zip writer replaces the error of a full disk by its own
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
        results.digests = dict(self.fs.digests)
        self.push(results.digests)
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when all ranks have written: the table, the state, and last the manifest."""
        super().finish(metadata, results)
        read_table(self.partial)  # so that an invalid one is not found at the next start only
        self.write(STATE, self.state)
        own = {METADATA: self.fs.digests[f"{METADATA}.tmp"], STATE: self.fs.digests[STATE]}
        self.push(own)
        self.commit(own | {name: digest for part in results for name, digest in part.digests.items()})

    def write(self, name: str, data: bytes) -> None:
        with self.fs.create_stream(self.partial / name, "wb") as file:
            file.write(data)

    def push(self, names: dict[str, str]) -> None:
        """Make files that this rank has written durable; in a folder they are."""

    def commit(self, files: dict[str, str]) -> None:
        if others := sorted(files.keys() ^ {path.name for path in self.partial.iterdir()}):
            raise CheckpointError(
                f"{others[0]}: not seen by rank 0, or not written by this run; all ranks must share --out, "
                "and no other run may use it"
            )
        self.write(MANIFEST, manifest_of(files).encode())
        flush(self.partial)
        if self.final.exists():  # of a killed run whose writer went on
            remove(self.final)
        commit(self.partial, self.final)


def remove(folder: Path) -> None:
    """Remove a checkpoint, under another name, so that an interrupted removal leaves no part of one."""
    aside = folder
    if not _PARTIAL.fullmatch(folder.name):
        aside = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
        commit(folder, aside)
    for path in [path for path in aside.iterdir() if is_own(path.name) and not path.is_dir()]:
        path.unlink(missing_ok=True)
    try:
        aside.rmdir()
    except OSError:
        others = sorted(path.name for path in aside.iterdir())
        _LOG.warning("%s stays: no run wrote %s", aside, first_names(others))


class Folder:
    """The checkpoints in `folder`, which rank 0 locks; `root` is its path or URL.

    All ranks call `prove`, `writer` and `drop`, only rank 0 the others.
    """

    remedy = "free space or repair the disk"

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.root, self.ranks = folder, str(folder), ranks
        self._held = contextlib.ExitStack()
        self.token = secrets.token_hex(4)  # a writer of a killed run and this run never share a folder

    def begin(self) -> str:
        """Lock the folder and remove what was not committed; return the token of this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, began, waits = self.folder.parent / _HOLDER, time.monotonic(), False
        while True:
            with contextlib.suppress(LockedError):
                self._held.enter_context(lock(self.folder))
                break
            holder = path.read_text() if path.exists() else "which has just begun"
            if time.monotonic() > began + _LOCK_PATIENCE:
                out = self.folder.parent
                raise LockedError(f"--out {out}: in use by another run, process {holder}; pass another --out")
            if not waits:
                waits, text = True, "waiting %.0f s for the end of another run with this --out, process %s"
                _LOG.warning(text, _LOCK_PATIENCE, holder)
            time.sleep(0.5)
        path.write_text(f"{socket.gethostname()}:{os.getpid()}")
        for left in [left for left in self.folder.iterdir() if _PARTIAL.fullmatch(left.name)]:
            remove(left)
        return self.token

    def steps(self) -> list[int]:
        return steps(self.folder)

    def is_old(self, step: int) -> bool:
        return is_old(self.folder / folder_name(step))

    def prove(self, step: int) -> Path:
        """The folder of a checkpoint whose digests are right; CheckpointError: it is damaged."""
        folder, ranks = self.folder / folder_name(step), self.ranks
        shares = ranks.on_all(lambda: damaged(folder, ranks.rank, ranks.world_size))
        if wrong := sorted({name for share in shares for name in share}):
            raise as_error(folder, wrong)
        return folder

    def drop(self, folder: Path) -> None:
        """The local copy of a checkpoint is not needed any more; here it is the checkpoint."""

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it counts no more; return its new path."""
        folder = self.folder / folder_name(step)
        aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
        commit(folder, aside)
        return str(aside)

    def writer(self, step: int, state: bytes) -> CommitWriter:
        final = self.folder / folder_name(step)
        return CommitWriter(final.with_name(f"{final.name}.partial-{self.token}"), final, state)

    def discard(self, writer: CommitWriter) -> None:
        """Make the space of a failed write free."""
        if self.ranks.rank == 0 and writer.partial.exists():
            remove(writer.partial)

    def remove(self, step: int) -> None:
        remove(self.folder / folder_name(step))

    def close(self) -> None:
        self._held.close()
