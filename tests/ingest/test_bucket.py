"""A run that writes to a bucket gives the bytes of a run that writes to a folder, whatever happens to it.

The bucket is a folder with the interface of an object store (fsspec's `local://`), which the processes of a run
share. test_ceph.py repeats the main tests with an object store.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simplejpeg

import sa1b
from tests import directories, processes
from tests.ingest.test_several_runs import files
from tests.shards import tiny
from tests.storage.store_server import StoreServer

REPOSITORY = Path(__file__).parents[2]
TARS = 3


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for number in range(TARS):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(100 * number, 100 * number + 20))
    return folder


@pytest.fixture(scope="module")
def alone(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run into a folder makes."""
    root = tmp_path_factory.mktemp("alone") / "root"
    assert sa1b.reshard(tars, root, images_per_shard=8, quiet=True).exit_code == 0
    return files(root)


def left(folder: Path) -> list[Path]:
    """Everything below the scratch folder."""
    return list((folder / "scratch").rglob("*"))


def test_a_shard_that_is_missing_is_made_again(tars: Path, tmp_path: Path, alone: dict[str, bytes]) -> None:
    url, options = prepared(tmp_path), {"images_per_shard": 8, "scratch": tmp_path / "scratch", "quiet": True}
    sa1b.reshard(tars, url, **options)
    (tmp_path / "root" / "sa1b-000001-0001.parquet").unlink()
    made = sa1b.reshard(tars, url, **options)
    assert (made.done, made.skipped) == (["sa_000001"], ["sa_000000", "sa_000002"])
    assert files(tmp_path / "root") == alone


def test_a_source_is_replaced_only_on_request(tars: Path, tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "sa_000001.tar", range(900, 910))
    options, url = {"scratch": tmp_path / "scratch", "quiet": True}, prepared(tmp_path)
    assert sa1b.reshard([tars], url, **options).exit_code == 0
    before = files(tmp_path / "root")
    refused = sa1b.reshard([tmp_path / "sa_000001.tar"], url, **options)
    assert refused.exit_code == 1
    assert f"{url} already has a source named 'sa_000001'" in refused.failed["sa_000001"]
    assert "--replace" in refused.failed["sa_000001"]
    assert files(tmp_path / "root") == before


def test_a_source_that_fails_leaves_its_reason_and_no_shard(tmp_path: Path) -> None:
    bad = tmp_path / "in" / "sa_000001.tar"
    tiny.write_tar(bad, [("./sa_1.jpg", b"not a jpeg"), ("./sa_1.json", b"{}")])
    url = directories.bucket(tmp_path / "root", "sa_000001")
    made = sa1b.reshard(bad, url, scratch=tmp_path / "scratch", quiet=True)
    assert "no usable pair" in made.failed["sa_000001"]
    found = files(tmp_path / "root")
    assert {name for name in found if "quarantine" not in name} == {"tasks/sa_000001.failed"}
    assert "quarantine/sa_000001/refused.jsonl" in found
    assert f"{url}/quarantine/sa_000001" in made.text
    assert left(tmp_path) == []


def command(*arguments: object) -> list[str]:
    return [sys.executable, "tools/reshard.py", *map(str, arguments)]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return processes.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True, check=False)


def prepared(folder: Path) -> str:
    """The URL of an empty bucket for a command; its file system does not make folders."""
    (folder / "root" / "tasks").mkdir(parents=True)
    return f"local://{folder}/root"


def flags_of(folder: Path) -> tuple[object, ...]:
    scratch = folder / "scratch"
    return ("--out", prepared(folder), "--images-per-shard", 8, "--scratch", scratch, "--json")


