"""Validation of one pair of a source: the pair to store, or the reason why it cannot be used."""

from sa1b.errors import BadSample
from sa1b.shards import annotation, jpeg
from sa1b.shards.manifest import Options
from sa1b.shards.shard import Pair
from sa1b.sources.pairing import MemberPair


def check_pair(members: MemberPair, options: Options, max_pixels: int) -> Pair:
    """Parse both members, compare them, and scale the image down if `options.image_size` is set.

    With `options.annotations_only`, the image is checked too, and the pair to store has none.

    Args:
        members: the JPEG and the JSON of one image.
        options: options of the dataset.
        max_pixels: largest accepted image, in pixels.

    Raises:
        BadSample: the pair cannot be used.
        MemoryError: memory is exhausted; the pair may be valid.
    """
    data, text = members.image.data, members.text.data
    parsed = annotation.parse_annotation(text, members.image_id, max_pixels)
    frame = jpeg.frame(data, max_pixels)
    height, width = parsed.annotations.height, parsed.annotations.width
    if (frame.height, frame.width) != (height, width):
        raise BadSample(
            "image_size", f"JPEG of {frame.width} x {frame.height}, annotated as {width} x {height}"
        )
    jpeg.check_length(frame)
    if options.decode_images:
        jpeg.decode(data)
    if options.annotations_only:
        data, height, width = b"", 0, 0
    elif options.image_size is not None:
        data, height, width = jpeg.scale_down(data, frame, options.image_size, options.quality or 95)
    if frame.trailing_bytes:
        message = f"{frame.trailing_bytes:,} bytes after the end of the JPEG"
        parsed.warnings.add("jpeg_trailing_bytes", message)
    keep = text if options.keep_json else None
    return Pair(data, height, width, parsed.annotations, parsed.runs, keep, parsed.warnings)
