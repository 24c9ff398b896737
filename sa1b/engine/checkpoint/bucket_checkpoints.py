"""Checkpoints in a bucket.

    RUN/checkpoints/step-00000100/__0_0.distcp ...   uploaded by the rank that has written it, verified
    RUN/checkpoints/step-00000100/manifest.json      created last, on the condition that it does not exist

A checkpoint without a manifest is incomplete. It is never read, and it is removed before the next one is
written. The manifest of an old checkpoint is removed before its other objects. The names and bytes are those
of a checkpoint in a folder, so that a copy of RUN is the folder of a run.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sa1b.engine.checkpoint import folder as checkpoint_files
from sa1b.engine.checkpoint.folder import Found, Location, RetrievalError, folder_name, is_own, step_of
from sa1b.engine.checkpoint.remote_run import CHECKPOINTS, RemoteRun
from sa1b.engine.checkpoint.sealed_folder import MANIFEST, SealedFile, damaged, encode, manifest_files
from sa1b.errors import CheckpointError
from sa1b.storage.cache import fetch
from sa1b.storage.errors import DamageError, MissingError, ReplacedError, StorageError
from sa1b.storage.store import Store


class BucketLocation(Location):
    # A rank writes its files to the local folder of the run and uploads them, with the other files of the
    # run. To resume, one rank of each machine copies the checkpoint to the local folder.

    def __init__(self, run: RemoteRun) -> None:
        self.run, self.store, self.ranks = run, run.store, run.ranks
        self.folder = run.folder / CHECKPOINTS
        self.root = run.store.url(CHECKPOINTS)
        self.remedy = f"free space in {run.folder} or make {run.store.root} available"
        self._committed: list[int] = []
        self._may_be_incomplete = True  # whether there may be parts of checkpoints without a manifest

    def begin(self) -> None:
        self._committed = committed(self.store)
        self._sweep()

    def steps(self) -> list[int]:
        return list(self._committed)  # the claim excludes other runs

    def fetch(self, step: int) -> Found:
        outcomes = self.ranks.on_all(partial(self._copy, step))
        local = self.folder / folder_name(step)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, CheckpointError)]:
            if self.run.leads:
                shutil.rmtree(local, ignore_errors=True)
            raise next((outcome for outcome in errors if isinstance(outcome, RetrievalError)), errors[0])
        checkpoint = next(outcome for outcome in outcomes if isinstance(outcome, Found))
        return replace(checkpoint, folder=local)

    def drop(self, checkpoint: Found) -> None:
        if self.run.leads:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def target(self, step: int) -> str:
        return self.name(step)

    def prepare(self, step: int) -> Path:
        self.ranks.on_first(partial(self._make_free, step))
        temporary = self._temporary(step)
        if self.run.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        self.ranks.on_all(partial(temporary.mkdir, parents=True, exist_ok=True))
        return temporary

    def keep(self, temporary: Path, paths: Iterable[Path]) -> None:
        for path in paths:
            sending = temporary / f".sending-{path.name}"
            os.link(path, sending)  # because an upload removes its file
            self.store.commit_file(sending, f"{self._name(temporary)}/{path.name}")
        self.run.upload()

    def commit(self, temporary: Path, step: int, files: dict[str, SealedFile]) -> None:
        self.run.check()
        manifest = f"{self._name(temporary)}/{MANIFEST}"
        if not self.store.put_if_absent(manifest, encode(step, files)):
            raise CheckpointError(
                f"{self.store.url(manifest)}: not written by this run; start one run at a time with this "
                "--out"
            )
        self._committed = sorted({*self._committed, step})
        self._may_be_incomplete = False

    def discard(self, step: int) -> None:
        if self.run.leads:
            shutil.rmtree(self._temporary(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        remove(self.store, step)
        self._committed.remove(step)

    def close(self) -> None:
        self.run.close()

    def _copy(self, step: int) -> Found | CheckpointError | None:
        """Copy a checkpoint to the local folder; the error is returned with its class."""
        if not self.run.leads:
            return None
        try:
            return download(self.store, step, self.folder)
        except CheckpointError as error:
            return error

    def _make_free(self, step: int) -> None:
        if self._may_be_incomplete:
            self._sweep()
        self._may_be_incomplete = True
        if step in self._committed:
            self.remove(step)

    def _sweep(self) -> None:
        self.store.abort_uploads(lambda name: name.startswith(f"{CHECKPOINTS}/"))
        for folder in self.store.folders(CHECKPOINTS):
            if step_of(folder) is not None and step_of(folder) not in self._committed:
                self.store.remove_folder(f"{CHECKPOINTS}/{folder}", is_own)
        self._may_be_incomplete = False

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{folder_name(step)}.partial"

    def _name(self, temporary: Path) -> str:
        return f"{CHECKPOINTS}/{temporary.name.removesuffix('.partial')}"


def committed(store: Store) -> list[int]:
    """Steps of the checkpoints of a run that have a manifest, oldest first."""
    names = [name for name in store.folders(CHECKPOINTS) if step_of(name) is not None]
    there = store.map(lambda name: store.exists(f"{CHECKPOINTS}/{name}/{MANIFEST}"), names)
    steps = (step_of(name) for name, is_there in zip(names, there, strict=True) if is_there)
    return sorted(step for step in steps if step is not None)


def remove(store: Store, step: int) -> None:
    """Remove a checkpoint; the manifest first."""
    name = f"{CHECKPOINTS}/{folder_name(step)}"
    store.remove(f"{name}/{MANIFEST}")
    store.remove_folder(name, is_own)


def download(store: Store, step: int, folder: Path) -> Found:
    """Copy a checkpoint to a folder in `folder`, and verify its digests, its table of tensors and its state.
    RetrievalError: the store cannot be reached, or the disk has no space. CheckpointError: it is damaged.
    """
    url = store.url(f"{CHECKPOINTS}/{folder_name(step)}")
    local = folder / folder_name(step)
    try:
        shutil.rmtree(local, ignore_errors=True)
        local.mkdir(parents=True)
        _download(store, step, local)
        return checkpoint_files.read(local)
    except (DamageError, MissingError, ReplacedError) as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(local), url)) from None
    except (StorageError, OSError) as error:
        raise RetrievalError(
            f"{url}: cannot be copied to {local} ({error}); start the same command again when the store is "
            "available, or pass another folder with --scratch"
        ) from None


def _download(store: Store, step: int, local: Path) -> None:
    name = f"{CHECKPOINTS}/{local.name}"
    try:
        (local / MANIFEST).write_bytes(store.read(f"{name}/{MANIFEST}"))
    except FileNotFoundError:
        raise damaged(
            store.url(f"{name}/{MANIFEST}"),
            "missing (it is written last, so the checkpoint may be incomplete)",
        ) from None
    files = manifest_files(local / MANIFEST, step)
    sizes = store.map(lambda file: store.size(f"{name}/{file}"), files)
    for (file, sealed), size in zip(files.items(), sizes, strict=True):
        if size != sealed.bytes:
            why = "missing" if size is None else f"{size} bytes, {sealed.bytes} expected"
            raise damaged(store.url(f"{name}/{file}"), why)
    need, free = sum(file.bytes for file in files.values()), shutil.disk_usage(local).free
    if need > free:
        raise RetrievalError(
            f"{store.url(name)}: {need:,} bytes, and {local.parent} has {free:,} bytes free; pass another "
            "folder with --scratch"
        )
    for file, sealed in files.items():
        with (local / file).open("w+b") as copy:
            store.reader.forget(f"{name}/{file}")
            fetch(store.reader, f"{name}/{file}", sealed.sha256, copy)
