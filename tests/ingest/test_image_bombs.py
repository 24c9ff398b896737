"""Small files that claim to be huge: refused for what they claim, before memory or time is spent on it.

Each runs in a child process whose address space may grow by 300 MB, no more.
"""

import gzip
import json
import multiprocessing
import resource
import struct
import tempfile
from pathlib import Path

import pytest
import zstandard

import sa1b
from sa1b.errors import SourceError
from sa1b.shards import record
from tests import forked_workers
from tests.shards import tiny
from tests.shards.tiny import counts_from, document, encode, pair, pair_members, pairs

GROWTH = 300 << 20  # bytes
MAX_JSON_BYTES, MAX_MEMBER_BYTES = 4 << 20, 32 << 20  # of what is read at all
SECONDS = 600  # of processor time for all cases: what decodes a bomb does not end
GOOD = range(100, 104)
BAD = 500
JPEG, TEXT = pair(BAD)


def claims(width, height, jpeg=JPEG):
    """The JPEG with another size in its frame header."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


def says(width, height):
    """The annotation file with another image size."""
    found = document(BAD)
    found["image"] |= {"width": width, "height": height}
    for one in found["annotations"]:
        one["segmentation"]["size"] = [height, width]
    return encode(found)


def one_mask(counts, width, height):
    found = json.loads(says(width, height))
    found["annotations"] = [
        document(BAD)["annotations"][0] | {"segmentation": {"size": [height, width], "counts": counts}}
    ]
    return encode(found)


SCAN = JPEG.index(b"\xff\xda")
FAT_JPEG = JPEG[:-2] + bytes(2 << 20) + JPEG[-2:]
OBJECTS = b"[" + b"{}," * ((MAX_JSON_BYTES - 200) // 3) + b"{}]"
LISTS = b"[" + b"[]," * ((MAX_JSON_BYTES - 200) // 3) + b"[]]"
IMAGE = json.dumps(document(BAD)["image"]).encode()

PAIRS = {  # name: (jpeg, annotation file, reason)
    "JPEG of 65500 x 65500": (claims(65500, 65500), TEXT, "absurd_size"),
    "JPEG of 65500 x 65500 and 2 MB": (claims(65500, 65500, FAT_JPEG), TEXT, "absurd_size"),
    "JPEG of 65535 x 300": (claims(65535, 300), TEXT, "absurd_size"),
    "JPEG of 4096 x 4096, annotated as usual": (claims(4096, 4096), TEXT, "image_size"),
    "JPEG and annotation of 65500 x 65500": (claims(65500, 65500), says(65500, 65500), "absurd_size"),
    "annotation of 2^31 x 2^31": (JPEG, says(2**31, 2**31), "absurd_size"),
    "annotation of 10^4000 x 1": (JPEG, says(10**4000, 1), "absurd_size"),
    "a mask of 4 billion pixels": (
        JPEG,
        one_mask(counts_from([2**32 - 1], 65535, 65537), 65535, 65537),
        "absurd_size",
    ),
    "a run of 10^18": (JPEG, one_mask("o" * 11 + "0", 64, 48), "bad_rle"),
    "4 MB of runs": (JPEG, one_mask("0" * (MAX_JSON_BYTES - 1000), 64, 48), "bad_rle"),
    "32 MB of annotations": (
        JPEG,
        TEXT[:-2] + b" " * (MAX_MEMBER_BYTES - 9999) + TEXT[-2:],
        "json_too_large",
    ),
    "a million empty lists": (JPEG, LISTS, "wrong_type"),
    "a million masks that are none": (
        JPEG,
        b'{"image": %s, "annotations": %s}' % (IMAGE, OBJECTS),
        "missing_key",
    ),
    "a million brackets": (JPEG, b"[" * 1_000_000, "invalid_json"),
    "a number of a million digits": (
        JPEG,
        TEXT.replace(b'"area": ', b'"area": ' + b"9" * 1_000_000, 1),
        "invalid_json",
    ),
    "32 MB of fill bytes": (JPEG[:2] + b"\xff" * (MAX_MEMBER_BYTES - 100), TEXT, "jpeg_truncated"),
    "a million JPEG segments": (JPEG[:2] + b"\xff\xfe\x00\x02" * 1_000_000 + JPEG[2:], TEXT, "jpeg_broken"),
    "a million scans": (JPEG[:SCAN] + JPEG[SCAN : SCAN + 14] * 1_000_000 + JPEG[SCAN:], TEXT, "jpeg_broken"),
}


def ingest_pair(name, root):
    """Ingest one of PAIRS among good ones, scaling images down: (what became of it)."""
    jpeg, text, _ = PAIRS[name]
    path = tiny.write_tar(root / "sa_000020.tar", [*pairs(GOOD), *pair_members(BAD, jpeg, text)])
    task = tiny.ingest_tar(path, root / "root", image_size=max(tiny.SIZE))
    assert task.counts["images"] == len(GOOD)
    return "+".join(task.counts["refused"])


def frame(content, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


def record_of(header, body=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return frame(struct.pack("<Q", len(text)) + text + body)


def lying_frame():
    """A frame that says it holds 100 bytes and holds 100 MB of zeros."""
    honest = frame(bytes(100))
    bomb = frame(bytes(100 << 20))
    size = zstandard.get_frame_parameters(bomb).content_size.to_bytes(4, "little")
    assert size in bomb[:12]
    assert zstandard.get_frame_parameters(honest).content_size == 100
    return bomb.replace(size, (100).to_bytes(4, "little"), 1)


def lying_record(name, more=b"", **entry):
    """A good record in whose header a tensor is described otherwise; `more` stands at its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_tar(Path(folder) / "sa_000001.tar", pair_members(BAD))
        tiny.ingest_tar(path, Path(folder) / "root")
        (sample,) = sa1b.open(Path(folder) / "root")
        content = zstandard.decompress(record.encode(sample.annotations))
    (length,) = struct.unpack_from("<Q", content)
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    offsets = [len(body), len(body) + len(more)]
    header[name] = header.get(name, {"dtype": "U8", "shape": [len(more)], "data_offsets": offsets}) | entry
    return record_of(header, body + more)


