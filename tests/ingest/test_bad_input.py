"""One thing wrong with one pair: what becomes of that pair, and that it costs no other.

Every test puts a bad pair (or member) among twelve good ones and says where it ends up: exactly as it was in
the shards, kept but listed as doubtful, or in quarantine with its bytes, offset and reason.
"""

import io
import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

from sa1b.errors import RefusedError, SourceError, SystematicError
from sa1b.shards.annotation import MAX_JSON_BYTES, MAX_JSON_DEPTH
from sa1b.sources.spill import Spill
from tests.shards import tiny
from tests.shards.tiny import SIZE, counts_from, document, encode, pair, pair_members, pairs

GOOD = range(100, 112)
BAD = 500  # the image that something is wrong with
HEIGHT, WIDTH = SIZE


class Outcome:
    """What ingest made of a source: the task, the samples, and what quarantine lists."""

    def __init__(self, root, task):
        self.root, self.task = root, task
        self.samples = tiny.read_back(root)
        self.refused = tiny.lines(root, task.name)
        self.doubtful = tiny.lines(root, task.name, "doubtful.jsonl")

    def check(self, members, ids=GOOD):
        """The good pairs are exact, the sums agree, what is refused lies in quarantine byte for byte."""
        for image_id in ids:
            jpeg, text = pair(image_id)
            assert self.samples[image_id] == (jpeg, json.loads(text))
        counts = self.task.counts
        assert counts["members"] == 2 * counts["images"] + counts["refused_members"]
        assert counts["images"] == len(self.samples)
        lines = [line for line in self.refused if line["name"] is not None]
        assert counts["refused_members"] == len(lines)
        contents = set(members)
        for line in lines:
            data = tiny.quarantined(self.root, self.task.name, line)
            assert (line["name"], data) in contents
            assert line["bytes"] == len(data)
        return self


@pytest.fixture
def ingest(tmp_path):
    """Members -> Outcome, with the checks that always hold."""

    def ingest(members, *, gzip=False, **options):
        path = tiny.write_tar(tmp_path / "sa_000020.tar", members, gzip)
        task = tiny.ingest_tar(path, tmp_path / "root", **options)
        outcome = Outcome(tmp_path / "root", task).check(members)
        assert not list((tmp_path / "root").rglob("*.spill"))
        for line in outcome.refused:  # the offset points to the member
            if line["name"] is not None:
                stored = path.read_bytes()[line["offset"] : line["offset"] + 100]
                assert stored.startswith(line["name"].encode()[:90])
        return outcome

    return ingest


@pytest.fixture
def bad_pair(ingest):
    """A jpg and a json of image BAD, among good pairs -> Outcome."""

    def bad_pair(jpeg=None, text=None, **options):
        members = [*pairs(GOOD), *pair_members(BAD, jpeg, text)]
        random.Random(1).shuffle(members)
        return ingest(members, **options)

    return bad_pair


@pytest.fixture
def refused(bad_pair):
    """The one reason and message for which the bad pair is refused, both halves of it."""

    def refused(jpeg=None, text=None, **options):
        outcome = bad_pair(jpeg, text, **options)
        assert BAD not in outcome.samples
        assert sorted(line["name"] for line in outcome.refused) == [f"./sa_{BAD}.jpg", f"./sa_{BAD}.json"]
        ((reason, message),) = {(line["reason"], line["message"]) for line in outcome.refused}
        assert outcome.task.counts["refused"] == {reason: 1}
        assert outcome.doubtful == []
        return reason, message

    return refused


@pytest.fixture
def kept(bad_pair):
    """The reasons for which the odd pair is listed; it is kept exactly, types and all."""

    def kept(jpeg=None, text=None, **options):
        outcome = bad_pair(jpeg, text, **options)
        stored_jpeg, stored = outcome.samples[BAD]
        usual = pair(BAD)
        assert stored_jpeg == (usual[0] if jpeg is None else jpeg)
        assert typed(stored) == typed(json.loads(usual[1] if text is None else text))
        assert outcome.refused == []
        assert {line["image_id"] for line in outcome.doubtful} <= {BAD}
        return {line["reason"]: line["message"] for line in outcome.doubtful}

    return kept


def typed(value):
    """A value that equals another only if types, key order and the bits of floats do."""
    if isinstance(value, dict):
        return dict, [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, list):
        return list, [typed(item) for item in value]
    return type(value), value.hex() if isinstance(value, float) else value


def changed(**image):
    """The bad image's annotation file with other values in `image`."""
    found = document(BAD)
    found["image"] |= image
    return encode(found)


def mask_changed(number=1, **values):
    """The bad image's annotation file with other values in one mask."""
    found = document(BAD)
    found["annotations"][number] |= values
    return encode(found)


def with_counts(counts, size=SIZE):
    return mask_changed(segmentation={"size": list(size), "counts": counts})


