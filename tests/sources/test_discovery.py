"""Paths of the command line, the sources found below them, and the list of files not taken."""

import errno
import os

import pytest

import sa1b
from sa1b.errors import SourceError
from tests.kit import fail, refused, run_when
from tests.shards import tiny
from tests.shards.tiny import make_tar, pair_members, pairs
from tests.sources.archives import check_exact, extract

IDS = range(100, 106)


@pytest.mark.parametrize("gzip", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("name", ["sa_000020.tar", "sa_000020.tar.gz", "sa_000020.tgz", "sa_000020"])
def test_a_tar_is_told_by_its_content_whatever_its_name(tmp_path, name, gzip):
    make_tar(tmp_path / name, IDS, gzip=gzip)
    task = tiny.ingest_tar(tmp_path / name, tmp_path / "root")
    assert (task.source["name"], task.source["kind"]) == ("sa_000020", "tar")
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
    with pytest.raises(SourceError, match=r"sa_000020.tar: "):
        tiny.ingest_tar(path, tmp_path / "root")


def test_gzip_of_something_else_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.gzip_bytes(b"name,cdn_link\n" * 1000))
    with pytest.raises(SourceError, match=r"sa_000020.tar: no usable pair; no valid member header"):
        tiny.ingest_tar(path, tmp_path / "root")


def test_an_empty_download_in_a_folder_of_tars_is_named_and_the_others_go_on(tmp_path):
    make_tar(tmp_path / "in" / "sa_000020.tar", IDS)
    (tmp_path / "in" / "sa_000021.tar").touch()
    made = sa1b.reshard(tmp_path / "in", tmp_path / "out", workers=1, quiet=True)
    assert (made.exit_code, made.done, list(made.failed)) == (1, ["sa_000020"], ["sa_000021"])
    assert "sa_000021.tar: " in made.failed["sa_000021"]


@pytest.mark.parametrize(
    ("files", "words", "named"),
    [
        ((), ["sa_000020.tar"], ["sa_000020.tar: "]),
        ((), ["in"], ["in: "]),
        (["fifo"], ["in/fifo"], ["in/fifo: "]),
        (["photo.jpg"], ["in/photo.jpg"], ["in/photo.jpg: ", "--images-only"]),
        (["a.txt", "b.txt", "c.txt", "d.txt"], ["in"], ["a.txt", "c.txt", "1 more", "--images-only"]),
        (["sa_100.jpeg"], ["in"], ["in: ", "sa_100.jpeg"]),
        (["sa_1.jpg", "sa_1.json", "sa_20.tar"], ["in"], ["--ignore 'sa_20.tar'"]),
        (["a/sa_20.tar", "b/sa_20.tar"], ["in/a/sa_20.tar", "in/b"], ["'20'", "--rename in/b/sa_20.tar"]),
        (["sa_20.tar", "sa_20.tgz"], ["in"], ["'20'", "--ignore", "--rename in/sa_20.tgz=NAME"]),
        (["sa_20.tar", "20.tar"], ["in"], ["'20'", "--ignore", "--rename in/sa_20.tar=NAME"]),
        (["dataset.json", "sa_000020.tar"], ["in"], ["in: ", "dataset.json"]),
        (["tasks/x.json", "sa1b-000020-0000.tar"], ["in"], ["in: ", "dataset"]),
        (["x.tar"], ["in", "--rename", "in=y"], ["--rename in: "]),
        (["x.tar"], ["in", "--rename", "in/missing.tar=y"], ["in/missing.tar: "]),
        (["x.tar", "y.tar"], ["in", "--rename", "in/x.tar=y"], ["'y'", "in/y.tar", "in/x.tar"]),
        (["x.tar"], ["in", "--rename", "in/x.tar=a b"], ["--rename in/x.tar=a b: "]),
        ([".tar"], ["in/.tar"], ["--rename in/.tar=NAME"]),
        (["-x.tar"], ["in/-x.tar"], ["--rename in/-x.tar=NAME"]),
        (["sa 20.tar"], ["in/sa 20.tar"], ["--rename 'in/sa 20.tar=NAME'"]),
        (["sa_20*.tar"], ["in/sa_20*.tar"], ["--rename 'in/sa_20*.tar=NAME'"]),
        (["sä.tar"], ["in/sä.tar"], ["--rename 'in/sä.tar=NAME'"]),
        (["a\nb.tar"], ["in/a\nb.tar"], ["--rename"]),
        (["..tar"], ["in/..tar"], ["--rename in/..tar=NAME"]),
    ],
)
def test_what_cannot_be_taken_whole_is_refused_by_name(tmp_path, monkeypatch, files, words, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name in files:
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path) if name == "fifo" else path.write_bytes(b"x")
    done = refused("reshard", *words, "--out", "out", names=named[0])
    assert [name for name in named if name not in done.err] == []
    assert not (tmp_path / "out").exists()


# At any depth


@pytest.fixture
def found(tmp_path):
    """Paths of `tmp_path / "in"` -> names of the sources, and the paths that are not taken with the reasons."""

    def found(*paths, **options):
        folder = tmp_path / "in"
        made = sa1b.reshard(
            [folder / path for path in paths or [""]], tmp_path / "out", workers=1, quiet=True, **options
        )
        listed = {os.path.relpath(one["path"], folder): one["reason"] for one in made.document["not_taken"]}
        return sorted([*made.done, *made.failed]), listed

    return found