RECORDS = {
    "a record of 100 MB of zeros": lambda: frame(bytes(100 << 20)),
    "a record that does not say its size": lambda: frame(bytes(100 << 20), write_content_size=False),
    "a record that says less than it holds": lying_frame,
    "a record whose header is all of it": lambda: record_of(b"[" + b"[]," * 8_000_000 + b"[]]"),
    "a record whose header is longer than it": lambda: frame(struct.pack("<Q", 2**64 - 1) + bytes(100)),
    "a record with an array of 10^15 numbers": lambda: lying_record("rle_bytes", shape=[10**15]),
    "a record with 30 MB of JSON": lambda: lying_record("json", b"[" + b"[]," * 10_000_000 + b"[]]"),
    "a record nested a million deep": lambda: record_of(b"[" * 1_000_000),
}


BUILT = {}  # in the child, before the limit: to make a bomb takes memory too


def decode_record(name, root):
    try:
        record.decode(BUILT[name])
    except record.RecordError:
        return "RecordError"
    return "accepted"


def squeezed(data):
    return gzip.compress(data, 1, mtime=0)


def huge_member(size):
    """A member that claims `size` bytes, and a gzip stream that holds 64 MB of zeros for it."""
    block = tiny.header("./sa_500.jpg")
    lie = tiny.checksummed(block[:124] + b"\x80" + size.to_bytes(11, "big") + block[136:])
    return squeezed(tiny.tar_bytes(pairs(GOOD), end=b"") + lie) + squeezed(bytes(16 << 20)) * 4


def waiting_members():
    """Twelve images of nothing but zeros, of the largest size that is read at all, and no annotations."""
    size = MAX_MEMBER_BYTES
    zeros = squeezed(bytes(size))
    images = [squeezed(tiny.header(f"./sa_{i}.jpg", size)) + zeros for i in range(500, 512)]
    return b"".join([*images, squeezed(tiny.tar_bytes(pairs(GOOD)))])