# Members


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_good_pairs_in_any_order_come_back_exactly(ingest, gzip):
    outcome = ingest(pairs(GOOD), gzip=gzip)
    assert sorted(outcome.samples) == list(GOOD)
    assert outcome.refused == outcome.doubtful == outcome.task.damage == []


@pytest.mark.parametrize(("missing", "reason"), [(1, "jpg_unpaired"), (0, "json_unpaired")])
def test_half_a_pair_is_refused(ingest, missing, reason):
    half = pair_members(BAD)[1 - missing]
    outcome = ingest([half, *pairs(GOOD)])
    assert [(line["reason"], line["name"], line["offset"]) for line in outcome.refused] == [
        (reason, half[0], 0)
    ]


@pytest.mark.parametrize("place", [1, 2], ids=["before the pair is complete", "after"])
@pytest.mark.parametrize("which", [0, 1], ids=["jpg", "json"])
@pytest.mark.parametrize("same", [True, False], ids=["same bytes", "other bytes"])
def test_the_first_of_duplicates_counts_and_the_others_are_listed(ingest, place, which, same):
    both = pair_members(BAD)
    first, second = both[which], both[1 - which]
    again = (first[0], first[1] if same else pair(BAD, seed=1)[which])
    members = [*pairs(GOOD), first, second]
    members.insert(len(GOOD) * 2 + place, again)
    outcome = ingest(members)
    assert outcome.samples[BAD] == (pair(BAD)[0], json.loads(pair(BAD)[1]))
    assert [(line["reason"], line["name"]) for line in outcome.refused] == [("duplicate", first[0])]


