"""Checks of one shard: the structure of the tar, its members compared with the index and the sample table,
the numbers of the index compared with the mask records and, with `deep`, every JPEG and mask.

A check does not stop at the first damage: it reads the tar to its end and reports missing members.
"""

import os
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c

from sa1b.names import member_name, parse_member_name
from sa1b.shards.index import MemberLocation
from sa1b.shards.index_file import shard_files
from sa1b.shards.shard import member_header, tar_size
from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import BLOCK, Damage, Member, StoredStream
from sa1b.verify.member_check import ContentCheck, ExpectedShard, Locations, ShardResult
from sa1b.verify.report import Problem, VerifyRemedy, short

_HEADER_FIELDS = {  # POSIX.1-1988 ustar: where each field begins
    "name": 0, "mode": 100, "uid": 108, "gid": 116, "size": 124, "mtime": 136, "checksum": 148, "type": 156,
    "link name": 157, "magic and version": 257, "user": 265, "group": 297, "device": 329, "prefix": 345,
}  # fmt: skip


def check_shard(
    expected: ExpectedShard,
    remedy: VerifyRemedy,
    tar: Path,
    index: Path,
    table: Path | None,
    *,
    deep: bool = False,
    progress: Callable[[int], object] | None = None,
) -> ShardResult:
    """Check one shard and its index. Memory: a row group, a member and its decoded content.

    `tar` and `index` are local files, which need not exist; so is `table`, None if it cannot be compared with
    the shard. `progress` is called with bytes of the tar as they are read.
    """
    return _ShardCheck(
        expected, remedy, tar=tar, index=index, table=table, deep=deep, progress=progress
    ).run()


