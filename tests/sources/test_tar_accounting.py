"""Every byte of an archive, damaged or not, belongs to an item or a permitted gap."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.shards.tiny import checksummed, header, member, tar_bytes
from tests.sources.archives import FILES, GOOD, files
from tests.sources.items import BLOCK, MAX_KEPT_BYTES, Member


def accounted(data, items):
    """Assert that items cover the archive: gaps hold only extended headers, or zeros at the end."""
    position = 0
    for item in items:
        position = skip_extended(data, position, item.offset)
        assert item.offset == position, (item, position)
        if isinstance(item, Member):
            length = BLOCK + len(item.data) + -len(item.data) % BLOCK
            if item.kind == "file":
                assert data[item.offset + BLOCK : item.offset + BLOCK + len(item.data)] == item.data
        else:
            length = item.length
            assert item.data == data[item.offset : item.offset + min(length, MAX_KEPT_BYTES)] or (
                item.reason == "zero_blocks" and not any(data[item.offset : item.offset + length])
            )
        position = min(position + length, len(data))
    rest = data[skip_extended(data, position, len(data)) :]
    assert not any(rest)


def skip_extended(data, position, stop):
    while position + BLOCK <= stop and data[position + 156 : position + 157] in (b"x", b"g", b"L", b"K"):
        size = int(data[position + 124 : position + 136].split(b"\0")[0] or b"0", 8)
        position += BLOCK + size + -size % BLOCK
    return min(position, len(data))


LONG = tar_bytes([("a/" * 60 + "sa_9.jpg", b"x" * 700)], end=b"") + GOOD


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_reader_never_raises_and_accounts_for_every_byte(read, data):
    archive = bytearray(LONG)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(archive) - 1)))
        length = data.draw(st.sampled_from([1, 7, BLOCK, 1300]))
        change = data.draw(st.sampled_from(["flip", "cut", "zero", "remove", "insert", "copy"]))
        if change == "flip" and archive:
            archive[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del archive[at:]
        elif change == "zero":
            archive[at : at + length] = bytes(len(archive[at : at + length]))
        elif change == "remove":
            del archive[at : at + length]
        elif change == "insert":
            archive[at:at] = data.draw(st.binary(min_size=1, max_size=600))
        elif change == "copy":
            other = data.draw(st.integers(0, len(archive)))
            archive[at : at + length] = archive[other : other + length]
    assume(not archive.startswith(b"\x1f\x8b"))  # that is a gzip file, and a corrupt one
    accounted(bytes(archive), read(bytes(archive)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["name", "size", "kind", "magic", "prefix"]), st.binary(max_size=12), max_size=5
    ),
    st.binary(max_size=1100),
)
def test_any_header_with_a_right_checksum_is_survived(read, changes, content):
    places = {"name": 0, "size": 124, "kind": 156, "magic": 257, "prefix": 345}
    block = bytearray(header("sa_1.jpg", len(content)))
    for field, change in changes.items():
        value = change[:1] if field == "kind" else change
        block[places[field] : places[field] + len(value)] = value
    items = read(member(*FILES[0]) + checksummed(bytes(block)) + content + tar_bytes(FILES[1:]))
    assert set(files(items)) >= {FILES[0], *FILES[2:]}
