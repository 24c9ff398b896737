"""Runs of ingest that write to a bucket, in forked children that can be killed at the k-th request.

`python -m tests.ingest.bucket_runs SETTINGS` reads one JSON document, see `Settings`, and prints a JSON document of
what happened. The parent makes no request, so that every child connects by itself.
"""

import functools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa1b.ingest.finish import finish
from sa1b.ingest.ingest import work_on
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.names import OPTIONS
from sa1b.shards.documents import Options
from sa1b.shards.staging import remove_leftovers
from sa1b.sources.discovery import discover
from sa1b.storage import cache
from sa1b.storage.bucket import BucketStore
from sa1b.storage.objects import Objects, S3Objects

_LONGEST = 120  # seconds; a run takes one
_TRIES = 20  # `sa1b reshard` tries without limit
_REQUESTS = ("stat", "get", "put", "put_file", "delete", "sizes", "is_folder")
_UPLOADS = ("start", "put_part", "complete", "abort", "uploads")


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        sources: source tars.
        url: of a folder for the runs; each has its own dataset directory below it.
        options: of fsspec's file system.
        scratch: local folder.
        images_per_shard: of the shards.
        points: steps at which a run is killed; a request is two steps, its start and its end. None: 1, 2, ...
            until a run survives.
        at_a_time: how often a run is killed before the one that must succeed.
    """

    sources: list[str]
    url: str
    options: dict[str, Any]
    scratch: str
    images_per_shard: int = 2
    points: list[int] | None = None
    at_a_time: int = 1

    def store(self, name: str) -> BucketStore:
        return BucketStore(f"{self.url}/{name}", scratch=Path(self.scratch), options=self.options)


class Killer:
    """Counts the requests of this process, and kills it at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.steps = at, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, request: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(request)
        async def counted(*arguments: Any, **more: Any) -> Any:
            self.step()
            result = await request(*arguments, **more)
            self.step()
            return result

        return counted

    def install(self) -> None:
        for kind, names in ((Objects, _REQUESTS), (S3Objects, (*_REQUESTS, *_UPLOADS))):
            for name in names:
                if name in vars(kind):
                    setattr(kind, name, self.wrap(vars(kind)[name]))


def make(settings: Settings, store: BucketStore) -> None:
    """What `sa1b reshard` does, in this process."""
    remove_leftovers(store)
    for source in discover([Path(one) for one in settings.sources]).sources:
        options = Options(images_per_shard=settings.images_per_shard)
        for _ in range(_TRIES):
            outcome = work_on(source, store, options, Policy(), IngestRun(), lambda counts: None)
            if outcome.kind != "held":  # by a process that was killed
                break
            time.sleep(0.1)
        assert outcome.kind in ("done", "skipped"), f"{outcome.kind}: {outcome.note}"
    finish(store)
    remove_leftovers(store)


def contents(store: BucketStore) -> dict[str, bytes]:
    """Every object of a dataset directory, also the hidden ones."""
    names = list(store._requests.sizes("", deep=True))
    with store.files(*names) as paths:
        return {name: path.read_bytes() for name, path in zip(names, paths, strict=True)}


def forked(work: Callable[[], object]) -> tuple[int, str]:
    """Call a function in a child: its wait status, and its result as text, or the error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(_LONGEST)
        try:
            code, text = 0, json.dumps(work())
        except BaseException:
            code, text = 1, traceback.format_exc()[-4000:]
        os.write(writer, text.encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    return os.waitpid(child, 0)[1], text


def kill_everywhere(settings: Settings, expected: dict[str, bytes]) -> dict[str, Any]:
    """Kill runs at their requests and compare what the next run makes with `expected`."""

    def run(name: str, at: int | None) -> int:
        killer = Killer(at)
        killer.install()
        make(settings, settings.store(name))
        return killer.steps

    def unfinished(name: str) -> int:
        return len(settings.store(name).uploads())

    def check(name: str) -> list[str] | None:
        store = settings.store(name)
        found = contents(store)
        names = {*found, *expected} - {OPTIONS}  # that is written by `sa1b.ingest.reshard`
        wrong = [one for one in sorted(names) if found.get(one) != expected.get(one)]
        wrong += [f"unfinished upload of {one.name}" for one in store.uploads()]
        wrong += [f"left in scratch: {path}" for path in Path(settings.scratch).rglob("*")]
        store.remove(*found)
        return wrong or None

    found: dict[str, Any] = {"killed": 0, "steps": 0, "uploads": 0, "wrong": []}
    k, survived = 0, False
    while not survived if settings.points is None else k < len(settings.points):
        at = k + 1 if settings.points is None else settings.points[k]
        name = f"run{k}"
        shutil.rmtree(settings.scratch, ignore_errors=True)
        for more in range(settings.at_a_time):
            status, text = forked(functools.partial(run, name, at + more))
            if os.WIFSIGNALED(status):
                found["killed"] += 1
            elif status:
                found["wrong"].append([at, text])
            else:
                survived, found["steps"] = True, int(text)
        found["uploads"] += int(forked(functools.partial(unfinished, name))[1])
        for last in (functools.partial(run, name, None), functools.partial(check, name)):
            status, text = forked(last)
            if status or text.startswith("["):
                found["wrong"].append([at, text])
        k += 1
    return found


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    expected = Path(document.pop("expected"))
    cache.PART = cache.PIECE = 5 << 20  # the least that S3 accepts
    files = {
        str(path.relative_to(expected)): path.read_bytes() for path in expected.rglob("*") if path.is_file()
    }
    json.dump(kill_everywhere(Settings(**document), files), sys.stdout)


if __name__ == "__main__":
    main()
