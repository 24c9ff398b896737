"""Paths of the command line, the sources found below them, and the list of files not taken."""

import os
import shlex

import pytest

from sa1b.errors import SourceError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards.documents import Options
from sa1b.sources.discovery import discover
from tests.shards import tiny
from tests.shards.tiny import make_tar, pair_members, pairs
from tests.sources.archives import check_exact, extract

IDS = range(100, 106)


@pytest.mark.parametrize("gzip", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("name", ["sa_000020.tar", "sa_000020.tar.gz", "sa_000020.tgz", "sa_000020"])
def test_a_tar_is_told_by_its_content_whatever_its_name(tmp_path, name, gzip):
    make_tar(tmp_path / name, IDS, gzip=gzip)
    (source,) = discover([tmp_path / name]).sources
    assert (source.name, source.kind) == ("sa_000020", "tar")
    tiny.ingest_tar(tmp_path / name, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


@pytest.mark.parametrize("damage", ["flipped", "zeroed"])
def test_a_plain_tar_is_one_though_its_first_header_is_damaged(tmp_path, damage):
    data = tiny.tar_bytes(pair_members(99) + pairs(IDS))
    head = bytes(512) if damage == "zeroed" else data[:256] + b"???" + data[259:512]
    (tmp_path / "sa_000020.tar").write_bytes(head + data[512:])
    tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


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
def test_a_file_that_is_no_tar_is_refused_by_name_when_it_is_read(tmp_path, content):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(content)
    assert [source.name for source in discover([path]).sources] == ["sa_000020"]
    with pytest.raises(SourceError, match=r"sa_000020.tar: "):
        tiny.ingest_tar(path, tmp_path / "root")


def test_gzip_of_something_else_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.gzip_bytes(b"name,cdn_link\n" * 1000))
    with pytest.raises(SourceError, match=r"sa_000020.tar: no usable pair; no valid member header"):
        tiny.ingest_tar(path, tmp_path / "root")


def test_what_does_not_exist_is_named(tmp_path):
    with pytest.raises(SourceError, match="sa_000020.tar: no such file or folder"):
        discover([tmp_path / "sa_000020.tar"])


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
    summary = reshard([tmp_path / "in"], tmp_path / "out", Options(), Policy(), IngestRun(quiet=True))
    assert summary.done == ["sa_000020"]
    assert summary.failed.keys() == {"sa_000021"}
    assert "sa_000021.tar: no usable pair; " in summary.failed["sa_000021"]
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
    with pytest.raises(
        SourceError, match=r"has the name '000020', as.*leave one out with --ignore, or .* --rename .*=NAME"
    ):
        discover([tmp_path / first, tmp_path / second])


def test_a_source_named_twice_counts_once(tmp_path, monkeypatch):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / "sa_000020.tar", tmp_path / "." / "sa_000020.tar", tmp_path]
    assert len(discover(paths).sources) == 1


@pytest.mark.parametrize("name", [".tar", "-x.tar", "sa 20.tar", "sa_20*.tar", "sä.tar", "a\nb.tar", "..tar"])
def test_a_name_unfit_for_shards_is_refused(tmp_path, name):
    make_tar(tmp_path / name, IDS)
    with pytest.raises(SourceError, match="use letters, digits, '_', '-' and '.'") as caught:
        discover([tmp_path / name])
    assert f"--rename {shlex.quote(f'{tmp_path / name}=NAME')}" in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "sa_000020.tar")
    with pytest.raises(SourceError, match=r"sa_000020.tar: neither a file nor a folder"):
        discover([tmp_path / "sa_000020.tar"])


# At any depth


def found(path, **options):
    """Names of sources, and the files not taken: path below `path` -> reason."""
    result = discover([path], **options)
    listed = {one.path.relative_to(path).as_posix(): one.reason for one in result.not_taken}
    return [source.name for source in result.sources], listed


def test_tars_are_found_at_any_depth_and_in_upper_case(tmp_path):
    for name in (
        "sa_000020.tar",
        "batch1/sa_000021.tar",
        "batch1/deep/er/sa_000022.tgz",
        "X.TAR",
        "Y.Tar.Gz",
    ):
        make_tar(tmp_path / name, IDS)
    make_tar(tmp_path / "batch2" / "downloaded", IDS)  # detected by its content
    assert found(tmp_path) == (["X", "Y", "downloaded", "sa_000020", "sa_000021", "sa_000022"], {})


