import json
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.programs.export import source_tars
from sa1b.programs.export.export import export as export_here
from sa1b.programs.export.export_part import ExportRecord
from sa1b.programs.export.source_tars import SourceTars
from sa1b.shards import manifest
from sa1b.shards.manifest import table_name
from sa1b.sources.discovery import discover
from sa1b.storage.atomic import this_process
from tests.export.exporting import export
from tests.shards.tiny_source import ROOTS, make_root, odd_pairs, pairs, write_source

CONTENT = {
    "sa_000001": pairs(range(100, 109)) | odd_pairs(200),
    "sa_000002": pairs(range(300, 303), seed=2),
    "holiday": pairs(range(400, 402), seed=3),
}
OTHER_WHITE_SPACE = 206


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    sources = [write_source(folder / f"{name}.tar", content) for name, content in CONTENT.items()]
    return make_root(folder / "root", sources, ROOTS["plain"])


def read(path, mode="r:gz"):
    """image id -> (JPEG, annotation file); names and order must be those of the download."""
    found = {}
    with tarfile.open(path, mode) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    for (jpg, picture), (text, annotation) in zip(members[::2], members[1::2], strict=True):
        image_id = int(jpg.removeprefix("./sa_").removesuffix(".jpg"))
        assert (jpg, text) == (f"./sa_{image_id}.jpg", f"./sa_{image_id}.json")
        found[image_id] = (picture, annotation)
    return found


def test_the_sources_come_back(root, tmp_path):
    summary = export(root, tmp_path)
    assert summary.parts == ["holiday.tar", "sa_000001.tar", "sa_000002.tar"]
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == summary.parts
    assert summary.images == 21
    for name, content in CONTENT.items():
        found = read(tmp_path / f"{name}.tar")
        assert found.keys() == content.keys()
        for image_id, (jpg, text) in content.items():
            assert found[image_id][0] == jpg
            if image_id == OTHER_WHITE_SPACE:
                assert json.loads(found[image_id][1]) == json.loads(text)
            else:
                assert found[image_id][1] == text


def test_a_round_trip_gives_the_same_shards(root, tmp_path):
    export(root, tmp_path / "tars")
    again = make_root(tmp_path / "again", sorted((tmp_path / "tars").glob("*.tar")), ROOTS["plain"])
    written = sorted(path.name for path in root.glob("sa1b-*"))
    assert sorted(path.name for path in again.glob("sa1b-*")) == written
    for name in [*written, table_name(root)]:
        assert (again / name).read_bytes() == (root / name).read_bytes()
    one, two = manifest.read_dataset(root), manifest.read_dataset(again)
    # The bytes of the tars differ, because their members are in another order.
    assert one.pop("sources").keys() == two.pop("sources").keys()
    assert one == two


def test_annotation_files_kept_verbatim_make_no_difference(root, tmp_path):
    sources = [write_source(tmp_path / f"{name}.tar", content) for name, content in CONTENT.items()]
    kept = make_root(tmp_path / "kept", sources, ROOTS["keep_json"])
    export(root, tmp_path / "one")
    export(kept, tmp_path / "two")
    for path in (tmp_path / "one").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_gzip_header_holds_no_time_and_no_name(root, tmp_path):
    export(root, tmp_path)
    assert (tmp_path / "sa_000002.tar").read_bytes()[:8] == b"\x1f\x8b\x08" + bytes(5)


def test_plain(root, tmp_path):
    export(root, tmp_path, plain=True)
    assert read(tmp_path / "holiday.tar", "r:").keys() == CONTENT["holiday"].keys()


def test_chosen_images(root, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text("301\n\nsa_100.jpg\n301\n")
    assert export(root, tmp_path / "out", ids=ids).parts == ["sa_000001.tar", "sa_000002.tar"]
    assert list(read(tmp_path / "out" / "sa_000001.tar")) == [100]
    assert list(read(tmp_path / "out" / "sa_000002.tar")) == [301]


def test_small_tars(root, tmp_path):
    summary = export(root, tmp_path, images_per_tar=10)
    assert summary.parts == [
        "holiday-0000.tar",
        "sa_000001-0000.tar",
        "sa_000001-0001.tar",
        "sa_000002-0000.tar",
    ]
    parts = [read(tmp_path / f"sa_000001-{part:04d}.tar") for part in range(2)]
    assert [len(part) for part in parts] == [10, 6]
    assert (parts[0] | parts[1]).keys() == CONTENT["sa_000001"].keys()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("7\n8\n", "7, 8: not in"),
        ("100\nsa_101.png\n", "line 2: .* is not an image id"),
        (f"100\n{2**63}\n", "line 2: .* is not an image id; .*below 2"),
        ("\n", "no image id"),
    ],
)
def test_a_bad_list_of_images_is_refused(root, tmp_path, lines, message):
    ids = tmp_path / "ids.txt"
    ids.write_text(lines)
    with pytest.raises(UsageError, match=message):
        export(root, tmp_path / "out", ids=ids)
    assert not (tmp_path / "out").exists()


