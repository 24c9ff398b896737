"""Copies that are killed at the k-th change of a file or request to a store, each in a forked child, then resumed.

`python -m tests.transfer.copy_runs SETTINGS` reads one JSON document, see `Settings`, and prints a JSON document of
what was found. A process of its own: children are forked from one without threads.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sa1b.programs.transfer.dataset_copy import copy_dataset
from sa1b.storage.open import open_store
from sa1b.storage.store import FolderStore, Store
from tests.ingest.bucket_runs import Killer, contents, forked


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        root: folder or URL of the dataset directory.
        dest: folder or URL for the copies; each has its own dataset directory below it.
        points: steps at which a copy is killed. An operation is two steps, its start and its end.
        options, of_root: of fsspec's file system for `dest` and for `root`.
        scratch: local folder.
        workers: threads.
    """

    root: str
    dest: str
    points: list[int]
    scratch: str
    options: dict[str, Any] = field(default_factory=dict)
    of_root: dict[str, Any] = field(default_factory=dict)
    workers: int = 1

    def store(self, name: str) -> Store:
        return open_store(f"{self.dest}/{name}", scratch=Path(self.scratch), options=self.options)


class FileKiller(Killer):
    """Also counts the changes of local files."""

    def install(self) -> None:
        super().install()
        for owner, name in (
            (os, "fsync"),
            (os, "link"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "rename"),
        ):
            setattr(owner, name, self.wrap_call(getattr(owner, name)))

    def wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **more: Any) -> Any:
            self.step()
            result = call(*arguments, **more)
            self.step()
            return result

        return counted


def of_store(store: Store) -> dict[str, bytes]:
    if isinstance(store, FolderStore):
        files = (path for path in store.folder.rglob("[!.]*") if path.is_file())
        return {str(path.relative_to(store.folder)): path.read_bytes() for path in files}
    found = contents(store)  # type: ignore[arg-type]
    return {name: data for name, data in found.items() if not name.startswith(".")}


def kill_everywhere(settings: Settings) -> dict[str, Any]:
    def source() -> Store:  # opened in each child, because its connections do not survive a fork
        return open_store(settings.root, scratch=Path(settings.scratch), options=settings.of_root)

    status, listed = forked(lambda: {name: data.hex() for name, data in of_store(source()).items()})
    assert status == 0, listed
    expected = {name: bytes.fromhex(data) for name, data in json.loads(listed).items()}

    def run(name: str, at: int | None) -> int:
        killer = FileKiller(at)
        killer.install()
        summary = copy_dataset(source(), settings.store(name), workers=settings.workers, quiet=True)
        assert summary.exit_code() == 0, summary.failed
        return killer.steps

    def check(name: str) -> list[str] | None:
        store = settings.store(name)
        found = of_store(store)
        names = {*found, *expected}
        wrong = [one for one in sorted(names) if found.get(one) != expected.get(one)]
        wrong += [f"unfinished upload of {one.name}" for one in store.uploads()]
        wrong += [f"left in scratch: {path}" for path in Path(settings.scratch).rglob("*") if path.is_file()]
        return wrong or None

    found: dict[str, Any] = {"killed": 0, "steps": 0, "wrong": []}
    for at in settings.points:
        name = f"run{at}"
        status, text = forked(functools.partial(run, name, at))
        if os.WIFSIGNALED(status):
            found["killed"] += 1
        elif status:
            found["wrong"].append([at, text])
        else:
            found["steps"] = int(text)
        for last in (functools.partial(run, name, None), functools.partial(check, name)):
            status, text = forked(last)
            if status or text.startswith("["):
                found["wrong"].append([at, text])
    return found


if __name__ == "__main__":
    print(json.dumps(kill_everywhere(Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))))