def test_folders_of_pairs_are_found_at_any_depth(tmp_path):
    extract(pairs(IDS[:2]), images=tmp_path / "a" / "b" / "flat")
    nested = tmp_path / "a" / "c" / "nested"
    extract(pairs(IDS[2:4]), images=nested / "images", annotations=nested / "annotations")
    extract(pairs(IDS[4:]), images=tmp_path / "a")
    assert found(tmp_path) == (["a", "flat", "nested"], {})


def test_what_is_not_taken_is_listed_with_the_reason(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    stored = (tmp_path / "sa_000020.tar").read_bytes()
    os.link(tmp_path / "sa_000020.tar", tmp_path / "same.tar")
    contents = {
        "x.tar.gz.part": stored,
        ".hidden.tar": stored,
        "sub/notes.txt": b"notes",
        "sub/empty": b"",
        "sub/sa_5.jpeg": b"\xff\xd8\xff\xd9",
        "sub/sa 21.tar": stored,
        "list.csv.gz": tiny.gzip_bytes(b"name,cdn_link\n" * 1000),
        "a.tar.bz2": b"BZh91AY&SY",
        "a.tar.xz": b"\xfd7zXZ\0",
        "a.tar.zst": b"(\xb5/\xfd\0\0",
        "a.zip": b"PK\x03\x04\0\0",
    }
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".cache").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    names, listed = found(tmp_path)
    assert names == ["sa_000020"]
    assert listed.pop("sub/sa 21.tar").startswith("the name becomes part of the names of shards; use letters")
    assert listed == {
        "x.tar.gz.part": "a partial download",
        ".hidden.tar": "a hidden file",
        ".cache": "a hidden folder",
        "sub/notes.txt": "neither a tar nor a member of a pair",
        "sub/sa_5.jpeg": "neither a tar nor a member of a pair",
        "sub/empty": "an empty file",
        "list.csv.gz": "a gzip file that contains no tar; only plain and gzip tars are read",
        "a.tar.bz2": "compressed with bzip2; only plain and gzip tars are read",
        "a.tar.xz": "compressed with xz; only plain and gzip tars are read",
        "a.tar.zst": "compressed with Zstandard; only plain and gzip tars are read",
        "a.zip": "a zip archive; only plain and gzip tars are read",
        "fifo": "not a regular file",
        "gone": "a link to a missing file",
        "same.tar": f"the same file as {tmp_path / 'sa_000020.tar'}",
    }


def test_files_of_operating_systems_are_neither_taken_nor_listed(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    for name in (".DS_Store", "._sa_000020.tar", "Thumbs.db", "desktop.ini", "._sa_5.jpg"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "lost+found").mkdir()
    assert found(tmp_path) == (["sa_000020"], {})


def test_patterns_leave_out_what_they_match_by_name_or_by_path(tmp_path):
    for name in (
        "sa_000020.tar",
        "old/sa_000021.tar",
        "new/sa_000022.tar",
        "new/x.part",
        "notes.txt",
        "new/notes.txt",
    ):
        make_tar(tmp_path / name, IDS)
    everything = ["notes.txt", "sa_000020", "sa_000021", "sa_000022"]
    with pytest.raises(SourceError, match=r"has the name 'notes.txt', as"):
        discover([tmp_path])
    assert found(tmp_path, ignore=["new/notes.txt"]) == (everything, {"new/x.part": "a partial download"})
    assert found(tmp_path, ignore=["*.txt", "old", "new/*.part"]) == (["sa_000020", "sa_000022"], {})
    assert found(tmp_path, ignore=["notes.*", "*.part", "NEW"])[0] == everything[1:]
    assert discover([tmp_path / "sa_000020.tar"], ignore=["*"]).sources != []  # named itself


def test_a_folder_reached_twice_counts_once_and_loops_end(tmp_path):
    extract(pairs(IDS[:2]), images=tmp_path / "in" / "sa_000020")
    make_tar(tmp_path / "in" / "deep" / "sa_000021.tar", IDS[2:])
    (tmp_path / "in" / "a_link").symlink_to("sa_000020")
    (tmp_path / "in" / "deep" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to("self")
    assert found(tmp_path / "in") == (["sa_000020", "sa_000021"], {"self": "a link to a missing file"})


def test_a_linked_folder_outside_is_searched(tmp_path):
    make_tar(tmp_path / "disk2" / "sa_000020.tar", IDS)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "disk").symlink_to(tmp_path / "disk2")
    assert found(tmp_path / "in") == (["sa_000020"], {})


def test_a_folder_that_cannot_be_read_is_listed(tmp_path, monkeypatch):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    (tmp_path / "secret").mkdir()
    usual = os.scandir

    def failing(path):
        if path == tmp_path / "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", failing)
    assert found(tmp_path) == (["sa_000020"], {"secret": "cannot be read: Permission denied"})


