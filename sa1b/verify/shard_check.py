"""Everything that can be checked about one shard: the tar's structure, its members against the index and
the sample table, the numbers of the index against the mask records, and, deep, every JPEG and mask.

A check never stops at the first damage: the tar is walked to its end, and what is missing from it is named.
"""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import google_crc32c

from sa1b.names import parse_member_name
from sa1b.shards.index_reader import Place
from sa1b.shards.manifest import TASKS
from sa1b.shards.shard import index_path
from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import BLOCK, Damage, Member, StoredStream
from sa1b.verify.member_check import ContentCheck
from sa1b.verify.places import Claim, Places
from sa1b.verify.report import Finding, ShardResult, remake, short

_HEADER_FIELDS = {  # POSIX.1-1988 ustar: where each field begins
    "name": 0, "mode": 100, "uid": 108, "gid": 116, "size": 124, "mtime": 136, "checksum": 148, "type": 156,
    "link name": 157, "magic and version": 257, "user": 265, "group": 297, "device": 329, "prefix": 345,
}  # fmt: skip


def check_shard(
    root: Path, claim: Claim, *, deep: bool = False, progress: Callable[[int], None] | None = None
) -> ShardResult:
    """Check one shard and its index. Memory: a row group, a member and what decodes from it.

    Args:
        deep: also decode every JPEG and every mask.
        progress: called with bytes of the tar as they are read.
    """
    return _ShardCheck(root, claim, deep, progress).run()