@pytest.mark.parametrize(
    "name",
    [
        "/sa_500.jpg",
        "/etc/passwd",
        "../sa_500.jpg",
        "../../../../tmp/sa_500.jpg",
        "./x/../sa_500.jpg",
        "x//sa_500.jpg",
        "sa_500.jpg/",
        "..",
        "sa_500.JPG",
        "sa_500.jpeg",
        "sa_0500.jpg",
        "sa_+500.jpg",
        "sa_-500.jpg",
        "sa_٥٠٠.jpg",
        "sa_500.jpg\n",
        "sa_500.jpg ",
        "sa_\x1b[2J500.jpg",
        "xsa_500.jpg",
        "sa_9223372036854775808.jpg",
        "sa_" + "9" * 80 + ".jpg",
        "README",
    ],
)
def test_a_name_of_another_form_is_refused_and_writes_nothing_outside(ingest, tmp_path, name):
    half = pair_members(BAD)[1]
    outcome = ingest([(name, b"content"), half, *pairs(GOOD)])
    assert [(line["reason"], line["name"]) for line in outcome.refused] == [
        ("unexpected_name", name),
        ("json_unpaired", half[0]),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"root", "sa_000020.tar"}
    (file,) = (tmp_path / "root" / "quarantine" / "sa_000020").glob("000001*")
    assert file.read_bytes() == b"content"
    assert set(file.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_a_very_long_name_is_listed_in_full(tmp_path):
    name = "x" * 5000 + "/sa_1.txt"
    data = tiny.member("././@LongLink", name.encode() + b"\0", kind=b"L") + tiny.member("short", b"content")
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(data + tiny.tar_bytes(pairs(GOOD)))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    outcome.check([(name, b"content")])
    assert [line["reason"] for line in outcome.refused] == ["unexpected_name"]


@pytest.mark.parametrize("name", ["sa_500.jpg", "./sa_500.jpg", "sa_000020/sa_500.jpg", "a/b/c/sa_500.jpg"])
def test_pairs_may_lie_in_folders_of_the_archive(ingest, name):
    outcome = ingest([*pairs(GOOD), (name, pair(BAD)[0]), pair_members(BAD)[1]])
    assert BAD in outcome.samples
    assert outcome.refused == []


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6"], ids=lambda kind: kind.decode())
def test_links_and_devices_are_refused_and_not_followed(tmp_path, kind):
    link = tiny.header(f"./sa_{BAD}.jpg", kind=kind, link="/etc/passwd")
    members = [pair_members(BAD)[1], *pairs(GOOD)]
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(link + tiny.tar_bytes(members))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    outcome.check([*members, (f"./sa_{BAD}.jpg", b"")])
    assert [(line["reason"], line["offset"]) for line in outcome.refused] == [
        ("not_a_file", 0),
        ("json_unpaired", 512),
    ]


def test_folders_in_the_archive_hold_nothing_of_their_own(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.header("./", kind=b"5") + tiny.tar_bytes(pairs(GOOD)))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root")).check([])
    assert outcome.task.counts["members"] == 2 * len(GOOD)
    assert outcome.refused == []


@pytest.mark.parametrize("image_id", [0, 2**31, 2**63 - 1])
def test_image_ids_from_0_to_the_largest_int64_are_kept(ingest, image_id):
    assert image_id in ingest([*pairs(GOOD), *pair_members(image_id)]).samples


def test_what_waits_takes_bounded_memory_and_its_spill_folder_is_empty_afterwards(
    ingest, tmp_path, monkeypatch
):
    spill = tmp_path / "spill"
    seen = []
    put = Spill.put

    def watched(self, name, data):
        put(self, name, data)
        seen.append((sum(map(len, self._memory.values())), len(list(spill.rglob("*.jpg")))))

    monkeypatch.setattr(Spill, "put", watched)
    worst = sorted(pairs(GOOD), key=lambda member: member[0].endswith("json"))  # every jpg before any json
    outcome = ingest(worst, spill=spill, spill_memory=10_000)
    assert sorted(outcome.samples) == list(GOOD)
    assert len(seen) == len(GOOD)
    assert max(memory for memory, _ in seen) <= 10_000
    assert max(files for _, files in seen) >= len(GOOD) - 5
    assert list(spill.rglob("*")) == []


# Images

JPEG = pair(BAD)[0]


def cut_places():
    frame = JPEG.index(b"\xff\xc0")
    scan = JPEG.index(b"\xff\xda")
    return [2, 3, 4, 21, frame + 1, frame + 6, scan, scan + 5, scan + 12, len(JPEG) // 2, len(JPEG) - 1]


@pytest.mark.parametrize("length", [*cut_places(), len(JPEG) - 2])
def test_a_truncated_jpeg_is_refused(refused, length):
    reason, message = refused(jpeg=JPEG[:length])
    assert reason == "jpeg_truncated"
    assert "JPEG" in message


def encoded(extension, *options):
    ok, data = cv2.imencode(extension, tiny.picture(BAD), list(options))
    assert ok
    return data.tobytes()


def cmyk():
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(tiny.picture(BAD)).convert("CMYK").save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("jpeg", "begins"),
    [
        (b"", "nothing"),
        (b"\xff", "ff"),
        (encoded(".png"), "89 50 4e 47"),
        (b"<html>Request has expired</html>", "3c 68 74 6d"),
        (b"\0" * 2000, "00 00 00 00"),
    ],
    ids=["empty", "one byte", "PNG", "HTML", "zeros"],
)
def test_what_is_not_a_jpeg_is_refused_by_its_first_bytes(refused, jpeg, begins):
    reason, message = refused(jpeg=jpeg)
    assert reason == "not_a_jpeg"
    assert f"begins with {begins}" in message


def frame_header(width=WIDTH, height=HEIGHT, *, kind=0xC0, bits=8, components=3, length=None):
    """A JPEG whose frame header says so; the rest of it is as it was."""
    at = JPEG.index(b"\xff\xc0")
    (old,) = struct.unpack_from(">H", JPEG, at + 2)
    body = b"".join(struct.pack("BBB", i + 1, 0x11, 0) for i in range(components))
    length = 8 + len(body) if length is None else length
    new = struct.pack(">BBHBHHB", 0xFF, kind, length, bits, height, width, components) + body
    return JPEG[:at] + new + JPEG[at + 2 + old :]


@pytest.mark.parametrize("size", [(65500, 65500), (65535, 65535), (65535, 513), (1, 0), (0, 1), (0, 0)])
def test_a_jpeg_of_absurd_size_is_refused_without_decoding(refused, size, monkeypatch):
    monkeypatch.delattr(simplejpeg, "decode_jpeg")
    width, height = size
    reason, message = refused(jpeg=frame_header(width, height), image_size=max(SIZE))
    assert reason == "absurd_size"
    assert f"{width} x {height}" in message


@pytest.mark.parametrize("size", [(WIDTH + 1, HEIGHT), (WIDTH, HEIGHT - 1), (HEIGHT, WIDTH), (2250, 1500)])
def test_a_jpeg_of_another_size_than_its_annotation_says_is_refused(refused, size):
    reason, message = refused(jpeg=frame_header(*size))
    assert reason == "image_size"
    assert message == f"JPEG of {size[0]} x {size[1]}, annotated as {WIDTH} x {HEIGHT}"


@pytest.mark.parametrize(
    "jpeg",
    [
        frame_header(kind=0xC3),
        frame_header(kind=0xC9),
        frame_header(kind=0xCA),
        frame_header(bits=12),
        frame_header(bits=16),
        frame_header(components=4),
        frame_header(components=2),
        cmyk(),
    ],
    ids=["lossless", "arithmetic", "arithmetic progressive", "12 bits", "16 bits", "4", "2", "CMYK"],
)
def test_a_jpeg_that_decoders_cannot_read_is_refused(refused, jpeg):
    reason, message = refused(jpeg=jpeg)
    assert reason == "jpeg_unsupported"
    assert "can be decoded" in message


SCAN = JPEG.index(b"\xff\xda")


@pytest.mark.parametrize(
    "jpeg",
    [
        frame_header(length=7),
        frame_header(length=20),
        JPEG[:2] + JPEG[SCAN:],
        JPEG[:SCAN] + b"\xff\xd9",
        JPEG[:SCAN] + frame_header()[JPEG.index(b"\xff\xc0") :],
        JPEG[:2] + b"\xff\xe0\x00\x01" + JPEG[2:],
        JPEG[:2] + b"garbage" + JPEG[2:],
        JPEG[:2] + b"\xff\xd8" + JPEG[2:],
        JPEG[:2] + b"\xff\xfe\x00\x02" * 5000 + JPEG[2:],
    ],
    ids=[
        "frame header too short",
        "frame header of another length",
        "no frame header",
        "no coded data",
        "two frame headers",
        "segment of length 1",
        "no marker",
        "two starts",
        "thousands of segments",
    ],
)
def test_a_jpeg_with_broken_markers_is_refused(refused, jpeg):
    assert refused(jpeg=jpeg)[0] == "jpeg_broken"


def test_megabytes_of_fill_bytes_cost_no_time(refused):
    assert refused(jpeg=JPEG[:2] + b"\xff" * (8 << 20))[0] == "jpeg_truncated"


@pytest.mark.parametrize(
    "jpeg",
    [
        encoded(".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        encoded(".jpg", cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
        simplejpeg.encode_jpeg(np.ascontiguousarray(tiny.picture(BAD)[:, :, :1]), 75, "GRAY", "Gray"),
        JPEG[:2] + b"\xff\xff\xff" + JPEG[2:],
        JPEG[:2] + b"\xff\xe1\x40\x00" + bytes(0x3FFE) + JPEG[2:],
        JPEG[:2] + b"\xff\xfe\x00\x06\xff\xd9\xff\xc0" + JPEG[2:],
    ],
    ids=["progressive", "restart markers", "grey", "fill bytes", "EXIF", "markers in a comment"],
)
def test_every_jpeg_that_decoders_read_is_kept_byte_for_byte(kept, jpeg):
    assert kept(jpeg=jpeg) == {}


@pytest.mark.parametrize(
    "tail", [b"\0", b"trailing", JPEG, bytes(100_000)], ids=["1", "8", "a JPEG", "zeros"]
)
def test_bytes_behind_the_end_of_a_jpeg_are_kept_and_listed(kept, tail):
    assert kept(jpeg=JPEG + tail) == {
        "jpeg_trailing_bytes": f"{len(tail):,} bytes behind the end of the JPEG"
    }


@pytest.mark.parametrize(
    "options", [{"image_size": max(SIZE)}, {"decode_images": True}], ids=["scaled", "decoded"]
)
def test_a_jpeg_that_does_not_decode_is_refused_where_it_is_decoded(refused, options):
    jpeg, text = pair(BAD, size=(2 * HEIGHT, 2 * WIDTH))
    broken = jpeg[: len(jpeg) // 2].rstrip(b"\xff") + b"\xff\xd9"
    reason, message = refused(jpeg=broken, text=text, **options)
    assert reason == "jpeg_broken"
    assert message.startswith("JPEG does not decode: ")


def test_a_jpeg_with_next_to_no_coded_data_is_refused(refused):
    reason, message = refused(jpeg=JPEG[: JPEG.index(b"\xff\xda") + 14] + b"\x01\xff\xd9")
    assert reason == "jpeg_truncated"
    assert "has only 1 bytes of coded data" in message


@pytest.mark.parametrize("marker", [b"\xff\xdb", b"\xff\xc4"], ids=["quantisation", "Huffman"])
def test_a_jpeg_without_tables_is_refused(refused, marker):
    jpeg = JPEG
    while (at := jpeg.find(marker)) >= 0:
        jpeg = jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]
    assert refused(jpeg=jpeg) == ("jpeg_broken", "JPEG has coded data before its tables")


# Annotation files: not readable


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b"\x1f\x8b\x08",
        pair(BAD)[1][:-1],
        pair(BAD)[1][: len(pair(BAD)[1]) // 2],
        pair(BAD)[1] + b"x",
        pair(BAD)[1] + b"\0" * 100,
        pair(BAD)[1] + pair(BAD)[1],
        pair(BAD)[1].replace(b"sa_500", b"sa_\xff500"),
        pair(BAD)[1].replace(b'"area"', b'"ar\nea"', 1),
        pair(BAD)[1].decode().encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        mask_changed(area=1).replace(b'"area": 1,', b'"area": ' + b"9" * 5000 + b",", 1),
    ],
    ids=range(17),
)
def test_an_annotation_file_that_is_not_json_is_refused(refused, text):
    reason, message = refused(text=text)
    assert reason == "invalid_json"
    assert message.startswith("annotation file is not ")


def test_an_annotation_file_of_absurd_length_is_refused(refused):
    assert refused(text=pair(BAD)[1] + b" " * MAX_JSON_BYTES)[0] == "json_too_large"


@pytest.mark.parametrize("key", ["note", "bbox"])
@pytest.mark.parametrize("twice", [False, True], ids=["", "and merged by a second one"])
def test_an_annotation_file_nested_absurdly_deep_is_refused(refused, key, twice):
    deep = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    text = pair(BAD)[1].replace(b'"bbox"', b'"%s": %s, "bbox"' % (key.encode(), deep), 1)
    assert refused(text=text)[0] == "nested_too_deep"


def test_brackets_in_strings_are_no_nesting(kept):
    assert set(kept(text=changed(note='["{' * 200))) == {"keys"}


def without(key):
    found = document(BAD)
    del found["image"][key]
    return encode(found)


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        (b"[]", "wrong_type", "a list where an object belongs"),
        (b"null", "wrong_type", "null where an object belongs"),
        (b"1e999", "wrong_type", "a number where an object belongs"),
        (b"{}", "missing_key", "no object 'image'"),
        (b'{"image": []}', "missing_key", "no object 'image'"),
        (without("image_id"), "missing_key", "no 'image_id'"),
        (without("width"), "missing_key", "no 'width'"),
        (without("height"), "missing_key", "no 'height'"),
        (changed(width=float(WIDTH)), "wrong_type", "image.width is a number, not an integer"),
        (changed(height=True), "wrong_type", "image.height is a boolean"),
        (changed(image_id="500"), "wrong_type", "image.image_id is a string"),
        (changed(image_id=None), "wrong_type", "image.image_id is null"),
        (changed(image_id=501), "image_id_mismatch", "image.image_id is 501, the name says 500"),
        (changed(image_id=-500), "image_id_mismatch", "-500"),
        (changed(width=0), "absurd_size", f"0 x {HEIGHT}"),
        (changed(height=-1), "absurd_size", "-1"),
        (changed(width=10**100), "absurd_size", "cap"),
        (changed(width=2**16, height=2**16), "absurd_size", "65536 x 65536"),
        (changed(width=WIDTH + 1), "mask_size", "mask 0"),
        (encode({"image": document(BAD)["image"]}), "missing_key", "no list 'annotations'"),
        (encode(document(BAD) | {"annotations": {}}), "missing_key", "no list 'annotations'"),
        (encode(document(BAD) | {"annotations": [1]}), "wrong_type", "mask 0 is a number"),
        (encode(document(BAD) | {"annotations": [{}]}), "missing_key", "mask 0 has no segmentation"),
        (mask_changed(segmentation=[]), "missing_key", "mask 1 has no segmentation"),
        (mask_changed(segmentation={"size": [HEIGHT, WIDTH]}), "missing_key", "mask 1"),
        (with_counts([HEIGHT * WIDTH]), "wrong_type", "counts is a list, not a string"),
        (with_counts(None), "wrong_type", "counts is null"),
        (with_counts(counts_from([HEIGHT * WIDTH], *SIZE), (WIDTH, HEIGHT)), "mask_size", "mask 1"),
        (with_counts("", (HEIGHT,)), "mask_size", "mask 1"),
        (with_counts("", (HEIGHT, float(WIDTH))), "mask_size", "mask 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_annotation_file_without_what_every_mask_needs_is_refused(refused, text, reason, says):
    found, message = refused(text=text)
    assert found == reason
    assert says in message


ALL = HEIGHT * WIDTH


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ("", "its runs end before the last"),
        (counts_from([ALL - 1], HEIGHT, WIDTH), "its runs end before the last"),
        (counts_from([ALL + 1], HEIGHT, WIDTH), "a run goes beyond the last"),
        (counts_from([5, 2**32 - 1], HEIGHT, WIDTH), "a run goes beyond the last"),
        (counts_from([ALL], HEIGHT, WIDTH) + "0P", "ends inside a number"),
        (counts_from([ALL], HEIGHT, WIDTH)[:-1], "ends inside a number"),
        ("O" + counts_from([ALL], HEIGHT, WIDTH), "a run is negative"),
        ("o" * 12 + "0", "more than 12 characters"),
        (" " + counts_from([ALL], HEIGHT, WIDTH), "outside 48..111"),
        ("p", "outside 48..111"),
        ("\x00", "outside 48..111"),
        ("é", "outside COCO's alphabet"),
        ("\ud800", "outside COCO's alphabet"),
        ("o" * 100_000, "mask 1"),
    ],
    ids=range(14),
)
def test_a_malformed_mask_is_refused_by_number_and_reason(refused, counts, says):
    reason, message = refused(text=with_counts(counts))
    assert reason == "bad_rle"
    assert says in message


