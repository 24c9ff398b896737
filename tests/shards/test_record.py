"""The mask record: exact, self-describing, refused when damaged."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.programs.synthetic.source_tars import scene
from sa1b.shards import annotation, record
from sa1b.shards.annotation import Annotations

FIELDS = [name for name in Annotations.__dataclass_fields__ if name != "text"]


def synthetic(image_id: int = 5) -> Annotations:
    return annotation.parse_annotation(
        json.dumps(scene(image_id, long_side=128)[1]).encode(), image_id
    ).annotations


def equal(a: Annotations, b: Annotations) -> bool:
    def bits(value: object) -> object:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return all(bits(getattr(a, name)) == bits(getattr(b, name)) for name in (*FIELDS, "text"))


def test_round_trip_gives_the_same_bits_and_types() -> None:
    annotations = synthetic()
    data = record.encode(annotations)
    assert equal(record.decode(data), annotations)
    assert record.encode(record.decode(data)) == data


def test_the_safetensors_library_is_a_full_decoder() -> None:
    annotations = synthetic()
    arrays = safetensors.numpy.load(zstandard.decompress(record.encode(annotations)))
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
    content = zstandard.decompress(record.encode(annotations))
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {
        "format": "sa1b-masks-1",
        "image_id": "5",
        "width": str(annotations.width),
        "height": str(annotations.height),
    }
    spans = sorted(entry["data_offsets"] for entry in header.values())
    # No gaps and no trailing bytes, as safetensors requires.
    assert [start for start, _ in spans] == [0] + [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == len(content) - 8 - length
    start, stop = header["area"]["data_offsets"]
    assert header["area"]["dtype"] == "U32"
    area = np.frombuffer(content[8 + length :][start:stop], "<u4")
    assert (area == annotations.area).all()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_harmless_and_never_a_crash(data: st.DataObject) -> None:
    content = bytearray(zstandard.decompress(_RECORD))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(1500, len(content) - 1)))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    try:
        found = record.decode(zstandard.compress(bytes(content)))
    except record.RecordError:
        return
    assert len(found.rle_bytes) == len(found)


_RECORD = record.encode(synthetic())


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(record.MAX_CONTENT_BYTES + 1))
    with pytest.raises(
        record.RecordError, match=f"says it holds {record.MAX_CONTENT_BYTES + 1:,} bytes, cap"
    ):
        record.decode(bomb)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(record.RecordError, match="does not state its content size"):
        record.decode(unsized)
    with pytest.raises(record.RecordError, match="damaged mask record"):
        record.decode(zstandard.compress(b""))


def test_another_format_is_named() -> None:
    header = json.dumps({"__metadata__": {"format": "sa1b-masks-9"}}).encode()
    with pytest.raises(record.RecordError, match=r"'sa1b-masks-9'; this version reads 'sa1b-masks-1'"):
        record.decode(zstandard.compress(struct.pack("<Q", len(header)) + header))


def header_of(content: bytes) -> tuple[int, dict[str, dict[str, object]]]:
    (length,) = struct.unpack_from("<Q", content)
    return length, json.loads(content[8 : 8 + length])


@pytest.mark.parametrize("text", [None, b"{}", b"[1]"])
def test_every_tensor_lies_at_a_multiple_of_its_width(text: bytes | None) -> None:
    """A reader may map the decompressed content, so tensors are aligned, as safetensors specifies."""
    for image_id in (5, 12_345, 11_185_363):
        annotations = replace(synthetic(image_id), text=text)
        length, header = header_of(zstandard.decompress(record.encode(annotations)))
        assert length % 8 == 0
        widths = {"U8": 1, "U16": 2, "U32": 4, "I64": 8, "F32": 4, "F64": 8}
        for name, entry in header.items():
            if name != "__metadata__":
                (start, _), dtype = entry["data_offsets"], entry["dtype"]
                assert start % widths[dtype] == 0, name


def test_sizes_up_to_the_caps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = record.encode(replace(synthetic(), text=b"{}"))
    content = len(zstandard.decompress(data))
    for cap, exact, said in (
        ("MAX_CONTENT_BYTES", content, "cap"),
        ("MAX_JSON_BYTES", 2, "annotation file of 2 bytes, cap 1"),
        ("MAX_HEADER_BYTES", header_of(zstandard.decompress(data))[0], "header of"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(record, cap, exact)
            assert record.decode(data).text == b"{}"
            patch.setattr(record, cap, exact - 1)
            with pytest.raises(record.RecordError, match=said):
                record.decode(data)


def test_a_header_that_is_longer_than_the_record_is_named() -> None:
    content = struct.pack("<Q", 9) + b"x" * 8
    with pytest.raises(record.RecordError, match="header of 9 bytes in a record of 16"):
        record.decode(zstandard.compress(content))


def test_columns_of_different_lengths_are_refused() -> None:
    content = zstandard.decompress(record.encode(synthetic()))
    length, header = header_of(content)
    entry = header["mask_id"]
    (start, stop), (rows,) = entry["data_offsets"], entry["shape"]
    header["mask_id"] = entry | {"shape": [rows - 1], "data_offsets": [start, stop - 8]}
    text = json.dumps(header).encode()
    changed = struct.pack("<Q", len(text)) + text + content[8 + length :]
    with pytest.raises(record.RecordError):
        record.decode(zstandard.compress(changed))
