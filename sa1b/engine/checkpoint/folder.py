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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from sa1b.engine.checkpoint.tensors import METADATA, read_table
from sa1b.engine.ranks.rank_info import ranks
from sa1b.errors import CheckpointError, LockedError, UsageError
from sa1b.report import first_names
from sa1b.storage.atomic import commit, flush, lock, naming_path, sha256_of
from sa1b.storage.store import Store

CHECKPOINTS, MANIFEST, STATE = "checkpoints", "manifest.sha256", "state.json"
OLD_MANIFEST = "manifest.json"  # of earlier versions, whose weights can be read: the digests as JSON
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial-[0-9a-f]{8}")
_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.json|manifest\.sha256(\.damaged)?")
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")
_INSIDE = re.compile(r"(.+)/checkpoints/step-\d{8,}(?:/.*)?")
_PATIENCE = 60.0  # seconds to wait for processes of a killed run to end
_POLL, _QUIET = 0.5, 5.0  # seconds between two looks at a claim, and before a wait is reported
# Files that a run replaces -> first bytes of a file that a run wrote. Profiles have no bytes that distinguish
# them from other profiles of torch.
_REPLACED = {
    "config.json": b'{\n "preset": ',
    "metrics.jsonl": b'{"run": {',
    "predictions.jsonl": b'{"image_id": ',
}
_PROFILE = re.compile(r"operations-\d+\.txt|trace-\d+\.json")
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

    def __init__(self, final: Path, token: str, state: bytes) -> None:
        self.final, self.partial = final, final.with_name(f"{final.name}.partial-{token}")
        # One thread, because torch loses errors of other threads. No prefetching of copies, because every
        # rank would create streams on the first GPU.
        super().__init__(self.partial, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.fs, self.state = _DurableFiles(), state

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


def check_files(store: Store, out: str, *only: str) -> None:
    """UsageError for a folder with a file that the run would replace and that no run wrote.

    The files of a folder with the config.json of a run are its own. `only`: the files that are replaced; by
    default all of a run.
    """
    for name in store.names(""):  # sorted: config.json is the first
        begins = _REPLACED.get(name, b"" if _PROFILE.fullmatch(name) else None)
        if begins is None:
            continue
        beginning = store.read(name)[: len(begins)] if begins else b"not known"
        if begins.startswith(beginning):  # or it is empty
            if beginning and name == "config.json":
                return
        elif not only or name in only:
            raise UsageError(
                f"--out {out}: {name} in it is not of a run of this program, and would be replaced; pass "
                "another folder, or move the file away"
            )


T = TypeVar("T")


def wait_for_claim(out: str, take: Callable[[], T | None], holder: Callable[[float], str | None]) -> T:
    """What `take` returns, after the end of a killed run. `holder`: a run that is alive, after so many
    seconds of waiting; LockedError names it.
    """
    began, is_logged = time.monotonic(), False
    while (taken := take()) is None:
        waited = time.monotonic() - began
        other = holder(waited)
        if other is not None and waited > _PATIENCE:
            raise LockedError(
                f"--out {out}: in use by another run, process {other}; pass another --out, or stop that run"
            )
        if waited > _QUIET and not is_logged:
            is_logged = True
            _LOG.warning("waiting for the end of another run with this --out, process %s", other or "unknown")
        time.sleep(_POLL)
    return taken


class Folder:
    """The checkpoints of a run in a folder that all ranks share, which rank 0 locks.

    `folder` is that of the run, `root` the path or URL of its checkpoints. `leads`: this rank removes files
    that several ranks have written. All ranks create it and call `proved` and `writer`, only rank 0 `steps`,
    `set_aside` and `remove`.
    """

    remedy = "free space or repair the disk"

    def __init__(self, folder: Path, limit: float = 1800.0) -> None:
        self.folder, self.ranks, self.root = folder, ranks(limit), str(folder / CHECKPOINTS)
        self.leads = self.ranks.rank == 0
        self._held = contextlib.ExitStack()
        # With a token of its own, a writer of a killed run and this run never share a folder.
        self.token: str = self.ranks.on_first(self._begin)

    def _begin(self) -> str:
        """Lock the folder and remove what was not committed; return the token of this run."""
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
        for left in [left for left in folder.iterdir() if _PARTIAL.fullmatch(left.name)]:
            remove(left)
        return secrets.token_hex(4)

    def path(self, step: int) -> Path:
        """The local folder of a checkpoint."""
        return self.folder / CHECKPOINTS / folder_name(step)

    def steps(self) -> list[int]:
        return steps(self.folder / CHECKPOINTS)

    @contextlib.contextmanager
    def proved(self, step: int) -> Iterator[Path]:
        """The local folder of a checkpoint whose digests are right; CheckpointError: it is damaged."""
        shares = self.ranks.on_all(lambda: damaged(self.path(step), self.ranks.rank, self.ranks.world_size))
        if wrong := sorted({name for share in shares for name in share}):
            raise as_error(self.path(step), wrong)
        yield self.path(step)

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it counts no more; return its new path."""
        aside = self.path(step).with_name(f"{folder_name(step)}.damaged-{secrets.token_hex(4)}")
        commit(self.path(step), aside)
        return str(aside)

    def writer(self, step: int, state: bytes) -> CommitWriter:
        return CommitWriter(self.path(step), self.token, state)

    def remove(self, step: int) -> None:
        remove(self.path(step))

    def close(self) -> None:
        """Release the folder, once no rank writes any more."""
        self._held.close()
