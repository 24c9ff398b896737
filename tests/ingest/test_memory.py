"""Memory of a worker is bounded by bytes, whatever a legal pair holds; running out of it is an error with a message."""

import subprocess
import sys
from pathlib import Path

import cv2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
import zstandard

from sa1b.errors import OutOfMemoryError
from sa1b.ingest.ingest import limit_threads
from sa1b.shards import index, jpeg, record
from tests.ingest import inside
from tests.ingest.dense_pairs import RUNS, write_dense
from tests.shards import tiny

REPOSITORY = Path(__file__).parents[2]
WORKER_MB = 600  # what the help text of --workers says


def ingest_apart(source, root, growth=0):
    """Ingest in a process of its own; what it says, and everything on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ingest.dense_pairs", str(source), str(root), str(growth)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip(), done.stderr


# The runs of 50 images take more memory than a worker may, and fill fewer rows than a row group has.
@pytest.mark.slow  # quick: test_row_groups_cut_by_bytes_hold_the_same_rows
@pytest.mark.parametrize("images", [50, 100])
def test_pairs_of_millions_of_runs_stay_below_what_a_worker_may_take(images, tmp_path):
    assert images * RUNS * 4 > WORKER_MB << 20
    dense = write_dense(tmp_path / "sa_000001.tar", images)
    assert dense.stat().st_size < 1 << 20
    said, errors = ingest_apart(dense, tmp_path / "root")
    taken, peak = map(int, said.split())
    assert (taken, errors) == (images, "")
    assert peak < WORKER_MB
    (path,) = (tmp_path / "root").glob("*.parquet")
    assert pq.read_metadata(path).num_row_groups > images // 10


def test_a_worker_without_memory_says_so_and_leaves_nothing(tmp_path):
    dense = write_dense(tmp_path / "sa_000001.tar", 3)
    said, errors = ingest_apart(dense, tmp_path / "root", growth=60)
    assert said.startswith(f"OutOfMemoryError: {dense}: out of memory: ")
    assert "--workers" in said
    assert "ulimit -v" in said
    assert errors == ""
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == []


def test_usual_images_stand_128_to_a_row_group(tmp_path):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(300)))
    inside.ingest_tar(path, tmp_path / "root")
    (file,) = (tmp_path / "root").glob("*.parquet")
    found = pq.read_metadata(file)
    assert [found.row_group(i).num_rows for i in range(found.num_row_groups)] == [128, 128, 44]


def test_row_groups_cut_by_bytes_hold_the_same_rows(tmp_path, monkeypatch):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(30)))
    inside.ingest_tar(path, tmp_path / "usual")
    monkeypatch.setattr(index, "ROW_GROUP_BYTES", 2000)
    inside.ingest_tar(path, tmp_path / "cut")
    files = [next((tmp_path / root).glob("*.parquet")) for root in ("usual", "cut")]
    assert pq.read_metadata(files[1]).num_row_groups > 3
    assert pq.read_table(files[1]).equals(pq.read_table(files[0]))
    assert tiny.read_back(tmp_path / "cut") == tiny.read_back(tmp_path / "usual")


def test_what_waits_for_a_row_group_is_its_columns_only(tmp_path, monkeypatch):
    """The annotation file and the COCO strings of 127 images would be half a gigabyte."""
    kept = []
    write = index.IndexWriter._write

    def seen(self):
        kept.extend(name for name, values in self._columns.items() if values)
        write(self)

    monkeypatch.setattr(index.IndexWriter, "_write", seen)
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(3)))
    inside.ingest_tar(path, tmp_path / "root", index_runs=False)
    assert set(kept) == set(index.schema(()).names)


@pytest.mark.parametrize("options", [{"decode_images": True}, {"image_size": 16}], ids=["decode", "scale"])
@pytest.mark.parametrize("where", ["decoder", "scaling", "compressor"])
def test_a_decoder_without_memory_is_no_verdict_on_the_image(tmp_path, monkeypatch, where, options):
    """libjpeg, OpenCV and zstandard each have their own way to say that they get no memory."""

    def fails(error):
        def fail(*arguments, **options):
            raise error

        return fail

    if where == "decoder":
        monkeypatch.setattr(simplejpeg, "decode_jpeg", fails(ValueError("Insufficient memory (case 4)")))
    elif where == "scaling":
        monkeypatch.setattr(
            jpeg.cv2, "resize", fails(cv2.error("(-4:Insufficient memory) Failed to allocate"))
        )
        options = {"image_size": 16}
    else:
        compressor = type("Compressor", (), {"compress": fails(zstandard.ZstdError("not enough memory"))})()
        monkeypatch.setattr(record, "_compressor", lambda: compressor)
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(3)))
    with pytest.raises(OutOfMemoryError, match="sa_000020.tar: out of memory"):
        inside.ingest_tar(path, tmp_path / "root", **options)


def test_a_worker_keeps_the_thread_pools_of_opencv_and_arrow_at_one():
    before = cv2.getNumThreads(), pa.cpu_count(), pa.io_thread_count()
    try:
        limit_threads()
        assert (cv2.getNumThreads(), pa.cpu_count(), pa.io_thread_count()) == (1, 1, 1)
    finally:
        cv2.setNumThreads(before[0])
        pa.set_cpu_count(before[1])
        pa.set_io_thread_count(before[2])
