"""What may be named on the command line, and what a person is told about anything else."""

import json
import os

import pytest

from sa1b.errors import SourceError, UsageError
from sa1b.ingest.ingest import Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards.manifest import Options
from sa1b.sources.discovery import discover
from sa1b.sources.source import SourceReader, digest_of_source, read_checklist
from tests.shards import tiny
from tests.shards.tiny import make_tar, pair, pair_members, pairs, write_tar

IDS = range(100, 106)


def extract(members, *, images, annotations=None):
    """Write pairs as files: jpgs into `images`, the rest into `annotations`."""
    for name, data in members:
        folder = images if name.endswith("jpg") or annotations is None else annotations
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.rsplit("/", 1)[-1]).write_bytes(data)


def check_exact(root, ids=IDS):
    assert tiny.read_back(root) == {i: (pair(i)[0], json.loads(pair(i)[1])) for i in ids}


# Tars


@pytest.mark.parametrize("gzip", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("name", ["sa_000020.tar", "sa_000020.tar.gz", "sa_000020.tgz", "sa_000020"])
def test_a_tar_is_told_by_its_content_whatever_its_name(tmp_path, name, gzip):
    make_tar(tmp_path / name, IDS, gzip=gzip)
    (source,) = discover([tmp_path / name]).sources
    assert (source.name, source.kind) == ("sa_000020", "tar")
    tiny.ingest_tar(tmp_path / name, tmp_path / "root")
    check_exact(tmp_path / "root")


@pytest.mark.parametrize("damage", ["flipped", "zeroed"])
def test_a_plain_tar_is_one_though_its_first_header_is_damaged(tmp_path, damage):
    data = tiny.tar_bytes(pair_members(99) + pairs(IDS))
    head = bytes(512) if damage == "zeroed" else data[:256] + b"???" + data[259:512]
    (tmp_path / "sa_000020.tar").write_bytes(head + data[512:])
    tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    check_exact(tmp_path / "root")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x1f",
        b"<html>This link has expired</html>",
        bytes(10240),
        b"x" * 10240,
        b"PK\x03\x04" + bytes(600),
    ],
    ids=["empty", "one byte", "HTML", "zeros", "text", "zip"],
)
def test_a_file_that_is_no_tar_is_refused_by_name(tmp_path, content):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"sa_000020.tar: neither a gzip file nor a tar"):
        discover([path])


def test_gzip_of_something_else_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.gzip_bytes(b"name,cdn_link\n" * 1000))
    with pytest.raises(SourceError, match=r"sa_000020.tar: holds no usable pair; no valid member header"):
        tiny.ingest_tar(path, tmp_path / "root")


def test_what_does_not_exist_is_named(tmp_path):
    with pytest.raises(SourceError, match="sa_000020.tar: no such file or folder"):
        discover([tmp_path / "sa_000020.tar"])


# Folders


@pytest.mark.parametrize("name", ["sa_000020", "pictures"])
def test_a_flat_folder_of_pairs_is_a_source_of_its_name(tmp_path, name):
    extract(pairs(IDS), images=tmp_path / name)
    (source,) = discover([tmp_path / name]).sources
    assert (source.name, source.kind) == (name, "folder")
    assert source.size == sum(len(data) for _, data in pairs(IDS))
    tiny.ingest_tar(tmp_path / name, tmp_path / "root")
    check_exact(tmp_path / "root")


def test_images_beside_annotations_are_one_source(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder / "images", annotations=folder / "annotations")
    tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root")


def test_folders_below_are_sources_of_their_own(tmp_path):
    extract(pairs(IDS[:3]), images=tmp_path / "all" / "sa_000020")
    nested = tmp_path / "all" / "sa_000021"
    extract(pairs(IDS[3:]), images=nested / "images", annotations=nested / "annotations")
    (tmp_path / "all" / "notes").mkdir()
    assert [source.name for source in discover([tmp_path / "all"]).sources] == ["sa_000020", "sa_000021"]


