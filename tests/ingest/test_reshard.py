"""Runs of `tools/reshard.py` as a user starts them: finished, interrupted, killed, repeated, changed."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from tests import kit, processes
from tests.ingest.at_open import run_changing
from tests.shards import tiny

REPOSITORY = Path(__file__).parents[2]
IMAGES = 24


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    kit.run("synthesize", folder, "--tars", 3, "--images-per-tar", IMAGES, "--long-side", 160)
    return folder


@pytest.fixture(scope="module")
def clean(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clean") / "root"
    run(sources, root)
    return root


def command(source: Path, root: Path, *flags: str) -> list[str]:
    out = ["--out", str(root), "--images-per-shard", "10"]
    return [sys.executable, "tools/reshard.py", str(source), *out, *flags]


def run(source: Path, root: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    done = processes.run(
        command(source, root, "--json", *flags), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    result: dict[str, Any] = json.loads(done.stdout) if code in (0, 1, 3) else {"error": done.stderr}
    return result


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_summary_counts_everything(sources: Path, clean: Path) -> None:
    result = run(sources, clean)
    assert result["skipped"] == ["sa_000000", "sa_000001", "sa_000002"]
    assert result["done"] == []
    assert result["members"] == 2 * result["images"] == 6 * IMAGES
    assert result["shards"] == 9
    assert result["masks"] == sum(len(sample.annotations) for sample in sa1b.open(clean))


def test_bytes_do_not_depend_on_workers_or_the_order_of_sources(
    sources: Path, clean: Path, tmp_path: Path
) -> None:
    for name in ("sa_000002.tar", "sa_000000.tar", "sa_000001.tar"):
        run(sources / name, tmp_path / "one by one")
    run(sources, tmp_path / "together", "--workers", "3")
    assert contents(tmp_path / "one by one") == contents(clean)
    assert contents(tmp_path / "together") == contents(clean)


def test_killed_at_random_times_it_goes_on_to_the_same_bytes(
    sources: Path, clean: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    for _ in range(4):
        process = processes.Process(
            command(sources, tmp_path, "--workers", "2"), cwd=REPOSITORY, stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(draw.uniform(0.05, 0.8))
        with suppress(ProcessLookupError):  # it has no group yet, or has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run(sources, tmp_path)
    assert contents(tmp_path) == contents(clean)


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("long") / "sa_000007.tar"
    tiny.make_tar(source, range(250))
    return source


@pytest.fixture(scope="module")
def undisturbed(long_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run of the long source makes."""
    root = tmp_path_factory.mktemp("undisturbed") / "root"
    run(long_source, root)
    return contents(root)


