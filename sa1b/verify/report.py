"""The report of a check: findings with the command that repairs each, notes, totals, and their text."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from sa1b.console import command, counted
from sa1b.report import fact_lines, first_lines, rate_text
from sa1b.shards.documents import Options
from sa1b.sources.discovery import format_of

KEPT = 1000  # findings of one kind in one file; the others are counted
SHOWN = 10  # findings on the screen


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage at one location."""

    kind: str  # short snake_case word
    file: str  # name in the dataset directory
    message: str
    remedy: str  # the shortest command that repairs it, or other advice
    shard: str | None = None  # None if the damage is not in one shard
    offset: int | None = None  # bytes from the start of the shard; None: no position
    image_id: int | None = None

    def line(self) -> str:
        """One line of text, without the remedy."""
        where = [self.file]
        if self.offset is not None:
            where.append(f"offset {self.offset:,}")
        if self.image_id is not None:
            where.append(f"image {self.image_id}")
        return f"{', '.join(where)}: {self.kind}: {self.message}"


class Find(Protocol):
    """Function that adds a finding for one file; arguments as in `Problem`."""

    def __call__(
        self, kind: str, message: str, offset: int | None = None, image_id: int | None = None
    ) -> None: ...


@dataclass(slots=True)
class Findings:
    """Findings in the order they were made, at most KEPT of a kind in a file: memory stays bounded."""

    kept: list[Problem] = field(default_factory=list)
    # file -> kind -> number of findings, including those that are not kept
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(count for kinds in self.counts.values() for count in kinds.values())

    def add(self, finding: Problem) -> None:
        kinds = self.counts.setdefault(finding.file, {})
        kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
        if kinds[finding.kind] <= KEPT:
            self.kept.append(finding)

    def merge(self, other: "Findings") -> None:
        """Add the findings of another check."""
        for finding in other.kept:
            self.add(finding)
        for file, kinds in other.counts.items():
            for kind, count in kinds.items():
                self.counts[file][kind] += max(0, count - KEPT)  # the others have been added

    def kinds(self) -> dict[str, int]:
        """Kind -> number of findings, over all files."""
        counts: dict[str, int] = {}
        for kinds in self.counts.values():
            for kind, count in kinds.items():
                counts[kind] = counts.get(kind, 0) + count
        return dict(sorted(counts.items()))

    def lines(self) -> list[str]:
        """Text for the terminal: the first findings of each kind in each file."""
        groups: dict[tuple[str, str], list[Problem]] = {}
        for finding in self.kept:
            groups.setdefault((finding.file, finding.kind), []).append(finding)
        lines = []
        for (file, kind), findings in groups.items():
            lines += [finding.line() for finding in findings[:SHOWN]]
            more = self.counts[file][kind] - SHOWN
            if more > 0:
                lines.append(f"{file}: {kind}: and {more:,} more; --json lists the first {KEPT:,}")
        return lines

    def remedies(self) -> list[str]:
        """The remedies of all findings, without duplicates."""
        return list(dict.fromkeys(finding.remedy for finding in self.kept))