def started(*arguments: object) -> processes.Process:
    """A command that leads its own session."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return processes.Process(command(*arguments), cwd=REPOSITORY, text=True, start_new_session=True, **pipes)


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_command_that_is_killed_at_any_time_is_resumed(
    tars: Path, tmp_path: Path, alone: dict[str, bytes], kills: int
) -> None:
    flags = flags_of(tmp_path)
    for number in range(kills):
        process = started(tars, *flags)
        deadline = time.monotonic() + 60
        while process.poll() is None and not list(tmp_path.glob("root/*")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.05 + 1.5 * number / kills)
        process.send_signal(signal.SIGKILL, session=True)
        process.communicate(timeout=60)
    done = run(tars, *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    assert files(tmp_path / "root") == alone
    assert left(tmp_path) == []


def test_ctrl_c_leaves_no_claim_and_no_file_in_scratch(tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "in" / "sa_000000.tar", range(400))
    process = started(tmp_path / "in", "--out", prepared(tmp_path), "--scratch", tmp_path / "scratch")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("scratch/.partial/*/sa_000000/*.tar")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Nothing is damaged; run the same command again to resume." in out
    assert list(tmp_path.glob("root/tasks/*")) == []
    assert left(tmp_path) == []


@pytest.mark.slow  # quick: test_a_command_that_is_killed_at_any_time_is_resumed
def test_runs_killed_at_every_request_are_resumed(tmp_path: Path) -> None:
    result = killed_at(tmp_path, f"local://{tmp_path}/bucket", {"auto_mkdir": True}, None)
    assert result["killed"] >= 100
    assert result["wrong"] == []


def killed_at(
    folder: Path, url: str, options: dict[str, Any], points: list[int] | None, large: bool = False
) -> dict[str, Any]:
    """Runs killed at steps of the requests of one process, each resumed and compared; see bucket_runs.py.

    Args:
        large: shards of several parts.
    """
    sources = folder / "in"
    for number in range(2):
        members = tiny.pairs(range(100 * number, 100 * number + 6))
        if large:  # 3 images of 7 MB
            size = (1500, 1500)
            members = [
                member
                for one in range(100 * number, 100 * number + 3)
                for member in tiny.pair_members(
                    one,
                    simplejpeg.encode_jpeg(tiny.picture(one, size=size), 100, "RGB", "444"),
                    tiny.encode(tiny.document(one, size=size)),
                )
            ]
        tiny.write_tar(sources / f"sa_00000{number}.tar", members, gzip=False)
    alone = folder / "alone"
    assert sa1b.reshard(sources, alone, images_per_shard=4, quiet=True).exit_code == 0
    settings = {
        "sources": [str(sources)],
        "url": url,
        "options": options,
        "scratch": str(folder / "scratch"),
        "images_per_shard": 4,
        "points": points,
        "expected": str(alone),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ingest.bucket_runs", str(folder / "settings.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "KEY")
    with StoreServer(page=100) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def into(store: StoreServer, folder: Path) -> tuple[object, ...]:
    return ("--out", store.root, "--images-per-shard", 8, "--scratch", folder / "scratch")


def test_a_store_that_fails_stops_the_run_and_the_next_one_resumes(
    tars: Path, tmp_path: Path, store: StoreServer, alone: dict[str, bytes]
) -> None:
    store.fault("403", "PUT", "*/sa1b-000001-*.tar", times=1e9)
    done = run(tars, *into(store, tmp_path), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["done"], found["images"]) == (1, ["sa_000000"], 20)
    assert f"{store.root}/sa1b-000001-000" in found["store_error"]
    assert "sa_000002" not in found["failed"]  # it was not tried
    assert not [name for name in store.files() if name.endswith(".failed")]  # the source is not at fault
    assert left(tmp_path) == []
    store.faults.clear()
    assert json.loads(run(tars, *into(store, tmp_path), "--json").stdout)["skipped"] == ["sa_000000"]
    assert store.files() == {name: data for name, data in alone.items() if name[0] != "."}


def test_later_runs_too_check_at_their_start_that_they_may_write(
    tars: Path, tmp_path: Path, store: StoreServer
) -> None:
    assert run(tars / "sa_000000.tar", *into(store, tmp_path)).returncode == 0
    before = store.files()
    for what in ("PUT", "CREATE", "REPLACE"):
        store.fault("403", what, times=1e9)
    store.log.clear()
    done = run(tars, *into(store, tmp_path))
    assert done.returncode == 2
    assert f"{store.root}/" in done.stderr
    assert (len(store.asked("PUT CREATE REPLACE")), store.files()) == (1, before)


def test_a_process_whose_claim_was_taken_over_during_its_upload_leaves_the_source_to_the_other(
    tars: Path, tmp_path: Path, store: StoreServer
) -> None:
    theirs = json.dumps({"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs"}).encode()
    claim = f"{store.prefix}/tasks/sa_000000.claim"

    def taken_over(what: str, key: str) -> None:
        """By another machine, which removes the upload."""
        if what == "PUT" and key.endswith("sa1b-000000-0000.tar"):
            store.put(claim, theirs)

    store.before = taken_over
    store.fault("404", "PUT", "*/sa1b-000000-0000.tar", times=1e9)
    process = started(tars / "sa_000000.tar", *into(store, tmp_path))
    assert process.stderr is not None
    assert any("sa_000000, which node7:4711 works on" in line for line in process.stderr)
    assert left(tmp_path) == []
    process.send_signal(signal.SIGKILL, session=True)
    process.communicate(timeout=60)
    assert store.objects[claim].data == theirs
    assert store.files().keys() == {"tasks/sa_000000.claim"}


def test_an_interrupted_run_removes_its_unfinished_uploads(
    tars: Path, tmp_path: Path, store: StoreServer
) -> None:
    """Killed workers cannot: the run does, except for uploads of sources that another process is writing."""
    live = {"host": "node7", "pid": 7, "process": f"{'0' * 12}-7", "token": "theirs", "timeout": 1000}
    store.put(f"{store.prefix}/tasks/sa_000001.claim", json.dumps(live).encode())

    def interrupt(what: str, key: str) -> None:
        if what == "PUT" and key.endswith("sa1b-000000-0000.tar"):
            for name in ("sa1b-000000-0001.tar", "sa1b-000001-0002.tar", "sa1b-000009-0000.tar"):
                store.uploads[name] = (f"{store.prefix}/{name}", {})
            os.killpg(process.pid, signal.SIGINT)

    store.before = interrupt
    process = started(tars, *into(store, tmp_path))
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert store.uploads.keys() == {"sa1b-000001-0002.tar", "sa1b-000009-0000.tar"}


def test_a_full_scratch_disk_stops_the_run_and_the_next_one_resumes(small_disk: Path, tmp_path: Path) -> None:
    for number in range(3):
        pairs = [(i, *tiny.pair(i, size=(160, 200))) for i in range(1000 * number, 1000 * number + 50)]
        members = [member for pair in pairs for member in tiny.pair_members(*pair)]
        tiny.write_tar(tmp_path / "in" / f"sa_00000{number}.tar", members)
    url = prepared(tmp_path)
    full = run(tmp_path / "in", "--out", url, "--scratch", small_disk, "--no-space-check")
    assert full.returncode == 1
    assert "No space left on device" in full.stdout
    assert str(small_disk) in full.stdout
    assert "Stopped: the disk is full" in full.stdout
    assert list(small_disk.rglob("*")) == []
    done = run(tmp_path / "in", "--out", url, "--scratch", tmp_path / "scratch")
    assert done.returncode == 0, done.stderr
    sa1b.reshard(tmp_path / "in", tmp_path / "alone", quiet=True)
    assert files(tmp_path / "root") == files(tmp_path / "alone")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "http://127.0.0.1:1/shards"], "can only be read; pass a folder, or a URL"),
        (["--out", "https://127.0.0.1:1/shards", "--finish"], "can only be read"),
        (["--out", "nonsense://bucket/shards"], "fsspec has no protocol 'nonsense'"),
        (["--out", "github://x"], "github://x: GithubFileSystem.__init__() missing 2 required"),
        (
            ["--out", "PATH", "--scratch", "elsewhere"],
            "--scratch elsewhere: only for a dataset directory at a URL",
        ),
        (
            ["--out", "PATH", "--endpoint", "http://127.0.0.1:1"],
            "--endpoint http://127.0.0.1:1: only if --out",
        ),
        (["--out", "local://PATH/none", "--finish"], "is empty; check the URL"),
        (["--out", "local://PATH/none", "--drop", "sa_1"], "is empty; check the URL"),
    ],
)
def test_flags_that_mean_nothing_are_refused(tars: Path, tmp_path: Path, flags: list[str], said: str) -> None:
    words = [word.replace("PATH", str(tmp_path / "root")) for word in flags]
    sources = [] if {"--finish", "--drop"} & {*words} else [tars]
    refused = run(*sources, *words)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "root").exists()


def test_finish_and_drop_take_a_url(tars: Path, tmp_path: Path, alone: dict[str, bytes]) -> None:
    url = prepared(tmp_path)
    scratch = ("--scratch", tmp_path / "scratch")
    for number in range(2):
        run(tars, "--out", url, *scratch, "--images-per-shard", 8, "--task", f"{number}/2")
    done = run("--out", url, *scratch, "--finish")
    assert (done.returncode, done.stdout) == (0, f"Complete: {url}/dataset.json\n")
    assert files(tmp_path / "root") == alone
    dropped = run("--out", url, *scratch, "--drop", "sa_000001")
    assert (dropped.returncode, dropped.stdout) == (0, f"Complete: {url}/dataset.json\n")
    unknown = run("--out", url, *scratch, "--drop", "sa_000001")
    assert unknown.returncode == 2
    assert f"{url} has no such source; it has sa_000000, sa_000002" in unknown.stderr