@pytest.fixture
def long_run(long_source: Path, tmp_path: Path) -> Iterator[tuple[processes.Process, Path, Path]]:
    """A run whose worker is in the middle of its source: the process, the source and the root."""
    process = processes.Process(
        command(long_source, tmp_path / "root"),
        cwd=REPOSITORY,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 300
    while not list((tmp_path / "root").glob(".partial/*/*/*-0001.tar")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    yield process, long_source, tmp_path / "root"
    process.send_signal(signal.SIGKILL, session=True)
    process.wait()


def test_a_killed_worker_is_replaced_and_the_result_is_the_same(
    long_run: tuple[processes.Process, Path, Path], undisturbed: dict[str, bytes]
) -> None:
    process, _, root = long_run
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    (worker,) = (pid for pid in children if b"resource_tracker" not in lines[pid])
    os.kill(int(worker), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "retried sa_000007" in out
    assert "SIGKILL" in out
    assert contents(root) == undisturbed


def test_ctrl_c_leaves_nothing_broken(
    long_run: tuple[processes.Process, Path, Path], undisturbed: dict[str, bytes]
) -> None:
    process, source, root = long_run
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group hears it
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "run the same command again" in out
    assert "Traceback" not in err
    assert contents(root) == {}
    run(source, root)
    assert contents(root) == undisturbed


def test_another_time_is_looked_into_and_other_content_is_refused_unless_it_is_to_replace(
    sources: Path, tmp_path: Path
) -> None:
    source = tmp_path / "sa_000000.tar"
    shutil.copy2(sources / "sa_000000.tar", source)
    root = tmp_path / "root"
    first = run(source, root)
    assert first["done"] == ["sa_000000"]
    assert first["shards"] == 3
    assert run(source, root)["skipped"] == ["sa_000000"]
    before = contents(root)
    os.utime(source, (1, 1))
    assert run(source, root, "--recheck")["skipped"] == ["sa_000000"]
    assert run(source, root)["skipped"] == ["sa_000000"]
    after = contents(root)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"tasks/sa_000000.json"}  # its time is known now
    tiny.synthesize(source, images=8, first_id=1, long_side=64)
    for flags in ([], ["--recheck"]):
        done = processes.run(
            command(source, root, *flags), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        for part in ("other content", "--replace", f"--rename {source}=NEW_NAME"):
            assert part in done.stdout
        assert contents(root) == after
    assert run(source, root, "--replace")["done"] == ["sa_000000"]
    # The shards of the longer source are gone.
    assert sorted(path.name for path in root.glob("*.tar")) == ["sa1b-000000-0000.tar"]
    assert len(sa1b.open(root)) == 8


def test_a_missing_shard_is_made_again(sources: Path, tmp_path: Path) -> None:
    run(sources / "sa_000000.tar", tmp_path)
    before = contents(tmp_path)
    (tmp_path / "sa1b-000000-0001.tar").unlink()
    assert run(sources / "sa_000000.tar", tmp_path)["done"] == ["sa_000000"]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["samples-*.bin", "dataset.json", "sa1b-000000-0001.parquet"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_root_that_lost_a_file_is_completed_again(
    sources: Path, tmp_path: Path, name: str, cut: bool
) -> None:
    source = sources / "sa_000000.tar"
    sa1b.reshard(source, tmp_path, images_per_shard=10, quiet=True)
    before = contents(tmp_path)
    (path,) = tmp_path.glob(name)
    if cut:
        path.write_bytes(before[path.name][:-10])
    else:
        path.unlink()
    assert sa1b.reshard(source, tmp_path, images_per_shard=10, quiet=True).document["complete"]
    assert contents(tmp_path) == before


def test_a_checklist_given_later_checks_finished_sources_too(sources: Path, tmp_path: Path) -> None:
    source = sources / "sa_000000.tar"
    right = hashlib.md5(source.read_bytes()).hexdigest()
    checklist = tmp_path / "md5.txt"
    for recorded in (False, True):
        root = tmp_path / str(recorded)
        checklist.write_text(f"{right}  sa_000000.tar\n")
        first = {"md5": checklist} if recorded else {}
        assert sa1b.reshard(source, root, quiet=True, **first).exit_code == 0
        assert sa1b.reshard(source, root, md5=checklist, quiet=True).exit_code == 0
        checklist.write_text(f"{'0' * 32}  sa_000000.tar\n")
        again = sa1b.reshard(source, root, md5=checklist, quiet=True)
        assert again.exit_code == 1
        assert f"its md5 is {right} and the checklist has {'0' * 32}" in again.failed["sa_000000"]


def test_images_of_a_complete_root_are_not_taken_twice_and_the_root_stays_complete(
    sources: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    sa1b.reshard(sources / "sa_000000.tar", root, quiet=True)
    before = contents(root)
    shutil.copy(sources / "sa_000000.tar", tmp_path / "sa_000009.tar")
    again = sa1b.reshard(tmp_path / "sa_000009.tar", root, quiet=True)
    assert again.exit_code == 1
    assert "of sa_000009 is in" in again.failed["sa_000009"]
    assert list(sa1b.open(root).failed) == ["sa_000009"]
    assert "Complete" in kit.run("reshard", "--out", root, "--drop", "sa_000009").out
    assert contents(root) == before


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_source_that_vanishes_or_changes_before_it_is_read_is_named_without_a_traceback(
    sources: Path, tmp_path: Path, vanishes: bool
) -> None:
    source = tmp_path / "sa_000000.tar"
    shutil.copy(sources / source.name, source)
    with kit.fault(tmp_path / "root", 1, lambda _: source.unlink() if vanishes else os.utime(source, (1, 1))):
        done = kit.run("reshard", source, "--out", tmp_path / "root", code=1)
    assert f"FAILED {source.stem}: " in done.out
    assert ("No such file or directory" if vanishes else "changed before it was read") in done.out
    assert str(source) in done.out
    assert "Traceback" not in done.out + done.err
    assert not list((tmp_path / "root").rglob("*.tar"))


def test_a_shard_that_does_not_read_back_ends_its_source_and_is_not_stored(tmp_path: Path) -> None:
    """The disk gives other bytes than were written: one changes when a finished shard is opened to be read."""
    tiny.make_tar(tmp_path / "sa_000005.tar", range(60))
    words = [
        "reshard",
        tmp_path / "sa_000005.tar",
        "--out",
        tmp_path / "root",
        "--images-per-shard",
        5,
        "--json",
    ]
    done = run_changing(words, "sa1b-000005-0002.tar", None, b"?", 700)
    assert done.code == 1, done.err
    assert "sa1b-000005-0002.tar" in done.json["failed"]["sa_000005"]
    assert contents(tmp_path / "root").keys() <= {"tasks/sa_000005.failed"}


def test_a_failed_second_attempt_leaves_the_quarantine_of_the_first(tmp_path: Path) -> None:
    path, root = tmp_path / "sa_000005.tar", tmp_path / "root"
    tiny.write_tar(path, [*tiny.pairs(range(6)), *tiny.pair_members(7, text=b"{")])
    assert sa1b.reshard(path, root, quiet=True).exit_code == 3
    before = contents(root)
    tiny.write_tar(path, tiny.pair_members(5, text=b"["))
    again = sa1b.reshard(path, root, replace=True, quiet=True)
    assert "no usable pair" in again.failed["sa_000005"]
    assert contents(root) == before


def test_a_reason_to_accept_that_no_pair_has_is_questioned(sources: Path, tmp_path: Path) -> None:
    done = kit.run("reshard", sources / "sa_000000.tar", "--out", tmp_path, "--accept", "aera")
    assert "--accept aera: " in done.err


def test_what_was_refused_of_a_failed_source_is_kept(tmp_path: Path) -> None:
    tiny.write_tar(tmp_path / "sa_000005.tar", tiny.pair_members(5, text=b"{"))
    made = sa1b.reshard(tmp_path / "sa_000005.tar", tmp_path / "root", quiet=True)
    assert made.exit_code == 1
    assert f"{tmp_path}/root/quarantine/sa_000005" in made.text
    assert {line["name"] for line in tiny.lines(tmp_path / "root", "sa_000005")} == {
        "./sa_5.jpg",
        "./sa_5.json",
    }


def test_image_size_scales_images_and_keeps_masks(sources: Path, clean: Path, tmp_path: Path) -> None:
    run(sources / "sa_000000.tar", tmp_path, "--image-size", "100", "--quality", "90")
    full, small = sa1b.open(clean), sa1b.open(tmp_path)
    assert small.manifest["options"]["image_size"] == 100
    for sample in small:
        original = full.by_id(sample.image_id)
        height, width = original.image.shape[:2]
        scale = 100 / max(height, width)
        assert np.abs(np.subtract(sample.image.shape[:2], (height * scale, width * scale))).max() <= 0.5
        assert max(sample.image.shape[:2]) == 100
        assert (sample.annotations.height, sample.annotations.width) == (height, width)
        assert sample.annotations.to_json() == original.annotations.to_json()
        # Antialiased: the mean colour of every picture is kept.
        assert np.abs(sample.image.mean((0, 1)) - original.image.mean((0, 1))).max() < 2


def test_images_already_small_enough_keep_their_bytes(sources: Path, clean: Path, tmp_path: Path) -> None:
    run(sources / "sa_000000.tar", tmp_path, "--image-size", "4000")
    full = sa1b.open(clean)
    assert all(sample.jpeg == full.by_id(sample.image_id).jpeg for sample in sa1b.open(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quality", "90"], "--quality 90: must be from 1 to 100, and needs --image-size"),
        (["--image-size", "3"], "--image-size 3: must be from 16"),
        (["--images-per-shard", "0"], "at least 1"),
        (["--md5", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_flags_are_named(sources: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    found = run(sources, tmp_path / "root", *flags, code=2)
    assert message in found["error"]
    assert "Traceback" not in found["error"]
    assert not (tmp_path / "root").exists()
