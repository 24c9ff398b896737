"""Repairs of a dataset directory: the shortest command for each kind of damage."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from sa1b.console import command
from sa1b.shards.manifest import Options


@dataclass(frozen=True, slots=True)
class Remedy:
    """Commands for one dataset directory.

    Attributes:
        root: the dataset directory.
        options: options of the dataset; None: unknown.
        folders: names of sources that are folders of pairs; others are treated as tars.
    """

    root: Path
    options: Options | None = None
    folders: frozenset[str] = frozenset()

    def index(self, shard: str) -> str:
        """The index of one shard is damaged."""
        return f"`{command('index')} {self._quoted(shard)}` (first restore the shard if it is damaged too)"

    def tables(self) -> str:
        """The sample table, a source's rows or dataset.json is damaged, everything else is not."""
        return f"`{command('index')} {self._quoted()} --tables`"

    def everything(self) -> str:
        """Only the shards are reliable."""
        return f"`{command('index')} {self._quoted()}`"

    def source(self, source: str | None) -> str:
        """A shard, a task file or what was refused of a source is damaged: the source must be read again."""
        name = source or "SOURCE"
        # Nothing is removed first: --redo replaces what is there when the source has been read. The
        # placeholder means nothing to a shell, so a command pasted as it is only reports a missing file.
        path = shlex.quote(f"PATH/TO/{name}" if name in self.folders else f"PATH/TO/{name}.tar")
        flags = "".join(f" {flag}" for flag in self.flags())
        again = f"{command('reshard')} {path} --out {self._quoted()} --redo {shlex.quote(name)}{flags}"
        return f"restore it from a copy; or, with the real path of the source, `{again}`"

    def flags(self) -> list[str]:
        """The flags of `sa1b reshard` that differ from its defaults."""
        if self.options is None:
            return []
        defaults, flags = Options().flags(), self.options.flags()
        return [flags[name] for name in flags if flags[name] != defaults[name]]

    def _quoted(self, name: str = "") -> str:
        return shlex.quote(str(self.root / name if name else self.root))
