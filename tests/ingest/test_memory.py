"""Memory of a worker is bounded by bytes, whatever a legal pair holds; running out of it is an error with a message."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sa1b.ingest.ingest import limit_threads
from sa1b.shards import index
from tests import processes
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
    assert said.startswith(f"{dense}: out of memory: ")
    assert "--workers" in said
    assert "ulimit -v" in said
    assert errors == ""
    left = [path.name for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert left == ["sa_000001.failed"]


def test_usual_images_stand_128_to_a_row_group(tmp_path):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(300)))
    tiny.ingest_tar(path, tmp_path / "root")
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


@pytest.mark.parametrize(
    ("where", "error", "flags"),
    [
        ("simplejpeg.decode_jpeg", 'ValueError("Insufficient memory (case 4)")', "--decode-images"),
        ("simplejpeg.decode_jpeg", 'ValueError("Insufficient memory (case 4)")', "--image-size 16"),
        ("cv2.resize", 'cv2.error("(-4:Insufficient memory) Failed to allocate")', "--image-size 16"),
        ("zstandard.ZstdCompressor", 'zstandard.ZstdError("not enough memory")', ""),
    ],
)
def test_a_decoder_without_memory_is_no_verdict_on_the_image(tmp_path, where, error, flags):
    """libjpeg, OpenCV and zstandard each have their own way to say that they get no memory."""
    path = tiny.write_tar(tmp_path / "sa_000020.tar", tiny.pairs(range(3)))
    words = ["reshard", str(path), "--out", str(tmp_path / "root"), "--json", *flags.split()]
    program = f"""
from tests import forked_workers, kit
import cv2, simplejpeg, zstandard

forked_workers.use_fork()

def fail(*arguments, **options):
    raise {error}

if {where!r} == "zstandard.ZstdCompressor":
    zstandard.ZstdCompressor = lambda **options: type("Compressor", (), {{"compress": fail}})()
else:
    {where} = fail
kit.main({words})
"""
    run = subprocess.run if "Compressor" in where else processes.run  # whose server has a compressor already
    done = run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["failed"]["sa_000020"].startswith(f"{path}: out of memory")


def test_a_worker_keeps_the_thread_pools_of_opencv_and_arrow_at_one():
    before = cv2.getNumThreads(), pa.cpu_count(), pa.io_thread_count()
    try:
        limit_threads()
        assert (cv2.getNumThreads(), pa.cpu_count(), pa.io_thread_count()) == (1, 1, 1)
    finally:
        cv2.setNumThreads(before[0])
        pa.set_cpu_count(before[1])
        pa.set_io_thread_count(before[2])