# Annotation files: readable but odd


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (mask_changed(area=7), "area"),
        (mask_changed(area=-7), "area"),
        (mask_changed(bbox=[1.0, 2.0, 3.5, 4.0]), "bbox"),
        (mask_changed(bbox=[math.nan] * 4), "bbox"),
        (mask_changed(bbox=[-1.0, 1e308, math.inf, -0.0]), "bbox"),
        (mask_changed(predicted_iou=-0.5), "predicted_iou"),
        (mask_changed(predicted_iou=math.nan), "predicted_iou"),
        (mask_changed(stability_score=1e9), "stability_score"),
        (mask_changed(point_coords=[[-1.0, 5.0]]), "point_coords"),
        (mask_changed(crop_box=[0.0, 0.0, 10_000.0, 1.0]), "crop_box"),
        (mask_changed(crop_box=[0.0, 0.0, 0.0, 1.0]), "crop_box"),
        (mask_changed(crop_box=[2**60, 0, 1, 1]), "crop_box"),
    ],
    ids=range(12),
)
def test_numbers_that_disagree_with_mask_or_image_are_kept_and_listed(kept, text, reason):
    found = kept(text=text)
    assert set(found) == {reason}
    assert found[reason].startswith("mask 1: ")


def test_a_doubtful_number_names_what_it_should_be(kept):
    area = document(BAD)["annotations"][1]["area"]
    assert kept(text=mask_changed(area=7)) == {"area": f"mask 1: area 7, the mask says {area}"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"area": 12.0}, "type_area"),
        ({"area": True}, "type_area"),
        ({"area": None}, "type_area"),
        ({"area": 2**63}, "type_area"),
        ({"area": 10**400}, "type_area"),
        ({"id": 2**63}, "type_id"),
        ({"id": "5"}, "type_id"),
        ({"id": 5.0}, "type_id"),
        ({"bbox": [1.0, 2.0, 3.0]}, "type_bbox"),
        ({"bbox": []}, "type_bbox"),
        ({"bbox": "1234"}, "type_bbox"),
        ({"bbox": {"a": 1, "b": 2, "c": 3, "d": 4}}, "type_bbox"),
        ({"bbox": [True, False, True, False]}, "type_bbox"),
        ({"bbox": [10**400] * 4}, "type_bbox"),
        ({"predicted_iou": "0.9"}, "type_predicted_iou"),
        ({"predicted_iou": [0.9]}, "type_predicted_iou"),
        ({"stability_score": False}, "type_stability_score"),
        ({"point_coords": [5.0, 5.0]}, "type_point_coords"),
        ({"point_coords": []}, "type_point_coords"),
        ({"point_coords": [[5.0, 5.0], [6.0, 6.0]]}, "type_point_coords"),
        ({"point_coords": [["a", "b"]]}, "type_point_coords"),
        ({"crop_box": [0.0, 0.0, 64.0, 48.0, 5.0], "point_coords": [[5.0]]}, "type_crop_box"),
        ({"crop_box": [0.0, 0.0, 64.0], "point_coords": [[5.0, 5.0, 5.0]]}, "type_crop_box"),
        ({"crop_box": None}, "type_crop_box"),
    ],
    ids=range(24),
)
def test_values_of_a_wrong_type_are_kept_and_listed(kept, change, reason):
    assert reason in kept(text=mask_changed(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"id": -1},
        {"id": -(2**63)},
        {"id": 2**63 - 1},
        {"predicted_iou": 1.0195},
        {"predicted_iou": 0.1},
        {"predicted_iou": 5e-324},
        {"stability_score": -0.0},
    ],
    ids=range(7),
)
def test_unusual_values_of_the_right_type_are_nothing_to_list(kept, change):
    assert kept(text=mask_changed(**change)) == {}