def test_a_folder_of_tars_is_all_of_them_in_order_of_name(tmp_path):
    for name in ("sa_000021.tar", "sa_000020.tar", "sa_000019.tgz"):
        make_tar(tmp_path / name, IDS)
    (tmp_path / "sa_images_ids.txt").write_text("1\n")
    assert [source.name for source in discover([tmp_path]).sources] == ["sa_000019", "sa_000020", "sa_000021"]


def test_an_empty_download_in_a_folder_of_tars_is_named_and_the_others_go_on(tmp_path):
    make_tar(tmp_path / "in" / "sa_000020.tar", IDS)
    (tmp_path / "in" / "sa_000021.tar").touch()
    summary = reshard([tmp_path / "in"], tmp_path / "out", Options(), Policy(), quiet=True)
    assert summary.done == ["sa_000020"]
    assert summary.failed.keys() == {"sa_000021"}
    assert "sa_000021.tar: holds no usable pair; " in summary.failed["sa_000021"]
    assert summary.exit_code() == 1


@pytest.mark.parametrize("content", [[], ["notes.txt"], ["sa_100.jpeg"]])
def test_a_folder_without_sources_is_refused(tmp_path, content):
    for name in content:
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match=r"holds no tar and no sa_<id>.jpg"):
        discover([tmp_path])


def test_a_folder_of_tars_and_pairs_is_refused_rather_than_half_read(tmp_path):
    extract(pairs(IDS), images=tmp_path)
    make_tar(tmp_path / "sa_000020.tar", IDS)
    with pytest.raises(SourceError, match=r"holds extracted pairs and sa_000020.tar too"):
        discover([tmp_path])


def test_half_a_pair_in_a_folder_is_refused_and_costs_no_other(tmp_path):
    extract([*pairs(IDS), pair_members(500)[0]], images=tmp_path / "sa_000020")
    task = tiny.ingest_tar(tmp_path / "sa_000020", tmp_path / "root")
    check_exact(tmp_path / "root")
    assert task.counts["refused"] == {"jpg_unpaired": 1}


@pytest.mark.parametrize("kind", ["link to nothing", "fifo", "folder"])
def test_what_is_no_file_in_a_folder_is_not_read_and_costs_no_other(tmp_path, kind):
    folder = tmp_path / "sa_000020"
    extract([*pairs(IDS), pair_members(500)[1]], images=folder)
    odd = folder / "sa_500.jpg"
    match kind:
        case "fifo":
            os.mkfifo(odd)
        case "folder":
            odd.mkdir()
        case _:
            odd.symlink_to(tmp_path / "gone")
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root")
    assert task.counts["refused"]["json_unpaired"] == 1


def test_links_to_files_are_read(tmp_path):
    extract(pairs(IDS), images=tmp_path / "real")
    linked = tmp_path / "sa_000020"
    linked.mkdir()
    for path in (tmp_path / "real").iterdir():
        (linked / path.name).symlink_to(path)
    tiny.ingest_tar(linked, tmp_path / "root")
    check_exact(tmp_path / "root")


def test_the_digest_of_a_folder_depends_on_names_and_contents_only(tmp_path):
    extract(pairs(IDS), images=tmp_path / "a")
    extract(pairs(IDS, seed=1), images=tmp_path / "b" / "images", annotations=tmp_path / "b" / "annotations")
    extract(pairs(IDS[1:]), images=tmp_path / "c")
    a, b, c = (digest_of_source(discover([tmp_path / name]).sources[0]) for name in "abc")
    assert a == b != c


def test_the_digest_of_a_tar_is_that_of_the_file_as_stored(tmp_path):
    import hashlib

    make_tar(tmp_path / "sa_000020.tar", IDS)
    (source,) = discover([tmp_path / "sa_000020.tar"]).sources
    stored = (tmp_path / "sa_000020.tar").read_bytes()
    reader = SourceReader(source, md5=True)
    expected = {"sha256": hashlib.sha256(stored).hexdigest(), "md5": hashlib.md5(stored).hexdigest()}
    assert reader.digests() == expected  # even if nothing of it was unpacked
    reader.close()
    assert digest_of_source(source) == expected["sha256"]


