"""The mask record: exact, self-describing, refused when damaged."""

import json
import struct
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import sa1b
from sa1b.shards import record
from sa1b.shards.annotation import Annotations
from tests.shards import tiny

FIELDS = [name for name in Annotations.__dataclass_fields__ if name != "text"]


@cache
def synthetic(image_id: int = 5) -> Annotations:
    """Annotations with every kind of number, of an image of `sa1b synthesize`."""
    if image_id != 5:
        return replace(synthetic(), image_id=image_id)
    with tempfile.TemporaryDirectory() as folder:
        source = tiny.synthesize(Path(folder, "sa_000001.tar"), images=1, first_id=5, long_side=128)
        tiny.ingest_tar(source, Path(folder, "root"))
        return sa1b.open(Path(folder, "root"))[0].annotations


def contents(annotations: Annotations) -> tuple[dict[str, Any], bytes]:
    """The header of a record, and its tensors."""
    content = zstandard.decompress(record.encode(annotations))
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def packed(header: bytes, tensors: bytes) -> bytes:
    return zstandard.compress(struct.pack("<Q", len(header)) + header + tensors)


def equal(a: Annotations, b: Annotations) -> bool:
    def bits(value: object) -> object:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return all(bits(getattr(a, name)) == bits(getattr(b, name)) for name in (*FIELDS, "text"))


def test_the_safetensors_library_is_a_full_decoder() -> None:
    annotations = synthetic()
    data = record.encode(annotations)
    assert record.encode(record.decode(data)) == data
    arrays = safetensors.numpy.load(zstandard.decompress(data))
    assert set(arrays) == set(FIELDS) - {"image_id", "width", "height"}
    for name, array in arrays.items():
        assert (array == getattr(annotations, name)).all()


doubles = st.floats(width=64, allow_nan=True) | st.just(-0.0) | st.integers(-5, 70000).map(float)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 6))
def test_round_trip_of_any_numbers(data: st.DataObject, count: int) -> None:
    def column(width: int) -> np.ndarray:
        values = data.draw(st.lists(doubles, min_size=count * width, max_size=count * width))
        return np.array(values, np.float64).reshape((count, width) if width > 1 else count)

    lengths = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    annotations = Annotations(
        image_id=data.draw(st.integers(0, 2**63 - 1)),
        width=7,
        height=9,
        mask_id=np.array(
            data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count)), np.int64
        ),
        area=np.array(data.draw(st.lists(st.integers(-1, 2**40), min_size=count, max_size=count)), np.int64),
        bbox=column(4),
        predicted_iou=column(1),
        stability_score=column(1),
        point_coords=column(2),
        crop_box=column(4),
        number_types=np.zeros(count, np.uint8),
        rle=np.frombuffer(data.draw(st.binary(min_size=sum(lengths), max_size=sum(lengths))), np.uint8),
        rle_bytes=np.array(lengths, np.uint32),
        runs_count=np.array(lengths, np.uint32),
        text=data.draw(st.none() | st.binary()),
    )
    assert equal(record.decode(record.encode(annotations)), annotations)


def test_the_content_is_a_safetensors_file_as_documented() -> None:
    annotations = synthetic()
    header, tensors = contents(annotations)
    assert header.pop("__metadata__") == {
        "format": "sa1b-masks-1",
        "image_id": "5",
        "width": str(annotations.width),
        "height": str(annotations.height),
    }
    spans = sorted(entry["data_offsets"] for entry in header.values())
    # No gaps and no trailing bytes, as safetensors requires.
    assert [start for start, _ in spans] == [0] + [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == len(tensors)
    start, stop = header["area"]["data_offsets"]
    assert header["area"]["dtype"] == "U32"
    assert (np.frombuffer(tensors[start:stop], "<u4") == annotations.area).all()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_harmless_and_never_a_crash(data: st.DataObject) -> None:
    content = bytearray(zstandard.decompress(record.encode(synthetic())))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(1500, len(content) - 1)))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    try:
        found = record.decode(zstandard.compress(bytes(content)))
    except record.RecordError:
        return
    assert len(found.rle_bytes) == len(found)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=True).compressobj(size=1 << 40)
    bomb = frame.compress(bytes(1 << 20)) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    for data, says in ((bomb, f"{1 << 40:,}"), (unsized, "size"), (zstandard.compress(b""), "damaged")):
        with pytest.raises(record.RecordError, match=says):
            record.decode(data)


def test_another_format_is_named() -> None:
    header = json.dumps({"__metadata__": {"format": "sa1b-masks-9"}}).encode()
    with pytest.raises(record.RecordError, match=r"'sa1b-masks-9'; this version reads 'sa1b-masks-1'"):
        record.decode(zstandard.compress(struct.pack("<Q", len(header)) + header))


@pytest.mark.parametrize("text", [None, b"{}", b"[1]"])
def test_every_tensor_lies_at_a_multiple_of_its_width(text: bytes | None) -> None:
    """A reader may map the decompressed content, so tensors are aligned, as safetensors specifies."""
    for image_id in (5, 12_345, 11_185_363):
        annotations = replace(synthetic(image_id), text=text)
        header, tensors = contents(annotations)
        assert (len(zstandard.decompress(record.encode(annotations))) - len(tensors)) % 8 == 0
        widths = {"U8": 1, "U16": 2, "U32": 4, "I64": 8, "F32": 4, "F64": 8}
        for name, entry in header.items():
            if name != "__metadata__":
                (start, _), dtype = entry["data_offsets"], entry["dtype"]
                assert start % widths[dtype] == 0, name


def test_sizes_up_to_the_documented_caps_are_read() -> None:
    """A header of 64 KiB, a content of 32 MiB, and an annotation file of 4 MiB."""
    annotations = synthetic()
    header, tensors = contents(annotations)

    def with_strings(count: int) -> bytes:
        lengths = np.array([count, *[0] * (len(annotations) - 1)], np.uint32)
        return record.encode(replace(annotations, rle=np.zeros(count, np.uint8), rle_bytes=lengths))

    least = (32 << 20) - 8192
    rest = (32 << 20) - len(zstandard.decompress(with_strings(least)))
    for more in (0, 1):
        padded = packed(json.dumps(header).encode().ljust((64 << 10) + more), tensors)
        text = record.encode(replace(annotations, text=b" " * ((4 << 20) + more)))
        for data in (padded, with_strings(least + rest + more), text):
            if more:
                with pytest.raises(record.RecordError):
                    record.decode(data)
            else:
                assert len(record.decode(data)) == len(annotations)


def test_a_header_that_is_longer_than_the_record_is_named() -> None:
    content = struct.pack("<Q", 9) + b"x" * 8
    with pytest.raises(record.RecordError, match="header of 9 bytes in a record of 16"):
        record.decode(zstandard.compress(content))


def test_columns_of_different_lengths_are_refused() -> None:
    header, tensors = contents(synthetic())
    for name in set(header) - {"__metadata__"}:
        entry = header[name]
        (start, stop), (rows, *rest) = entry["data_offsets"], entry["shape"]
        size = (stop - start) // rows
        changed = entry | {"shape": [rows - 1, *rest], "data_offsets": [start, stop - size]}
        with pytest.raises(record.RecordError):
            record.decode(packed(json.dumps(header | {name: changed}).encode(), tensors))
