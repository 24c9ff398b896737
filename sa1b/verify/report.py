"""What a check of a root found: findings, notes, totals, and how they read."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

_SHOWN = 10  # findings of one kind in one file on the screen; --json has them all


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of damage.

    Attributes:
        kind: short snake_case word.
        file: name below the root: a shard, its index, samples.bin, dataset.json or a task file.
        message: what is wrong.
        remedy: what to do about it.
        shard: name of the shard concerned, None for damage of no one shard.
        offset: bytes from the start of the shard, where there is a place.
        image_id: the image concerned, where there is one.
    """

    kind: str
    file: str
    message: str
    remedy: str
    shard: str | None = None
    offset: int | None = None
    image_id: int | None = None

    def line(self) -> str:
        where = [self.file]
        if self.offset is not None:
            where.append(f"offset {self.offset:,}")
        if self.image_id is not None:
            where.append(f"image {self.image_id}")
        return f"{', '.join(where)}: {self.kind}: {self.message}"


class Find(Protocol):
    """Takes a finding in a file that is known already; arguments as in `Finding`."""

    def __call__(
        self, kind: str, message: str, offset: int | None = None, image_id: int | None = None
    ) -> None: ...


@dataclass(slots=True)
class ShardResult:
    """What the check of one shard found.

    Attributes:
        images, masks, jpg_bytes: of complete pairs.
        bytes: read, of tar and index.
        largest: as in a task file, of complete pairs.
        odd: what differs between the numbers and the mask (area, bbox, empty_mask) -> offset and id of the
            images. Only deep. No damage by itself: ingest keeps such images and counts them as doubtful.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    images: int = 0
    masks: int = 0
    bytes: int = 0
    jpg_bytes: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    odd: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """The outcome of a check.

    Attributes:
        deep: every JPEG and mask was decoded.
        seconds: of the whole check.
        shards, images, masks, bytes: checked; bytes of tars and indexes read.
        findings: all damage.
        notes: what is worth knowing and no damage.
    """

    root: Path
    deep: bool
    seconds: float = 0.0
    shards: int = 0
    images: int = 0
    masks: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def exit_code(self) -> int:
        """0: clean. 1: damage."""
        return 1 if self.findings else 0

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "root": str(self.root), "exit_code": self.exit_code()}

    def table(self) -> str:
        """For people."""
        lines = [f"note: {note}" for note in self.notes]
        lines += self._findings()
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        what = "digests, structure, checksums, numbers"
        rows = [
            ("checked", f"{what}, every JPEG and mask decoded" if self.deep else what),
            ("shards", f"{self.shards:,}"),
            ("images", f"{self.images:,}"),
            ("masks", f"{self.masks:,}"),
            ("bytes", f"{self.bytes:,} ({rate:,.1f} MB/s, {self.seconds:,.1f} s)"),
            ("findings", f"{len(self.findings):,}"),
        ]
        kinds = Counter(finding.kind for finding in self.findings)
        rows += [(f"  {kind}", f"{count:,}") for kind, count in sorted(kinds.items())]
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        lines.append(f"{'DAMAGED' if self.findings else 'Clean'}: {self.root}")
        return "\n".join(lines)

    def _findings(self) -> list[str]:
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.file, finding.kind), []).append(finding)
        lines = []
        for (file, kind), findings in groups.items():
            lines += [finding.line() for finding in findings[:_SHOWN]]
            if len(findings) > _SHOWN:
                lines.append(f"{file}: {kind}: and {len(findings) - _SHOWN:,} more; --json lists all")
        remedies = dict.fromkeys(finding.remedy for finding in self.findings)
        return lines + (["What to do:", *(f"  - {remedy}" for remedy in remedies)] if remedies else [])


def short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def remake(root: Path) -> str:
    """What to do about an index, samples.bin or dataset.json."""
    return (
        f"`python tools/index.py {root}` makes indexes, samples.bin and dataset.json again from the tars "
        "(first mend the tars, if any is damaged)"
    )
