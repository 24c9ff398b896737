"""An image that something is wrong with costs its own pair and no other."""

import io
import struct

import cv2
import numpy as np
import pytest
import simplejpeg

from tests.ingest.bad_pairs import BAD, HEIGHT, JPEG, WIDTH
from tests.shards import tiny
from tests.shards.tiny import SIZE, pair


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
    assert "save it as a baseline or progressive JPEG" in message


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
    assert kept(jpeg=JPEG + tail) == {"jpeg_trailing_bytes": f"{len(tail):,} bytes after the end of the JPEG"}


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
