"""The mask record: the content of `sa_<id>.masks`, one per image.

One zstandard frame around a safetensors file, which many languages can read. A complete decoder in Python:

    arrays = safetensors.numpy.load(zstandard.decompress(data))

The tensors are the columns of `Annotations` under the same names; `rle` holds all COCO strings one after
the other, `json` the annotation file's text where the columns cannot give it back (see annotation.py).
Numbers take the narrowest of the listed types that holds every value of the image exactly. The header's
`__metadata__` carries format, image_id, width and height as strings.

The record of an image in a layer (sa1b.shards.layer) is a mask record with two further tensors: `replaces`
and `hidden`.
"""

import json
import struct
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from sa1b.errors import Sa1bError
from sa1b.shards.annotation import MAX_JSON_BYTES, Annotations

FORMAT = "sa1b-masks-1"
MAX_CONTENT_BYTES = 32 << 20  # real records: 45 kB; the largest annotation file: 20 MB
MAX_HEADER_BYTES = 1 << 16  # twelve tensors take 1.5 kB; JSON takes 25 times its text in memory
_LEVEL = 3
_THREAD = threading.local()

_FIELDS = {  # name -> types that may hold it, narrowest first
    "mask_id": ("I64",),
    "area": ("U32", "I64"),
    "bbox": ("U16", "F32", "F64"),
    "predicted_iou": ("F32", "F64"),
    "stability_score": ("F32", "F64"),
    "point_coords": ("F32", "F64"),
    "crop_box": ("U16", "F32", "F64"),
    "number_types": ("U8",),
    "rle_bytes": ("U32",),
    "runs_count": ("U32",),
    "rle": ("U8",),
}
_OF_LAYERS = {"replaces": ("U8",), "hidden": ("I64",)}
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


class RecordError(Sa1bError, ValueError):
    """The bytes are not a mask record that this version can read."""


def encode(annotations: Annotations, of_layer: Mapping[str, npt.NDArray[Any]] | None = None) -> bytes:
    """The mask record of an image, equal for equal columns; `of_layer`: its further tensors."""
    # Masks stay COCO strings because they are small and verbatim. A real file with 84 masks, 12,516 runs,
    # zstd level 3, one thread:
    #
    #     encoding                              raw      stored    decompress
    #     COCO strings                       14,711       5,824     0.010 ms   chosen: verbatim
    #     deltas, zigzag, varint             13,639       5,731     0.010 ms   not verbatim
    #     runs, uint32, bytes split          50,064       9,123     0.011 ms
    #     runs, varint                       20,084       9,664     0.014 ms
    #     runs, uint16 with escapes          25,652      10,127     0.017 ms
    #     runs, uint32                       50,064      11,724     0.023 ms
    #
    # Level 9 saves 5 % and takes 20 times as long; level 19 saves 9 % and takes 100 times as long (`pytest
    # benchmarks/test_record.py` prints the table for synthetic images).
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "image_id": str(annotations.image_id),
            "width": str(annotations.width),
            "height": str(annotations.height),
        }
    }
    pieces = []
    start = 0
    arrays = [(name, *_narrow(getattr(annotations, name), types)) for name, types in _FIELDS.items()]
    for name, array in (of_layer or {}).items():
        arrays.append((name, *_narrow(array, _OF_LAYERS[name])))
    if annotations.text is not None:
        arrays.append(("json", "U8", np.frombuffer(annotations.text, np.uint8)))
    # Widest first keeps every tensor aligned to its type.
    arrays.sort(key=lambda item: -item[2].itemsize)
    for name, dtype, array in arrays:
        data = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [start, start + len(data)],
        }
        pieces.append(data)
        start += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = b"".join((struct.pack("<Q", len(text)), text, *pieces))
    try:
        return _compressor().compress(content)
    except zstandard.ZstdError as error:  # lack of memory is the only reason why compression fails
        raise MemoryError(str(error)) from None


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's decompressor: a new one for every record costs a quarter of the decompression."""
    decompressor: zstandard.ZstdDecompressor | None = getattr(_THREAD, "decompressor", None)
    if decompressor is None:
        decompressor = _THREAD.decompressor = zstandard.ZstdDecompressor()
    return decompressor


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor: a new one for every record costs 0.1 ms and 1 MB of fresh memory."""
    compressor: zstandard.ZstdCompressor | None = getattr(_THREAD, "compressor", None)
    if compressor is None:
        # The content size in the frame's header lets a reader refuse a bomb before it decompresses.
        compressor = _THREAD.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    return compressor


def decode(data: bytes | memoryview) -> Annotations:
    """The annotations in a mask record; `.runs()` gives the masks, `.to_json()` the original file.

    The columns are views into one decompressed buffer where the types allow.

    Args:
        data: content of a member `sa_<id>.masks`.

    Raises:
        RecordError: not a record, another format version, or damaged.
    """
    return _decode(data, ())[0]


def decode_of_layer(data: bytes | memoryview) -> tuple[Annotations, npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """A layer's record: its masks, whether each replaces a mask, bool [N], and hidden ids, int64 [H]."""
    annotations, (replaces, hidden) = _decode(data, tuple(_OF_LAYERS))
    if replaces.shape != (len(annotations),) or hidden.ndim != 1:
        raise RecordError(f"replaces and hidden have shapes {replaces.shape} and {hidden.shape}")
    return annotations, replaces.astype(np.bool_), hidden.astype(np.int64, copy=False)


