"""A run in a bucket is a run in a folder of this machine, whose files are uploaded with each checkpoint.

Names and bytes are those of a run in a folder. Each rank uploads its part of a checkpoint; the manifest is
created last, if there is none. One without is incomplete: it is never read, and removed before the next save.
To resume, one rank of each machine copies a checkpoint.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sa1b.engine.checkpoint import folder as folders
from sa1b.engine.checkpoint.folder import CHECKPOINTS, MANIFEST, OLD_MANIFEST, CommitWriter, Folder
from sa1b.engine.ranks.rank_info import ranks
from sa1b.errors import CheckpointError, LockedError, Sa1bError, UsageError
from sa1b.shards.manifest import DATASET
from sa1b.shards.staging import remove_leftovers
from sa1b.storage.atomic import check_free_bytes
from sa1b.storage.cache import fetch
from sa1b.storage.claim import Claim, observe
from sa1b.storage.errors import DamageError, MissingError, ReplacedError, StorageError, UnavailableError
from sa1b.storage.open import open_store
from sa1b.storage.protocols import protocol_of
from sa1b.storage.store import FolderStore, Store

_CLAIM = "run.claim"
_DAMAGED = f"{MANIFEST}.damaged"  # name of the manifest of a damaged checkpoint
_CLOCKS = 1.0  # seconds by which the store's clock may be inexact
_CONTINUED = ("metrics.jsonl", "damaged.jsonl", "not-finite.jsonl")  # files that are appended to


def local_folder(url: str, scratch: Path | None) -> Path:
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return (scratch or Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}") / f"run-{name}-{digest}"


def committed(store: Store) -> list[int]:
    return sorted(step for step, names in _checkpoints(store).items() if names & {MANIFEST, OLD_MANIFEST})


def _checkpoints(store: Store) -> dict[int, set[str]]:
    there = {step: name for name in store.folders(CHECKPOINTS) if (step := folders.step_of(name)) is not None}
    names = store.map(lambda name: set(store.names(f"{CHECKPOINTS}/{name}")), there.values())
    return dict(zip(there, names, strict=True))


def _name(step: int) -> str:
    return f"{CHECKPOINTS}/{folders.folder_name(step)}"


def saved(run: str, scratch: Path | None = None) -> list[int]:
    """Steps of the committed checkpoints, good or damaged, of a run in a folder or at a URL, oldest first."""
    if protocol_of(run):
        return committed(open_store(run, scratch=scratch))
    return folders.steps(Path(run, CHECKPOINTS))


def download(store: Store, folder: Path, step: int) -> Path:
    """Copy a checkpoint to a folder in `folder`, and verify its digests."""
    name, local = _name(step), folder / folders.folder_name(step)
    url = store.url(name)
    try:
        shutil.rmtree(local, ignore_errors=True)
        local.mkdir(parents=True)
        manifest = MANIFEST if store.exists(f"{name}/{MANIFEST}") else OLD_MANIFEST
        (local / manifest).write_bytes(store.read(f"{name}/{manifest}"))
        for file, sha256 in folders.digests(local).items():
            with (local / file).open("w+b") as copy:
                store.reader.forget(f"{name}/{file}")
                fetch(store.reader, f"{name}/{file}", sha256, copy)
    except (CheckpointError, DamageError, MissingError, ReplacedError, FileNotFoundError) as error:
        raise CheckpointError(str(error).replace(str(local), url)) from None
    except (StorageError, OSError) as error:
        way = "start the same command again later, or pass another folder with --scratch"
        raise folders.RetrievalError(f"{url}: cannot be copied to {local} ({error}); {way}") from None
    return local


class RemoteRun(Folder):
    """The files of a run in a bucket, of which rank 0 holds the claim; created and closed on all ranks."""

    def __init__(self, store: Store, folder: Path, limit: float = 1800.0) -> None:
        self.store, self.folder, self.ranks = store, folder, ranks(limit)
        self.root, self.token = store.url(CHECKPOINTS), secrets.token_hex(4)
        self.remedy = f"free space in {folder} or make {store.root} available"
        self.claim: Claim | None = None
        self._held = contextlib.ExitStack()
        self._sent: dict[str, tuple[int, int]] = {}  # name in the bucket -> size and time of the local file
        try:
            self.ranks.on_first(self._open)
            machines = self.ranks.on_all(self._identify)
            self._leader = machines.index(machines[self.ranks.rank])
            self.leads = self._leader == self.ranks.rank  # this rank copies the files of its machine
            self.ranks.on_all(self._pull)
        except Sa1bError:
            self.release()
            raise

    def _open(self) -> None:
        store, url = self.store, self.store.root
        try:
            if store.exists(DATASET):
                raise UsageError(f"--out {url}: is a dataset directory; name another URL")
            claim = folders.wait_for_claim(url, lambda: Claim.take(store, _CLAIM), self._holder)
            self.claim = self._held.enter_context(claim)
            folders.check_files(store, url)
            remove_leftovers(store)
            self.sweep()
        except StorageError as error:
            if isinstance(error, UnavailableError):
                raise
            raise UsageError(f"--out {url}: cannot be written: {error}; pass another") from None

    def _holder(self, waited: float) -> str | None:
        """The holder of the claim; on another machine, if it has sent a heartbeat since the wait began."""
        holder = observe(self.store, _CLAIM)
        return str(holder) if holder and (holder.is_here or holder.age < waited - _CLOCKS) else None

    def _identify(self) -> str:
        """A text that is the same on the ranks that share the folder, and on no others."""
        self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        store = FolderStore(self.folder)
        store.put_if_absent(".id", secrets.token_hex(8).encode())
        return store.read(".id").decode()

    def _pull(self) -> None:
        """Continue the lines in the bucket, unless a file here begins with them: that was not uploaded."""
        if not self.leads:
            return
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)  # of a killed run
        for path in (self.folder / name for name in _CONTINUED):
            name = self._object_name(path.name)
            there = self.store.read(name) if self.store.exists(name) else b""
            if there and not (path.exists() and path.read_bytes().startswith(there)):
                path.write_bytes(there)
        self.upload()

    def check_space(self, need: int) -> None:
        def check() -> None:
            way = "pass a folder on a larger disk with --scratch"
            try:
                check_free_bytes(self.folder, need, way, " for a checkpoint")
            except UsageError as error:  # the flags are right, and the same command may be queued again
                raise CheckpointError(str(error)) from None

        self.ranks.on_all(check)

    def steps(self) -> list[int]:
        return committed(self.store)

    @contextlib.contextmanager
    def proved(self, step: int) -> Iterator[Path]:
        folder = self.folder / CHECKPOINTS
        try:
            self.ranks.on_all(lambda: download(self.store, folder, step) if self.leads else None)
            yield self.path(step)
        finally:
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)

    def push(self, writer: CommitWriter, names: Iterable[str]) -> None:
        for name in names:
            self.store.commit_file(writer.partial / name, f"{_name(writer.step)}/{name}")
        self.upload()

    def commit(self, writer: CommitWriter, files: dict[str, str]) -> None:
        if self.claim is None or not self.claim.is_held():
            other = observe(self.store, _CLAIM) or "ended since"
            raise LockedError(f"{self.store.root}: another run ({other}) has taken over this --out; stop one")
        if not self.store.put_if_absent(f"{_name(writer.step)}/{MANIFEST}", folders.manifest_of(files)):
            raise CheckpointError(f"{MANIFEST}: of another run with this --out; start one at a time")

    def set_aside(self, step: int) -> str:
        manifest, aside = f"{_name(step)}/{MANIFEST}", f"{_name(step)}/{_DAMAGED}"
        self.store.put(aside, self.store.read(manifest))
        self.store.remove(manifest)
        return self.store.url(aside)

    def remove(self, step: int) -> None:
        self.store.remove(f"{_name(step)}/{MANIFEST}")  # first
        self.store.remove_folder(_name(step), folders.is_own)

    def sweep(self, step: int | None = None) -> None:
        """Remove what was not committed, and an earlier checkpoint of this step, also a damaged one."""
        self.store.abort_uploads(lambda name: name.startswith(f"{CHECKPOINTS}/"))
        for there, names in _checkpoints(self.store).items():
            if there == step or not names & {MANIFEST, OLD_MANIFEST, _DAMAGED}:
                self.remove(there)

    def upload(self) -> None:
        """Upload the files of this machine that have changed."""
        if not self.leads:
            return
        sending = self.folder / CHECKPOINTS / ".sending"
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            hidden = parts[0] in (CHECKPOINTS, "heartbeat") or any(part.startswith(".") for part in parts)
            if hidden or not path.is_file():
                continue
            state, name = (path.stat().st_size, path.stat().st_mtime_ns), self._object_name("/".join(parts))
            if state[0] and self._sent.get(name) != state:  # the watchdog opens its file early
                sending.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, sending)  # other threads may append to the file during the upload
                self.store.commit_file(sending, name)
                self._sent[name] = state

    def _object_name(self, name: str) -> str:
        if self._leader == 0 or not name.endswith(".jsonl"):
            return name  # else with the number of the first rank of its machine
        return f"{name.removesuffix('.jsonl')}-{self._leader}.jsonl"

    def close(self) -> None:
        try:
            self.ranks.on_all(lambda: None)  # the other ranks have closed their files
            self.ranks.on_all(self.upload)
        except CheckpointError as error:
            why = f"the last files are in {self.folder}, and cannot be uploaded ({error})"
            raise CheckpointError(f"{self.store.root}: {why}; start the same command again here") from None
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.release()