def integers(values):
    return [int(value) for value in values]


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: {"bbox": integers(mask["bbox"])},
        lambda mask: {"bbox": [*integers(mask["bbox"][:2]), *mask["bbox"][2:]]},
        lambda mask: {"crop_box": integers(mask["crop_box"])},
        lambda mask: {"crop_box": [*integers(mask["crop_box"][:1]), *mask["crop_box"][1:]]},
        lambda mask: {"predicted_iou": 1},
        lambda mask: {"stability_score": 1},
        lambda mask: {"point_coords": [integers(mask["point_coords"][0])]},
    ],
    ids=["bbox", "bbox in part", "crop_box", "crop_box in part", "iou", "stability", "point"],
)
def test_integers_and_floats_may_mix_and_come_back_as_they_were(kept, change):
    mask = document(BAD)["annotations"][1]
    assert kept(text=mask_changed(**change(mask))) == {}


def respelled(old, new):
    text = pair(BAD)[1]
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    "text",
    [
        encode(dict(reversed(document(BAD).items()))),
        changed(note="héé 😀"),
        mask_changed(uncertain_iou=0.9),
        encode(document(BAD) | {"info": {"list": [1, 2.0, None, True, {"a": []}]}}),
        encode(
            document(BAD) | {"annotations": [dict(reversed(m.items())) for m in document(BAD)["annotations"]]}
        ),
        encode(
            document(BAD)
            | {
                "annotations": [
                    {k: v for k, v in m.items() if k != "area"} for m in document(BAD)["annotations"]
                ]
            }
        ),
        encode(
            document(BAD)
            | {"annotations": [{"segmentation": m["segmentation"]} for m in document(BAD)["annotations"]]}
        ),
    ],
    ids=["order", "image key", "mask key", "top key", "mask order", "no area", "segmentation only"],
)
def test_unknown_missing_and_reordered_keys_are_kept_and_listed(kept, text):
    assert "keys" in kept(text=text)