def _decode(data: bytes | memoryview, further: tuple[str, ...]) -> tuple[Annotations, list[npt.NDArray[Any]]]:
    """The annotations in a record, and its further tensors."""
    content = _decompress(data)
    try:
        (length,) = struct.unpack_from("<Q", content)
        if length > min(len(content) - 8, MAX_HEADER_BYTES):
            raise RecordError(f"header of {length:,} bytes in a record of {len(content):,}")
        header = msgspec.json.decode(memoryview(content)[8 : 8 + length])
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT:
            raise RecordError(f"format {metadata['format']!r}; this version reads {FORMAT!r}")
        start = 8 + length
        columns: dict[str, Any] = {name: _array(content, start, header[name]) for name in _FIELDS}
        text = bytes(_array(content, start, header["json"])) if "json" in header else None
        if text is not None and len(text) > MAX_JSON_BYTES:
            raise RecordError(f"annotation file of {len(text):,} bytes, cap {MAX_JSON_BYTES:,}")
        others = [_array(content, start, header[name]) for name in further]
        for name in ("mask_id", "area"):
            columns[name] = columns[name].astype(np.int64, copy=False)
        with np.errstate(invalid="ignore"):  # a damaged number may be a signalling NaN
            for name in ("bbox", "predicted_iou", "stability_score", "point_coords", "crop_box"):
                columns[name] = columns[name].astype(np.float64)
        columns |= {name: int(metadata[name]) for name in ("image_id", "width", "height")}
        annotations = Annotations(**columns, text=text)
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError, struct.error, RecursionError, msgspec.MsgspecError) as error:
        raise RecordError(f"damaged mask record: {error!r}") from None
    _check_shapes(annotations)
    return annotations, others


def webdataset_decoder(key: str, data: bytes) -> Annotations | None:
    """Decode mask records in a webdataset pipeline.

        WebDataset("shards/sa1b-000020-{0000..0010}.tar").decode("pil", sa1b.webdataset_decoder)

    Replaces "masks" of each sample by its `Annotations`; the other decoders decode the other members.

    Args:
        key: the member's ending, such as ".masks".
        data: the member's bytes.

    Returns:
        None if the member is not a mask record.

    Raises:
        RecordError: not a record, another format version, or damaged; webdataset passes it to its `handler`.
    """
    return decode(data) if key.rpartition(".")[2] == "masks" else None


def _decompress(data: bytes | memoryview) -> bytes:
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise RecordError("zstandard frame does not state its content size")
        if size > MAX_CONTENT_BYTES:
            raise RecordError(f"record says it holds {size:,} bytes, cap {MAX_CONTENT_BYTES:,}")
        return _decompressor().decompress(data, max_output_size=MAX_CONTENT_BYTES)
    except zstandard.ZstdError as error:
        raise RecordError(f"damaged zstandard frame: {error}") from None


def _narrow(array: npt.NDArray[Any], types: tuple[str, ...]) -> tuple[str, npt.NDArray[Any]]:
    """The array as the first of `types` that preserves its bits."""
    for name in types[:-1]:
        with np.errstate(invalid="ignore", over="ignore"):
            narrow = array.astype(_DTYPES[name])
            back = narrow.astype(array.dtype)
        # Bits are compared, not values, so that -0.0 and the payload of a NaN are preserved.
        if np.array_equal(back.view(np.uint64), array.view(np.uint64)):
            return name, narrow
    return types[-1], array.astype(_DTYPES[types[-1]], copy=False)


def _array(content: bytes, origin: int, entry: dict[str, Any]) -> npt.NDArray[Any]:
    """A tensor of a record, as a view into it; its offsets are counted from `origin`."""
    start, stop = entry["data_offsets"]
    array = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], content, origin + start)
    if start < 0 or array.nbytes != stop - start:
        raise RecordError(f"a tensor of {array.nbytes:,} bytes is listed at {start:,} to {stop:,}")
    return array


def _check_shapes(annotations: Annotations) -> None:
    count = len(annotations)
    for name, width in (("bbox", 4), ("crop_box", 4), ("point_coords", 2)):
        if getattr(annotations, name).shape != (count, width):
            raise RecordError(f"{name} has shape {getattr(annotations, name).shape} for {count} masks")
    for name in ("area", "predicted_iou", "stability_score", "number_types", "rle_bytes", "runs_count"):
        if getattr(annotations, name).shape != (count,):
            raise RecordError(f"{name} has shape {getattr(annotations, name).shape} for {count} masks")
    if int(annotations.rle_bytes.sum(dtype=np.int64)) != len(annotations.rle):
        raise RecordError("the lengths of the COCO strings do not add up")