def test_tars_that_exist_are_not_replaced_unasked(root, tmp_path):
    (tmp_path / "sa_000002.tar").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"already has sa_000002\.tar"):
        export(root, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sa_000002.tar"]
    export(root, tmp_path, overwrite=True)
    with pytest.raises(UsageError, match="an export with --to sa1b, not --to sa1b --images-per-tar 4;"):
        export(root, tmp_path, images_per_tar=4, overwrite=True)
    assert read(tmp_path / "sa_000002.tar").keys() == CONTENT["sa_000002"].keys()


def test_scaled_images_are_refused(tmp_path):
    source = write_source(tmp_path / "sa_000001.tar", pairs(range(3)))
    root = make_root(tmp_path / "root", [source], ROOTS["image_size"])
    with pytest.raises(UsageError, match="--image-size 32"):
        export(root, tmp_path / "out")


def test_a_damaged_sample_costs_its_tar_alone_which_the_same_command_writes_after_repair(tmp_path):
    sources = [
        write_source(tmp_path / f"sa_00000{i}.tar", pairs(range(10 * i, 10 * i + 8))) for i in (1, 2, 3)
    ]
    root = make_root(tmp_path / "root", sources, ROOTS["plain"])
    shard = root / "sa1b-000002-0001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:600] + bytes([whole[600] ^ 1]) + whole[601:])
    out = tmp_path / "out"
    with pytest.raises(
        ShardError, match=r"sa_000002.tar: .*sa1b-000002-0001\.tar.*; 2 tars complete; repair"
    ):
        export(root, out)
    other = shard.with_name("sa1b-000003-0001.tar")
    undamaged = other.read_bytes()
    other.write_bytes(undamaged[:600] + bytes([undamaged[600] ^ 1]) + undamaged[601:])
    with pytest.raises(ShardError, match=r"\(1 other tar failed too\); 1 tar complete"):
        export(root, tmp_path / "other")
    other.write_bytes(undamaged)
    assert sorted(path.name for path in out.iterdir()) == [".export.jsonl", "sa_000001.tar", "sa_000003.tar"]
    shard.write_bytes(whole)
    summary = export(root, out)
    assert summary.skipped == ["sa_000001.tar", "sa_000003.tar"]
    assert (summary.parts, summary.images) == (["sa_000001.tar", "sa_000002.tar", "sa_000003.tar"], 24)


def bytes_of(out):
    return {path.name: path.read_bytes() for path in out.glob("*.tar")}


def test_any_number_of_workers_writes_the_same_bytes(root, tmp_path):
    one = export(root, tmp_path / "one", images_per_tar=7)
    three = export(root, tmp_path / "three", images_per_tar=7, workers=3)
    assert bytes_of(tmp_path / "three") == bytes_of(tmp_path / "one")
    assert (three.parts, three.images, three.masks, three.bytes) == (
        one.parts,
        one.images,
        one.masks,
        one.bytes,
    )
    assert not [path.name for path in (tmp_path / "three").iterdir() if path.name.endswith(".partial")]


class KilledError(Exception):
    pass


@pytest.mark.parametrize("point", ["in a tar", "before the record"])
def test_an_interrupted_export_continues_with_the_same_command(root, tmp_path, monkeypatch, point):
    export_here(root, tmp_path / "whole", SourceTars(), quiet=True)
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        calls = []

        def killed(*_):
            calls.append(1)
            if len(calls) == (1 if point == "before the record" else 15):
                raise KilledError

        if point == "in a tar":
            original = source_tars.annotation_text
            broken.setattr(source_tars, "annotation_text", lambda sample: killed() or original(sample))
        else:
            broken.setattr(ExportRecord, "finish", killed)
        with pytest.raises(KilledError):
            export_here(root, out, SourceTars(), quiet=True)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(times) == 1
    summary = export_here(root, out, SourceTars(), quiet=True)
    assert summary.skipped == (["holiday.tar"] if point == "in a tar" else [])
    assert (summary.images, len(summary.parts)) == (21, 3)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    again = export_here(root, out, SourceTars(), quiet=True)  # the export was complete
    assert (again.skipped, again.parts, again.bytes_written) == (summary.parts, summary.parts, 0)
    if point == "in a tar":
        assert (out / "holiday.tar").stat().st_mtime_ns == times["holiday.tar"]


KILLED = """
import os, signal, sys
from pathlib import Path
from sa1b.programs.export import export_part
from sa1b.programs.export.export import export
from sa1b.programs.export.source_tars import SourceTars
if __name__ == "__main__":
    finish, done = export_part.ExportRecord.finish, []
    def killed(record, name, written):
        finish(record, name, written)
        done.append(name)
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    export_part.ExportRecord.finish = killed
    export(Path(sys.argv[1]), Path(sys.argv[2]), SourceTars(4), workers=2, quiet=True)
"""


def test_an_export_whose_process_was_killed_continues(root, tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, program, root, out], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (out / ".export.partial" / f".sa_000002-0000.tar.{this_process()}-01234567.partial").mkdir(parents=True)
    summary = export(root, out, images_per_tar=4)
    assert len(summary.skipped) >= 2
    assert not (out / ".export.partial").exists()
    assert len(summary.parts) == 6
    export(root, tmp_path / "whole", images_per_tar=4)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_the_folder_is_a_source_with_nothing_left_over(root, tmp_path):
    export(root, tmp_path / "out")
    found = discover([tmp_path / "out"])
    assert [source.name for source in found.sources] == ["holiday", "sa_000001", "sa_000002"]
    assert found.not_taken == []


def test_a_tar_that_is_cut_or_of_other_images_does_not_count_as_complete(root, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text("100\n300\n400\n")
    out = tmp_path / "out"
    export(root, out)
    tar = out / "sa_000002.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[:-1])
    assert export(root, out).skipped == ["holiday.tar", "sa_000001.tar"]
    assert tar.read_bytes() == whole
    with pytest.raises(UsageError, match="not from an export of these images"):
        export(root, out, ids=ids)
    assert export(root, out, ids=ids, overwrite=True).skipped == []
    assert list(read(tar)) == [300]
    with pytest.raises(UsageError, match="not from an export of these images"):
        export(root, out, ids=ids, plain=True)
    path = out / ".export.jsonl"
    assert len(export(root, out, ids=ids).skipped) == 3
    path.write_text(path.read_text().replace('"images": 1', '"images": 2'))  # lines without their digest
    assert export(root, out, ids=ids).skipped == []
    path.write_text("{")
    with pytest.raises(UsageError, match=r"\.export\.jsonl: damaged .*--overwrite"):
        export(root, out)


def test_images_of_a_view(root, tmp_path):
    images = np.array([101, 102, 301, 999], np.uint64)
    assert export(root, tmp_path / "out", images=images).images == 3
    assert list(read(tmp_path / "out" / "sa_000001.tar")) == [101, 102]
    ids = tmp_path / "ids.txt"
    ids.write_text("102\n300\n")
    assert export(root, tmp_path / "both", images=images, ids=ids).images == 1
    ids.write_text("400\n")
    with pytest.raises(UsageError, match="no image to export"):
        export(root, tmp_path / "none", images=images, ids=ids)


def test_tars_are_not_written_into_a_dataset_directory(root):
    before = sorted(root.rglob("*"))
    with pytest.raises(
        UsageError, match=r"--out .*: a dataset directory; name another folder for the export"
    ):
        export(root, root / "tasks" / "..")
    with pytest.raises(UsageError, match="a dataset directory"):
        export(root, root)
    with pytest.raises(UsageError, match="in the dataset directory .*; name another folder"):
        export(root, root / "tasks" / "new")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        export(root, root / "dataset.json")
    assert sorted(root.rglob("*")) == before


def test_an_unfinished_root_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no dataset there"):
        export(tmp_path, tmp_path / "out")


def test_names_of_sources_are_those_of_the_manifest(root):
    assert manifest.read_dataset(root)["sources"].keys() == set(CONTENT)