@pytest.mark.parametrize("name", ["sa_501.jpg", "../../etc/passwd", "", None, 5, ["a"]], ids=repr)
def test_another_file_name_in_the_annotation_is_kept_and_listed(kept, name):
    assert set(kept(text=changed(file_name=name))) == {"file_name"}


@pytest.mark.parametrize(
    "text",
    [respelled(b'"area": ', b'"area": 5, "area": '), respelled(b'"width": ', b'"width": 9999, "width": ')],
)
def test_a_key_that_stands_twice_is_read_as_json_does_and_listed(kept, text):
    assert set(kept(text=text)) == {"duplicate_key"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(document(BAD), indent=2).encode(),
        json.dumps(document(BAD), separators=(",", ":")).encode() + b"\n",
        respelled(b'"area"', b'"\\u0061rea"'),
        b"\xef\xbb\xbf" + pair(BAD)[1],
    ],
    ids=["indented", "compact", "escaped", "byte order mark"],
)
def test_another_spelling_of_the_same_json_is_nothing_to_list(kept, text):
    assert kept(text=text) == {}


def test_a_coco_string_that_is_not_canonical_is_kept_verbatim(kept):
    mask = document(BAD)["annotations"][1]
    counts = mask["segmentation"]["counts"]
    last = ord(counts[-1]) - 48
    longer = counts[:-1] + chr(48 + last % 32 + 32) + ("O" if last & 16 else "0")  # one character more
    assert kept(text=with_counts(longer)) == {}