class _ShardCheck:
    def __init__(
        self,
        expected: ExpectedShard,
        remedy: VerifyRemedy,
        tar: Path,
        index: Path,
        table: Path | None,
        deep: bool,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.expected, self.remedy, self.progress = expected, remedy, progress
        self.info, self.name = expected.info, expected.info.name
        self.tar = tar
        self.result = ShardResult(self.name)
        locations = self.locations = Locations(index, table, expected, self.result, self._find_index)
        self.content = ContentCheck(
            locations.index,
            locations.rows,
            self.result,
            deep=deep,
            find=self._find,
            find_index=self._find_index,
        )
        # Ending of the first member of every image; None: not known before a member is read.
        self.first = {True: "masks", False: "jpg", None: None}[expected.annotations_only]
        self.seen: set[tuple[int, str]] = set()
        self.last: tuple[int, str] | None = None  # the previous member; None after damage
        self.end: int | None = 0  # expected offset of the next header; None after damage

    def run(self) -> ShardResult:
        try:
            with self.tar.open("rb") as file:
                compressed = file.read(2) == b"\x1f\x8b"
            if compressed:
                self._find("tar_compressed", "a gzip file; shards are plain, so that any part can be read")
            else:
                self._walk()
        except FileNotFoundError:
            self._find("tar_missing", "not there")
        except OSError as error:
            self._find("tar_unreadable", short(error), self.end)
        if self.locations.index is not None:
            self.locations.index.close()
        return self.result

    def _find(
        self,
        kind: str,
        message: str,
        offset: int | None = None,
        image_id: int | None = None,
        file: str | None = None,
    ) -> None:
        if file is not None and file == self.expected.table:
            remedy = self.remedy.tables()
        elif file is not None:
            remedy = self.remedy.index(self.name)
        elif kind == "jpg_undecodable":  # its checksum fits
            remedy = (
                f"image {image_id} of {self.name} has this damage in its source too, so no copy repairs it; "
                "exclude the image"
            )
        else:
            remedy = f"{self.remedy.root}/{self.name}: {self.remedy.source(self.expected.source)}"
        finding = Problem(
            kind, file or self.name, message, remedy, shard=self.name, offset=offset, image_id=image_id
        )
        self.result.findings.add(finding)

    def _find_index(
        self, kind: str, message: str, offset: int | None = None, image_id: int | None = None
    ) -> None:
        self._find(kind, message, offset, image_id, shard_files(self.name)[1])

    def _walk(self) -> None:
        info = self.info
        stream = StoredStream(self.tar, progress=self.progress)
        try:
            with self.tar.open("rb", buffering=0) as raw:
                size = os.fstat(raw.fileno()).st_size
                for item in members(stream):
                    if isinstance(item, Damage):
                        self._damage(item)
                        continue
                    header = os.pread(raw.fileno(), BLOCK, item.offset)
                    padding = os.pread(
                        raw.fileno(), -len(item.data) % BLOCK, item.offset + BLOCK + len(item.data)
                    )
                    self._member(item, header, padding)
            sha256 = self.result.sha256 = stream.digests()["sha256"]
        finally:
            stream.close()
        self.result.bytes += size
        if size != info.bytes:
            self._find("tar_bytes", f"{size:,} bytes, {info.bytes:,} written", min(size, info.bytes))
        elif sha256 != info.sha256:
            self._find("tar_sha256", f"sha256 is {sha256}, written {info.sha256}")
        if self.end is not None and size != tar_size(self.end):
            self._find("tar_end", f"{size:,} bytes do not fit the end of the last member", self.end)
        self._missing()
        if not len(self.result.findings) and (self.result.images, self.result.masks) != (
            info.images,
            info.masks,
        ):
            message = f"{self.result.images:,} images with {self.result.masks:,} masks, "
            self._find("shard_counts", message + f"written {info.images:,} with {info.masks:,}")

    def _damage(self, damage: Damage) -> None:
        end = damage.offset + max(damage.length, 1)
        lost = [
            image_id
            for image_id in self.locations.image_ids()
            for ending in self._endings()
            for place in self.locations.find(image_id, ending).values()
            if damage.offset <= place.offset - BLOCK < end
        ]
        self._find(damage.reason, damage.message, damage.offset, lost[0] if lost else None)
        self.last = self.end = None

    def _member(self, member: Member, header: bytes, padding: bytes) -> None:
        if self.end is not None and self.end != member.offset:
            self._find("gap", f"{member.offset - self.end:,} bytes that do not belong to a member", self.end)
        size = len(member.data)
        self.end = member.offset + BLOCK + size + -size % BLOCK
        named = parse_member_name(member.name)
        if member.kind != "file" or named is None:
            message = f"{member.kind} {member.name!r} does not belong in a shard"
            self._find("unexpected_member", message, member.offset)
            return
        image_id, ending = named
        self._header(member, header, image_id)
        if padding.strip(b"\0"):
            self._find(
                "padding", f"bytes after {member.name} are not zero", self.end - len(padding), image_id
            )
        if self.first is None:  # the options are unknown
            self.first = "masks" if ending == "masks" else "jpg"
        self._order(image_id, ending, member.offset)
        if (image_id, ending) in self.seen:
            self._find("duplicate", f"a second {member.name}", member.offset, image_id)
            return
        self.seen.add((image_id, ending))
        if ending == "json" or self._content(image_id, ending, member):
            self.content.member(ending, member.data, member.offset + BLOCK, image_id)
        if ending == self.first == "masks":
            self._without_image(image_id, member.offset)
        if self._complete(image_id) and ending != "json":
            self.result.images += 1

    def _endings(self) -> tuple[str, ...]:
        """The endings of the members of an image that index and table refer to."""
        return ("masks",) if self.first == "masks" else ("jpg", "masks")

    def _complete(self, image_id: int) -> bool:
        return all((image_id, ending) in self.seen for ending in self._endings())

    def _without_image(self, image_id: int, offset: int) -> None:
        """Check that the index and the table have an empty image at the offset of the masks' header."""
        actual = MemberLocation(offset, 0, 0)
        for file, place in self.locations.find(image_id, "jpg").items():
            if message := _differences("jpg", place, actual):
                kind = "table_row" if file == self.locations.table_file else "index_row"
                self._find(kind, message, offset, image_id, file)

    def _header(self, member: Member, header: bytes, image_id: int) -> None:
        expected = member_header(member.name, len(member.data))
        if header != expected:
            starts = [*_HEADER_FIELDS.values(), BLOCK]
            wrong = [
                name
                for name, start, stop in zip(_HEADER_FIELDS, starts, starts[1:], strict=False)
                if header[start:stop] != expected[start:stop]
            ]
            message = f"{member.name}: header fields with wrong values: {', '.join(wrong)}"
            self._find("header", message, member.offset, image_id)

    def _order(self, image_id: int, ending: str, offset: int) -> None:
        """jpg, masks, then json with --keep-json; nothing between them."""
        first = self.first or "jpg"
        after_masks = {True: ["json"], False: [first], None: [first, "json"]}[self.expected.keep_json]
        if self.last is None:
            where, expected = "at the start", [first]
            fits = ending == first or offset > 0  # after damage anything may come first
        else:
            last_id, last = self.last
            where = f"after {member_name(last_id, last)}"
            expected = {"jpg": ["masks"], "masks": after_masks, "json": [first]}[last]
            fits = ending in expected and (ending == first) == (image_id != last_id)
        self.last = (image_id, ending)
        if not fits:
            message = f"{member_name(image_id, ending)} is {where}, where a {' or '.join(expected)} belongs"
            self._find("member_order", message, offset, image_id)

    def _content(self, image_id: int, ending: str, member: Member) -> bool:
        """Compare a jpg or masks member with index and table; return whether its content is undamaged."""
        data, offset = member.data, member.offset + BLOCK
        actual = MemberLocation(offset, len(data), crc32c(data))
        locations = self.locations.find(image_id, ending)
        if not self._complete(image_id) or self.first == "masks":  # reported once for an image
            if self.locations.index is not None and image_id not in self.locations.rows:
                self._find_index("index_row_missing", "no row for this image", offset, image_id)
            if self.locations.table is not None and image_id not in self.locations.table:
                self._find(
                    "table_row_missing", "no row for this image", offset, image_id, self.locations.table_file
                )
        wrong = {file: _differences(ending, place, actual) for file, place in locations.items()}
        if locations and all(place.crc32c != actual.crc32c for place in locations.values()):
            message = f"content of {member.name}, by {' and '.join(locations)}: {next(iter(wrong.values()))}"
            self._find(f"{ending}_damaged", message, offset, image_id)
            return False
        if len(set(locations.values())) == 1 < len(locations):  # index and table agree, so the tar is damaged
            wrong = {self.name: next(iter(wrong.values()))}
        for file, message in wrong.items():
            if message:
                kind = {self.name: f"{ending}_misplaced", self.locations.table_file: "table_row"}.get(
                    file, "index_row"
                )
                self._find(kind, message, offset, image_id, None if file == self.name else file)
        return True

    def _missing(self) -> None:
        for image_id in self.locations.image_ids():
            absent = [ending for ending in self._endings() if (image_id, ending) not in self.seen]
            if not absent:
                continue
            locations = self.locations.find(image_id, absent[0])
            offset = next(iter(locations.values())).offset
            if (
                len(absent) == len(self._endings())
                and len(locations) == 1
                and self.locations.index is not None
                and self.locations.table is not None
            ):
                (file,) = locations
                kind = "table_row_extra" if file == self.locations.table_file else "index_row_extra"
                self._find(kind, "a row for an image that no other file contains", offset, image_id, file)
                continue
            kind = "pair_missing" if len(absent) == len(self._endings()) else f"{absent[0]}_missing"
            what = " and ".join(member_name(image_id, ending) for ending in absent)
            self._find(
                kind, f"{what} missing in the tar, listed in {' and '.join(locations)}", offset, image_id
            )


def _differences(ending: str, listed: MemberLocation, actual: MemberLocation) -> str:
    pairs = (
        (f"{ending}_offset", listed.offset, actual.offset),
        (f"{ending}_bytes", listed.bytes, actual.bytes),
        (f"{ending}_crc32c", listed.crc32c, actual.crc32c),
    )
    return "; ".join(
        f"{name} {value:,}, in the tar {other:,}" for name, value, other in pairs if value != other
    )