# Names


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a/sa_000020.tar", "b/sa_000020.tar"),
        ("sa_000020.tar", "sa_000020.tgz"),
        ("sa_000020.tar", "000020.tar"),
    ],
)
def test_two_sources_whose_shards_would_share_a_name_are_refused(tmp_path, first, second):
    for name in (first, second):
        make_tar(tmp_path / name, IDS)
    with pytest.raises(SourceError, match=r"two sources are named '000020'.*leave one out or rename it"):
        discover([tmp_path / first, tmp_path / second])


def test_a_source_whose_shards_would_replace_those_of_another_run_is_refused(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    make_tar(tmp_path / "000020.tar", IDS)
    tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    with pytest.raises(
        UsageError, match=r"000020.tar: .* holds a source named 'sa_000020' already.*rename it"
    ):
        reshard([tmp_path / "000020.tar"], tmp_path / "root", Options(), Policy(), quiet=True)


def test_a_checklist_says_nothing_of_a_folder(tmp_path):
    extract(pairs(IDS), images=tmp_path / "sa_000020")
    (tmp_path / "md5.txt").write_text(f"{'0' * 32}  sa_000020\n")
    summary = reshard(
        [tmp_path / "sa_000020"],
        tmp_path / "root",
        Options(),
        Policy(),
        checklist=tmp_path / "md5.txt",
        quiet=True,
    )
    assert summary.failed == {}


def test_a_source_named_twice_counts_once(tmp_path, monkeypatch):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / "sa_000020.tar", tmp_path / "." / "sa_000020.tar", tmp_path]
    assert len(discover(paths).sources) == 1


@pytest.mark.parametrize("name", [".tar", "-x.tar", "sa 20.tar", "sa_20*.tar", "sä.tar", "a\nb.tar", "..tar"])
def test_a_name_unfit_for_shards_is_refused(tmp_path, name):
    make_tar(tmp_path / name, IDS)
    with pytest.raises(SourceError, match="use letters, digits, '_', '-' and '.'"):
        discover([tmp_path / name])


# Checklists


def test_a_checklist_is_what_md5sum_writes(tmp_path):
    path = tmp_path / "md5.txt"
    path.write_text(
        f"{'A' * 32}  sa_000020.tar\r\n{'b' * 32} *x/sa_000021.tar\n\n{'c' * 32}\tsa_000022.tar\n"
    )
    assert read_checklist(path) == {
        "sa_000020.tar": "a" * 32,
        "sa_000021.tar": "b" * 32,
        "sa_000022.tar": "c" * 32,
    }


@pytest.mark.parametrize(
    "line", [b"sa_000020.tar", b"0" * 31 + b"  sa_000020.tar", b"\xff\xfe\x00", b"g" * 32 + b" x", b"0" * 32]
)
def test_a_checklist_line_of_another_form_is_named(tmp_path, line):
    path = tmp_path / "md5.txt"
    path.write_bytes(b"0" * 32 + b"  sa_000019.tar\n" + line)
    with pytest.raises(SourceError, match=r"md5.txt, line 2: expected '<md5>  <file name>', found"):
        read_checklist(path)


def test_a_checklist_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"md5.txt"):
        read_checklist(tmp_path / "md5.txt")


def test_a_tar_that_vanishes_is_named(tmp_path):
    write_tar(tmp_path / "sa_000020.tar", pairs(IDS))
    (source,) = discover([tmp_path / "sa_000020.tar"]).sources
    (tmp_path / "sa_000020.tar").unlink()
    with pytest.raises(OSError, match=r"sa_000020.tar"):
        SourceReader(source)