def test_runs_of_length_zero_are_kept_verbatim(kept):
    found = document(BAD)
    runs = [0, 0, 0, HEIGHT, ALL - HEIGHT]
    found["annotations"] = [
        found["annotations"][0]
        | {
            "segmentation": {"size": list(SIZE), "counts": counts_from(runs, *SIZE)},
            "area": HEIGHT,
            "bbox": [0.0, 0.0, 0.0, HEIGHT - 1.0],
        }
    ]
    assert kept(text=encode(found)) == {}


def test_an_image_without_masks_is_kept(kept):
    assert kept(text=encode(document(BAD, masks=0))) == {}


def test_an_empty_mask_is_kept_and_listed(kept):
    empty = counts_from([ALL], *SIZE)
    text = mask_changed(segmentation={"size": list(SIZE), "counts": empty}, area=0, bbox=[0.0, 0.0, 0.0, 0.0])
    assert set(kept(text=text)) == {"empty_mask"}


def test_a_full_mask_is_kept(kept):
    text = mask_changed(
        segmentation={"size": list(SIZE), "counts": counts_from([0, ALL], *SIZE)},
        area=ALL,
        bbox=[0.0, 0.0, WIDTH - 1.0, HEIGHT - 1.0],
    )
    assert kept(text=text) == {}


def test_what_a_file_says_cannot_forge_lines_or_drive_a_terminal(bad_pair):
    nasty = "\x1b[2J\r\nFAILED sa_000021: \ud800" + "x" * 100_000
    outcome = bad_pair(text=mask_changed(predicted_iou=nasty))
    (line,) = [line for line in outcome.doubtful if line["reason"] == "type_predicted_iou"]
    assert line["message"].isprintable()
    assert len(line["message"]) < 600


# Many bad pairs


def with_bad(count, total):
    """`total` pairs, `count` of them with a wrong area."""
    members = []
    for image_id in range(1000, 1000 + total):
        found = document(image_id)
        if image_id < 1000 + count:
            found["annotations"][0]["area"] += 1
        members += pair_members(image_id, text=encode(found))
    return members


@pytest.fixture
def count_bad(tmp_path):
    def count_bad(count, total, **options):
        path = tiny.write_tar(tmp_path / "sa_000020.tar", with_bad(count, total), gzip=False)
        return tiny.ingest_tar(path, tmp_path / "root", **options)

    return count_bad


def test_examples_of_refused_pairs_say_where_they_stand(tmp_path):
    members = [member for image_id in range(1000, 1030) for member in pair_members(image_id, jpeg=b"")]
    path = tiny.write_tar(tmp_path / "sa_000020.tar", members, gzip=False)
    with pytest.raises(SystematicError) as error:
        tiny.ingest_tar(path, tmp_path / "root")
    assert "\n  ./sa_1000.jpg at offset 0 + ./sa_1000.json at offset 512: image begins with" in str(
        error.value
    )


def test_twenty_pairs_bad_for_one_reason_are_chance(count_bad):
    assert count_bad(20, 30).counts["doubtful"] == {"area": 20}