def make(folder, *names):
    """Tars, or folders of pairs where the name ends with "/"; each has one image, whose id is its number."""
    for number, name in enumerate(names):
        if name.endswith("/"):
            extract(pairs([number]), images=folder / name)
        else:
            make_tar(folder / name, [number])


def test_tars_and_folders_of_pairs_are_found_at_any_depth_and_each_once(tmp_path, found):
    folder = tmp_path / "in"
    tars = "X.TAR", "Y.Tar.Gz", "batch1/deep/er/sa_000022.tgz", "batch2/by_content", "../disk2/sa_000024.tar"
    make(folder, *tars, "a/", "a/b/flat/")
    extract(pairs([7]), images=folder / "c/nested/images", annotations=folder / "c/nested/annotations")
    (folder / "notes").mkdir()
    links = {"a_link": "a", "disk": tmp_path / "disk2", "batch1/loop": folder, "self": "self"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    names, listed = found()
    assert names == ["X", "Y", "a", "by_content", "flat", "nested", "sa_000022", "sa_000024"]
    assert list(listed) == ["self"]
    check_exact(tmp_path / "out", range(8))


def test_what_is_not_taken_is_listed_with_the_reason(tmp_path, found):
    folder = tmp_path / "in"
    make(folder, "sa_000020.tar")
    stored = (folder / "sa_000020.tar").read_bytes()
    os.link(folder / "sa_000020.tar", folder / "same.tar")
    contents = {  # and what the reason says
        "x.tar.gz.part": (stored, ""),
        ".hidden.tar": (stored, ""),
        "sub/notes.txt": (b"notes", ""),
        "sub/empty": (b"", "empty"),
        "sub/sa_5.jpeg": (b"\xff\xd8\xff\xd9", ""),
        "sub/sa 21.tar": (stored, "--rename"),
        "list.csv.gz": (tiny.gzip_bytes(b"name,cdn_link\n" * 1000), "gzip"),
        "a.tar.bz2": (b"BZh91AY&SY", "bzip2"),
        "a.tar.xz": (b"\xfd7zXZ\0", "xz"),
        "a.tar.zst": (b"(\xb5/\xfd\0\0", "Zstandard"),
        "a.zip": (b"PK\x03\x04\0\0", "zip"),
        "photo.heic": (b"x", "JPEG"),
    }
    folders = ".cache/x.tar", "shards/dataset.json", "half/tasks/options.json", "half/sa1b-000020-0000.tar"
    of_systems = [
        ".DS_Store",
        "._sa_000020.tar",
        "Thumbs.db",
        "desktop.ini",
        "._sa_5.jpg",
        "lost+found/x.tar",
    ]
    made = {name: data for name, (data, _) in contents.items()} | dict.fromkeys(
        (*folders, *of_systems), stored
    )
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "fifo")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    names, listed = found()
    assert names == ["sa_000020"]
    assert listed.keys() == {*contents, ".cache", "shards", "half", "fifo", "gone", "same.tar"}
    assert {name: word for name, (_, word) in contents.items() if word not in listed[name]} == {}
    assert str(folder / "sa_000020.tar") in listed["same.tar"]


@pytest.mark.parametrize(
    ("paths", "ignore", "names", "listed"),
    [
        ([], ["new/notes.txt"], ["notes.txt", "sa_000020", "sa_000021", "sa_000022"], ["new/x.part"]),
        ([], ["*.txt", "old", "new/*.part", "NEW"], ["sa_000020", "sa_000022"], []),
        (["sa_000020.tar"], ["*"], ["sa_000020"], []),  # named itself
        (
            ["old", "", "./old", "old/sa_000021.tar"],
            ["*.txt", "sa_000020*", "*22.tar"],
            ["sa_000021"],
            ["new/x.part"],
        ),
        (["old", "new", "new/x.part"], ["*.txt"], ["sa_000021", "sa_000022", "x.part"], []),
    ],
)
def test_patterns_leave_out_what_they_match_and_what_is_named_twice_counts_once(
    tmp_path, found, paths, ignore, names, listed
):
    files = (
        "sa_000020.tar",
        "old/sa_000021.tar",
        "new/sa_000022.tar",
        "new/x.part",
        "notes.txt",
        "new/notes.txt",
    )
    make(tmp_path / "in", *files)
    assert found(*paths, ignore=ignore) == (names, dict.fromkeys(listed, "a partial download"))


def test_a_folder_that_cannot_be_read_is_listed(tmp_path):
    make(tmp_path / "in", "sa_000020.tar", "secret/")
    secret, words = tmp_path / "in" / "secret", (tmp_path / "in", "--out", tmp_path / "out", "--json")
    made = run_when(["reshard", *words], "os.scandir", secret, fail, errno.EACCES).json
    assert (made["done"], [one["path"] for one in made["not_taken"]]) == (["sa_000020"], [str(secret)])


def test_sources_get_other_names_wherever_they_are_found(tmp_path, found):
    make(tmp_path / "in", "batch1/x.tar", "batch2/x.tar", "sa 20.tar", "sub/my pairs/")
    renamed = {"batch2/x.tar": "y", "sub/my pairs": "my_pairs", "sa 20.tar": "sa_20"}
    rename = [f"{tmp_path / 'in' / path}={name}" for path, name in renamed.items()]
    assert found(rename=rename) == (["my_pairs", "sa_20", "x", "y"], {})
    check_exact(tmp_path / "out", range(4))
