"""An annotation file that cannot be used costs its own pair and no other."""

import pytest

from tests.ingest.bad_pairs import ALL, BAD, HEIGHT, WIDTH, changed, mask_changed, with_counts
from tests.shards.tiny import SIZE, counts_from, document, encode, pair


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
    assert refused(text=pair(BAD)[1] + b" " * (4 << 20))[0] == "json_too_large"


@pytest.mark.parametrize(("depth", "reason"), [(100, "nested_too_deep"), (50_000, "invalid_json")])
@pytest.mark.parametrize("key", ["note", "bbox"])
def test_an_annotation_file_nested_absurdly_deep_is_refused(refused, key, depth, reason):
    deep = b"[" * depth + b"]" * depth
    text = pair(BAD)[1].replace(b'"bbox"', b'"%s": %s, "bbox"' % (key.encode(), deep), 1)
    assert refused(text=text)[0] == reason


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
