"""The result of a copy: totals, failed sources, and their text."""

from dataclasses import asdict, dataclass, field
from typing import Any

from sa1b.console import counted


@dataclass(slots=True)
class CopySummary:
    """The result of a copy; sources, shards, images and masks are those in the copy.

    Attributes:
        dataset: path or URL of the dataset.json of the copy.
        skipped: names of the sources that an earlier run had copied.
        bytes_copied: bytes of the shards and indexes that this run wrote.
        bytes_kept: bytes of those that the destination already had, with the right digest.
        partial: sources of which only some shards were copied.
        failed: source that is not in the copy, or not with all its shards -> the reason.
        missing: sources that the original dataset directory lists as failed or pending.
        views: names of the copied files of views.
    """

    root: str
    dest: str
    dataset: str
    seconds: float = 0.0
    sources: int = 0
    shards: int = 0
    images: int = 0
    masks: int = 0
    skipped: list[str] = field(default_factory=list)
    bytes_copied: int = 0
    bytes_kept: int = 0
    partial: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    views: list[str] = field(default_factory=list)

    def exit_code(self) -> int:
        """0: everything was copied. 1: a source was not."""
        return 1 if self.failed else 0

    def document(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self) -> str:
        rate = self.bytes_copied / 1e6 / self.seconds if self.seconds else 0.0
        skipped = f" ({len(self.skipped):,} copied before)" if self.skipped else ""
        kept = f"; {self.bytes_kept:,} had been copied before" if self.bytes_kept else ""
        lines = [
            f"  sources  {self.sources:,}{skipped}",
            f"  shards   {self.shards:,}",
            f"  images   {self.images:,}",
            f"  masks    {self.masks:,}",
            f"  bytes    {self.bytes_copied:,} ({rate:,.1f} MB/s, {self.seconds:,.1f} s){kept}",
        ]
        if self.partial:
            lines.append(f"  partial  {counted(len(self.partial), 'source')}: only some of their shards")
        lines += [f"FAILED {name}: {why}" for name, why in sorted(self.failed.items())]
        if not self.sources:
            lines.append(f"No source was copied: {self.dataset} was not written.")
        elif self.failed:
            lines.append(f"Not complete: {self.dataset} lists the sources that were copied.")
        elif self.missing:
            names = ", ".join(self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
            lines.append(
                f"Complete copy: {self.dataset}. As in {self.root}, {counted(len(self.missing), 'source')} "
                f"failed or pending ({names})."
            )
        else:
            lines.append(f"Complete: {self.dataset}")
        return "\n".join(lines)
