"""A run in a bucket: its claim, its folder on this machine, and the upload of its files.

run = RemoteRun(open_store("s3://BUCKET/run"), folder)     # all ranks; only one run can have this URL
... append to run.folder / "metrics.jsonl" ...
run.upload()                                               # with each checkpoint
run.close()
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sa1b.engine.checkpoint.resume import check_files
from sa1b.engine.ranks.rank_info import ranks
from sa1b.errors import CheckpointError, LockedError, UsageError
from sa1b.shards.manifest import DATASET
from sa1b.shards.staging import remove_leftovers
from sa1b.storage.atomic import json_bytes, write_whole
from sa1b.storage.claim import Claim, observe
from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.store import FolderStore, Store

CHECKPOINTS = "checkpoints"
_CLAIM = "run.claim"
_PATIENCE = 60.0  # seconds to wait for processes of a killed run to end
_POLL, _QUIET = 1.0, 5.0  # seconds between two looks at a claim, and before a wait is reported
_CLOCKS = 1.0  # seconds by which the store's clock may be inexact
_SENT = ".sent.json"  # name in the bucket -> size and time of the local file, and version of the object
_UNSENT = ".unsent"
_OF_OTHER_MACHINES = re.compile(r".*-\d+\.jsonl")
_LOG = logging.getLogger(__name__)


def local_folder(url: str, scratch: Path | None) -> Path:
    """The local folder of a run in a bucket, in `scratch` or the system's folder for temporary files."""
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return (scratch or Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}") / f"run-{name}-{digest}"