@dataclass(slots=True)
class VerifyReport:
    """The outcome of a check: the numbers checked, and the damage found."""

    root: str
    deep: bool  # every JPEG and mask was decoded
    seconds: float = 0.0  # without those of an interrupted check before it
    shards: int = 0
    images: int = 0
    masks: int = 0
    bytes: int = 0  # read from shards and indexes
    layers: int = 0
    found: Findings = field(default_factory=Findings)
    # shard -> why: lack of memory or threads, not damage
    unchecked: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # useful facts that are not damage
    unlisted_images: int = 0  # only in shards that no task file lists; not in the dataset

    @property
    def findings(self) -> list[Problem]:
        """All damage, with at most KEPT findings of one kind for each file."""
        return self.found.kept

    def exit_code(self) -> int:
        """0: no damage. 1: damage. 2: no damage was found, but not everything could be checked."""
        return 1 if self.findings else 2 if self.unchecked else 0

    def document(self) -> dict[str, Any]:
        document = asdict(self)
        findings = document.pop("found")
        return {
            **document,
            "findings": findings["kept"],
            "counts": findings["counts"],
            "exit_code": self.exit_code(),
        }

    def table(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        lines += self.found.lines()
        unchecked = [f"could not be checked: {name}: {why}" for name, why in self.unchecked.items()]
        lines += first_lines(unchecked, SHOWN, "could not be checked: and {:,} more; --json lists all")
        if unchecked:
            lines.append(
                "Check again with fewer --workers, or with more memory (ulimit -v, the job's memory)"
            )
        if self.findings:
            lines += ["What to do:", *(f"  - {remedy}" for remedy in self.found.remedies())]
        what = "digests, structure, checksums, numbers"
        rows = [
            ("checked", f"{what}, every JPEG and mask decoded" if self.deep else what),
            ("shards", f"{self.shards:,}"),
            ("images", f"{self.images:,}"),
            ("masks", f"{self.masks:,}"),
            ("bytes", f"{self.bytes:,} ({rate_text(self.bytes, self.seconds)})"),
            *([("layers", f"{self.layers:,}")] if self.layers else []),
            ("findings", f"{len(self.found):,}"),
        ]
        rows += [(f"  {kind}", f"{count:,}") for kind, count in self.found.kinds().items()]
        rows += [("could not be checked", f"{len(unchecked):,}")] if unchecked else []
        lines += fact_lines(rows)
        outcome = "DAMAGED" if self.findings else "NOT CHECKED" if self.unchecked else "Clean"
        if self.unlisted_images and outcome == "Clean":
            outcome += (
                f", but {counted(self.unlisted_images, 'stored image')} not in the dataset (see the notes)"
            )
        lines.append(f"{outcome}: {self.root}")
        return "\n".join(lines)


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@dataclass(frozen=True, slots=True)
class VerifyRemedy:
    """Commands for one dataset directory."""

    root: str
    options: Options | None = None  # of the dataset; None: unknown
    # source -> name of its format; others are treated as tars
    kinds: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # source -> how it was read

    def index(self, shard: str) -> str:
        """Remedy for a damaged index of one shard."""
        return f"`{command('index', f'{self.root}/{shard}')}` (first restore the shard if it is damaged too)"

    def names(self, shards: Sequence[str]) -> str:
        """Remedy for shards that have the content of others: before any other, which may overwrite them."""
        rebuild = command("index", *(f"{self.root}/{shard}" for shard in shards))
        return f"first `{rebuild}`, which restores the shards that these are; then check again"

    def tables(self) -> str:
        """Remedy if only the sample table, rows of a source or dataset.json are damaged."""
        return f"`{command('index', self.root, '--tables')}`"

    def everything(self) -> str:
        """Remedy if only the shards are intact."""
        return f"`{command('index', self.root)}`"

    def source(self, source: str | None, *, has_shards: bool = False, is_known: bool = True) -> str:
        """Remedy for damage that needs the source again: of a shard, a task file or refused members.

        `has_shards`: a task file can be rebuilt from them, the only advice if dataset.json is lost too: how
        the source was read is unknown then. `is_known`: dataset.json says how it was read.
        """
        rebuild = f"{self.everything()}, which rebuilds it from the shards"
        if has_shards and self.options is None:
            return f"restore it from a copy; or run {rebuild}"
        name = source or "SOURCE"
        # --redo replaces the files after the source has been read, so the user removes nothing first. The
        # placeholder has no meaning in a shell: the unedited command only reports a missing file.
        reading = self.readings.get(name, {})
        source_format = format_of(self.kinds.get(name, reading.get("kind")))
        path = shlex.quote(f"PATH/TO/{name}{source_format.ending}")
        verb, flags = "reshard", self.flags()
        if reading.get("image_ids", "keep") != "keep":
            flags.append(f"--image-ids {reading['image_ids']}")
        if reading.get("images"):
            flags.append("--images PATH/TO/IMAGES")
        if reading.get("images_only"):
            flags.append("--images-only")
        if "max_pixels" in reading:
            flags.append(f"--max-pixels {reading['max_pixels']}")
        flags += [f"--ignore {shlex.quote(pattern)}" for pattern in reading.get("ignore", ())]
        if reading.get("part"):  # the images that the directory has of it are read again
            verb, flags = "fetch", ["--ids PATH/TO/IDS.txt", *flags]
        more = "".join(f" {flag}" for flag in flags)
        again = f"{command(verb)} {path} --out {shlex.quote(self.root)} --redo {shlex.quote(name)}{more}"
        real = "the real path of the source,"
        if source_format.has_links:
            real = "the real path or URL of the source, or --links FILE,"
        if not is_known:
            which = "--image-ids, --images-only, --ignore"
            real += f" and the flags of its conversion ({which}), which nothing records,"
        without = f"; or, without the source, {rebuild}" if has_shards else ""
        return f"restore it from a copy; or, with {real} `{again}`{without}"

    def flags(self) -> list[str]:
        """The flags of `sa1b reshard` that differ from its defaults."""
        if self.options is None:
            return []
        defaults, flags = Options().flags(), self.options.flags()
        return [flags[name] for name in flags if flags[name] != defaults[name]]