def test_more_than_twenty_of_few_pairs_stop_the_run_with_examples_and_the_flag(count_bad, tmp_path):
    with pytest.raises(SystematicError) as error:
        count_bad(21, 30)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'sa_000020.tar'}: 21 of 30 pairs have the problem 'area'")
    assert all(f"\n  sa_{image_id}: mask 0: area" in message for image_id in (1000, 1001, 1002))
    assert message.count("\n  ") == 3
    assert message.endswith("run again with --accept area")
    assert not list((tmp_path / "root").glob("*.tar"))
    assert not list((tmp_path / "root").rglob("*.json"))


def test_one_percent_of_many_pairs_is_chance(count_bad):
    assert count_bad(21, 2100).counts["doubtful"] == {"area": 21}


def test_an_accepted_reason_may_be_frequent(count_bad):
    assert count_bad(30, 30, accept=frozenset({"area"})).counts["doubtful"] == {"area": 30}


def test_accepting_one_reason_accepts_no_other(count_bad):
    with pytest.raises(SystematicError):
        count_bad(30, 30, accept=frozenset({"bbox"}))


def test_partners_lost_to_damage_are_no_system(tmp_path):
    members = sorted(pairs(range(1000, 1060)), key=lambda item: item[0].endswith("json"))
    stored = tiny.gzip_bytes(tiny.tar_bytes(members))
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(stored[: len(stored) * 9 // 10])
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    lost = outcome.task.counts["refused"]["jpg_partner_lost"]
    assert 20 < lost == 60 - outcome.task.counts["images"]


# Stopping


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"nonsense", "invalid_json: annotation file is not JSON"),
        (with_counts("p"), "bad_rle: mask 1: a character of its string lies outside 48..111"),
    ],
)
def test_on_error_stop_ends_with_the_first_refusal_naming_file_members_and_offset(
    ingest, tmp_path, text, says
):
    with pytest.raises(RefusedError) as error:
        ingest([*pair_members(BAD, text=text), *pairs(GOOD)], stop=True)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'sa_000020.tar'}: './sa_500.jpg' at offset 0, './sa_500.json' at")
    assert says in message
    assert not list((tmp_path / "root").glob("*.tar"))


def test_on_error_stop_ends_with_damage_too(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.tar_bytes(pairs(GOOD), end=b""))
    with pytest.raises(RefusedError, match=r"sa_000020.tar: at offset [0-9,]+: the archive ends without"):
        tiny.ingest_tar(path, tmp_path / "root", stop=True)


def test_on_error_stop_lets_doubtful_pairs_pass(bad_pair):
    assert BAD in bad_pair(text=mask_changed(area=7), stop=True).samples


# Nothing left


@pytest.mark.parametrize(
    "members", [[], [("README", b"")], pair_members(BAD, jpeg=b"x")], ids=["empty", "other", "one bad pair"]
)
def test_a_source_without_a_usable_pair_is_an_error_that_says_why(tmp_path, members):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", members)
    with pytest.raises(
        SourceError, match=r"sa_000020.tar: holds no usable pair; .*(empty|unexpected|not_a_jpeg)"
    ):
        tiny.ingest_tar(path, tmp_path / "root")


def test_a_wrong_md5_is_an_error_that_names_both(tmp_path):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", pairs(GOOD))
    with pytest.raises(SourceError, match=r"sa_000020.tar: md5 is [0-9a-f]{32}, the checklist says 0{32}"):
        tiny.ingest_tar(path, tmp_path / "root", md5="0" * 32)
    assert not (tmp_path / "root" / "tasks").exists()


# The command


def reshard(*arguments):
    tool = Path(__file__).parents[2] / "tools" / "reshard.py"
    return subprocess.run(
        [sys.executable, tool, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_goes_on_after_a_damaged_source_and_says_what_became_of_each(tmp_path):
    import hashlib

    for number, ids in enumerate((GOOD, range(200, 210), range(300, 310))):
        tiny.make_tar(tmp_path / f"sa_00002{number}.tar", ids)
    cut = tmp_path / "sa_000021.tar"
    cut.write_bytes(cut.read_bytes()[:-3000])
    good = hashlib.md5((tmp_path / "sa_000020.tar").read_bytes()).hexdigest()
    checklist = tmp_path / "md5.txt"
    checklist.write_text(f"{good}  sa_000020.tar\n{'0' * 32}  sa_000022.tar\n")
    done = reshard(tmp_path, "--out", tmp_path / "root", "--md5", checklist)
    assert done.returncode == 1
    assert "sa_000021.tar is not in" in done.stderr
    assert "md5 is not checked" in done.stderr
    assert f"FAILED sa_000022: {tmp_path / 'sa_000022.tar'}: md5 is" in done.stdout
    assert "damage in sa_000021" in done.stdout
    assert "gzip stream ends in the middle" in done.stdout
    assert "Not complete" in done.stdout
    finished = {path.stem for path in (tmp_path / "root" / "tasks").iterdir()}
    assert finished == {"sa_000020", "sa_000021"}