SOURCES = {
    "a member of 8 EB": lambda: huge_member(8 << 60),
    "a member of 8 GB": lambda: huge_member(8 << 30),
    "a member of the largest size": lambda: huge_member(MAX_MEMBER_BYTES),
    "a long name of 16 MB": lambda: squeezed(
        tiny.member("L", b"x" * (16 << 20), kind=b"L") + tiny.tar_bytes(pairs(GOOD))
    ),
    "a pax header of a million records": lambda: squeezed(
        tiny.member("x", b"5 a=\n" * 200_000, kind=b"x") + tiny.tar_bytes(pairs(GOOD))
    ),
    "128 MB of noise": lambda: squeezed(b"noise" * (16 << 20) + tiny.tar_bytes(pairs(GOOD))),
    "256 MB of zeros": lambda: squeezed(tiny.tar_bytes(pairs(GOOD))) + squeezed(bytes(32 << 20)) * 8,
    "images of 384 MB that wait": waiting_members,
}


def ingest_source(name, root):
    path = root / "sa_000020.tar"
    path.write_bytes(SOURCES[name]())
    try:
        task = tiny.ingest_tar(path, root / "root")
    except SourceError:
        return "SourceError"
    assert sorted(tiny.read_back(root / "root")) == list(GOOD)
    return "+".join([*task.counts["refused"], *(damage["reason"] for damage in task.damage)])


CASES = [(ingest_pair, name) for name in PAIRS]
CASES += [(decode_record, name) for name in RECORDS]
CASES += [(ingest_source, name) for name in SOURCES]


def memory(field):
    """A figure of this process in bytes: VmSize, or VmHWM, the most it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def child(pipe):
    """Run every case under the limit; send (name, outcome, bytes held at most, here or in a worker)."""
    forked_workers.use_fork()  # a worker may take no more than this process, and its children's peak is known
    with tempfile.TemporaryDirectory() as folder:
        warm = tiny.write_tar(Path(folder) / "sa_000001.tar", pairs(GOOD))
        tiny.ingest_tar(warm, Path(folder) / "root", image_size=16)
        tiny.read_back(Path(folder) / "root")
    BUILT.update({name: make() for name, make in RECORDS.items()})
    limit = memory("VmSize") + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for run, name in CASES:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = run(name, Path(folder))
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
        workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        pipe.send((name, outcome, max(memory("VmHWM"), workers) - before))
    pipe.close()


@pytest.fixture(scope="module")
def results():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    found = {}
    while True:
        try:
            name, *rest = ours.recv()
        except EOFError:
            break
        found[name] = rest
    process.join()
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_claims_to_be_huge_is_refused_without_decoding(results, name):
    outcome, held = results[name]
    assert outcome == PAIRS[name][2]
    assert held < GROWTH


def test_records_like_these_that_tell_the_truth_are_read():
    assert record.decode(lying_record("json", TEXT)).to_json() == json.loads(TEXT)


@pytest.mark.parametrize("name", RECORDS)
def test_a_mask_record_that_claims_to_be_huge_is_refused(results, name):
    outcome, held = results[name]
    assert outcome == "RecordError"
    assert held < GROWTH


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a member of 8 EB", "bad_size"),
        ("a member of 8 GB", "bad_size"),
        ("a member of the largest size", "jpg_partner_lost+zero_tail"),
        ("a long name of 16 MB", "bad_size"),
        ("a pax header of a million records", ""),
        ("128 MB of noise", "bad_header"),
        ("256 MB of zeros", "zero_tail"),
        ("images of 384 MB that wait", "jpg_unpaired"),
    ],
)
def test_a_source_that_claims_to_be_huge_costs_no_good_pair(results, name, expected):
    outcome, held = results[name]
    assert outcome == expected
    assert held < GROWTH