class RemoteRun:
    """The files of a run in a bucket, except its checkpoints; all ranks create and close it together.

    Rank 0 has a claim with a heartbeat as long as the run lasts. Creating the claim writes and removes an
    object, so missing permissions are found at the start. `folder`: see `local_folder`; created. `leads`:
    this rank copies the files of its machine: it is the first one that uses the folder.

    Raises:
        UsageError: the store cannot be written, or contains a dataset.
        CheckpointError: another run uses the store; the store cannot be reached, or the folder not written.
    """

    # Files that a run appends to cannot be in a bucket, because objects cannot be appended to. They are in a
    # local folder, which the ranks of a machine share and which other machines do not see. `upload` copies
    # the files that have changed. At the start, files that an earlier run could not upload are uploaded,
    # unless the bucket has newer ones: then they are renamed to NAME.unsent. After that the *.jsonl files are
    # copied from the bucket to the folder, so that they continue those of another machine.

    def __init__(self, store: Store, folder: Path, limit: float = 1800.0) -> None:
        self.store, self.folder = store, folder
        self.ranks = ranks(limit)
        self._claim: Claim | None = None
        self._sent: dict[str, tuple[int, int, str | None]] = {}  # see _SENT
        refused = self.ranks.on_first(self._begin)
        if refused is not None:
            raise UsageError(refused)
        try:
            folders = self.ranks.on_all(self._identify)
            self._leader = folders.index(folders[self.ranks.rank])
            self.leads = self._leader == self.ranks.rank
            self.ranks.on_all(self._fetch)
        except CheckpointError:
            self.release()
            raise

    def check(self) -> None:
        """Raise LockedError if another run has taken over the claim; on rank 0."""
        if self._claim is None or not self._claim.is_held():
            claim = observe(self.store, _CLAIM)
            raise LockedError(
                f"{self.store.root}: another run ({claim or 'ended since'}) has taken over this --out, "
                "because this run sent no heartbeat for too long; stop one of them"
            )

    def upload(self) -> None:
        """Upload the files of the local folder that have changed, without `checkpoints` and hidden files.

        Only one of the ranks that share a folder uploads. The *.jsonl files of a machine without rank 0 get
        the number of its first rank: `damaged-8.jsonl`. StorageError: the store cannot be written.
        """
        if not self.leads:
            return
        sending = self.folder / CHECKPOINTS / ".sending"
        for path, name in self._files():
            state = _state(path)
            if (
                state[0] and self._sent.get(name, (0, 0, None))[:2] != state
            ):  # the watchdog opens its file early
                sending.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, sending)  # other threads may append to the file during the upload
                self.store.commit_file(sending, name)
                self._sent[name] = (*state, self.store.version(name))
                write_whole(self.folder / _SENT, json_bytes(self._sent))

    def _files(self) -> Iterator[tuple[Path, str]]:
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            hidden = parts[0] == CHECKPOINTS or any(part.startswith(".") for part in parts)
            if not hidden and path.suffix != _UNSENT and path.is_file():
                yield path, self._object_name("/".join(parts))

    def close(self) -> None:
        """Upload the last files, remove the local folder and release the claim; collective. CheckpointError:
        a file cannot be uploaded; the local folder is kept.
        """
        try:
            self.ranks.on_all(lambda: None)  # the other ranks have closed their files
            self.ranks.on_all(self.upload)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.store.root}: the last files of the run cannot be uploaded ({error}); they are in "
                f"{self.folder}: start the same command again here, which uploads them"
            ) from None
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Remove the claim, so that another run can use the URL; on rank 0, once no rank writes any more."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def _begin(self) -> str | None:
        """Take the claim; returns why the URL is refused."""
        url = self.store.root
        try:
            if self.store.exists(DATASET):
                return (
                    f"--out {url}: is a dataset directory, and a run must not write there; name another URL"
                )
            self._claim = self._take().__enter__()
            check_files(self.store, url)
            remove_leftovers(self.store)
        except UsageError as error:
            self.release()
            return str(error)
        except UnavailableError:
            raise
        except (StorageError, ImportError, ValueError) as error:
            return f"--out {url}: cannot be written: {error}"
        return None

    def _take(self) -> Claim:
        began = time.monotonic()
        logged = False
        while (claim := Claim.take(self.store, _CLAIM)) is None:
            waited = time.monotonic() - began
            holder = observe(self.store, _CLAIM)
            if holder is None:
                continue
            terms = holder.terms(self.store.url(_CLAIM))
            # A holder on another machine is alive if it has sent a heartbeat since the wait began.
            if waited > _PATIENCE and (holder.is_here or holder.age < waited - _CLOCKS):
                raise LockedError(
                    f"--out {self.store.root}: in use by another run, process {holder}; pass another --out, "
                    f"or stop that run ({terms})"
                )
            if not logged and waited > _QUIET:
                logged = True
                _LOG.warning("waiting for the end of another run with this --out (%s)", terms)
            time.sleep(_POLL)
        return claim

    def _identify(self) -> str:
        """A text that is the same on the ranks that share the folder, and on no others."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            store = FolderStore(self.folder)
            store.put_if_absent(".id", secrets.token_hex(8).encode())
            return store.read(".id").decode()
        except OSError as error:
            raise UsageError(
                f"--scratch {self.folder.parent}: cannot be written ({error.strerror}); pass another folder"
            ) from None

    def _fetch(self) -> None:
        if not self.leads:
            return
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)  # of a killed run
        self._send_left()
        for path in self.folder.glob("*.jsonl"):  # the bucket has what they have
            path.unlink()
        there = self.store.names("", ".jsonl")
        if self._leader == 0:
            names = {name: name for name in there if not _OF_OTHER_MACHINES.fullmatch(name)}
        else:
            ending = f"-{self._leader}.jsonl"
            names = {name: f"{name.removesuffix(ending)}.jsonl" for name in there if name.endswith(ending)}
        with self.store.files(*names) as copies:
            for local, copy in zip(names.values(), copies, strict=True):
                if copy.exists():
                    shutil.copyfile(copy, self.folder / local)
                    name = self._object_name(local)
                    self._sent[name] = (*_state(self.folder / local), self.store.version(name))
        write_whole(self.folder / _SENT, json_bytes(self._sent))

    def _send_left(self) -> None:
        """Upload what an earlier run on this machine wrote and could not upload."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            record = json.loads((self.folder / _SENT).read_bytes())
            self._sent = {
                str(name): (int(entry[0]), int(entry[1]), entry[2]) for name, entry in record.items()
            }
        for path, name in self._files():
            *sent, version = self._sent.get(name, (0, 0, None))
            state = _state(path)
            if state[0] and list(state) != sent:
                # An upload may be complete although its answer, or its record, was lost.
                there = self.store.version(name)
                if there == version or (there and path.read_bytes().startswith(self.store.read(name))):
                    _LOG.warning("uploading %s, which an earlier run could not upload", path)
                    continue
                kept = path.with_name(f"{path.name}{_UNSENT}")
                path.replace(kept)
                _LOG.warning("%s was not uploaded: the bucket has a newer one; it is now %s", path, kept)
        self.upload()

    def _object_name(self, name: str) -> str:
        if self._leader == 0 or not name.endswith(".jsonl"):
            return name
        return f"{name.removesuffix('.jsonl')}-{self._leader}.jsonl"


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
