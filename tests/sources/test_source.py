"""One source read once: digests, changes while it is read, and checklists."""

import hashlib
import os
import pickle
import shutil
import time

import pytest

from sa1b.errors import SourceError, UsageError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards.documents import Options
from sa1b.sources.discovery import FORMATS, discover
from sa1b.sources.pairing import Spill, pair_up
from sa1b.sources.source import SourceFormat, SourceReader, SourceReading, digest_of_source, read_checklist
from sa1b.sources.tar_stream import Member
from tests.ingest import inside
from tests.shards import tiny
from tests.shards.tiny import make_tar, pairs, write_tar
from tests.sources.archives import extract

IDS = range(100, 106)


def test_the_digest_of_a_tar_is_that_of_the_file_as_stored(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    (source,) = discover([tmp_path / "sa_000020.tar"]).sources
    stored = (tmp_path / "sa_000020.tar").read_bytes()
    reader = SourceReader(source, md5=True)
    expected = {"sha256": hashlib.sha256(stored).hexdigest(), "md5": hashlib.md5(stored).hexdigest()}
    assert reader.digests() == expected  # even if no member was unpacked
    reader.close()
    assert digest_of_source(source) == expected["sha256"]


def test_a_source_whose_shards_would_replace_those_of_another_run_is_refused(tmp_path):
    make_tar(tmp_path / "sa_000020.tar", IDS)
    make_tar(tmp_path / "000020.tar", IDS)
    inside.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    with pytest.raises(
        UsageError, match=r"000020.tar: .* already contains a source named 'sa_000020'.*--rename"
    ):
        reshard([tmp_path / "000020.tar"], tmp_path / "root", Options(), Policy(), IngestRun(quiet=True))


def test_a_checklist_says_nothing_of_a_folder(tmp_path):
    extract(pairs(IDS), images=tmp_path / "sa_000020")
    (tmp_path / "md5.txt").write_text(f"{'0' * 32}  sa_000020\n")
    summary = reshard(
        [tmp_path / "sa_000020"],
        tmp_path / "root",
        Options(),
        Policy(),
        IngestRun(checklist=tmp_path / "md5.txt", quiet=True),
    )
    assert summary.failed == {}


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
    with pytest.raises(SourceError, match=r"md5.txt, line 2: .* must be '<md5>  <file name>'"):
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


# Changes while it is read


def stamped(path):
    """Restore the time of modification, as `cp -p` and `rsync -t` do."""
    stat = path.stat()
    return lambda: os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", ["overwritten", "replaced", "appended", "removed", "only touched"])
def test_a_tar_that_changes_while_it_is_read_is_noticed_though_its_time_is_restored(tmp_path, change):
    path = tmp_path / "sa_000020.tar"
    make_tar(path, IDS)
    restore = stamped(path)
    time.sleep(0.02)  # one tick of the clock of the file system
    reader = SourceReader(discover([path]).sources[0])
    next(iter(reader.items()))
    match change:
        case "overwritten":
            with path.open("r+b") as file:
                file.seek(-9, 2)
                file.write(b"x")
        case "replaced":
            shutil.copy(path, tmp_path / "copy")
            (tmp_path / "copy").rename(path)
        case "appended":
            with path.open("ab") as file:
                file.write(b"x")
        case "removed":
            path.unlink()
    if path.exists():
        restore()
    with pytest.raises(SourceError, match=r"sa_000020.tar: (changed|removed) while it was read; .*run"):
        reader.check_unchanged()
    reader.close()


def test_a_tar_that_is_overwritten_while_it_is_ingested_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "sa_000020.tar"
    make_tar(path, range(100, 140), gzip=False)
    restore = stamped(path)
    time.sleep(0.02)
    usual = SourceReader.digests

    def overwritten(reader):
        with path.open("r+b") as file:
            file.seek(512)
            file.write(bytes(100))
        restore()
        return usual(reader)

    monkeypatch.setattr(SourceReader, "digests", overwritten)
    with pytest.raises(SourceError, match=r"sa_000020.tar: changed while it was read"):
        inside.ingest_tar(path, tmp_path / "root")
    assert not list((tmp_path / "root").glob("*.tar"))


def test_a_tar_that_others_read_meanwhile_is_unchanged(tmp_path):
    path = tmp_path / "sa_000020.tar"
    make_tar(path, IDS)
    reader = SourceReader(discover([path]).sources[0])
    for _ in reader.items():
        path.read_bytes()
    reader.check_unchanged()
    reader.close()


def test_the_second_pass_for_links_counts_no_bytes_twice_but_shows_that_work_goes_on(tmp_path):
    path = tmp_path / "sa_000020.tar"
    link = tiny.header("./sa_500.jpg", kind=b"1", link="./sa_100.jpg")
    path.write_bytes(tiny.tar_bytes(pairs(IDS), end=link + bytes(1024)))
    seen = []
    reader = SourceReader(discover([path]).sources[0], progress=seen.append)
    assert [item.name for item in reader.items()][-1] == "./sa_500.jpg"
    reader.close()
    assert sum(seen) == path.stat().st_size
    assert seen[-1] == 0


class Listed(SourceFormat):
    """A format of a user: a text file that names the pairs in the folder beside it."""

    kind, ending = "listed", ".lst"

    def takes(self, path):
        return path.suffix == self.ending

    def name_of(self, path):
        return path.stem

    def measure(self, path, name, ignore):
        return path.stat().st_size, path.stat().st_mtime_ns

    def open(self, source, *, md5, progress):
        return ListedPass(source.path)

    def reading(self, source):
        return {"order": "listed"}


class ListedPass(SourceReading):
    def __init__(self, path):
        self.path = path

    def items(self):
        for name in self.path.read_text().split():
            yield Member(name, "file", 0, (self.path.parent / "files" / name).read_bytes())

    def digests(self):
        return {"sha256": hashlib.sha256(self.path.read_bytes()).hexdigest()}

    def check_unchanged(self):
        assert self.path.exists()

    def close(self):
        pass


def test_a_format_is_one_class_and_one_entry_of_the_table(tmp_path):
    extract(pairs(IDS), images=tmp_path / "files")
    (tmp_path / "mine.lst").write_text("sa_101.json sa_101.jpg sa_100.jpg")
    (source,) = discover([tmp_path / "mine.lst"], formats=(Listed(), *FORMATS)).sources
    source = pickle.loads(pickle.dumps(source))  # as for a worker
    assert (source.name, source.kind, source.label) == ("mine", "listed", str(tmp_path / "mine.lst"))
    assert source.reading == {"kind": "listed", "order": "listed"}
    items = list(pair_up(SourceReader(source).items(), Spill(tmp_path / "spill", 0)))
    pair, alone = items
    assert (pair.image_id, alone.reason) == (101, "jpg_unpaired")
    assert digest_of_source(source) == hashlib.sha256((tmp_path / "mine.lst").read_bytes()).hexdigest()