class _ShardCheck:
    def __init__(self, root: Path, claim: Claim, deep: bool, progress: Callable[[int], None] | None) -> None:
        self.root, self.claim, self.progress = root, claim, progress
        self.info, self.name = claim.info, claim.info.name
        self.tar = root / self.name
        self.result = ShardResult(self.name)
        places = self.places = Places(root, claim, self.result, self._find_index)
        self.content = ContentCheck(
            places.index, places.rows, self.result, deep=deep, find=self._find, find_index=self._find_index
        )
        self.seen: set[tuple[int, str]] = set()
        self.last: tuple[int, str] | None = None  # the member before, None behind damage
        self.end: int | None = 0  # where the next header belongs, None behind damage

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
        if self.places.index is not None:
            self.places.index.close()
        return self.result

    def _find(
        self,
        kind: str,
        message: str,
        offset: int | None = None,
        image_id: int | None = None,
        file: str | None = None,
    ) -> None:
        if file is not None:
            remedy = remake(self.root)
        elif kind == "jpg_undecodable":  # its checksum fits
            remedy = f"the source of {self.name} had image {image_id} so: no copy helps; leave it out of use"
        else:
            task_file = self.root / TASKS / f"{self.claim.source or '<source>'}.json"
            remedy = (
                f"{self.tar}: restore it from a copy; or remove {task_file} and run tools/reshard.py again "
                "with that source"
            )
        finding = Finding(kind, file or self.name, message, remedy, self.name, offset, image_id)
        self.result.findings.append(finding)

    def _find_index(
        self, kind: str, message: str, offset: int | None = None, image_id: int | None = None
    ) -> None:
        self._find(kind, message, offset, image_id, index_path(self.tar).name)

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
            sha256 = stream.digests()["sha256"]
        finally:
            stream.close()
        self.result.bytes += size
        if size != info.bytes:
            self._find("tar_bytes", f"{size:,} bytes, {info.bytes:,} written", min(size, info.bytes))
        elif sha256 != info.sha256:
            self._find("tar_sha256", f"sha256 is {sha256}, written {info.sha256}")
        if self.end is not None:
            least = self.end + 2 * BLOCK
            if size != least + -least % tarfile.RECORDSIZE:
                self._find("tar_end", f"{size:,} bytes do not fit the end of the last member", self.end)
        self._missing()
        if not self.result.findings and (self.result.images, self.result.masks) != (info.images, info.masks):
            message = f"{self.result.images:,} images with {self.result.masks:,} masks, "
            self._find("shard_counts", message + f"written {info.images:,} with {info.masks:,}")

    def _damage(self, damage: Damage) -> None:
        end = damage.offset + max(damage.length, 1)
        lost = [
            image_id
            for image_id in self.places.image_ids()
            for ending in ("jpg", "masks")
            for place in self.places.find(image_id, ending).values()
            if damage.offset <= place.offset - BLOCK < end
        ]
        self._find(damage.reason, damage.message, damage.offset, lost[0] if lost else None)
        self.last = self.end = None

    def _member(self, member: Member, header: bytes, padding: bytes) -> None:
        if self.end is not None and self.end != member.offset:
            self._find("gap", f"{member.offset - self.end:,} bytes that are no member", self.end)
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
                "padding", f"bytes behind {member.name} are not zero", self.end - len(padding), image_id
            )
        self._order(image_id, ending, member.offset)
        if (image_id, ending) in self.seen:
            self._find("duplicate", f"a second {member.name}", member.offset, image_id)
            return
        self.seen.add((image_id, ending))
        if ending == "json" or self._content(image_id, ending, member):
            self.content.member(ending, member.data, member.offset + BLOCK, image_id)
        if {(image_id, "jpg"), (image_id, "masks")} <= self.seen and ending != "json":
            self.result.images += 1

    def _header(self, member: Member, header: bytes, image_id: int) -> None:
        info = tarfile.TarInfo(member.name)
        info.size = len(member.data)
        expected = info.tobuf(tarfile.USTAR_FORMAT)
        if header != expected:
            starts = [*_HEADER_FIELDS.values(), BLOCK]
            wrong = [
                name
                for name, start, stop in zip(_HEADER_FIELDS, starts, starts[1:], strict=False)
                if header[start:stop] != expected[start:stop]
            ]
            message = f"{member.name}: not the header that is written: {', '.join(wrong)}"
            self._find("header", message, member.offset, image_id)

    def _order(self, image_id: int, ending: str, offset: int) -> None:
        """jpg, masks, then json with --keep-json; nothing between them."""
        behind_masks = {True: ["json"], False: ["jpg"], None: ["jpg", "json"]}[self.claim.keep_json]
        if self.last is None:
            where, expected = "at the start", ["jpg"]
            fits = ending == "jpg" or offset > 0  # behind damage anything may come first
        else:
            last_id, last = self.last
            where = f"behind sa_{last_id}.{last}"
            expected = {"jpg": ["masks"], "masks": behind_masks, "json": ["jpg"]}[last]
            fits = ending in expected and (ending == "jpg") == (image_id != last_id)
        self.last = (image_id, ending)
        if not fits:
            message = f"sa_{image_id}.{ending} stands {where}, where a {' or '.join(expected)} belongs"
            self._find("member_order", message, offset, image_id)

    def _content(self, image_id: int, ending: str, member: Member) -> bool:
        """Hold a jpg or masks member against index and table; whether its content is what was written."""
        data, offset = member.data, member.offset + BLOCK
        found = Place(offset, len(data), google_crc32c.value(data))
        places = self.places.find(image_id, ending)
        if not {(image_id, "jpg"), (image_id, "masks")} <= self.seen:  # once for an image
            if self.places.index is not None and image_id not in self.places.rows:
                self._find_index("index_row_missing", "no row for this image", offset, image_id)
            if self.places.table is not None and image_id not in self.places.table:
                self._find(
                    "table_row_missing", "no row for this image", offset, image_id, self.places.samples
                )
        wrong = {file: _differences(ending, place, found) for file, place in places.items()}
        if places and all(place.crc32c != found.crc32c for place in places.values()):
            message = f"content of {member.name}, by {' and '.join(places)}: {next(iter(wrong.values()))}"
            self._find(f"{ending}_damaged", message, offset, image_id)
            return False
        if len(set(places.values())) == 1 < len(places):  # both say the same: then it is the tar
            wrong = {self.name: next(iter(wrong.values()))}
        for file, message in wrong.items():
            if message:
                kind = {self.name: f"{ending}_misplaced", self.places.samples: "table_row"}.get(
                    file, "index_row"
                )
                self._find(kind, message, offset, image_id, None if file == self.name else file)
        return True

    def _missing(self) -> None:
        """Members that index or samples.bin know and the tar does not hold."""
        for image_id in self.places.image_ids():
            absent = [ending for ending in ("jpg", "masks") if (image_id, ending) not in self.seen]
            if not absent:
                continue
            places = self.places.find(image_id, absent[0])
            offset = next(iter(places.values())).offset
            if (
                len(absent) == 2
                and len(places) == 1
                and self.places.index is not None
                and self.places.table is not None
            ):
                (file,) = places
                kind = "table_row_extra" if file == self.places.samples else "index_row_extra"
                self._find(kind, "a row for an image that only this file knows", offset, image_id, file)
                continue
            kind = "pair_missing" if len(absent) == 2 else f"{absent[0]}_missing"
            what = " and ".join(f"sa_{image_id}.{ending}" for ending in absent)
            self._find(kind, f"{what} not in the tar, only in {' and '.join(places)}", offset, image_id)


def _differences(ending: str, said: Place, found: Place) -> str:
    pairs = (
        (f"{ending}_offset", said.offset, found.offset),
        (f"{ending}_bytes", said.bytes, found.bytes),
        (f"{ending}_crc32c", said.crc32c, found.crc32c),
    )
    return "; ".join(f"{name} {one:,}, in the tar {other:,}" for name, one, other in pairs if one != other)
