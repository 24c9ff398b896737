"""Repairs of a dataset directory: the shortest command for each kind of damage."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sa1b.console import command
from sa1b.shards.manifest import Options


@dataclass(frozen=True, slots=True)
class Remedy:
    """Commands for one dataset directory.

    Attributes:
        root: path or URL of the dataset directory.
        options: options of the dataset; None: unknown.
        kinds: source -> "folder" or "coco"; others are treated as tars.
        readings: source -> how it was read, see sa1b.sources.source.Source.reading.
    """

    root: str
    options: Options | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def index(self, shard: str) -> str:
        """Remedy for a damaged index of one shard."""
        return f"`{command('index')} {self._quoted(shard)}` (first restore the shard if it is damaged too)"

    def names(self, shards: Sequence[str]) -> str:
        """Remedy for shards that have the content of others: before any other, which may overwrite them."""
        listed = " ".join(map(self._quoted, shards))
        return (
            f"first `{command('index')} {listed}`, which restores the shards that these are; then check again"
        )

    def tables(self) -> str:
        """Remedy if only the sample table, rows of a source or dataset.json are damaged."""
        return f"`{command('index')} {self._quoted()} --tables`"

    def everything(self) -> str:
        """Remedy if only the shards are intact."""
        return f"`{command('index')} {self._quoted()}`"

    def source(self, source: str | None, *, has_shards: bool = False, is_known: bool = True) -> str:
        """Remedy for damage that needs the source again: of a shard, a task file or refused members.

        Args:
            has_shards: the shards are there, so that a task file can be rebuilt from them. This is the only
                advice if dataset.json is lost too: how the source was read is unknown then.
            is_known: dataset.json lists the source, and says how it was read.
        """
        rebuild = f"{self.everything()}, which rebuilds it from the shards"
        if has_shards and self.options is None:
            return f"restore it from a copy; or run {rebuild}"
        name = source or "SOURCE"
        # --redo replaces the files after the source has been read, so the user removes nothing first. The
        # placeholder has no meaning in a shell: the unedited command only reports a missing file.
        reading = self.readings.get(name, {})
        kind = self.kinds.get(name, reading.get("kind"))
        path = shlex.quote(f"PATH/TO/{name}{ {'folder': '', 'coco': '.json'}.get(str(kind), '.tar') }")
        verb, flags = "reshard", self.flags()
        if reading.get("image_ids", "keep") != "keep":
            flags.append(f"--image-ids {reading['image_ids']}")
        if reading.get("images"):
            flags.append("--images PATH/TO/IMAGES")
        if "max_pixels" in reading:
            flags.append(f"--max-pixels {reading['max_pixels']}")
        flags += [f"--ignore {shlex.quote(pattern)}" for pattern in reading.get("ignore", ())]
        if reading.get("part"):  # the images that the directory has of it are read again
            verb, flags = "fetch", ["--ids PATH/TO/IDS.txt", *flags]
        more = "".join(f" {flag}" for flag in flags)
        again = f"{command(verb)} {path} --out {self._quoted()} --redo {shlex.quote(name)}{more}"
        real = "the real path of the source,"
        if kind not in ("folder", "coco"):
            real = "the real path or URL of the source, or --links FILE,"
        if not is_known:
            real += " and the flags of its conversion (--image-ids, --ignore), which nothing records,"
        without = f"; or, without the source, {rebuild}" if has_shards else ""
        return f"restore it from a copy; or, with {real} `{again}`{without}"

    def flags(self) -> list[str]:
        """The flags of `sa1b reshard` that differ from its defaults."""
        if self.options is None:
            return []
        defaults, flags = Options().flags(), self.options.flags()
        return [flags[name] for name in flags if flags[name] != defaults[name]]

    def _quoted(self, name: str = "") -> str:
        return shlex.quote(f"{self.root}/{name}" if name else self.root)