@pytest.mark.parametrize("complete", [True, False])
def test_a_dataset_directory_is_no_source(tmp_path, complete):
    make_tar(tmp_path / "in" / "sa_000020.tar", IDS)
    root = tmp_path / "in" / "shards"
    reshard([tmp_path / "in" / "sa_000020.tar"], root, Options(), Policy(), IngestRun(quiet=True))
    if not complete:
        (root / "dataset.json").unlink()
    with pytest.raises(SourceError, match=r"shards: is a dataset directory, not a source; name the tars"):
        discover([root])
    assert found(tmp_path / "in") == (["sa_000020"], {"shards": "a dataset directory, not a source"})
    assert found(tmp_path / "in", skip=[root]) == (["sa_000020"], {})


def test_what_belongs_to_the_run_is_skipped_unless_it_is_named(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    (tmp_path / "md5.txt").write_text("")
    assert found(tmp_path, skip=[tmp_path / "md5.txt", tmp_path, tmp_path / "missing"]) == (["sa_000020"], {})


def test_nothing_found_says_what_was_there_instead(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(SourceError, match=r"found and not taken: a.txt \(neither .*\), .* and 1 more.;"):
        discover([tmp_path])


def test_the_same_listing_of_two_arguments_comes_once(tmp_path):
    make_tar(tmp_path / "sub" / "sa_000020.tar", IDS)
    make_tar(tmp_path / "sub" / "x.tar.part", IDS)
    result = discover([tmp_path, tmp_path / "sub"])
    assert (len(result.sources), len(result.not_taken)) == (1, 1)
    result = discover([tmp_path, tmp_path / "sub" / "x.tar.part"])
    assert (len(result.sources), result.not_taken) == (2, [])


# Other names


def test_sources_get_other_names_wherever_they_are_found(tmp_path):
    make_tar(tmp_path / "batch1" / "x.tar", IDS)
    make_tar(tmp_path / "batch2" / "x.tar", IDS)
    make_tar(tmp_path / "sa 20.tar", IDS)
    extract(pairs(IDS), images=tmp_path / "sub" / "my pairs")
    rename = {tmp_path / "batch2" / "x.tar": "y", tmp_path / "sub" / "my pairs": "my_pairs"}
    unfit = {tmp_path / "sa 20.tar": "sa_20"}
    assert found(tmp_path, rename=rename | unfit) == (["my_pairs", "sa_20", "x", "y"], {})
    assert discover([tmp_path / "sa 20.tar"], rename=unfit).sources[0].name == "sa_20"


def test_a_new_name_for_what_is_no_source_is_refused(tmp_path):
    make_tar(tmp_path / "x.tar", IDS)
    for path in (tmp_path, tmp_path / "missing.tar"):
        with pytest.raises(SourceError, match=f"--rename {path}: no source is there"):
            discover([tmp_path], rename={path: "y"})


def test_a_new_name_must_be_free_and_fit(tmp_path):
    for name in ("x.tar", "y.tar"):
        make_tar(tmp_path / name, IDS)
    with pytest.raises(SourceError, match=r"has the name 'y', as"):
        discover([tmp_path], rename={tmp_path / "x.tar": "y"})
    with pytest.raises(SourceError, match=r"x.tar: the name becomes part"):
        discover([tmp_path / "x.tar"], rename={tmp_path / "x.tar": "a b"})
